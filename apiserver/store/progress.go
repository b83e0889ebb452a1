// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/feature"
)

// announceProgressSupport tells the watch cache that RequestWatchProgress works,
// so that it serves consistent lists and watch lists itself (KEP-2340). Upstream keeps that
// knowledge in one process-wide place and learns it by asking an etcd client
// for its version, so this is an etcd client that has only a version.
func announceProgressSupport(ctx context.Context) {
	feature.DefaultFeatureSupportChecker.CheckClient(ctx, versionOnly{}, storage.RequestWatchProgress)
}

// versionOnly is what upstream's check wants to see of an etcd client.
type versionOnly struct{}

// Endpoints names the one place to ask. The check asks each name only once in
// the life of a process.
func (versionOnly) Endpoints() []string { return []string{"kplab-store"} }

// Status answers with the first etcd version whose progress requests are
// reliable, as ours are.
func (versionOnly) Status(context.Context, string) (*clientv3.StatusResponse, error) {
	return &clientv3.StatusResponse{Version: "3.5.13"}, nil
}
