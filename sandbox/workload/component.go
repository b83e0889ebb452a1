// SPDX-License-Identifier: Apache-2.0

package workload

import "context"

// component is a part of the lab itself, as a pod of kube-system shows it. The part
// runs inside the daemon and not in the pod; what the pod has of it is its log.
type component struct{ ctx Context }

func newComponent(c Context) (Server, error) { return &component{ctx: c}, nil }

// Run implements Server: it prints what the part says, from its beginning.
func (s *component) Run(ctx context.Context) error {
	if s.ctx.PartLog != nil {
		return s.ctx.PartLog(ctx, repository(s.ctx.Image), s.ctx.Stderr)
	}
	<-ctx.Done()
	return nil
}
