// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"strings"

	"github.com/kplab/kplab/proxy"
)

// Chains that exist whether or not there are Services. The names are upstream's
// and part of what this mode promises: books, clusters and scripts name them.
const (
	chainServices         = "KUBE-SERVICES"
	chainNodePorts        = "KUBE-NODEPORTS"
	chainPostrouting      = "KUBE-POSTROUTING"
	chainMarkMasq         = "KUBE-MARK-MASQ"
	chainForward          = "KUBE-FORWARD"
	chainFirewall         = "KUBE-FIREWALL"
	chainProxyFirewall    = "KUBE-PROXY-FIREWALL"
	chainExternalServices = "KUBE-EXTERNAL-SERVICES"
	chainCanary           = "KUBE-PROXY-CANARY"
)

// Prefixes of the chains of one Service port or endpoint.
const (
	prefixCluster  = "KUBE-SVC-"
	prefixLocal    = "KUBE-SVL-"
	prefixExternal = "KUBE-EXT-"
	prefixFirewall = "KUBE-FW-"
	prefixEndpoint = "KUBE-SEP-"
)

// nfacct objects count packets for metrics; upstream's names.
const (
	acctInvalidDropped = "ct_state_invalid_dropped_pkts"
	acctLocalhost      = "localhost_nps_accepted_pkts"
)

// The mark that asks KUBE-POSTROUTING to masquerade, as bit and mask.
const masqueradeMark = "0x4000/0x4000"

// isServiceChain says whether a chain of the nat table belongs to one Service
// port or endpoint.
func isServiceChain(name string) bool {
	for _, p := range []string{prefixEndpoint, prefixCluster, prefixExternal, prefixLocal, prefixFirewall} {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// fixedChains are the chains that this mode has in each table.
func fixedChains(table string) []string {
	switch table {
	case "nat":
		return []string{chainServices, chainNodePorts, chainPostrouting, chainMarkMasq, chainCanary}
	case "filter":
		return []string{chainServices, chainExternalServices, chainNodePorts, chainForward, chainFirewall, chainProxyFirewall, chainCanary}
	case "mangle":
		return []string{chainCanary}
	}
	return nil
}

// isOwnChain says whether this mode owns a chain of that name in that table. The
// kubelet's KUBE- chains, and anybody else's, are not ours.
func isOwnChain(table, name string) bool {
	for _, c := range fixedChains(table) {
		if c == name {
			return true
		}
	}
	return table == "nat" && isServiceChain(name)
}

// hash is upstream's: the first 16 characters of base32(sha256). Five bits a
// character, so 80 bits; with the longest prefix the name has 25 characters, and
// a chain name may have 28.
func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

// portKey is what a Service port's chain names are hashed from.
func portKey(n proxy.ServicePortName) string {
	return n.String() + strings.ToLower(string(n.Protocol))
}
