// SPDX-License-Identifier: Apache-2.0

package labtest_test

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/internal/nettest"
)

const balanced = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: nginx, image: nginx}]}
---
apiVersion: v1
kind: Service
metadata: {name: cluster}
spec: {type: LoadBalancer, loadBalancerIP: 10.0.0.240, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: local}
spec: {type: LoadBalancer, loadBalancerIP: 10.0.0.241, externalTrafficPolicy: Local, allocateLoadBalancerNodePorts: false, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: ranges}
spec: {type: LoadBalancer, loadBalancerIP: 10.0.0.242, loadBalancerSourceRanges: [10.0.0.128/26], selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: nobody}
spec: {type: LoadBalancer, loadBalancerIP: 10.0.0.243, selector: {app: nobody}, ports: [{port: 80}]}
`

var header = regexp.MustCompile(`(?m)^X-Kplab-(\w+): (\S+)\r?$`)

// ask asks a web server from somewhere and returns on which node it is, and whom it saw.
func ask(lab *labtest.Lab, where, url string) (node, client string, err error) {
	out, err := lab.TryExec(where, "curl", "-sS", "-m", "8", "-o", "/dev/null", "-D", "-", url)
	for _, m := range header.FindAllStringSubmatch(out, -1) {
		switch m[1] {
		case "Node":
			node = m[2]
		case "Client":
			client = m[2]
		}
	}
	return node, client, err
}

// announcer is the node of a Service's address, by the API.
func announcer(t *testing.T, lab *labtest.Lab, name string) string {
	t.Helper()
	s, err := lab.Client.CoreV1().Services("default").Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s.Annotations["kplab/announced-by"]
}

// TestLoadBalancer sends packets to load balancer addresses: rows K of the Service
// behaviours, in the modes that answer for them by rules.
func TestLoadBalancer(t *testing.T) {
	macs := map[string]string{"master": "0a:58:0a:00:00:83", "node1": "0a:58:0a:00:00:84", "node2": "0a:58:0a:00:00:85"}
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			lab := labtest.Start(t, labtest.Options{Config: cluster.Config{
				LoadBalancer: cluster.LoadBalancerConfig{Pool: "10.0.0.240/28"}, Proxy: cluster.ProxyConfig{Mode: mode},
			}})
			lab.Apply(balanced)
			lab.Settle()

			if _, client, err := ask(lab, "outside", "http://10.0.0.240/"); err != nil || !strings.HasPrefix(client, "10.0.0.13") && !strings.HasPrefix(client, "10.244.") {
				t.Errorf("K06 from outside, policy Cluster: client %q, %v; want a node's address", client, err)
			}
			if neigh := lab.Exec("outside", "ip", "neigh", "show", "to", "10.0.0.240"); !strings.Contains(neigh, macs[announcer(t, lab, "cluster")]) {
				t.Errorf("K23: %s announces, and the neighbour is %s", announcer(t, lab, "cluster"), neigh)
			}
			if node, client, err := ask(lab, "outside", "http://10.0.0.241/"); err != nil || client != "10.0.0.200" || node != announcer(t, lab, "local") {
				t.Errorf("K06, K09 from outside, policy Local: client %q on %s, %v", client, node, err)
			}
			for _, from := range []string{"master", "node1"} {
				if _, _, err := ask(lab, from, "http://10.0.0.241/"); err != nil {
					t.Errorf("K04 from %s, which the policy does not concern: %v", from, err)
				}
				if addrs := lab.Exec(from, "ip", "-o", "addr"); strings.Contains(addrs, "10.0.0.24") {
					t.Errorf("node %s has the address on a link:\n%s", from, addrs)
				}
			}
			if _, _, err := ask(lab, "node1", "http://10.0.0.242/"); err != nil {
				t.Errorf("K15 a node in the source ranges: %v", err)
			}
			if _, _, err := ask(lab, "outside", "http://10.0.0.242/"); err == nil || !strings.Contains(err.Error(), "(28)") {
				t.Errorf("K12 a client out of the source ranges: %v, want a time-out", err)
			}
			if _, _, err := ask(lab, "outside", "http://10.0.0.243/"); err == nil || !strings.Contains(err.Error(), "(7)") {
				t.Errorf("K30 without endpoints: %v, want a refusal", err)
			}

			if mode != "iptables" {
				return // who announces does not depend on the mode
			}
			// The node that announces loses its link, under traffic.
			before := announcer(t, lab, "local")
			lab.Exec("fabric", "ip", "link", "set", before, "down")
			nettest.Eventually(t, 90*time.Second, "another node takes over", func() error {
				node, client, err := ask(lab, "outside", "http://10.0.0.241/")
				if err == nil && (node == before || client != "10.0.0.200") {
					err = fmt.Errorf("node %s saw %s", node, client)
				}
				return err
			})
			if after := announcer(t, lab, "local"); after == before {
				t.Errorf("still announced by %s", after)
			} else if neigh := lab.Exec("outside", "ip", "neigh", "show", "to", "10.0.0.241"); !strings.Contains(neigh, macs[after]) {
				t.Errorf("%s announces, and the neighbour is %s", after, neigh)
			}
			lab.Exec("fabric", "ip", "link", "set", before, "up")
			nettest.Eventually(t, 90*time.Second, "the node is healthy again and takes its address back", func() error {
				if now := announcer(t, lab, "local"); now != before {
					return fmt.Errorf("announced by %s", now)
				}
				_, _, err := ask(lab, "outside", "http://10.0.0.241/")
				return err
			})
		})
	}
}
