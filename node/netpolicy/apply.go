// SPDX-License-Identifier: Apache-2.0

package netpolicy

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// errDiffers says that the kernel holds something else than was written.
var errDiffers = errors.New("the kernel holds something else than was written")

// comment is what a rule of a chain shows: the policy that opens the way, or at the
// end those that close all others.
func (c *chain) comment(i int) string {
	if i < len(c.clauses) {
		return c.clauses[i].policy
	}
	return "isolated by " + strings.Join(c.policies, ", ")
}

// selfElements let a pod reach itself, which no policy forbids.
func selfElements(addrs []netip.Addr) (out []element) {
	for _, a := range addrs {
		out = append(out, element{key: concat(a, a)})
	}
	return out
}

// write makes have into want in one transaction; without have, whatever there is
// gives way to all of want.
func write(conn *nfnl.Conn, have, want *Program) error {
	b := newBatch(conn, want.v6)
	switch {
	case want.Empty():
		b.addTable() // so that there is one to delete
		b.deleteTable()
		return b.commit()
	case have == nil || have.Empty():
		b.addTable()
		b.deleteTable()
		b.addTable()
		b.addSet(setSelf, 2, 0)
		for _, dir := range []direction{ingress, egress} {
			b.addSet(mapPrefix+string(dir), 1, unix.NFT_SET_MAP)
		}
		have = &Program{v6: want.v6}
		b.difference(have, want)
		b.addChain(chainForward, true)
		for _, r := range baseRules(want.v6) {
			b.addRule(chainForward, r, "")
		}
	default:
		b.difference(have, want)
	}
	return b.commit()
}

// difference adds what turns one program into another.
func (b *batch) difference(have, want *Program) {
	for _, name := range slices.Sorted(maps.Keys(want.sets)) {
		before, had := have.sets[name]
		if !had {
			b.addSet(name, 1, unix.NFT_SET_INTERVAL)
		}
		b.elements(unix.NFT_MSG_DELSETELEM, name, intervals(minus(before, want.sets[name])))
		b.elements(unix.NFT_MSG_NEWSETELEM, name, intervals(minus(want.sets[name], before)))
	}
	for _, name := range slices.Sorted(maps.Keys(want.chains)) {
		if _, had := have.chains[name]; had {
			continue
		}
		c := want.chains[name]
		b.addChain(name, false)
		for i, r := range c.rules(want.v6) {
			b.addRule(name, r, c.comment(i))
		}
	}
	for _, dir := range []direction{ingress, egress} {
		var gone, fresh []element
		before, after := have.pods[dir], want.pods[dir]
		for _, a := range slices.SortedFunc(maps.Keys(before), netip.Addr.Compare) {
			if after[a] != before[a] {
				gone = append(gone, element{key: a.AsSlice(), to: before[a]})
			}
		}
		for _, a := range slices.SortedFunc(maps.Keys(after), netip.Addr.Compare) {
			if after[a] != before[a] {
				fresh = append(fresh, element{key: a.AsSlice(), to: after[a]})
			}
		}
		b.elements(unix.NFT_MSG_DELSETELEM, mapPrefix+string(dir), gone)
		b.elements(unix.NFT_MSG_NEWSETELEM, mapPrefix+string(dir), fresh)
	}
	before, after := have.isolated(), want.isolated()
	b.elements(unix.NFT_MSG_DELSETELEM, setSelf, selfElements(minus(before, after)))
	b.elements(unix.NFT_MSG_NEWSETELEM, setSelf, selfElements(minus(after, before)))
	for _, name := range slices.Sorted(maps.Keys(have.chains)) {
		if _, stays := want.chains[name]; !stays {
			b.deleteChain(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have.sets)) {
		if _, stays := want.sets[name]; !stays {
			b.deleteSet(name)
		}
	}
}

// minus is what a has and b has not.
func minus[T comparable](a, b []T) []T {
	in := make(map[T]bool, len(b))
	for _, v := range b {
		in[v] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(v T) bool { return in[v] })
}

// content is a table as it can be compared: each part by name, in words.
type content map[string]string

// wanted is the content of a program; empty for one that enforces nothing.
func wanted(p *Program) content {
	out := content{}
	if p.Empty() {
		return out
	}
	rules := func(name string, all []rule) {
		var text []string
		for i := range all {
			text = append(text, fmt.Sprintf("%x", all[i].digest()))
		}
		out["chain "+name] = strings.Join(text, " ")
	}
	rules(chainForward, baseRules(p.v6))
	out["chain "+chainForward] += fmt.Sprintf(" at %d %d", unix.NF_INET_FORWARD, hookPriority)
	for name, c := range p.chains {
		rules(name, c.rules(p.v6))
	}
	for name, s := range p.sets {
		out["set "+name] = text(intervals(s))
	}
	out["set "+setSelf] = text(selfElements(p.isolated()))
	for _, dir := range []direction{ingress, egress} {
		var all []element
		for a, to := range p.pods[dir] {
			all = append(all, element{key: a.AsSlice(), to: to})
		}
		out["set "+mapPrefix+string(dir)] = text(all)
	}
	return out
}

// text is elements in a fixed order.
func text(all []element) string {
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b element) int {
		if n := bytes.Compare(a.key, b.key); n != 0 {
			return n
		}
		return boolRank(b.end) - boolRank(a.end)
	})
	var out []string
	for _, e := range all {
		out = append(out, fmt.Sprintf("%x %v %s", e.key, e.end, e.to))
	}
	return strings.Join(out, ",")
}

