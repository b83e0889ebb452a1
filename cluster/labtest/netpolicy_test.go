// SPDX-License-Identifier: Apache-2.0

package labtest_test

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
)

const policed = `
apiVersion: v1
kind: Namespace
metadata: {name: other}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  nodeName: node1
  containers:
  - name: nginx
    image: nginx
    ports: [{name: http, containerPort: 80}]
    readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 8080, targetPort: http, nodePort: 30080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: friend, labels: {role: friend}}
spec: {nodeName: node1, terminationGracePeriodSeconds: 0, containers: [{name: c, image: pause}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, labels: {role: friend}}
spec: {nodeName: node2, terminationGracePeriodSeconds: 0, containers: [{name: c, image: pause}]}
---
apiVersion: v1
kind: Pod
metadata: {name: stranger, namespace: other, labels: {role: friend}}
spec: {nodeName: node2, terminationGracePeriodSeconds: 0, containers: [{name: c, image: pause}]}
`

const deny = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: deny}
spec: {podSelector: {}, policyTypes: [Ingress]}
`

const allow = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: friends}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {role: friend}}}]
    ports: [{port: http}]
`

const noEgress = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: quiet}
spec:
  podSelector: {matchLabels: {role: friend}}
  policyTypes: [Egress]
  egress:
  - to: [{ipBlock: {cidr: 10.0.0.0/24, except: [10.0.0.133/32]}}]
`

// TestNetworkPolicy applies policies and sends packets between pods, on one node and
// on two, to pods and through a ClusterIP.
func TestNetworkPolicy(t *testing.T) {
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			lab := labtest.Start(t, labtest.Options{Config: cluster.Config{Proxy: cluster.ProxyConfig{Mode: mode}}})
			lab.Apply(policed)
			lab.Settle()
			vip := "http://" + lab.ClusterIP("default", "web") + ":8080"
			web, err := lab.Client.CoreV1().Pods("default").Get(context.Background(), "web", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			direct := "http://" + web.Status.PodIP
			expect := func(what, where, url string, want bool) {
				t.Helper()
				_, err := lab.TryExec(where, "curl", "-sS", "-m", map[bool]string{true: "10", false: "1"}[want], "-o", "/dev/null", url)
				if (err == nil) != want {
					t.Errorf("%s: from %s to %s: %v, want an answer: %v", what, where, url, err, want)
				}
			}
			tables := func() string {
				return lab.Exec("node1", "nft", "list", "tables")
			}
			expect("no policy", "pod/other/stranger", vip, true)
			before := tables()

			lab.Apply(deny)
			lab.Settle()
			expect("default deny, by ClusterIP", "pod/friend", vip, false)
			expect("default deny, other node", "pod/far", direct, false)
			expect("default deny, other namespace", "pod/other/stranger", vip, false)
			expect("default deny, from outside", "outside", "http://10.0.0.132:30080", false)
			expect("default deny, the pod's own node", "node1", direct, true)
			expect("default deny, another node", "node2", direct, false)
			expect("default deny, itself", "pod/web", vip, true)

			lab.Apply(allow)
			lab.Settle()
			expect("allowed, by ClusterIP", "pod/friend", vip, true)
			expect("allowed, other node", "pod/far", vip, true)
			expect("allowed, other node, to the pod", "pod/far", direct, true)
			expect("same labels, other namespace", "pod/other/stranger", vip, false)

			lab.Apply(noEgress)
			lab.Settle()
			expect("no egress to pods", "pod/friend", vip, false)
			expect("egress to a block: another node, whose rules lead on to a pod", "pod/far", "http://10.0.0.132:30080", true)
			expect("egress to the exception of a block", "pod/friend", "http://10.0.0.133:30080", false)

			for _, name := range []string{"deny", "friends", "quiet"} {
				if err := lab.Client.NetworkingV1().NetworkPolicies("default").Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			lab.Settle()
			expect("no policy again", "pod/other/stranger", vip, true)
			if after := tables(); after != before {
				t.Errorf("tables %q, before any policy %q", after, before)
			}
		})
	}
}
