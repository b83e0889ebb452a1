// SPDX-License-Identifier: Apache-2.0

// Package rbac decides who may do what, by the Roles, ClusterRoles and bindings
// that are stored (rbac.authorization.k8s.io).
//
// [Authorizer] answers for every request. It keeps what the four kinds say in
// memory, by subject, and looks before each answer whether one of them was
// written since: a right is there when the write that gives it was answered,
// where a stock cluster takes a moment. [Escalation] refuses to give away what
// the giver has not. [Policy] is what a new cluster has: the roles and bindings
// of upstream under their usual names, which [Bootstrap] stores when they are
// missing. [Aggregate] fills in the ClusterRoles that are made of others.
//
// # What differs from upstream
//
//   - There is no node authorizer. Nodes have the rights of the ClusterRole
//     system:node by an ordinary binding, for all objects and not only for
//     those of their own pods.
//   - The controllers of a lab share one identity,
//     system:kube-controller-manager, to which the roles system:controller:*
//     are bound besides the service accounts that have them upstream.
//   - A role that was changed stays changed. Upstream restores missing rights of
//     its own roles at every start; here a role comes back when it was deleted.
package rbac
