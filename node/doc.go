// SPDX-License-Identifier: Apache-2.0

// Package node is one simulated node: a network namespace with a link to the
// lab's fabric, the routes to the other nodes' pods, and a kubelet.
//
//	fabric namespace:  bridge "underlay"
//	   │ one port a member (veth, one queue each end)
//	   ├── node namespace     eth0 10.0.0.131/24   forwards; routes to pods of others
//	   ├── …
//	   └── outside namespace  eth0 10.0.0.200/24   no node, no pod: no route to either
//
// A node's default route leads to the fabric's bridge, which forwards nothing; the
// client outside has none. So nothing in a lab leaves it.
//
// What a namespace takes over from the host is not to be relied on, so every
// setting that matters is written before the first link exists ([settings] in
// sysctl.go says which and why). Everything here may be done again: a start after
// a killed daemon finds the links of before, leaves them alone and adds what is
// missing, while packets flow.
//
// The node owns its own address, its routes to other nodes and its neighbours, and
// it sees to it that each pod's wiring is complete. One paced loop makes all of it
// true again when Node objects change or when somebody removes a piece ([Node.Run]
// listens to the kernel); it marks its routes with protocol [RouteProtocol] and
// touches no other.
//
// Pods are package node/kubelet's.
package node
