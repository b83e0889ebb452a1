// SPDX-License-Identifier: Apache-2.0

package ipvs

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Device is the link that holds the addresses of all Services.
const Device = "kube-ipvs0"

// Chains, as kube-proxy's ipvs mode names them: books, clusters and scripts do too.
const (
	chainServices       = "KUBE-SERVICES"
	chainPostrouting    = "KUBE-POSTROUTING"
	chainMarkMasq       = "KUBE-MARK-MASQ"
	chainNodePort       = "KUBE-NODE-PORT"
	chainLoadBalancer   = "KUBE-LOAD-BALANCER"
	chainForward        = "KUBE-FORWARD"
	chainProxyFirewall  = "KUBE-PROXY-FIREWALL"
	chainSourceFirewall = "KUBE-SOURCE-RANGES-FIREWALL"
	chainFilter         = "KUBE-IPVS-FILTER"
	chainOutFilter      = "KUBE-IPVS-OUT-FILTER"
)

// tables in the order in which a change is written: what refuses before what lets
// in. Mode iptables drops what its nat table has not translated, so on the way from
// it the filter table must be ours before the nat table is.
var tables = []string{"filter", "nat"}

// chainsOf are the chains that this mode has in a table, in the order of its text.
func chainsOf(table string) []string {
	if table == "nat" {
		return []string{chainServices, chainPostrouting, chainNodePort, chainLoadBalancer, chainMarkMasq}
	}
	return []string{chainForward, chainNodePort, chainProxyFirewall, chainSourceFirewall, chainFilter, chainOutFilter}
}

// jump is a rule of ours in a built-in chain.
type jump struct{ chain, rule string }

func (j jump) line() string { return "-A " + j.chain + " " + j.rule }

// jumpsOf are the rules in built-in chains of a table, those of one chain in the
// order in which they stand at its head.
func jumpsOf(table string) []jump {
	to := func(from, name, why string) jump { return jump{from, comment(why) + " -j " + name} }
	if table == "nat" {
		return []jump{
			to("PREROUTING", chainServices, "kubernetes service portals"),
			to("OUTPUT", chainServices, "kubernetes service portals"),
			to("POSTROUTING", chainPostrouting, "kubernetes postrouting rules"),
		}
	}
	return []jump{
		to("INPUT", chainFilter, "kubernetes ipvs access filter"),
		to("INPUT", chainProxyFirewall, "kube-proxy firewall rules"),
		to("INPUT", chainNodePort, "kubernetes health check rules"),
		to("FORWARD", chainProxyFirewall, "kube-proxy firewall rules"),
		to("FORWARD", chainForward, "kubernetes forwarding rules"),
		to("OUTPUT", chainOutFilter, "kubernetes ipvs access filter"),
	}
}

func comment(s string) string { return `-m comment --comment "` + s + `"` }

// masqueradeMark asks KUBE-POSTROUTING to masquerade, as bit and mask.
const masqueradeMark = "0x4000/0x4000"

// set is one of the ipsets.
type set int

const (
	setLoopBack set = iota
	setClusterIP
	setExternalIP
	setExternalIPLocal
	setLoadBalancer
	setLoadBalancerFW
	setLoadBalancerLocal
	setLoadBalancerSourceIP
	setLoadBalancerSourceCIDR
	setNodePortTCP
	setNodePortLocalTCP
	setNodePortUDP
	setNodePortLocalUDP
	setNodePortSCTP
	setNodePortLocalSCTP
	setHealthCheckNodePort
	setIPs
	sets
)

// Types of sets: what an entry is made of.
const (
	hashIPPort    = "hash:ip,port"
	hashIPPortIP  = "hash:ip,port,ip"
	hashIPPortNet = "hash:ip,port,net"
	hashIP        = "hash:ip"
	bitmapPort    = "bitmap:port"
)

