// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/trace"
)

const limited = `
apiVersion: v1
kind: Service
metadata: {name: limited}
spec: {type: LoadBalancer, selector: {app: one}, loadBalancerSourceRanges: [203.0.113.0/24], ports: [{port: 80}]}
`

// TestEnds breaks the way to a pod in one place after the other and looks whether the
// trace names it.
func TestEnds(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Config: cluster.Config{Proxy: cluster.ProxyConfig{Mode: "iptables"}}})
	lab.Apply(objects)
	lab.Apply(limited)
	lab.Settle()
	ctx := t.Context()
	ip := func(pod string) string {
		p, err := lab.Client.CoreV1().Pods("default").Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p.Status.PodIP
	}
	one, client := ip("one"), ip("client")
	svc, err := lab.Client.CoreV1().Services("default").Get(ctx, "limited", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.7"}}
	if _, err := lab.Client.CoreV1().Services("default").UpdateStatus(ctx, svc, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	lab.Settle()
	l := open(t, lab)
	for _, c := range []struct {
		name, from, to  string
		node, set, undo string
		reason, place   string
		says            string
	}{
		{name: "nothing broken", reason: "ok"},
		{name: "a rule drops", node: "node2", set: "iptables -I FORWARD -p tcp -d " + one + " -j DROP", undo: "iptables -D FORWARD -p tcp -d " + one + " -j DROP", reason: "dropped", place: "node2", says: "-A FORWARD -d " + one + "/32 -p tcp -j DROP"},
		{name: "a rule refuses", node: "node1", set: "iptables -I FORWARD -p tcp -d " + one + " -j REJECT", undo: "iptables -D FORWARD -p tcp -d " + one + " -j REJECT", reason: "rejected", place: "node1", says: "REJECT"},
		{name: "a policy drops", node: "node1", set: "iptables -P FORWARD DROP", undo: "iptables -P FORWARD ACCEPT", reason: "policy-drop", place: "node1", says: "its policy is to drop"},
		{name: "no route", node: "node2", set: "ip route add unreachable " + one + "/32", undo: "ip route del unreachable " + one + "/32", reason: "no-route", place: "node2", says: "unreachable"},
		{name: "rp_filter", node: "node1", set: "sh -c 'ip route add " + client + "/32 dev lo && sysctl -q -w net.ipv4.conf.eth0.rp_filter=1'", undo: "sh -c 'ip route del " + client + "/32 dev lo; sysctl -q -w net.ipv4.conf.eth0.rp_filter=0'", reason: "rp_filter", place: "node1", says: "rp_filter is strict"},
		{name: "source ranges", from: "node2", to: "198.51.100.7:80", reason: "source-range", place: "node2", says: "loadBalancerSourceRanges of Service default/limited"},
		{name: "nobody's address", from: "node2", to: "10.0.0.77:80", reason: "no-neighbour", place: "node2", says: "10.0.0.77"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.from == "" {
				c.from, c.to = "pod/client", "svc/self"
			}
			if c.set != "" {
				run(lab, c.node, c.set)
				defer run(lab, c.node, c.undo)
			}
			rep, err := l.Run(context.Background(), trace.Request{From: c.from, To: c.to, Namespace: "default", Timeout: 5 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			v := rep.Traces[0].Verdict
			var text strings.Builder
			if err := rep.WriteText(&text, trace.TextOptions{}); err != nil {
				t.Fatal(err)
			}
			if v.Reason != c.reason || (c.place != "" && v.Place != c.place) || !strings.Contains(v.Text, c.says) {
				t.Errorf("%s at %s, want %s at %s with %q:\n%s", v.Reason, v.Place, c.reason, c.place, c.says, text.String())
			}
		})
	}
	nothingLeft(t, lab)
}

// run runs a command line in a place; one quoted argument may stand at its end.
func run(lab *labtest.Lab, where, line string) {
	head, quoted, _ := strings.Cut(line, " '")
	args := strings.Fields(head)
	if quoted != "" {
		args = append(args, strings.TrimSuffix(quoted, "'"))
	}
	lab.Exec(where, args[0], args[1:]...)
}
