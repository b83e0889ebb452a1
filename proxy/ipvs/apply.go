// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// state is what the kernel holds of ours in one family.
type state struct {
	family  corev1.IPFamily
	servers map[key]*served
	bound   map[netip.Addr]bool
	// entries is nil for a set that is not there.
	entries [sets]map[entry]bool
	// rules is the text that was loaded last, saved what iptables-save prints of it; both
	// are empty when nobody knows.
	rules string
	saved map[string]map[string][]string
}

// served is a virtual server in the kernel, with the weights of its real servers.
type served struct {
	options
	weights map[netip.AddrPort]int
}

// look reads everything of ours: the sets by name, the addresses on kube-ipvs0, and the
// virtual servers on those, those that are wanted, and those that were noted.
func (m *Mode) look(k *kernel, f corev1.IPFamily, w *want) (*state, error) {
	r, err := m.remembered()
	if err != nil {
		return nil, err
	}
	st := &state{family: f, servers: map[key]*served{}}
	if st.bound, _, err = k.addresses(f); err != nil {
		return nil, err
	}
	for s := range sets {
		if st.entries[s], err = k.entriesOf(s, f); err != nil {
			return nil, err
		}
	}
	servers, err := k.serversOf(f)
	if err != nil {
		return nil, err
	}
	for name, o := range servers {
		if !st.bound[name.addr] && !r.owns(name) && (w == nil || w.servers[name] == nil) {
			continue // somebody else's
		}
		dests, err := k.destsOf(name)
		if err != nil {
			return nil, err
		}
		st.servers[name] = &served{o, weights(dests)}
	}
	return st, nil
}

func weights(dests map[netip.AddrPort]dest) map[netip.AddrPort]int {
	out := make(map[netip.AddrPort]int, len(dests))
	for a, d := range dests {
		out[a] = d.weight
	}
	return out
}

// apply brings one family up to date and reads back what it wrote. The order keeps a
// packet from meeting half of a Service: what rules look into, then who answers, then
// the rules, and the address, which brings the packets, last; the other way round for
// what goes.
func (m *Mode) apply(ctx context.Context, k *kernel, r *ruleset) (*state, error) {
	link, err := k.makeDevice()
	if err != nil {
		return nil, err
	}
	_, local, err := k.addresses(r.family)
	if err != nil {
		return nil, err
	}
	w := r.on(local)
	if err := m.keepServers(r.family, w); err != nil {
		return nil, err
	}
	st, full := m.applied[r.family], false
	if st == nil {
		full = true
		if st, err = m.look(k, r.family, w); err != nil {
			return nil, err
		}
	}
	c := &change{kernel: k, link: link, state: st, want: w}
	steps := []func() error{
		c.addEntries, c.addServers,
		func() error { return m.applyRules(ctx, st, r) },
		c.bindAddresses, c.unbindAddresses, c.deleteServers, c.deleteEntries,
		func() error { return c.readBack(full) },
	}
	for _, step := range steps {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := step(); err != nil {
			return nil, err
		}
	}
	return st, nil
}

// change is one Apply of one family; it keeps state up to date as it goes.
type change struct {
	*kernel
	link  netlink.Link
	state *state
	want  *want
	// What was touched, to be read back.
	touched         map[key]bool
	added, deleted  [sets][]entry
	bound, released []netip.Addr
}

func (c *change) addEntries() error {
	for s := range sets {
		if c.state.entries[s] == nil {
			if err := c.createSet(s, c.state.family); err != nil {
				return err
			}
			c.state.entries[s] = map[entry]bool{}
		}
		for e := range c.want.entries[s] {
			if c.state.entries[s][e] {
				continue
			}
			if err := c.addEntry(s, c.state.family, e); err != nil {
				return err
			}
			c.state.entries[s][e] = true
			c.added[s] = append(c.added[s], e)
		}
	}
	return nil
}

func (c *change) deleteEntries() error {
	for s := range sets {
		for e := range c.state.entries[s] {
			if c.want.entries[s][e] {
				continue
			}
			if err := c.deleteEntry(s, c.state.family, e); err != nil {
				return err
			}
			delete(c.state.entries[s], e)
			c.deleted[s] = append(c.deleted[s], e)
		}
	}
	return nil
}

