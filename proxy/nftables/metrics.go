// SPDX-License-Identifier: Apache-2.0

package nftables

import "github.com/kplab/kplab/proxy"

// Metrics implements proxy.Meter.
func (m *Mode) Metrics() []proxy.Metric {
	return []proxy.Metric{
		{Name: "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", Kind: "counter", Help: "Transactions that the kernel refused.", Value: float64(m.syncFailures)},
		{Name: "kubeproxy_sync_proxy_rules_nftables_cleanup_failures_total", Kind: "counter", Help: "Clean-ups that failed.", Value: float64(m.cleanupFailures)},
	}
}
