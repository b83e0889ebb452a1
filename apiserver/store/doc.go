// SPDX-License-Identifier: Apache-2.0

// Package store keeps API objects in one bbolt file, as a k8s.io/apiserver
// storage.Interface for the stock watch cache to sit on. It knows bytes,
// revisions and watches; it knows no kind.
//
//	db, err := store.Open(path, store.Options{})
//	pods := db.NewStore(store.Config{Codec: codec, NewFunc: newPod, Prefix: "/registry/pods"})
//	…
//	err = db.Close()
//
// What to rely on:
//
//   - One revision counter for all kinds: every write, of whatever kind, is the next
//     number. A resource version is such a number in decimal.
//   - A write is answered after it is on disk (after fsync). Writes that wait at
//     the same time share a transaction, and fail or succeed one by one.
//   - An update that changes nothing is not a write.
//   - The newest 10,000 changes or 16 MiB of them, whichever is less
//     (Options.LogEvents, LogBytes), are kept on disk with what was there before,
//     however old they are. Watches can begin and lists can be made at any revision
//     in that range, also after a restart; beyond it they get 410 Expired.
//   - A slow watch never holds up a write.
//   - A damaged, locked, full or unwritable file is an error that says so:
//     ErrCorrupt, ErrLocked, ErrNoSpace, ErrReadOnly.
//   - The file grows and never shrinks; what is free in it is used again. Inspect
//     checks a file that nobody has open, Rewrite makes it as small as its contents.
//
// README.md has the layout of the file and the paths of writes and watches, and
// which of upstream's conformance tests do not apply.
package store
