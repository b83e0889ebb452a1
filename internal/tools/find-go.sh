#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Go that can build kplab, or says where to get one.
want=1.26.8 # the go line of go.mod
for go in "$(command -v go)" /usr/local/go/bin/go /usr/lib/go/bin/go "$HOME/go/bin/go"; do
	[ -x "$go" ] || continue
	have=$(GOTOOLCHAIN=local "$go" env GOVERSION | sed 's/^go//; s/[^0-9.].*//')
	if [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ]; then
		echo "$go"
		exit 0
	fi
	old="$old $go ($have)"
done
echo "kplab needs Go $want or newer, found:${old:- none}. Get it from https://go.dev/dl/ and unpack it in /usr/local." >&2
echo go
