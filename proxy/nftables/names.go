// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kplab/kplab/proxy"
)

// tableName is the table in each family. It and all names below are upstream's
// and part of what this mode promises: books, clusters and scripts name them.
const (
	tableName    = "kube-proxy"
	tableComment = "rules for kube-proxy"
)

// Chains that exist whether or not there are Services: first those that hang on a
// hook, then those that they jump to.
const (
	chainFilterPrerouting = "filter-prerouting-pre-dnat"
	chainFilterOutputPre  = "filter-output-pre-dnat"
	chainFilterInput      = "filter-input"
	chainFilterForward    = "filter-forward"
	chainFilterOutput     = "filter-output"
	chainNATPrerouting    = "nat-prerouting"
	chainNATOutput        = "nat-output"
	chainNATPostrouting   = "nat-postrouting"

	chainNodePortCheck  = "nodeport-endpoints-check"
	chainServiceCheck   = "service-endpoints-check"
	chainFirewallCheck  = "firewall-check"
	chainServices       = "services"
	chainMasquerading   = "masquerading"
	chainClusterIPCheck = "cluster-ips-check"
	chainReject         = "reject-chain"
)

// Prefixes of the chains and sets of one Service port or endpoint.
const (
	prefixCluster  = "service-"
	prefixLocal    = "local-"
	prefixExternal = "external-"
	prefixFirewall = "firewall-"
	prefixEndpoint = "endpoint-"
	prefixAffinity = "affinity-"
)

// masqueradeMark is the bit that asks for masquerading.
const masqueradeMark = 0x4000

// longestName is what is left of the kernel's 256 characters for a name after its
// prefix, by upstream's count.
const longestName = 240

// hashed puts the hash of a name before it, and cuts what is too long.
func hashed(name string) string {
	sum := sha256.Sum256([]byte(name))
	name = base32.StdEncoding.EncodeToString(sum[:5]) + "-" + name
	if len(name) > longestName {
		name = name[:longestName-3] + "..."
	}
	return name
}

// portPath is the part of a Service port's names that a person reads.
func portPath(n proxy.ServicePortName) string {
	return n.Namespace + "/" + n.Name + "/" + strings.ToLower(string(n.Protocol)) + "/" + n.Port
}

// endpointPath is the same for an endpoint. A name may not hold a colon, so those
// of an IPv6 address become dots.
func endpointPath(port string, a netip.AddrPort) string {
	addr := strings.ReplaceAll(a.Addr().String(), ":", ".")
	return port + "__" + addr + "/" + strconv.Itoa(int(a.Port()))
}
