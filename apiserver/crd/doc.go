// SPDX-License-Identifier: Apache-2.0

// Package crd serves CustomResourceDefinitions and the custom resources that they
// define. What they mean (schemas, defaults, pruning, CEL rules, versions, status and
// scale, columns) is k8s.io/apiextensions-apiserver's; this package places it over the
// lab's store, behind the lab's one chain of handlers, and starts it late.
//
// The definitions themselves are a kind like any other ([Server.Storages]). Everything
// behind them, an informer, five small controllers and the handler of custom
// resources, begins to exist with the first definition: when one is created, or at a
// start that finds one. A lab without any pays for nothing.
//
// The handler stands behind the paths of the kinds that are built in: whatever below
// /apis/ none of them claims comes here. There is no second generic API server, as
// upstream has one: it would bring a handler chain, a mux, health checks and metrics
// of its own for what is one handler.
package crd
