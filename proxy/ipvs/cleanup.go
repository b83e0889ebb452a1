// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

var families = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}

// Chains implements proxy.Sharer.
func (m *Mode) Chains() proxy.Chains {
	out := proxy.Chains{}
	for _, table := range tables {
		out[table] = chainsOf(table)
	}
	return out
}

// Yield implements proxy.Sharer.
func (m *Mode) Yield(held proxy.Chains) { m.yielded = held }

// owns says whether this mode may remove a chain.
func (m *Mode) owns(table, chain string) bool {
	return slices.Contains(chainsOf(table), chain) && !slices.Contains(m.yielded[table], chain)
}

// Cleanup implements proxy.Mode: the rules first, so that nothing looks into the sets
// any more, then the virtual servers, kube-ipvs0 with its addresses, the sets, and the
// settings. Virtual servers of somebody else stay: ours are those on kube-ipvs0 and
// those that were noted. Open connections through it are cut; Drain lets them end.
func (m *Mode) Cleanup(ctx context.Context) error {
	clear(m.applied)
	if err := m.cleanRules(ctx); err != nil {
		return fmt.Errorf("clean up ipvs rules: %w", err)
	}
	k, err := openKernel(m.opts.NetNS)
	there := !errors.Is(err, ErrNoIPVS)
	if !there {
		k, err = openLinks(m.opts.NetNS)
	}
	if err != nil {
		return err
	}
	defer k.close()
	if there {
		for _, f := range families {
			st, err := m.look(k, f, nil)
			if err != nil {
				return err
			}
			for name := range st.servers {
				if err := k.deleteServer(name); err != nil {
					return err
				}
			}
		}
	}
	if err := errors.Join(m.deleteDevice(k), m.destroySets(k)); err != nil {
		return fmt.Errorf("clean up ipvs: %w", err)
	}
	if there {
		if err := m.leftBehind(k); err != nil {
			return err
		}
	}
	if err := m.restoreSysctls(); err != nil {
		return err
	}
	m.draining = false
	return m.forget()
}

func (m *Mode) deleteDevice(k *kernel) error {
	l, err := k.device()
	if err != nil || l == nil {
		return err
	}
	if err := k.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete %s: %w", Device, err)
	}
	if l, err = k.device(); l != nil {
		return fmt.Errorf("%s was deleted and is still there", Device)
	}
	return err
}

func (m *Mode) destroySets(k *kernel) error {
	var errs []error
	for _, f := range families {
		for s := range sets {
			have, err := k.entriesOf(s, f)
			if err == nil && have != nil {
				err = k.IpsetDestroy(s.nameIn(f))
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("destroy the set %s (a rule of somebody else may look into it): %w", s.nameIn(f), err))
			}
		}
	}
	return errors.Join(errs...)
}

// leftBehind reads back that no virtual server of ours is left.
func (m *Mode) leftBehind(k *kernel) error {
	r, err := m.remembered()
	if err != nil {
		return err
	}
	for _, f := range families {
		servers, err := k.serversOf(f)
		if err != nil {
			return err
		}
		for name := range servers {
			if r.owns(name) {
				return fmt.Errorf("clean up ipvs: virtual server %s is still there", name)
			}
		}
	}
	return nil
}

// cleanRules removes our rules and chains of both families, and reads back that they
// are gone. A chain that another mode holds now stays, with what leads to it.
func (m *Mode) cleanRules(ctx context.Context) error {
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	for _, f := range families {
		all, err := m.save(ctx, f)
		if err != nil {
			if m.tool.Variant == xtables.Legacy && f == corev1.IPv6Protocol {
				continue // no IPv6 in this kernel, so no rules either
			}
			return err
		}
		for _, table := range tables {
			saved := all[table]
			var declared, jumps, deleted strings.Builder
			for _, name := range saved.Names {
				if m.owns(table, name) {
					xtables.Declare(&declared, name)
					deleted.WriteString("-X " + name + "\n")
					continue
				}
				for _, l := range saved.Rules[name] {
					// A chain that was yielded may still have rules of ours, where the change
					// to the other mode did not get that far.
					if (saved.Builtin[name] || slices.Contains(chainsOf(table), name)) && m.owns(table, xtables.Target(l)) {
						jumps.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
					}
				}
			}
			if deleted.Len() == 0 {
				continue
			}
			if err := m.tool.Restore(ctx, f, "*"+table+"\n"+declared.String()+jumps.String()+deleted.String()+"COMMIT\n"); err != nil {
				return err
			}
			if saved, err = m.tool.Save(ctx, f, table); err != nil {
				return err
			}
			for _, name := range saved.Names {
				if m.owns(table, name) {
					return fmt.Errorf("chain %s of table %s is still there", name, table)
				}
			}
		}
	}
	return nil
}

// Drain implements proxy.Drainer. Rules and sets go at once: they are asked about new
// connections only. A virtual server stays while a real server of it has a connection,
// and so does its address; all weights are 0. Connections that are closing count the
// first time, since some of them may be opening. UDP does not stay: a flow finds the
// new mode's way with its next packet but one.
func (m *Mode) Drain(ctx context.Context) (open int, err error) {
	clear(m.applied)
	if err := m.cleanRules(ctx); err != nil {
		return 0, fmt.Errorf("drain ipvs: %w", err)
	}
	k, err := openKernel(m.opts.NetNS)
	if err != nil {
		return 0, err
	}
	defer k.close()
	first := !m.draining
	m.draining = true
	for _, f := range families {
		n, err := m.drain(k, f, first)
		if err != nil {
			return 0, fmt.Errorf("drain ipvs: %w", err)
		}
		open += n
	}
	return open, m.destroySets(k)
}

func (m *Mode) drain(k *kernel, f corev1.IPFamily, first bool) (open int, err error) {
	st, err := m.look(k, f, nil)
	if err != nil {
		return 0, err
	}
	needed := map[netip.Addr]bool{}
	for name := range st.servers {
		dests, err := k.destsOf(name)
		if err != nil {
			return 0, err
		}
		n := 0
		for a, d := range dests {
			busy := d.active
			if first {
				busy = d.open
			}
			if name.proto == unix.IPPROTO_UDP {
				busy = 0
			}
			if err := k.leave(name, a, dest{weight: d.weight, open: busy}, true); err != nil {
				return 0, err
			}
			n += busy
		}
		if n == 0 {
			if err := k.deleteServer(name); err != nil {
				return 0, err
			}
			continue
		}
		needed[name.addr] = true
		open += n
	}
	l, err := k.device()
	if err != nil || l == nil {
		return open, err
	}
	for a := range st.bound {
		if !needed[a] {
			if err := k.unbind(l, a); err != nil {
				return open, err
			}
		}
	}
	return open, nil
}
