// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/proxy"
)

// String implements proxy.Program: a script for a shell, which feeds each tool what is
// its own. With nodePorts on all addresses of the node it has those that the snapshot
// knows; Apply finds the others.
func (p *Program) String() string {
	var b strings.Builder
	b.WriteString("ip link add " + Device + " type dummy\n")
	for _, r := range p.rulesets {
		w := r.on(r.nodeAddrs)
		for _, a := range slices.SortedFunc(maps.Keys(w.bound), netip.Addr.Compare) {
			b.WriteString("ip addr add " + single(a).String() + " dev " + Device + "\n")
		}
		b.WriteString("ipset -exist restore <<'EOF'\n")
		for s := range sets {
			b.WriteString(createText(s, r.family) + "\n")
			for _, e := range slices.SortedFunc(maps.Keys(w.entries[s]), compareEntries) {
				b.WriteString("add " + s.nameIn(r.family) + " " + e.text(s.kind()) + "\n")
			}
		}
		b.WriteString("EOF\nipvsadm --restore <<'EOF'\n")
		for _, k := range slices.SortedFunc(maps.Keys(w.servers), compareKeys) {
			w.servers[k].text(&b)
		}
		tool := "iptables-restore"
		if r.v6() {
			tool = "ip6tables-restore"
		}
		b.WriteString("EOF\n" + tool + " --noflush <<'EOF'\n" + r.rulesText() + "EOF\n")
	}
	return b.String()
}

// createText is the line of ipset that makes a set.
func createText(s set, f corev1.IPFamily) string {
	if s.kind() == bitmapPort {
		return "create " + s.nameIn(f) + " " + bitmapPort + " range 0-65535"
	}
	family := "inet"
	if f == corev1.IPv6Protocol {
		family = "inet6"
	}
	return fmt.Sprintf("create %s %s family %s hashsize 1024 maxelem %d", s.nameIn(f), s.kind(), family, maxEntries)
}

// text writes a virtual server as ipvsadm --save --numeric prints it.
func (s *server) text(b *strings.Builder) {
	at := map[string]string{"tcp": "-t ", "udp": "-u ", "sctp": "--sctp-service "}[protoName(s.proto)] + s.addrPort().String()
	b.WriteString("-A " + at + " -s " + s.scheduler)
	if s.flags&flagPersistent != 0 {
		fmt.Fprintf(b, " -p %d", s.timeout)
	}
	if s.flags&flagMHPort != 0 {
		b.WriteString(" -b mh-port")
	}
	b.WriteByte('\n')
	for _, r := range s.real {
		b.WriteString("-a " + at + " -r " + r.String() + " -m -w 1\n")
	}
}

// rulesText is the input of iptables-restore --noflush: the chains of ours replaced as
// a whole, and the jumps to them put at the head of the built-in chains.
func (r *ruleset) rulesText() string {
	var b strings.Builder
	for _, table := range tables {
		r.tableText(&b, table)
		for _, j := range slices.Backward(jumpsOf(table)) {
			b.WriteString("-I " + j.chain + " " + j.rule + "\n")
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// tableText writes a table's chains, without what ends it.
func (r *ruleset) tableText(b *strings.Builder, table string) {
	b.WriteString("*" + table + "\n")
	for _, c := range chainsOf(table) {
		b.WriteString(":" + c + " - [0:0]\n")
	}
	for _, c := range chainsOf(table) {
		for _, rule := range r.rules[table][c] {
			b.WriteString("-A " + c + " " + rule + "\n")
		}
	}
}

// Service is the part of the text that belongs to one Service, all its ports: its
// addresses, its virtual servers, and its entries in the sets that all Services share.
func (p *Program) Service(namespace, name string) string {
	var b strings.Builder
	for _, r := range p.rulesets {
		one := &ruleset{settings: r.settings, nodeAddrs: r.nodeAddrs}
		for i, o := range r.owners {
			if o.Namespace == namespace && o.Name == name {
				one.blocks, one.owners = append(one.blocks, r.blocks[i]), append(one.owners, o)
			}
		}
		w := one.on(r.nodeAddrs)
		for _, a := range slices.SortedFunc(maps.Keys(w.bound), netip.Addr.Compare) {
			b.WriteString("ip addr add " + single(a).String() + " dev " + Device + "\n")
		}
		for _, k := range slices.SortedFunc(maps.Keys(w.servers), compareKeys) {
			w.servers[k].text(&b)
		}
		for s := range sets {
			for _, e := range slices.SortedFunc(maps.Keys(w.entries[s]), compareEntries) {
				b.WriteString("add " + s.nameIn(r.family) + " " + e.text(s.kind()) + "\n")
			}
		}
		for _, bl := range one.blocks {
			for _, rule := range bl.outRules {
				b.WriteString("-A " + chainOutFilter + " " + rule + "\n")
			}
		}
	}
	return b.String()
}

// settingsFor reads the settings of one family out of a snapshot.
func settingsFor(s *proxy.Snapshot, family corev1.IPFamily, scheduler string, f Features) settings {
	set := settings{family: family, scheduler: scheduler, masqueradeAll: s.MasqueradeAll, features: f}
	if c := s.ClusterCIDR(family); c.IsValid() {
		set.clusterCIDR = c.Masked()
	}
	return set
}
