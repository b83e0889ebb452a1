#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Generates into a copy of the tree and compares: a generated file that differs
# was edited by hand, or its source changed without it.
set -eu
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 -I{} sh -c 'test -e "$1" && echo "$1"' _ {} | tar cf - -T - | tar xf - -C "$copy"
(cd "$copy" && "$1" generate ./... >/dev/null)
git ls-files '*.go' | xargs grep -lE '^// Code generated .* DO NOT EDIT\.$' | while read -r f; do
	cmp -s "$f" "$copy/$f" || { echo "$f is stale: run make generate"; exit 1; }
done
