// SPDX-License-Identifier: Apache-2.0

// Package nftables is the proxy mode that writes upstream's nftables rules: one
// table kube-proxy a family, with the chains, maps, sets and comments of
// kube-proxy's nftables mode, or on request the same Services in a compact layout
// of our own. README.md beside this file follows a packet through them.
//
// A rule is written once, as statements that know both their text and their
// bytecode, so what a person is shown is what is loaded. Elements of sets are
// plain values that are printed or encoded when somebody asks.
//
// The kernel is spoken to over netlink only: a change is one transaction with
// what differs, and what it wrote is read back. What the kernel holds when nobody
// remembers is read, brought into the same form, and compared. Tools are needed
// for nothing.
package nftables
