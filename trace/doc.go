// SPDX-License-Identifier: Apache-2.0

// Package trace sends one real request through a lab and tells what the kernel did
// with it: each device, hook, rule and translation between the client's socket and
// the answer, and where it ended when there was none. It also puts rules into
// words, for `kplab proxy rules`.
//
// What is told comes from four places. nftrace events (also from iptables' rules,
// where these are nf_tables') say which rules a packet met. Packet sockets say which
// devices it crossed, and when. The connection tracking table says how it was
// translated. The kernel's own route look-up says why it went, or did not go, where
// it did. A step that none of them shows is marked as inferred, with what from.
//
// Our packets are known by a number that address translation leaves alone: the
// first sequence number of the TCP connection, which the client's socket is given
// beforehand, or the first bytes of the UDP payload. So the rules that mark packets
// for tracing match this flow and no other, in every namespace, whatever happened
// to its addresses on the way.
//
// Nothing stays behind: the marking rules are in a table that belongs to a netlink
// socket of this process, so that the kernel removes it when the process ends,
// however it ends. The modes' own rules are only read.
//
// An [Explainer] for each proxy mode puts the mode's rules into sentences. The rest
// of the package knows no mode.
package trace
