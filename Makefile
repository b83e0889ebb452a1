# The two commands that most people need:
#   make up      install what is missing, build, start a lab, say what to type next
#   make test    the same set-up, then every test (layers 0 to 4 of docs/testing.md)
# Both run as root, or through sudo where the user is not root.
SHELL := /bin/bash
GO := $(shell internal/tools/find-go.sh)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -E)
# One set of flags everywhere, so that one build cache serves all.
export GOFLAGS := -buildvcs=false
# No cgo but for the race detector: one library offers to load plugins, and where cgo
# could, the linker keeps every function that a plugin may want (a fifth of the binary).
export CGO_ENABLED := 0
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
# The embedded kubectl wants to know which release it is; the libraries' v0.X is v1.X.
KUBERNETES := $(shell $(GO) list -m -f '{{.Version}}' k8s.io/kubectl 2>/dev/null | sed 's/^v0/v1/')
COMPONENT := k8s.io/component-base/version
LDFLAGS := -s -w -X github.com/kplab/kplab/cluster.version=$(VERSION) -X $(COMPONENT).gitVersion=$(KUBERNETES) \
	-X $(COMPONENT).gitMajor=1 -X $(COMPONENT).gitMinor=$(word 2,$(subst ., ,$(KUBERNETES)))
# Everything but the commands and the whole labs runs under the race detector; the
# commands hold the embedded kubectl, whose race build alone costs minutes.
PACKAGES = $(shell $(GO) list ./... | grep -v -e /cmd/ -e /cluster/labtest)
# What setup installs and every supported kernel has: its lack fails a test that
# would else be skipped.
KPLAB_REQUIRE ?= root,iptables,iptables-legacy,nft,busybox,bridge
TEST = $(SUDO) env "PATH=$(dir $(GO)):$$PATH" KPLAB_BIN=$(CURDIR)/bin KPLAB_REQUIRE=$(KPLAB_REQUIRE) $(GO) test -count=1
RACE = CGO_ENABLED=1 $(TEST) -race

.PHONY: up down build setup test verify test-unit test-netns test-modes test-script test-vm test-long test-clients bench generate clean
.DELETE_ON_ERROR:

up: build
	$(SUDO) bin/kplab up -d

down: build
	$(SUDO) bin/kplab down

build: setup
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/kplab ./cmd/kplab

setup:
	internal/tools/setup.sh

test: build bin/kubectl-1.32 bin/cni verify
	$(RACE) -timeout 20m $(PACKAGES)
	$(TEST) -timeout 20m ./cluster/labtest ./cmd/...

verify: setup bin/golangci-lint
	internal/tools/verify.sh

test-unit: setup
	$(RACE) -short $(PACKAGES)

test-netns: setup
	$(RACE) ./internal/... ./sandbox/... ./cni/... ./node/... ./proxy/...

# Every row in every mode that the kernel has, written down as docs/modes.md.
# MODES_MERGE=a.json,b.json adds what KPLAB_MODES_JSON=… kept on other kernels.
test-modes: setup
	KPLAB_LONG=1 KPLAB_MODES_OUT=$(CURDIR)/docs/modes.md KPLAB_MODES_MERGE=$(MODES_MERGE) $(TEST) -timeout 60m -run TestModes ./proxy/proxytest

test-script: build bin/kubectl-1.32
	$(TEST) ./cmd/...

# Layer 5: what needs a kernel with IPVS, in a virtual machine; VM_SET=short for a part.
test-vm: setup
	mkdir -p bin
	$(GO) test -c -o bin/ipvs.test ./proxy/ipvs
	$(GO) test -c -o bin/proxytest.test ./proxy/proxytest
	$(SUDO) internal/tools/test-vm.sh $(VM_SET)

test-long: build bin/kubectl-1.32 bin/cni verify
	KPLAB_LONG=1 $(RACE) -timeout 120m $(PACKAGES)
	KPLAB_LONG=1 $(TEST) -timeout 60m ./cluster/labtest ./cmd/...
	$(MAKE) test-clients

# Programs that nobody here wrote, run against labs: Helm, controller-runtime and
# upstream's own kube-proxy. A module of their own, with minutes of building.
test-clients: build
	cd internal/tools/clients && $(GO) build -ldflags '-s -w' -o $(CURDIR)/bin/ ./helm ./kube-proxy
	cd internal/tools/clients && $(TEST) -timeout 20m .

# What it costs, as one table against the bars; BENCH_OUT=docs/bench.md keeps it.
bench: build
	$(SUDO) env "PATH=$(dir $(GO)):$$PATH" KPLAB_BIN=$(CURDIR)/bin $(GO) run ./internal/tools/bench -out '$(BENCH_OUT)'

generate: setup
	$(GO) generate ./...

clean:
	rm -rf bin

# Tools of their own modules, so that their dependencies are not ours.
bin/kubectl-1.32: internal/tools/kubectl132/go.sum internal/tools/kubectl132/main.go
	cd internal/tools/kubectl132 && $(GO) build -o $(CURDIR)/$@ .

# The reference CNI plugins, for the tests that call them.
bin/cni: internal/tools/cniplugins/go.sum
	mkdir -p $@
	cd internal/tools/cniplugins && $(GO) build -o $(CURDIR)/$@/ tool

bin/golangci-lint: internal/tools/lint/go.sum
	cd internal/tools/lint && $(GO) build -o $(CURDIR)/$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
