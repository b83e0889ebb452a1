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

step "format" unformatted
step "vet" "$go" vet ./...
step "imports, licences, package comments" "$go" test -count=1 ./internal/archtest
step "generated files are fresh" stale
# The linters take minutes from cold; `make test` leaves them to `make verify`.
[ "${1:-}" = static ] || step "golangci-lint" bin/golangci-lint run ./...
exit $fail
