// SPDX-License-Identifier: Apache-2.0

// Package tutorial replays the two tutorials that kplab was made for, command by
// command, in a lab with their nodes and addresses, and compares what is seen with
// what it says in them.
//
// A tutorial is a folder labs/tutorial-N: commands.yaml lists the commands in the
// tutorial's order, each with what has to be seen, beside the manifests that the
// commands read. [Load] reads it, [Run] runs it, [Page] writes what was seen down.
//
// A command runs in a shell on a node of the lab, as it does in the tutorial: kubectl,
// iptables, curl and the others are this machine's. Where the tutorial opens a shell in
// a pod, a terminal is opened and the next commands are typed into it.
package tutorial
