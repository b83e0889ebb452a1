// SPDX-License-Identifier: Apache-2.0

// Package routed is kplab's CNI plugin: a pod is joined to its node by a veth
// pair and plain routes, without a bridge.
//
//	pod namespace                          node namespace
//	eth0  10.244.1.5/32      <-- veth -->  veth1a2b3c4d  169.254.1.1/32
//	default via 169.254.1.1 dev eth0       10.244.1.5 dev veth1a2b3c4d src <node IP>
//	169.254.1.1 lladdr … permanent         10.244.1.5 lladdr … permanent
//
// Why each piece is there:
//
//   - Each pod has a /32 route, so the node routes between its own pods as it does
//     to any other, and every packet passes the hooks where Service rules sit.
//   - The gateway is one link-local address for all pods. It stands on every host
//     end for as long as that end lives: a REDIRECT rule needs an address on the
//     link that a packet came in by, and when the last address of a link goes, all
//     routes over the link go with it.
//   - With that address the node would talk to its pods as 169.254.1.1, so the pod
//     route names the node's own address as the source.
//   - Both neighbours are permanent: nothing is asked for on the wire, so the first
//     packet has nothing to wait for.
//   - Each end has one queue (see [rtnl.Batch.AddVeth]), and after both are up the
//     kernel is asked for each once, which makes it finish the change of carrier:
//     otherwise the first packets are dropped and tried again a second later.
//
// The name of the host end follows from the container's ID and interface, so ADD
// can be repeated. MAC addresses follow from the IPv4 address of the link's end
// (0a:58 and the address), so neither end has to be asked for its own.
//
// DEL takes the route, the neighbour and the reservation of the address away and
// does not wait for the pod's namespace to die: that can be minutes later, when a
// socket still holds it. The address is not handed out again before the host end
// of the pair has gone. With "keepLinks" in the configuration (kplab sets it) the
// pair is left to go with the namespace, because the kernel waits for all CPUs at
// each pair that is removed by itself; without it, DEL removes the pair.
//
// The plugin serves the CNI specification 1.1: ADD, DEL, CHECK, GC, STATUS and
// VERSION. [Plugin.Serve] serves a call inside this process, [Main] is the body of
// an executable; both run the same code.
package routed