func boolRank(b bool) int {
	if b {
		return 1
	}
	return 0
}

// look reads the table back; a table that is not there is empty.
func look(conn *nfnl.Conn, v6 bool) (content, error) {
	family := (&batch{v6: v6}).family()
	err := conn.Request(nfnl.NFTables|unix.NFT_MSG_GETTABLE, 0, family, func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_TABLE_NAME, table)
	}, nil)
	if errors.Is(err, unix.ENOENT) {
		return content{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for table %s: %w", table, err)
	}
	out := content{}
	hooks := map[string]string{}
	err = conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETCHAIN, family, nil, func() { clear(hooks) }, func(body []byte) {
		mine, name, hook := false, "", ""
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				mine = nfnl.CString(v) == table
			case unix.NFTA_CHAIN_NAME:
				name = nfnl.CString(v)
			case unix.NFTA_CHAIN_HOOK:
				var at, priority uint32
				nfnl.Attrs(v, func(typ uint16, v []byte) {
					switch typ {
					case unix.NFTA_HOOK_HOOKNUM:
						at = nfnl.U32(v)
					case unix.NFTA_HOOK_PRIORITY:
						priority = nfnl.U32(v)
					}
				})
				hook = fmt.Sprintf(" at %d %d", at, int32(priority))
			}
		})
		if mine {
			hooks[name] = hook
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read the chains of table %s: %w", table, err)
	}
	rules := map[string][]string{}
	err = conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETRULE, family, func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_RULE_TABLE, table)
	}, func() { clear(rules) }, func(body []byte) {
		name, digest := "", ""
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_RULE_CHAIN:
				name = nfnl.CString(v)
			case unix.NFTA_RULE_USERDATA:
				digest = digestOf(v)
			}
		})
		rules[name] = append(rules[name], digest)
	})
	if err != nil {
		return nil, fmt.Errorf("read the rules of table %s: %w", table, err)
	}
	for name, hook := range hooks {
		out["chain "+name] = strings.Join(rules[name], " ") + hook
	}
	var sets []string
	err = conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETSET, family, func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_SET_TABLE, table)
	}, func() { sets = nil }, func(body []byte) {
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			if typ == unix.NFTA_SET_NAME {
				sets = append(sets, nfnl.CString(v))
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read the sets of table %s: %w", table, err)
	}
	for _, name := range sets {
		all, err := readElements(conn, family, name)
		if err != nil {
			return nil, fmt.Errorf("read set %s of table %s: %w", name, table, err)
		}
		out["set "+name] = text(all)
	}
	return out, nil
}

func digestOf(userData []byte) string {
	for len(userData) >= 2 && len(userData) >= 2+int(userData[1]) {
		if userData[0] == udDigest {
			return fmt.Sprintf("%x", userData[2:2+userData[1]])
		}
		userData = userData[2+userData[1]:]
	}
	return "foreign"
}

func readElements(conn *nfnl.Conn, family uint8, set string) ([]element, error) {
	var all []element
	err := conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETSETELEM, family, func(b []byte) []byte {
		return nfnl.String(nfnl.String(b, unix.NFTA_SET_ELEM_LIST_TABLE, table), unix.NFTA_SET_ELEM_LIST_SET, set)
	}, func() { all = nil }, func(body []byte) {
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, list []byte) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				return
			}
			nfnl.Attrs(list, func(_ uint16, one []byte) {
				var e element
				nfnl.Attrs(one, func(typ uint16, v []byte) {
					switch typ {
					case unix.NFTA_SET_ELEM_KEY:
						nfnl.Attrs(v, func(_ uint16, key []byte) { e.key = slices.Clone(key) })
					case unix.NFTA_SET_ELEM_FLAGS:
						e.end = nfnl.U32(v)&unix.NFT_SET_ELEM_INTERVAL_END != 0
					case unix.NFTA_SET_ELEM_DATA:
						nfnl.Attrs(v, func(_ uint16, v []byte) {
							nfnl.Attrs(v, func(typ uint16, v []byte) {
								if typ == unix.NFTA_VERDICT_CHAIN {
									e.to = nfnl.CString(v)
								}
							})
						})
					}
				})
				all = append(all, e)
			})
		})
	})
	return all, err
}

// differs says in which part two contents differ; empty when they do not.
func differs(have, want content) string {
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got, there := have[name]; !there {
			return name + " is missing"
		} else if got != want[name] {
			return name + " is another"
		}
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if _, ours := want[name]; !ours {
			return name + " is not ours"
		}
	}
	return ""
}
