// SPDX-License-Identifier: Apache-2.0

package loadbalancer

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/kplab/kplab/controller/loop"
)

const (
	// proxyHealthPort is where kube-proxy tells load balancers of its health.
	proxyHealthPort = 10256
	// checkEvery, checkTimeout and checkFailures make a dead node lose its addresses
	// after three to six seconds; a pause of a busy machine costs nothing.
	checkEvery    = time.Second
	checkTimeout  = time.Second
	checkFailures = 3
)

// target is one thing to check on one node.
type target struct {
	node string
	addr netip.AddrPort
}

// checks is what to check, and what was found.
type checks struct {
	mu     sync.Mutex
	wanted map[loop.Key][]target
	// failures counts failed checks since the last good one.
	failures map[target]int
}

func (c *checks) init() { c.wanted, c.failures = map[loop.Key][]target{}, map[target]int{} }

// want has the targets of a Service checked from now on.
func (c *checks) want(key loop.Key, targets []target) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wanted[key] = targets
}

func (c *checks) drop(key loop.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.wanted, key)
}

// sick says that a target has failed too often. One never checked is well: the events
// of the API say soon enough where endpoints are.
func (c *checks) sick(t target) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failures[t] >= checkFailures
}

// due lists each target once, and forgets what nobody wants any more.
func (c *checks) due() []target {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := map[target]bool{}
	var out []target
	for _, key := range keysOf(c.wanted) {
		for _, t := range c.wanted[key] {
			if !seen[t] {
				seen[t] = true
				out = append(out, t)
			}
		}
	}
	for t := range c.failures {
		if !seen[t] {
			delete(c.failures, t)
		}
	}
	return out
}

// found notes a result and returns the Services for which it makes a difference.
func (c *checks) found(t target, err error) []loop.Key {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.failures[t] >= checkFailures
	if err == nil {
		delete(c.failures, t)
	} else {
		c.failures[t]++
	}
	if was == (c.failures[t] >= checkFailures) {
		return nil
	}
	var keys []loop.Key
	for key, targets := range c.wanted {
		for _, o := range targets {
			if o == t {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// checkNodes asks every target once a second until ctx ends.
func (c *Controller) checkNodes(ctx context.Context) {
	client := &http.Client{
		Timeout:   checkTimeout,
		Transport: &http.Transport{DialContext: c.dial, DisableKeepAlives: true},
	}
	tick := c.clock.NewTicker(checkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C():
		}
		var wg sync.WaitGroup
		slots := make(chan struct{}, 8)
		for _, t := range c.checks.due() {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				err := check(ctx, client, t.addr)
				if ctx.Err() != nil {
					return
				}
				for _, key := range c.checks.found(t, err) {
					c.loop.Log().Info("a node's health check for a load balancer changed", "service", key, "node", t.node, "address", t.addr, "error", err)
					c.loop.Add(key)
				}
			})
		}
		wg.Wait()
	}
}

// check is one question of a load balancer to a node.
func check(ctx context.Context, client *http.Client, addr netip.AddrPort) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/healthz", addr), nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // the status says it all
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", resp.Status)
	}
	return nil
}
