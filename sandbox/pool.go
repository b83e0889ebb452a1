// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/kplab/kplab/internal/netns"
)

// poolSize is how many network namespaces are kept ready for pods. Making one is
// most of the cost of a pod, 0.5 ms of kernel time; an idle one costs 0.3 MiB of
// kernel memory.
const poolSize = 8

// pool makes network namespaces for pods ahead of time. They are held by their
// descriptors only, so that nothing of them is left when the daemon dies.
type pool struct {
	create func() (*netns.NS, error)
	log    *slog.Logger
	ready  chan *netns.NS
	taken  chan struct{} // wakes a fill that has failed
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// startPool begins to fill a pool with what create returns.
func startPool(log *slog.Logger, create func() (*netns.NS, error)) *pool {
	ctx, cancel := context.WithCancel(context.Background())
	p := &pool{create: create, log: log, ready: make(chan *netns.NS, poolSize), taken: make(chan struct{}, 1), cancel: cancel}
	p.done.Go(func() { p.fill(ctx) })
	return p
}

// fill keeps the pool full until ctx ends. When a namespace cannot be made it
// waits for the next take, which makes its own and reports why that fails.
func (p *pool) fill(ctx context.Context) {
	for {
		ns, err := p.create()
		if err != nil {
			p.log.Warn("no network namespace can be made ahead; trying again with the next pod", "error", err)
			select {
			case <-p.taken:
				continue
			case <-ctx.Done():
				return
			}
		}
		select {
		case p.ready <- ns:
		case <-ctx.Done():
			_ = ns.Close() // a fresh handle: nothing can fail that matters
			return
		}
	}
}

// take returns a namespace prepared for a pod; the caller owns it.
func (p *pool) take() (*netns.NS, error) {
	select {
	case ns, ok := <-p.ready:
		if !ok {
			return nil, ErrClosed
		}
		return ns, nil
	default:
	}
	select {
	case p.taken <- struct{}{}:
	default: // it is awake already
	}
	return p.create()
}

// stop ends filling and drops what is ready.
func (p *pool) stop() error {
	p.cancel()
	p.done.Wait()
	close(p.ready)
	var errs []error
	for ns := range p.ready {
		errs = append(errs, ns.Close())
	}
	return errors.Join(errs...)
}
