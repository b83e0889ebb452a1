// SPDX-License-Identifier: Apache-2.0

// Package ctkeep keeps connection tracking and address translation switched on in a
// node. The kernel hangs both into a namespace's packet path for the first rule that
// needs them and takes them out with the last, and then every translated connection is
// cut in the middle: its packets go out with the addresses that they came with. A proxy
// that takes its rules away, for another mode or for none, must not do that to
// connections that others have open.
package ctkeep

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Table is the nftables table, of family inet, that does it. Nobody's packet meets a
// rule of it.
const Table = "kplab-node"

// ErrNoTables says that the kernel has no nf_tables, so that nothing is kept.
var ErrNoTables = errors.New("this kernel has no nf_tables: a change of the proxy's mode may cut connections")

// Keep makes the table in a namespace, or finds it.
func Keep(ns *netns.NS) error {
	c, err := nftables.New(nftables.WithNetNSFd(ns.Fd()))
	if err != nil {
		return fmt.Errorf("make the table %s: %w", Table, err)
	}
	t := c.AddTable(&nftables.Table{Name: Table, Family: nftables.TableFamilyINet})
	accept := nftables.ChainPolicyAccept
	// After everybody else's translation.
	priority := nftables.ChainPriorityRef(200)
	for name, hook := range map[string]*nftables.ChainHook{
		"prerouting": nftables.ChainHookPrerouting, "input": nftables.ChainHookInput,
		"output": nftables.ChainHookOutput, "postrouting": nftables.ChainHookPostrouting,
	} {
		c.AddChain(&nftables.Chain{Name: name, Table: t, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: priority, Policy: &accept})
	}
	keep := c.AddChain(&nftables.Chain{Name: "keep", Table: t})
	c.FlushChain(keep) // when the chain was there, so was the rule
	established := binary.NativeEndian.AppendUint32(nil, expr.CtStateBitESTABLISHED)
	c.AddRule(&nftables.Rule{Table: t, Chain: keep, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: established, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}})
	err = c.Flush()
	if errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: %w", ErrNoTables, err)
	}
	if err != nil {
		return fmt.Errorf("make the table %s: %w", Table, err)
	}
	return nil
}
