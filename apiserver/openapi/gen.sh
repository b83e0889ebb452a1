#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Writes zz_generated.openapi.go: the OpenAPI definitions of every type that the
# API serves. Run it by go generate. The generator's version is the one of
# k8s.io/kube-openapi in go.mod, so that the two never disagree.
set -eu
cd "$(dirname "$0")"
version=$(go list -m -f '{{.Version}}' k8s.io/kube-openapi)
file=zz_generated.openapi.go
# The generator reads the Go source of these packages out of the module cache.
go run "k8s.io/kube-openapi/cmd/openapi-gen@$version" \
	--output-dir . \
	--output-pkg github.com/kplab/kplab/apiserver/openapi \
	--output-file "$file" \
	--go-header-file header.txt \
	--report-filename /dev/null \
	k8s.io/api/admissionregistration/v1 \
	k8s.io/api/apps/v1 \
	k8s.io/api/authentication/v1 \
	k8s.io/api/authorization/v1 \
	k8s.io/api/autoscaling/v1 \
	k8s.io/api/autoscaling/v2 \
	k8s.io/api/batch/v1 \
	k8s.io/api/certificates/v1 \
	k8s.io/api/coordination/v1 \
	k8s.io/api/core/v1 \
	k8s.io/api/discovery/v1 \
	k8s.io/api/events/v1 \
	k8s.io/api/networking/v1 \
	k8s.io/api/node/v1 \
	k8s.io/api/policy/v1 \
	k8s.io/api/rbac/v1 \
	k8s.io/api/scheduling/v1 \
	k8s.io/api/scheduling/v1alpha3 \
	k8s.io/api/storage/v1 \
	k8s.io/apimachinery/pkg/api/resource \
	k8s.io/apimachinery/pkg/apis/meta/v1 \
	k8s.io/apimachinery/pkg/runtime \
	k8s.io/apimachinery/pkg/util/intstr \
	k8s.io/apimachinery/pkg/version \
	k8s.io/kube-aggregator/pkg/apis/apiregistration/v1 \
	k8s.io/metrics/pkg/apis/metrics/v1beta1
# Without its build constraint, so that the licence is the first line as in every
# other file.
sed -i '1,/^$/{/^\/\/go:build\|^\/\/ +build\|^$/d;}' "$file"
