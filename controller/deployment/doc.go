// SPDX-License-Identifier: Apache-2.0

// Package deployment turns a Deployment into ReplicaSets, one per pod template, and
// moves replicas from the old ones to the new one.
//
// It never touches a pod. A sync reads the ReplicaSets that the Deployment owns and
// does the next step: make the new one, let it grow, let old ones shrink, give scaled
// replicas out in proportion, tidy up. Each step's effect comes back as an event and
// causes the next. The files: revision.go finds or makes the ReplicaSet of the current
// template; rolling.go and recreate.go are the two strategies; scale.go gives out
// replicas when the Deployment itself is scaled; status.go reports, in the conditions
// that kubectl rollout status waits for. The numbers (how far may the new one grow
// now?) are pure functions in replicas.go.
package deployment
