// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
)

// chainKey names a chain of a namespace.
type chainKey struct {
	family uint8
	table  string
	chain  string
}

// familyName is the family as nft writes it.
func familyName(f uint8) string {
	switch f {
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_ARP:
		return "arp"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	}
	return strconv.Itoa(int(f))
}

// iptablesTables are those that the iptables tools keep in nf_tables.
var iptablesTables = []string{"raw", "mangle", "nat", "filter", "security"}

// program reads the rules of one namespace: chains when they are asked for, in the
// words of the tool that they belong to.
type program struct {
	ns    *netns.NS
	conn  *nfnl.Conn
	exec  execx.Runner
	lock  string
	hooks map[chainKey]string // base chains
	rules map[chainKey][]Rule
	saved map[string]map[string][]string // iptables-save: table → chain → rules
	note  string                         // why rules have no words
}

func openProgram(ns *netns.NS, lock string) (*program, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, err
	}
	p := &program{ns: ns, conn: conn, exec: execx.In(ns), lock: lock, rules: map[chainKey][]Rule{}, saved: map[string]map[string][]string{}}
	if err := p.readHooks(); err != nil {
		conn.Close()
		return nil, err
	}
	return p, nil
}

func (p *program) close() { p.conn.Close() }

// readHooks lists the base chains.
func (p *program) readHooks() error {
	names := map[uint32]string{
		unix.NF_INET_PRE_ROUTING: "prerouting", unix.NF_INET_LOCAL_IN: "input", unix.NF_INET_FORWARD: "forward",
		unix.NF_INET_LOCAL_OUT: "output", unix.NF_INET_POST_ROUTING: "postrouting",
	}
	err := p.conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETCHAIN, unix.AF_UNSPEC, nil, func() { p.hooks = map[chainKey]string{} }, func(body []byte) {
		k := chainKey{family: body[0]}
		hook := ""
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				k.table = nfnl.CString(v)
			case unix.NFTA_CHAIN_NAME:
				k.chain = nfnl.CString(v)
			case unix.NFTA_CHAIN_HOOK:
				nfnl.Attrs(v, func(typ uint16, v []byte) {
					if typ == unix.NFTA_HOOK_HOOKNUM {
						hook = names[nfnl.U32(v)]
					}
				})
			}
		})
		if hook != "" {
			p.hooks[k] = hook
		}
	})
	if err != nil {
		return fmt.Errorf("list the chains: %w", err)
	}
	return nil
}

// read makes the rules of some chains known. What cannot be put into words is left
// with handles only.
func (p *program) read(ctx context.Context, keys []chainKey) error {
	var native []chainKey
	for _, k := range keys {
		if _, known := p.rules[k]; known {
			continue
		}
		handles, err := p.handles(k)
		if err != nil {
			return err
		}
		rules := make([]Rule, len(handles))
		for i, h := range handles {
			rules[i] = Rule{Handle: h, Number: i + 1, Of: len(handles)}
		}
		p.rules[k] = rules
		if (k.family == unix.NFPROTO_IPV4 || k.family == unix.NFPROTO_IPV6) && slices.Contains(iptablesTables, k.table) {
			lines, err := p.save(ctx, k)
			if err == nil && len(lines[k.chain]) == len(rules) {
				for i := range rules {
					rules[i].Text = lines[k.chain][i]
				}
				continue
			}
		}
		native = append(native, k)
	}
	if len(native) == 0 {
		return nil
	}
	return p.list(ctx, native)
}

// handles lists the rules of a chain.
func (p *program) handles(k chainKey) (out []uint64, err error) {
	err = p.conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETRULE, k.family, func(b []byte) []byte {
		return nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, k.table), unix.NFTA_RULE_CHAIN, k.chain)
	}, func() { out = nil }, func(body []byte) {
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			if typ == unix.NFTA_RULE_HANDLE {
				out = append(out, nfnl.U64(v))
			}
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the rules of chain %s: %w", k.chain, err)
	}
	return out, nil
}

