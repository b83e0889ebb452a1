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

	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/internal/nettest"
)

const named = `
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: set}
spec: {clusterIP: None, selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: all}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {app: web}, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: empty}
spec: {clusterIP: None, selector: {app: nobody}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: api.example.com}
---
apiVersion: v1
kind: Service
metadata: {name: number}
spec: {type: ExternalName, externalName: 1.2.3.4}
---
apiVersion: v1
kind: Pod
metadata: {name: good, labels: {app: web}}
spec: {hostname: pal, subdomain: later, containers: [{name: c, image: nginx}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bad, labels: {app: web}}
spec: {containers: [{name: c, image: nginx, readinessProbe: {httpGet: {path: /, port: 81}, periodSeconds: 1}}]}
---
apiVersion: v1
kind: Pod
metadata: {name: onhost}
spec: {hostNetwork: true, nodeName: node1, terminationGracePeriodSeconds: 0, containers: [{name: c, image: busybox, command: [sleep, "100000"]}]}
`

const cutOff = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: cut, namespace: kube-system}
spec: {podSelector: {matchLabels: {k8s-app: kube-dns}}, policyTypes: [Egress]}
`

// TestDNSRows asks cluster DNS what the transcript of DNS does not: rows N.
func TestDNSRows(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Nodes: 2})
	lab.Apply(named)
	lab.Settle()
	ip := func(pod string) string {
		p, err := lab.Client.CoreV1().Pods("default").Get(context.Background(), pod, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p.Status.PodIP
	}
	nettest.Until(t, 90*time.Second, "a pod is ready, and DNS", func() bool {
		out, err := lab.TryExec("pod/good", "dig", "@10.96.0.10", "+tries=1", "+time=2", "+short", "set.default.svc.cluster.local")
		return err == nil && strings.Contains(out, ip("good"))
	})
	good, bad := ip("good"), ip("bad")
	dash := strings.ReplaceAll(good, ".", "-")
	const ask = " @10.96.0.10 +tries=1 +time=5 +noall +answer +authority +comments "
	for _, tc := range []struct {
		row, query string
		want       []string
		not        string
	}{
		{"N12", "set.default.svc.cluster.local A", []string{"NOERROR", good}, bad},
		{"N12 published", "all.default.svc.cluster.local A", []string{"NOERROR", good, bad}, ""},
		{"N13", "empty.default.svc.cluster.local A", []string{"NXDOMAIN"}, ""},
		{"N16", dash + ".set.default.svc.cluster.local A", []string{"NOERROR", good}, ""},
		{"N17", "_http._tcp.set.default.svc.cluster.local SRV", []string{dash + ".set.default.svc.cluster.local."}, ""},
		{"N18", dash + ".web.default.svc.cluster.local A", []string{"NOERROR", good}, ""},
		{"N20 no headless Service yet", "pal.later.default.svc.cluster.local A", []string{"NXDOMAIN"}, ""},
		{"N21", "alias.default.svc.cluster.local CNAME", []string{"api.example.com."}, ""},
		{"N23", "_http._tcp.alias.default.svc.cluster.local SRV", []string{"ANSWER: 0"}, ""},
		{"N24", "number.default.svc.cluster.local A", []string{"NXDOMAIN"}, "1.2.3.4"},
		{"N29", "cluster.local NS", []string{"ns.dns.cluster.local."}, ""},
		{"N31", "web.default.svc.cluster.local MX", []string{"NOERROR", "ANSWER: 0"}, ""},
		{"N33", "a.b.c.web.default.svc.cluster.local A", []string{"NXDOMAIN"}, ""},
		{"N34", "WeB.Default.SVC.cluster.LOCAL A", []string{"NOERROR", "WeB.Default.SVC.cluster.LOCAL."}, ""},
	} {
		out := lab.Exec("pod/good", "sh", "-c", "dig"+ask+tc.query)
		for _, want := range tc.want {
			if !strings.Contains(out, want) {
				t.Errorf("%s %s: no %q in\n%s", tc.row, tc.query, want, out)
			}
		}
		if tc.not != "" && strings.Contains(out, tc.not) {
			t.Errorf("%s %s: %q in\n%s", tc.row, tc.query, tc.not, out)
		}
	}
	if out, _ := lab.TryExec("pod/good", "dig", "@10.96.0.10", "+tries=1", "+time=5", "cluster.local", "AXFR"); strings.Contains(out, "web.default") || !strings.Contains(out, "Transfer failed") {
		t.Errorf("N32: a transfer of the zone:\n%s", out)
	}
	if out, err := lab.TryExec("pod/good", "curl", "-sS", "-m", "5", "http://"+good+":80"); err != nil {
		t.Errorf("N14: %s %v", out, err)
	}
	out := lab.Exec("pod/good", "sh", "-c", "dig"+ask+"+stats www.example.com A")
	if !strings.Contains(out, "status: NXDOMAIN") && !strings.Contains(out, "status: SERVFAIL") && !strings.Contains(out, "status: REFUSED") {
		t.Errorf("N38: a name outside:\n%s", out)
	}
	// By dig's own clock: the start of a program may take its time.
	if m := regexp.MustCompile(`Query time: (\d{0,3}) msec`).FindString(out); m == "" {
		t.Errorf("N38: a name outside does not fail within a second:\n%s", out)
	}
	// N36: what was denied a moment ago exists as soon as its Service does: the cache
	// keeps no denial of the cluster's names.
	lab.Apply(`{apiVersion: v1, kind: Service, metadata: {name: later}, spec: {clusterIP: None, selector: {app: web}, ports: [{port: 80}]}}`)
	lab.Settle()
	nettest.Eventually(t, 20*time.Second, "N20, N36: a name that was denied before", func() error {
		if out := lab.Exec("pod/good", "dig", "@10.96.0.10", "+short", "pal.later.default.svc.cluster.local"); !strings.Contains(out, good) {
			return fmt.Errorf("answer %q", out)
		}
		return nil
	})
	// N35: DNS that cannot reach the API knows nothing and says so.
	lab.Apply(cutOff)
	if err := lab.Client.CoreV1().Pods("kube-system").DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 60*time.Second, "N35: a DNS server without API", func() error {
		pods, err := lab.Client.CoreV1().Pods("kube-system").List(context.Background(), metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.DeletionTimestamp != nil || p.Status.PodIP == "" {
				continue
			}
			out, err := lab.TryExec("pod/good", "dig", "@"+p.Status.PodIP, "+tries=1", "+time=1", "web.default.svc.cluster.local")
			if err == nil && strings.Contains(out, "status: SERVFAIL") {
				return nil
			}
			return fmt.Errorf("%s says %s %w", p.Name, out, err)
		}
		return fmt.Errorf("no pod with an address")
	})
}