func (c *change) touch(k key) {
	if c.touched == nil {
		c.touched = map[key]bool{}
	}
	c.touched[k] = true
}

// addServers makes virtual servers and their real servers as wanted. Real servers that
// are not wanted leave.
func (c *change) addServers() error {
	for name, s := range c.want.servers {
		have := c.state.servers[name]
		switch {
		case have == nil:
			if err := c.ipvs.NewService(s.service()); err != nil {
				return fmt.Errorf("make virtual server %s with scheduler %s: %w", name, s.scheduler, explain(err))
			}
			have = &served{s.options, map[netip.AddrPort]int{}}
			c.state.servers[name] = have
			c.touch(name)
		case have.options != s.options:
			if err := c.ipvs.UpdateService(s.service()); err != nil {
				return fmt.Errorf("change virtual server %s to scheduler %s: %w", name, s.scheduler, explain(err))
			}
			have.options = s.options
			c.touch(name)
		}
		if err := c.realServers(s, have); err != nil {
			return err
		}
	}
	return nil
}

// explain adds to the kernel's error for a scheduler that it does not have.
func explain(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("%w: the kernel lacks that scheduler; load its module ip_vs_NAME or take another", err)
	}
	return err
}

// realServers makes the real servers of one virtual server those that are wanted.
func (c *change) realServers(s *server, have *served) error {
	for _, a := range s.real {
		weight, there := have.weights[a]
		var err error
		switch {
		case !there:
			err = c.ipvs.NewDestination(s.key.service(), destination(a, 1))
		case weight != 1:
			err = c.ipvs.UpdateDestination(s.key.service(), destination(a, 1))
		default:
			continue
		}
		if err != nil {
			return fmt.Errorf("give virtual server %s the real server %s: %w", s.key, a, err)
		}
		have.weights[a] = 1
		c.touch(s.key)
	}
	if len(have.weights) == len(s.real) {
		return nil
	}
	// Those that leave, and those that are leaving: who has no connection any more goes.
	dests, err := c.destsOf(s.key)
	if err != nil {
		return err
	}
	for a, d := range dests {
		if slices.Contains(s.real, a) {
			continue
		}
		if err := c.leave(s.key, a, d, slices.Contains(s.serving, a)); err != nil {
			return err
		}
		if d.open > 0 && stays(s.key, slices.Contains(s.serving, a)) {
			have.weights[a] = 0
		} else {
			delete(have.weights, a)
		}
		c.touch(s.key)
	}
	for a := range have.weights {
		if _, there := dests[a]; !there {
			return fmt.Errorf("real server %s of virtual server %s is gone: %w", a, s.key, errDiffers)
		}
	}
	return nil
}

// stays says whether a real server that is not wanted keeps its connections. A UDP flow
// never ends by itself, so it ends with the endpoint: its next packet finds another.
func stays(k key, serving bool) bool { return k.proto != unix.IPPROTO_UDP || serving }

// leave gives no new connections to a real server, and takes it out when it has no old
// ones.
func (k *kernel) leave(s key, a netip.AddrPort, d dest, serving bool) error {
	var err error
	switch {
	case d.open == 0, !stays(s, serving):
		err = k.ipvs.DelDestination(s.service(), destination(a, 0))
	case d.weight != 0:
		err = k.ipvs.UpdateDestination(s.service(), destination(a, 0))
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("take the real server %s from virtual server %s: %w", a, s, err)
	}
	return nil
}

func (c *change) deleteServers() error {
	for name := range c.state.servers {
		if c.want.servers[name] != nil {
			continue
		}
		if err := c.deleteServer(name); err != nil {
			return err
		}
		delete(c.state.servers, name)
		c.touch(name)
	}
	return nil
}

func (k *kernel) deleteServer(name key) error {
	// The kernel's word for "not there" is ESRCH for a virtual server.
	if err := k.ipvs.DelService(name.service()); err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete virtual server %s: %w", name, err)
	}
	return nil
}

func (c *change) bindAddresses() error {
	for a := range c.want.bound {
		if c.state.bound[a] {
			continue
		}
		if err := c.bind(c.link, a); err != nil {
			return err
		}
		c.state.bound[a] = true
		c.bound = append(c.bound, a)
	}
	return nil
}

