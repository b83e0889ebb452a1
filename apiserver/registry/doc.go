// SPDX-License-Identifier: Apache-2.0

// Package registry says what each kind of the API is: its names, defaults,
// validation, table columns, selectable fields, subresources, and the hooks
// that allocate. Kinds (kinds.go) is the one list of all of them.
//
// A kind is a value of type [Kind], built by one function in one file that
// bears the kind's name. [Build] turns the list into the REST storages that a
// generic API server installs, and [NewScheme] into the scheme that decodes,
// defaults and converts them. To add a kind: write its file, add one line to
// Kinds, run go generate in apiserver/openapi when its API group is new.
//
// The Go types are the published ones of k8s.io/api; each v1 type is also
// registered as the internal version of its group, so that no conversion is
// ever needed. Two API versions over one storage (events) are the exception,
// see [View].
//
// The order of work on a write, which decides where a piece of logic belongs:
//
//  1. decode, then Default;
//  2. patch or server-side apply, then Default again;
//  3. the field manager records who set which field;
//  4. admission (namespace lifecycle, service account; package apiserver);
//  5. Hooks.BeginCreate or BeginUpdate: allocation. What is written here has
//     no manager, as with a real API server;
//  6. PrepareForCreate or PrepareForUpdate;
//  7. Validate (and ValidateUpdate on updates), Warnings;
//  8. the write, then the finish function of step 5.
//
// Defaults also run when an object is read from storage.
package registry
