// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// Chains implements proxy.Sharer: those whose names do not come from a Service.
func (m *Mode) Chains() proxy.Chains {
	out := proxy.Chains{}
	for _, table := range tables {
		out[table] = fixedChains(table)
	}
	return out
}

// Yield implements proxy.Sharer.
func (m *Mode) Yield(held proxy.Chains) { m.yielded = held }

// owns says whether Cleanup may remove a chain.
func (m *Mode) owns(table, chain string) bool {
	return isOwnChain(table, chain) && !slices.Contains(m.yielded[table], chain)
}

// Cleanup implements proxy.Mode. It works on what the kernel has, not on what
// this process remembers: rules of built-in chains that lead to a chain of ours
// go first, then our chains in all three tables and both families, the counter
// objects, and the sysctl if Apply changed it. Tables and built-in chains stay,
// since somebody else's rules are in them, and since conntrack loses its hooks
// with the last of them. A chain of ours that a foreign chain jumps to cannot go;
// it is emptied and named in the error.
func (m *Mode) Cleanup(ctx context.Context) error {
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	clear(m.applied)
	var errs []error
	for _, family := range []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol} {
		for _, table := range slices.Backward(tables[:]) {
			errs = append(errs, m.cleanTable(ctx, family, table))
		}
	}
	if err := errors.Join(errs...); err != nil {
		// The sysctl stays while rules lean on it.
		return fmt.Errorf("clean up iptables rules: %w", err)
	}
	return errors.Join(m.deleteAccts(), m.restoreRouteLocalnet())
}

func (m *Mode) cleanTable(ctx context.Context, family corev1.IPFamily, table string) error {
	if m.tool.Variant == VariantNFT {
		// No process at all where there is nothing of ours.
		names, err := m.chainUses(ctx, family, table)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(slices.Collect(maps.Keys(names[table])), func(name string) bool { return m.owns(table, name) }) {
			return nil
		}
	}
	saved, err := m.tool.Save(ctx, family, table)
	if err != nil {
		if m.tool.Variant == VariantLegacy && family == corev1.IPv6Protocol {
			return nil // no IPv6 in this kernel, so no rules either
		}
		return err
	}
	var jumps strings.Builder
	var own []string
	foreign := map[string]string{}
	for _, name := range saved.Names {
		if m.owns(table, name) {
			own = append(own, name)
			continue
		}
		for _, l := range saved.Rules[name] {
			switch to := xtables.Target(l); {
			case !m.owns(table, to):
			case saved.Builtin[name]:
				jumps.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
			default:
				foreign[to] = l
			}
		}
	}
	if len(own) == 0 {
		return nil
	}
	var declared, deleted strings.Builder
	var remove []string
	for _, name := range own {
		if _, used := foreign[name]; used || m.tool.Variant == VariantLegacy {
			xtables.Declare(&declared, name)
		}
		if _, used := foreign[name]; !used {
			remove = append(remove, name)
			if m.tool.Variant == VariantLegacy {
				deleted.WriteString("-X " + name + "\n")
			}
		}
	}
	if text := declared.String() + jumps.String() + deleted.String(); text != "" {
		if err := m.restore(ctx, family, "*"+table+"\n"+text+"COMMIT\n"); err != nil {
			return err
		}
	}
	if m.tool.Variant == VariantNFT {
		k, err := dialNFNL(m.opts.NetNS)
		if err != nil {
			return err
		}
		defer k.Close()
		if err := k.removeChains(nfFamily(family), table, remove); err != nil {
			return err
		}
	}
	return m.leftBehind(ctx, family, table, foreign)
}

// leftBehind reads back that a table holds nothing of ours but chains that
// foreign rules use.
func (m *Mode) leftBehind(ctx context.Context, family corev1.IPFamily, table string, foreign map[string]string) error {
	names, err := m.chainUses(ctx, family, table)
	if err != nil {
		return err
	}
	for name := range names[table] {
		if !m.owns(table, name) {
			continue
		}
		if rule, used := foreign[name]; used {
			return fmt.Errorf("chain %s of table %s is emptied but still there: the foreign rule %q jumps to it; delete that rule and clean up again", name, table, rule)
		}
		return fmt.Errorf("chain %s of table %s is still there", name, table)
	}
	return nil
}

func (m *Mode) deleteAccts() error {
	c, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return err
	}
	defer c.Close()
	return errors.Join(c.deleteAcct(acctInvalidDropped), c.deleteAcct(acctLocalhost))
}
