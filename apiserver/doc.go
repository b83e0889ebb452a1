// SPDX-License-Identifier: Apache-2.0

// Package apiserver is the Kubernetes API of a lab: the generic API server of
// k8s.io/apiserver and its watch cache, over the bbolt store (package store)
// and the kinds of package registry. kubectl and client-go talk to it as to
// any cluster; nothing here is for kplab's own parts only.
//
// New builds a server on listeners that the caller has opened, Run serves
// until its context ends. The same server answers on every listener, so that
// the host reaches it on 127.0.0.1 and pods reach it inside the control-plane
// node's network namespace.
//
// # Who may do what
//
// A request is authenticated by a client certificate (common name is the user,
// organisations are the groups), by a service account token, or by a token
// that ClientConfig made for a component in this process. Without one of them
// only /healthz, /livez, /readyz and /version answer. What a user may do is said
// by the Roles, ClusterRoles and bindings that are stored (package rbac); members
// of system:masters may do everything. Upstream's policy is there from the start.
//
// # Start-up
//
// A lab starts in under a second, so New avoids what makes a stock API server
// slow: RSA keys, building the OpenAPI documents (done at the first request
// for one), API priority and fairness, and an etcd.
package apiserver
