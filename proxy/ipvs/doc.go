// SPDX-License-Identifier: Apache-2.0

// Package ipvs is the proxy mode that lets the kernel's load balancer, IPVS, send
// connections to endpoints: a virtual server for each address and port of a Service,
// with its endpoints as real servers, and every address of a Service on the device
// kube-ipvs0, so that packets to it are delivered to the node, where IPVS takes them.
// Masquerading and refusing is left to a fixed number of iptables rules that look
// into ipsets. All names are those of kube-proxy's ipvs mode. README.md beside this
// file follows a packet through it.
//
// Three things bite:
//   - A kernel without ip_vs answers nothing, and a library may take that for success.
//     What is written here is read back, and so does [Detect].
//   - An open connection lives in IPVS and in connection tracking together. When its
//     real server, its virtual server or its address on kube-ipvs0 goes, it is cut.
//     So real servers leave by weight 0 first, and a change to another mode drains.
//   - KUBE-SERVICES, KUBE-POSTROUTING, KUBE-MARK-MASQ, KUBE-FORWARD and
//     KUBE-PROXY-FIREWALL are chains of mode iptables as well, with other rules.
package ipvs