func (c *change) unbindAddresses() error {
	for a := range c.state.bound {
		if c.want.bound[a] {
			continue
		}
		if err := c.unbind(c.link, a); err != nil {
			return err
		}
		delete(c.state.bound, a)
		c.released = append(c.released, a)
	}
	return nil
}

// errDiffers says that the kernel does not hold what was written.
var errDiffers = errors.New("somebody else writes to it, or it was cleared")

// many is the number of changed entries of a set from which it is cheaper to read the
// whole set than to ask for each.
const many = 64

// readBack checks that the kernel has what was written; all of it after a full look.
func (c *change) readBack(full bool) error {
	st := c.state
	if full || len(c.touched) > 0 {
		servers, err := c.serversOf(st.family)
		if err != nil {
			return err
		}
		for name := range c.touched {
			if err := c.checkServer(servers, name); err != nil {
				return err
			}
		}
	}
	for s := range sets {
		if err := c.checkSet(s, full); err != nil {
			return err
		}
	}
	if full || len(c.bound)+len(c.released) > 0 {
		bound, _, err := c.addresses(st.family)
		if err != nil {
			return err
		}
		if !maps.Equal(bound, st.bound) {
			return fmt.Errorf("read back: %s has %d addresses instead of %d; %w", Device, len(bound), len(st.bound), errDiffers)
		}
	}
	return nil
}

func (c *change) checkServer(servers map[key]options, name key) error {
	want, wanted := c.state.servers[name]
	have, there := servers[name]
	if wanted != there || (wanted && have != want.options) {
		return fmt.Errorf("read back: virtual server %s is %+v instead of %+v (there %t, wanted %t); %w", name, have, want, there, wanted, errDiffers)
	}
	if !wanted {
		return nil
	}
	dests, err := c.destsOf(name)
	if err != nil {
		return err
	}
	if got := weights(dests); !maps.Equal(got, want.weights) {
		return fmt.Errorf("read back: virtual server %s has real servers %v instead of %v; %w", name, got, want.weights, errDiffers)
	}
	return nil
}

func (c *change) checkSet(s set, full bool) error {
	if full || len(c.added[s])+len(c.deleted[s]) > many {
		have, err := c.entriesOf(s, c.state.family)
		if err != nil {
			return err
		}
		if have == nil || !maps.Equal(have, c.state.entries[s]) {
			return fmt.Errorf("read back: set %s has %d entries instead of %d; %w", s.nameIn(c.state.family), len(have), len(c.state.entries[s]), errDiffers)
		}
		return nil
	}
	for want, list := range map[bool][]entry{true: c.added[s], false: c.deleted[s]} {
		for _, e := range list {
			have, err := c.has(s, c.state.family, e)
			if err != nil {
				return err
			}
			if have != want {
				return fmt.Errorf("read back: set %s holds %s: %t, and should: %t; %w", s.nameIn(c.state.family), e.text(s.kind()), have, want, errDiffers)
			}
		}
	}
	return nil
}

// Intact implements proxy.Checker: it reads everything of ours and compares.
func (m *Mode) Intact(ctx context.Context) (bool, error) {
	if len(m.applied) == 0 {
		return true, nil
	}
	k, err := openKernel(m.opts.NetNS)
	if err != nil {
		return false, err
	}
	defer k.close()
	for name, value := range m.sysctls() {
		if now, err := m.sysctl(name); err != nil || now != value {
			return false, err
		}
	}
	for f, st := range m.applied {
		l, err := k.device()
		if err != nil || l == nil {
			return false, err
		}
		have, err := m.look(k, f, nil)
		if err != nil {
			return false, err
		}
		if !maps.Equal(have.bound, st.bound) || !maps.EqualFunc(have.servers, st.servers, (*served).equal) {
			return false, nil
		}
		for s := range sets {
			if have.entries[s] == nil || !maps.Equal(have.entries[s], st.entries[s]) {
				return false, nil
			}
		}
		saved, err := m.saveRules(ctx, f)
		if err != nil || !equalRules(saved, st.saved) {
			return false, err
		}
	}
	return true, nil
}

func (s *served) equal(o *served) bool {
	return s.options == o.options && maps.Equal(s.weights, o.weights)
}
