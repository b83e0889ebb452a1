// SPDX-License-Identifier: Apache-2.0

// Package kubelet runs the pods of one node: it makes what the API says true, and
// tells the API what is so.
//
// Every event (a pod changed, a container ended, a probe's result turned, a
// back-off is over) only puts the pod's UID into one queue. A worker then looks at
// the whole pod and does what can be done now: sandbox, network, volumes, init
// containers in order, containers, or the steps of the end. Nothing waits inside a
// worker; what takes time runs beside it and puts the pod back into the queue.
//
//	informer ─┐
//	exits ────┤            ┌─ sandbox.Create → cni ADD → volumes → containers
//	probes ───┼─► queue ─► sync
//	timers ───┘            └─ status ─► status queue ─► API (only when it changed)
//
// Writing the status has a queue and workers of its own, because it waits for the
// API server's disk: many writes under way at once share one commit. A pod of
// built-in images is ready within one sync, so its whole way to Ready is one write.
//
// A container is either a server of a built-in image, which runs inside this
// process on sockets in the pod's namespace, or a real process (package sandbox).
// After the process was killed, the next one finds sandboxes and processes as they
// are, opens the servers again on the same addresses, and carries on with the
// restart counts that the API has. After a reboot there is no sandbox: it is made
// anew and each restart count goes up by one.
package kubelet
