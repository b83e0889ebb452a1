// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/internal/xtables"
)

// Cleanup implements proxy.Mode. It works on what the kernel has: rules of built-in
// chains that lead to a chain of ours go first, then our chains, in both families; then
// the listeners close. Connections that are under way are carried on until they end or
// Close cuts them. A chain of ours that a foreign chain jumps to cannot go; it is
// emptied and named in the error.
func (m *Mode) Cleanup(ctx context.Context) error {
	if err := m.haveTool(ctx); err != nil {
		return err
	}
	clear(m.applied)
	var errs []error
	for _, family := range families {
		for _, table := range slices.Backward(tables[:]) {
			errs = append(errs, m.cleanTable(ctx, family, table))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("clean up userspace rules: %w", err)
	}
	m.closeServers(nil)
	m.dropPorts(nil)
	return nil
}

func (m *Mode) cleanTable(ctx context.Context, family corev1.IPFamily, table string) error {
	have, err := m.tool.Save(ctx, family, table)
	if err != nil {
		if m.tool.Variant == xtables.Legacy && family == corev1.IPv6Protocol {
			return nil // no IPv6 in this kernel, so no rules either
		}
		return err
	}
	var text strings.Builder
	foreign := map[string]string{}
	for _, name := range have.Names {
		if isOwnChain(table, name) {
			xtables.Declare(&text, name) // empties it
		}
	}
	if text.Len() == 0 {
		return nil
	}
	for _, name := range have.Names {
		for _, l := range have.Rules[name] {
			switch to := xtables.Target(l); {
			case !isOwnChain(table, to) || isOwnChain(table, name):
			case have.Builtin[name]:
				text.WriteString("-D " + strings.TrimPrefix(l, "-A ") + "\n")
			default:
				foreign[to] = l
			}
		}
	}
	var remove []string
	for _, name := range have.Names {
		if _, used := foreign[name]; isOwnChain(table, name) && !used {
			remove = append(remove, name)
			if m.tool.Variant == xtables.Legacy {
				text.WriteString("-X " + name + "\n")
			}
		}
	}
	if err := m.tool.Restore(ctx, family, "*"+table+"\n"+text.String()+"COMMIT\n"); err != nil {
		return err
	}
	if m.tool.Variant == xtables.NFT {
		if err := m.removeChains(family, table, remove); err != nil {
			return err
		}
	}
	if have, err = m.tool.Save(ctx, family, table); err != nil {
		return err
	}
	for _, name := range have.Names {
		if !isOwnChain(table, name) {
			continue
		}
		if rule, used := foreign[name]; used {
			return fmt.Errorf("chain %s of table %s is emptied but still there: the foreign rule %q jumps to it; delete that rule and clean up again", name, table, rule)
		}
		return fmt.Errorf("chain %s of table %s is still there", name, table)
	}
	return nil
}

func (m *Mode) removeChains(family corev1.IPFamily, table string, names []string) error {
	c, err := nfnl.Dial(m.opts.NetNS)
	if err != nil {
		return err
	}
	defer c.Close()
	nf := uint8(unix.NFPROTO_IPV4)
	if family == corev1.IPv6Protocol {
		nf = unix.NFPROTO_IPV6
	}
	return xtables.RemoveChains(c, nf, table, names)
}
