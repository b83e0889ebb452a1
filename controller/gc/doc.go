// SPDX-License-Identifier: Apache-2.0

// Package gc removes objects whose owners are gone.
//
// It keeps a graph of all objects and their owner references, fed by the watches of
// every kind in [loop.Kinds] and of the custom resources that are defined, each with
// a watch on metadata alone from its definition on. Owners are matched by UID: an owner that was deleted and
// made again under the same name is not the owner any more. An owner that the graph
// does not know is looked up in the API before anything is deleted, because the
// watches of different kinds are not in step.
//
// What happens to an object whose owners are all gone: it is deleted in the
// background. An owner that is deleted with propagation "Foreground" carries a
// finalizer; its dependants are deleted first and the finalizer comes off when those
// that block it are gone. With "Orphan" the references to it are removed from its
// dependants, and then its finalizer.
//
// Not done, unlike upstream: cycles of blocking references are not broken.
package gc
