// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/internal/xtables"
)

// Message types of nf_tables and nfnetlink_acct, with their subsystem.
const (
	subsysAcct = 7 << 8

	msgGetChain = nfnl.NFTables | unix.NFT_MSG_GETCHAIN
	msgGetRule  = nfnl.NFTables | unix.NFT_MSG_GETRULE

	msgAcctNew = subsysAcct // NFNL_MSG_ACCT_NEW is 0
	msgAcctDel = subsysAcct | 3
	attrAcct   = 1
)

// conn is a netfilter netlink socket in a node's namespace. It exists because the
// iptables tools read a whole table to answer a question about one chain, and
// because their -X walks every chain: at ten thousand Services the one takes
// seconds and the other minutes. It only counts and deletes; rules are written by
// the tool.
type conn struct{ *nfnl.Conn }

// dialNFNL opens a socket in ns; nil means the current namespace.
func dialNFNL(ns *netns.NS) (conn, error) {
	c, err := nfnl.Dial(ns)
	return conn{c}, err
}

// chainUses lists the chains of the mode's tables, each with the number of its
// rules plus the number of rules that jump to it, as the kernel keeps it.
func (c conn) chainUses(family uint8) (map[string]map[string]int, error) {
	out := map[string]map[string]int{}
	reset := func() {
		for _, t := range tables {
			out[t] = map[string]int{}
		}
	}
	// One list for all tables: the kernel lists no table alone.
	err := c.Dump(msgGetChain, family, nil, reset, func(body []byte) {
		var in map[string]int
		var name string
		use := 0
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, value []byte) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				in = out[nfnl.CString(value)]
			case unix.NFTA_CHAIN_NAME:
				name = nfnl.CString(value)
			case unix.NFTA_CHAIN_USE:
				use = int(nfnl.U32(value))
			}
		})
		if in != nil {
			in[name] = use
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list the chains: %w", err)
	}
	return out, nil
}

// countRules counts the rules of one chain; one that is not there has none. It
// is for few chains: to list all rules takes the kernel a time that grows with
// their square, since it walks from the start for each part of the answer.
func (c conn) countRules(family uint8, table, chain string) (int, error) {
	n := 0
	err := c.Dump(msgGetRule, family, func(b []byte) []byte {
		return nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, table), unix.NFTA_RULE_CHAIN, chain)
	}, func() { n = 0 }, func([]byte) { n++ })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("count the rules of chain %s of table %s: %w", chain, table, err)
	}
	return n, nil
}

// removeChains empties and deletes chains.
func (c conn) removeChains(family uint8, table string, chains []string) error {
	return xtables.RemoveChains(c.Conn, family, table, chains)
}

// createAcct makes a packet counter object; one that exists is kept.
func (c conn) createAcct(name string) error {
	err := c.Request(msgAcctNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.AF_UNSPEC, acctName(name), nil)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("create the nfacct object %s: %w", name, err)
	}
	return nil
}

// deleteAcct removes a packet counter object; one that is not there, that is used
// by a rule of somebody else, or on a
// kernel without them, is success.
func (c conn) deleteAcct(name string) error {
	err := c.Request(msgAcctDel, 0, unix.AF_UNSPEC, acctName(name), nil)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("delete the nfacct object %s: %w", name, err)
	}
	return nil
}

func acctName(name string) func([]byte) []byte {
	return func(b []byte) []byte { return nfnl.String(b, attrAcct, name) }
}
