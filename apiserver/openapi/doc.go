// SPDX-License-Identifier: Apache-2.0

// Package openapi holds the OpenAPI definitions of the types that the API
// serves, generated from the comments and markers of k8s.io/api. They are what
// kubectl explain prints, what kubectl apply merges by, and what server-side
// apply knows lists and maps from.
//
// Never edit zz_generated.openapi.go. When a kind of a new API group is added,
// add the group's package to gen.sh and run go generate.
package openapi

//go:generate ./gen.sh
