// SPDX-License-Identifier: Apache-2.0

// Package dns is the cluster's DNS: CoreDNS with the plugins that a cluster needs, and
// the objects that make it one.
//
// It runs as the real thing does: a Deployment `coredns` in kube-system whose pods are
// processes, behind the Service `kube-dns`. A look-up goes through the Service path, so a
// broken proxy breaks DNS as it would in life; CoreDNS asks the API at its cluster IP, with
// the token of its service account; the Corefile is a ConfigMap, and an edit of it takes
// effect. The program is this one under another name: see [Main].
//
// A lab has no way out, so the Corefile does not forward. Names outside of the cluster are
// those of a zone file next to the Corefile, which is empty unless a lab defines some:
// others do not exist, and are refused at once.
package dns
