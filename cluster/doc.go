// SPDX-License-Identifier: Apache-2.0

// Package cluster puts a lab together: it is the only package that names every
// part. It holds the ordered list of the parts with their start, their readiness
// and their stop, the settings of a lab, the record of what a lab owns on the
// host, and the barrier that `kplab settle` waits at.
//
// The main path is [Start] in lab.go, and the seven steps that it runs in parts.go;
// read these first.
package cluster
