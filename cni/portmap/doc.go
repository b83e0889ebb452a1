// SPDX-License-Identifier: Apache-2.0

// Package portmap leads ports of a node to its pods: what `hostPort` in a pod asks
// for. It is a CNI plugin that stands behind the one that wires the pod, and answers
// to the capability portMappings of the CNI conventions.
//
// The rules are in a table of their own in each IP family, named as the reference
// plugin names its own:
//
//	table ip cni_hostport
//	  prerouting    fib daddr type local → hostports      from elsewhere, and from pods
//	  output        fib daddr type local → hostports      from the node itself
//	  hostports     tcp dport 8080 dnat to 10.244.1.5:80  one for each port
//	  masquerading  a pod that reaches itself; the node by 127.0.0.1
//
// Each rule carries the attachment that it is for as its comment. Nothing else is
// remembered, so DEL and GC find what a process that was killed left.
//
// Two pods with one port on one node do not meet here: the scheduler keeps them apart,
// and of two that were put there by name the first keeps the port.
package portmap
