// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// balancer picks the endpoints of one Service port in turn, and remembers which one a
// client has where the Service asks for that. It is safe for concurrent use.
type balancer struct {
	mu        sync.Mutex
	endpoints []netip.AddrPort // in an order of their own
	known     []netip.AddrPort // the same, sorted: to see a change
	next      int
	sticky    time.Duration
	clients   map[netip.Addr]affinity
}

// affinity is what a client has.
type affinity struct {
	endpoint netip.AddrPort
	used     time.Time
}

// set replaces the endpoints, which are sorted. A client whose endpoint is gone is free
// to move. The same endpoints go on in turn.
func (b *balancer) set(endpoints []netip.AddrPort, sticky time.Duration, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sticky = sticky
	if !slices.Equal(b.known, endpoints) {
		b.known, b.endpoints, b.next = endpoints, slices.Clone(endpoints), 0
		// Nodes that change at the same moment shall not all begin with the same one.
		rand.Shuffle(len(b.endpoints), func(i, j int) { b.endpoints[i], b.endpoints[j] = b.endpoints[j], b.endpoints[i] })
	}
	for client, a := range b.clients {
		if sticky == 0 || now.Sub(a.used) >= sticky || !slices.Contains(endpoints, a.endpoint) {
			delete(b.clients, client)
		}
	}
}

// pick chooses for a client; false when there is no endpoint. again says that the last
// choice did not answer: then the client's own is not asked once more, and what is
// chosen becomes its own.
func (b *balancer) pick(client netip.Addr, again bool, now time.Time) (netip.AddrPort, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.endpoints) == 0 {
		return netip.AddrPort{}, false
	}
	if a, ok := b.clients[client]; ok && !again && b.sticky > 0 && now.Sub(a.used) < b.sticky {
		b.clients[client] = affinity{a.endpoint, now}
		return a.endpoint, true
	}
	chosen := b.endpoints[b.next]
	b.next = (b.next + 1) % len(b.endpoints)
	if b.sticky > 0 {
		if b.clients == nil {
			b.clients = map[netip.Addr]affinity{}
		}
		b.clients[client] = affinity{chosen, now}
	}
	return chosen, true
}
