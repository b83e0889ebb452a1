// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// FaultTable is the nftables table that holds the rules of faults: of family bridge in
// the fabric's namespace, of family inet in a node's. It is there only while one needs
// it.
const FaultTable = "kplab-faults"

// NodeFault is what goes wrong in a node's own network. The zero value is nothing.
type NodeFault struct {
	// DNS are the servers whose answers the node and its pods do not get: their
	// questions are dropped.
	DNS []netip.Addr
	// Conns is how many connections the node tracks; packets that would begin one
	// more are dropped. 0 is no limit.
	Conns uint32
}

// SetNodeFault makes the network of a node faulty as given, or right with the zero
// value, and reads back what it wrote.
func SetNodeFault(ns *netns.NS, f NodeFault) error {
	var chains []faultChain
	if len(f.DNS) > 0 {
		ask := faultChain{name: "dns-dead"}
		for _, server := range f.DNS {
			for _, protocol := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
				ask.rules = append(ask.rules, faultRule{"dns-dead", append(question(server, protocol), &expr.Verdict{Kind: expr.VerdictDrop})})
			}
		}
		// Before a proxy's rules translate the address.
		chains = append(chains, ask)
		chains = append(chains, jumps("dns", ask.name, *nftables.ChainPriorityRaw)...)
	}
	if f.Conns > 0 {
		// One rule is one count, whichever way packets come.
		limit := faultChain{name: "conn-limit", rules: []faultRule{{"conn-limit", []expr.Any{
			&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: nativeEndian32(expr.CtStateBitNEW), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
			&expr.Connlimit{Count: f.Conns, Flags: expr.NFT_CONNLIMIT_F_INV},
			&expr.Counter{},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}}}}
		chains = append(chains, limit)
		// After the connection is looked up, before its address is translated.
		chains = append(chains, jumps("conns", limit.name, *nftables.ChainPriorityMangle)...)
	}
	return writeFaultTable(ns, nftables.TableFamilyINet, chains)
}

// jumps returns base chains for what a node forwards and for what it sends itself.
func jumps(prefix, to string, priority nftables.ChainPriority) []faultChain {
	jump := []faultRule{{rule: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: to}}}}
	return []faultChain{
		{name: prefix + "-prerouting", hook: nftables.ChainHookPrerouting, priority: priority, rules: jump},
		{name: prefix + "-output", hook: nftables.ChainHookOutput, priority: priority, rules: jump},
	}
}

// question matches what is sent to a name server.
func question(server netip.Addr, protocol byte) []expr.Any {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16)
	if server.Is6() {
		family, offset = unix.NFPROTO_IPV6, 24
	}
	equal := func(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, equal([]byte{family}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(server.BitLen() / 8)}, equal(server.AsSlice()),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, equal([]byte{protocol}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, equal([]byte{0, 53}),
		&expr.Counter{},
	}
}

// faultChain is a chain of the fault table; without a hook others jump to it.
type faultChain struct {
	name     string
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    []faultRule
}

// faultRule is a rule and the fault that it belongs to.
type faultRule struct {
	fault string
	rule  []expr.Any
}

// writeFaultTable makes the fault table of a namespace hold exactly these chains, in
// one transaction, and reads them back. Without chains there is no table.
func writeFaultTable(ns *netns.NS, family nftables.TableFamily, chains []faultChain) error {
	write := func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := &nftables.Table{Name: FaultTable, Family: family}
		// A table that is not there cannot be deleted, so it is made first.
		c.AddTable(table)
		c.DelTable(table)
		if len(chains) > 0 {
			c.AddTable(table)
		}
		for _, ch := range chains {
			made := &nftables.Chain{Name: ch.name, Table: table}
			if ch.hook != nil {
				made.Type, made.Hooknum, made.Priority = nftables.ChainTypeFilter, ch.hook, &ch.priority
			}
			made = c.AddChain(made)
			for _, r := range ch.rules {
				rule := &nftables.Rule{Table: table, Chain: made, Exprs: r.rule}
				if r.fault != "" {
					rule.UserData = userdata.AppendString(nil, userdata.TypeComment, shortComment(r.fault))
				}
				c.AddRule(rule)
			}
		}
		if err := c.Flush(); err != nil {
			return err
		}
		return checkFaultTable(c, table, chains)
	}
	if err := ns.Do(write); err != nil {
		return fmt.Errorf("write the nftables table %s: %w", FaultTable, err)
	}
	return nil
}

// checkFaultTable reads the table back.
func checkFaultTable(c *nftables.Conn, table *nftables.Table, chains []faultChain) error {
	tables, err := c.ListTablesOfFamily(table.Family)
	if err != nil {
		return err
	}
	there := slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == table.Name })
	if there != (len(chains) > 0) {
		return errors.New("the kernel took it, and what it has is something else")
	}
	for _, ch := range chains {
		rules, err := c.GetRules(table, &nftables.Chain{Name: ch.name, Table: table})
		if err != nil {
			return err
		}
		if len(rules) != len(ch.rules) {
			return fmt.Errorf("chain %s: %d rules written, the kernel has %d", ch.name, len(ch.rules), len(rules))
		}
	}
	return nil
}

// shortComment cuts a comment to what the kernel's tools take.
func shortComment(s string) string { return s[:min(len(s), 120)] }

func bigEndian32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

func nativeEndian32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// nodeOf is the node, or outside, whose namespace on the fabric it is.
func nodeOf(member string) string { return strings.TrimPrefix(member, NSName("")) }
