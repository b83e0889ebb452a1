// SPDX-License-Identifier: Apache-2.0

// Package labs runs exercises that check themselves.
//
// A lab is a folder: lab.yaml says what the steps are, what has to hold after
// each, and how it is done; lab.md and lab.zh.md tell it to people; manifests
// lie beside them. docs/labs.md is the format for those who write labs.
//
// The way through the code:
//
//	lab.go       what a lab is; load.go reads and lints a folder, decode.go reads
//	             YAML strictly, text.go the Markdown, values.go draws by seed
//	world.go     the cluster that a lab runs on: commands, objects, settling
//	check.go     one check: a command's behaviour or a field of the API
//	session.go   the learner's run: start, check, hint, solve, reset
//	verify.go    the author's proof: checks fail before the solution and pass after
//	receipt.go   what was passed, under a key
//
// The package speaks to Kubernetes as any client does, and to nodes through
// kplab's own commands; it knows no part of the lab from inside.
package labs
