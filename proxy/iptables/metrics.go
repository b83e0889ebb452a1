// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/proxy"
)

// tallies is what the mode counts for its metrics.
type tallies struct {
	// full says that the last Apply looked at every rule.
	full bool
	// written counts the rules that the last Apply gave the tool, by family and table.
	written map[corev1.IPFamily]map[string]int
	// failures of the restore tool, and those of them that were partial restores.
	failures, partialFailures int
}

// restore gives text to the tool, and counts it.
func (m *Mode) restore(ctx context.Context, family corev1.IPFamily, text string) error {
	if m.tallies.written[family] == nil {
		m.tallies.written[family] = map[string]int{}
	}
	table := ""
	for l := range strings.Lines(text) {
		switch {
		case strings.HasPrefix(l, "*"):
			table = strings.TrimSpace(l[1:])
		case strings.HasPrefix(l, "-A "), strings.HasPrefix(l, "-I "):
			m.tallies.written[family][table]++
		}
	}
	err := m.tool.Restore(ctx, family, text)
	if err != nil {
		m.tallies.failures++
		if !m.tallies.full {
			m.tallies.partialFailures++
		}
	}
	return err
}

// AppliedFully implements proxy.Partial.
func (m *Mode) AppliedFully() bool { return m.tallies.full }

// Metrics implements proxy.Meter.
func (m *Mode) Metrics() []proxy.Metric {
	const rules = "kubeproxy_sync_proxy_rules_iptables_"
	var total, last []proxy.Metric
	for family, r := range m.applied {
		for _, table := range []string{"filter", "nat"} {
			n := len(r.jumps(table))
			r.expect(table, func(_ string, t tally) { n += t.rules })
			labels := fmt.Sprintf("ip_family=%q,table=%q", string(family), table)
			total = append(total, proxy.Metric{Name: rules + "total", Kind: "gauge", Help: "Rules of this proxy in a table.", Labels: labels, Value: float64(n)})
			last = append(last, proxy.Metric{Name: rules + "last", Kind: "gauge", Help: "Rules that the last sync wrote.", Labels: labels, Value: float64(m.tallies.written[family][table])})
		}
	}
	return append(append(total, last...),
		proxy.Metric{Name: rules + "restore_failures_total", Kind: "counter", Help: "Failures of iptables-restore.", Value: float64(m.tallies.failures)},
		proxy.Metric{Name: rules + "partial_restore_failures_total", Kind: "counter", Help: "Failures of iptables-restore for a part of the rules.", Value: float64(m.tallies.partialFailures)})
}

// Counters implements proxy.Counters: the packet counters in the kernel, where it has them.
func (m *Mode) Counters() []proxy.Metric {
	m.mu.Lock()
	there := m.features != nil && m.features.NFAcct
	m.mu.Unlock()
	if !there {
		return nil
	}
	c, err := dialNFNL(m.opts.NetNS)
	if err != nil {
		return nil
	}
	defer c.Close()
	var out []proxy.Metric
	for _, x := range []struct{ object, name, help string }{
		{acctInvalidDropped, "kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets dropped as INVALID."},
		{acctLocalhost, "kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "Packets to nodePorts on loopback addresses."},
	} {
		if n, err := c.packets(x.object); err == nil {
			out = append(out, proxy.Metric{Name: x.name, Kind: "counter", Help: x.help, Value: float64(n)})
		}
	}
	return out
}

// packets reads a packet counter object.
func (c conn) packets(name string) (uint64, error) {
	const get, attrPackets = subsysAcct | 1, 2
	var n uint64
	err := c.Request(get, 0, unix.AF_UNSPEC, acctName(name), func(body []byte) {
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, value []byte) {
			if typ == attrPackets && len(value) >= 8 {
				n = binary.BigEndian.Uint64(value)
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("read the nfacct object %s: %w", name, err)
	}
	return n, nil
}
