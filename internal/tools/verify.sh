#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Layer 0: what can be said without running the product.
set -eu
cd "$(dirname "$0")/../.."
go=$(internal/tools/find-go.sh)
fail=0
step() { echo "verify: $1" >&2; shift; "$@" || fail=1; }

unformatted() { out=$("$(dirname "$go")"/gofmt -l $(git ls-files '*.go')); [ -z "$out" ] || { echo "gofmt would change:"; echo "$out"; return 1; }; }
stale() { internal/tools/generated.sh "$go"; }
# Tidying reads modules that no build needs, the tests of what we import. Where
# they are neither in the cache nor to be had there is no diff to show: say so.
untidy() {
	out=$("$go" mod tidy -diff 2>&1) && return 0
	case $out in
	*"diff current/go."*) echo "go mod tidy would change:"; echo "$out"; return 1 ;;
	*) echo "verify: not checked: $out" | tail -n 1 >&2 ;;
	esac
}

step "format" unformatted
step "go.mod is tidy" untidy
step "vet" "$go" vet ./...
step "imports, licences, package comments" "$go" test -count=1 ./internal/archtest
step "generated files are fresh" stale
step "golangci-lint" bin/golangci-lint run ./...
exit $fail
