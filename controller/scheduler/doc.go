// SPDX-License-Identifier: Apache-2.0

// Package scheduler gives every pod that names the default scheduler a node.
//
// It keeps its own account of which pods are on which node. A pod that was just
// placed is in that account from the moment of the decision ("assumed"), long before
// the API's answer and the watch event: therefore many pods can be bound at the same
// time and still be spread as if they were placed one after the other.
//
// Decisions are made one at a time, under one lock, from memory; binding is the slow
// part and runs outside the lock, with a bounded number of requests in flight.
//
// What decides: filter.go says which nodes can take a pod and why the others cannot
// (readiness, cordon, taints, selectors, host ports, the number of pods), volumes.go
// what the pod's claims have to say about it. score.go picks one of them. Pods that fit
// nowhere wait, without any polling, until a node, a pod or a claim changes in a way
// that can make room.
//
// Not considered, unlike in upstream's scheduler: requests of CPU and memory (a
// simulated node has no capacity worth the name), affinity between pods, topology
// spread constraints, preemption.
package scheduler
