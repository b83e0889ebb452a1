// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"context"
	"fmt"

	"github.com/kplab/kplab/apiserver/registry"
)

// Bootstrap adds what is missing of [Policy] to the seeds.
func (a *Authorizer) Bootstrap(ctx context.Context, seeds *registry.Seeds) error {
	x, err := a.index(ctx)
	if err != nil {
		return fmt.Errorf("read the stored roles: %w", err)
	}
	wantedRoles, wantedBindings := Policy()
	bound := map[string]bool{}
	for _, b := range x.clusterRoleBindings {
		bound[b.Name] = true
	}
	for _, r := range wantedRoles {
		if x.clusterRoles[r.Name] == nil {
			seeds.Add(ctx, a.source.Lookup(clusterRoles), r)
		}
	}
	for _, b := range wantedBindings {
		if !bound[b.Name] {
			seeds.Add(ctx, a.source.Lookup(clusterRoleBindings), b)
		}
	}
	return nil
}
