// SPDX-License-Identifier: Apache-2.0

// Package userspace is the historical proxy mode, which Kubernetes had from its first
// release and removed in 1.26: the proxy itself accepts the connections of clients and
// copies bytes to a backend and back. It is here to be compared with its successors:
// it can try another backend when one is dead, which no rule of the kernel can, and it
// pays with two copies and two connections for each one, and with the client's address.
// README.md beside this file follows a packet through it.
//
// The kernel's part are rules, by upstream's names, that lead the addresses of Services
// to listeners on the node: names.go, render.go and apply.go, in the manner of the
// iptables mode. The process's part are the listeners (server.go), who gets a client
// (balancer.go), and what is under way (tcp.go, udp.go, flows.go). Rules outlive the
// process, listeners do not: while no proxy runs, connections are refused.
package userspace