// setInfo is what each set is: its name, its type, and the comment of the rules that
// look into it.
var setInfo = [sets]struct{ name, kind, comment string }{
	setLoopBack:               {"KUBE-LOOP-BACK", hashIPPortIP, "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose"},
	setClusterIP:              {"KUBE-CLUSTER-IP", hashIPPort, "Kubernetes service cluster ip + port for masquerade purpose"},
	setExternalIP:             {"KUBE-EXTERNAL-IP", hashIPPort, "Kubernetes service external ip + port for masquerade and filter purpose"},
	setExternalIPLocal:        {"KUBE-EXTERNAL-IP-LOCAL", hashIPPort, "Kubernetes service external ip + port with externalTrafficPolicy=local"},
	setLoadBalancer:           {"KUBE-LOAD-BALANCER", hashIPPort, "Kubernetes service lb portal"},
	setLoadBalancerFW:         {"KUBE-LOAD-BALANCER-FW", hashIPPort, "Kubernetes service load balancer ip + port for load balancer with sourceRange"},
	setLoadBalancerLocal:      {"KUBE-LOAD-BALANCER-LOCAL", hashIPPort, "Kubernetes service load balancer ip + port with externalTrafficPolicy=local"},
	setLoadBalancerSourceIP:   {"KUBE-LOAD-BALANCER-SOURCE-IP", hashIPPortIP, "Kubernetes service load balancer ip + port + source IP for packet filter purpose"},
	setLoadBalancerSourceCIDR: {"KUBE-LOAD-BALANCER-SOURCE-CIDR", hashIPPortNet, "Kubernetes service load balancer ip + port + source cidr for packet filter purpose"},
	setNodePortTCP:            {"KUBE-NODE-PORT-TCP", bitmapPort, "Kubernetes nodeport TCP port for masquerade purpose"},
	setNodePortLocalTCP:       {"KUBE-NODE-PORT-LOCAL-TCP", bitmapPort, "Kubernetes nodeport TCP port with externalTrafficPolicy=local"},
	setNodePortUDP:            {"KUBE-NODE-PORT-UDP", bitmapPort, "Kubernetes nodeport UDP port for masquerade purpose"},
	setNodePortLocalUDP:       {"KUBE-NODE-PORT-LOCAL-UDP", bitmapPort, "Kubernetes nodeport UDP port with externalTrafficPolicy=local"},
	setNodePortSCTP:           {"KUBE-NODE-PORT-SCTP-HASH", hashIPPort, "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'"},
	setNodePortLocalSCTP:      {"KUBE-NODE-PORT-LOCAL-SCTP-HASH", hashIPPort, "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'"},
	setHealthCheckNodePort:    {"KUBE-HEALTH-CHECK-NODE-PORT", bitmapPort, "Kubernetes health check node port"},
	setIPs:                    {"KUBE-IPVS-IPS", hashIP, ""},
}

// maxSetName is the longest name of a set that the kernel takes.
const maxSetName = 31

// nameIn is the set's name in a family. The sets of both are in one name space, so
// those of IPv6 say so; names that get too long are cut, as upstream's are.
func (s set) nameIn(f corev1.IPFamily) string {
	name := setInfo[s].name
	if f == corev1.IPv6Protocol {
		name = "KUBE-6-" + strings.TrimPrefix(name, "KUBE-")
		name = name[:min(len(name), maxSetName)]
	}
	return name
}

func (s set) kind() string { return setInfo[s].kind }

// DefaultScheduler takes the endpoints in turn.
const DefaultScheduler = "rr"

// Schedulers lists the names of the kernel's schedulers that may be asked for, and
// what each does.
func Schedulers() map[string]string {
	return map[string]string{
		"rr":    "round robin",
		"wrr":   "weighted round robin",
		"lc":    "least connections",
		"wlc":   "weighted least connections",
		"lblc":  "locality-based least connections",
		"lblcr": "locality-based least connections with replication",
		"sh":    "source hashing",
		"dh":    "destination hashing",
		"sed":   "shortest expected delay",
		"nq":    "never queue",
		"fo":    "weighted failover",
		"ovf":   "weighted overflow",
		"mh":    "Maglev hashing of source address and port",
	}
}

// ParseScheduler checks the name of a scheduler; empty is the default.
func ParseScheduler(name string) (string, error) {
	if name == "" {
		return DefaultScheduler, nil
	}
	all := Schedulers()
	if _, ok := all[name]; ok {
		return name, nil
	}
	var names []string
	for n := range all {
		names = append(names, n)
	}
	slices.Sort(names)
	return "", fmt.Errorf("unknown IPVS scheduler %q: want one of %s", name, strings.Join(names, ", "))
}
