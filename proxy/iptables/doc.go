// SPDX-License-Identifier: Apache-2.0

// Package iptables is the proxy mode that writes upstream's iptables rules:
// chains, names, marks and comments as kube-proxy's iptables mode has them, for
// both the nft-backed and the legacy tools. README.md beside this file follows a
// packet through them.
//
// Rules are rendered as text in the form in which iptables-save prints them.
// That form is what makes the rest cheap: what is to be compared with the kernel
// is compared as lines, and what is shown to a person is what is loaded.
//
// A change goes to the kernel through iptables-restore --noflush and holds only
// the chains that differ. Chains that became stale are deleted over netlink and
// what was written is counted there again, because the tools read a whole table
// to answer a question about one chain.
package iptables