// save reads a table with the tool of iptables.
func (p *program) save(ctx context.Context, k chainKey) (map[string][]string, error) {
	tool := "iptables"
	if k.family == unix.NFPROTO_IPV6 {
		tool = "ip6tables"
	}
	id := tool + " " + k.table
	if lines, known := p.saved[id]; known {
		return lines, nil
	}
	for _, infix := range []string{"-nft", ""} {
		lines, err := savedRules(ctx, p.exec, tool+infix+"-save", k.table, p.lock)
		if err == nil {
			p.saved[id] = lines
			return lines, nil
		}
		if !errors.Is(err, exec.ErrNotFound) {
			return nil, err
		}
	}
	p.note = "the iptables tools are not installed: rules are named by their handles"
	return nil, exec.ErrNotFound
}

// savedRules runs one of the save tools and sorts its lines by chain.
func savedRules(ctx context.Context, run execx.Runner, tool, table, lock string) (map[string][]string, error) {
	out, err := run.Run(ctx, execx.Cmd{Path: tool, Args: []string{"-t", table}, Env: []string{"XTABLES_LOCKFILE=" + lock}})
	if err != nil {
		return nil, fmt.Errorf("read table %s: %w", table, err)
	}
	lines := map[string][]string{}
	for l := range strings.Lines(string(out.Stdout)) {
		if rest, ok := strings.CutPrefix(strings.TrimRight(l, "\n "), "-A "); ok {
			chain, _, _ := strings.Cut(rest, " ")
			lines[chain] = append(lines[chain], "-A "+strings.Join(strings.FieldsFunc(rest, func(r rune) bool { return r == ' ' }), " "))
		}
	}
	return lines, nil
}

// list reads the tables of chains with nft, without what is in their named sets: of
// several chains that are asked for at once, nft 1.0.6 finds only some.
func (p *program) list(ctx context.Context, keys []chainKey) error {
	byHandle := map[listed]string{}
	read := map[[2]string]bool{}
	for _, k := range keys {
		id := [2]string{familyName(k.family), k.table}
		if read[id] {
			continue
		}
		read[id] = true
		out, err := p.exec.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"-a", "-t", "list", "table", id[0], id[1]}})
		if errors.Is(err, exec.ErrNotFound) {
			p.note = "nft is not installed: rules are named by their handles"
			return nil
		}
		if err != nil {
			// The table may have gone meanwhile.
			p.note = "rules could not be listed: " + err.Error()
			continue
		}
		maps.Copy(byHandle, parseListing(string(out.Stdout)))
	}
	for _, k := range keys {
		for i := range p.rules[k] {
			r := &p.rules[k][i]
			r.Text = byHandle[listed{familyName(k.family), k.table, r.Handle}]
		}
	}
	return nil
}

// listed names a rule: handles count in a table.
type listed struct {
	family, table string
	handle        uint64
}

// parseListing reads the rules out of what nft -a list prints.
func parseListing(text string) map[listed]string {
	out := map[listed]string{}
	family, table, open := "", "", ""
	for l := range strings.Lines(text) {
		l = strings.TrimSpace(l)
		if f := strings.Fields(l); len(f) >= 3 && f[0] == "table" {
			family, table = f[1], f[2]
			continue
		}
		if l == "}" || slices.ContainsFunc([]string{"chain ", "set ", "map ", "type ", "comment ", "flags ", "size ", "timeout "}, func(p string) bool { return strings.HasPrefix(l, p) }) {
			open = ""
			continue
		}
		open = strings.TrimSpace(open + " " + l)
		body, number, ok := cutLast(open, " # handle ")
		if !ok {
			continue // a set that goes on in the next line
		}
		if h, err := strconv.ParseUint(number, 10, 64); err == nil {
			out[listed{family, table, h}] = body
		}
		open = ""
	}
	return out
}

func cutLast(s, sep string) (before, after string, ok bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// rule finds the rule of an event.
func (p *program) rule(e *event) (*Rule, []Rule) {
	all := p.rules[chainKey{e.family, e.table, e.chain}]
	for i := range all {
		if all[i].Handle == e.handle {
			return &all[i], all
		}
	}
	return nil, all
}

// generation is the number of the ruleset in force.
func (p *program) generation() (uint32, error) { return p.conn.Generation() }
