// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/trace"
)

// killedEnv makes the test binary a process that traces until it is killed; its
// value is the runtime directory and the kubeconfig of the lab.
const killedEnv = "KPLAB_TEST_TRACE_KILLED"

func TestMain(m *testing.M) {
	if v := os.Getenv(killedEnv); v != "" {
		traceUntilKilled(v)
		return
	}
	labtest.Main(m)
}

const objects = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: nginx, image: nginx}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{name: http, port: 80, nodePort: 30123}]}
---
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec: {selector: {app: web}, sessionAffinity: ClientIP, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: local}
spec: {type: NodePort, selector: {app: one}, externalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30124}]}
---
apiVersion: v1
kind: Service
metadata: {name: here}
spec: {selector: {app: one}, internalTrafficPolicy: Local, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: self}
spec: {selector: {app: one}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: empty}
spec: {selector: {app: none}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: wrong}
spec: {selector: {app: one}, ports: [{port: 80, targetPort: 8081}]}
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec: {selector: {app: echo}, ports: [{port: 70, targetPort: 7, protocol: UDP}]}
---
apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: one}}
spec: {nodeName: node1, containers: [{name: c, image: nginx}]}
---
apiVersion: v1
kind: Pod
metadata: {name: echo, labels: {app: echo}}
spec: {nodeName: node1, containers: [{name: c, image: udp-echo}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec: {nodeName: node2, containers: [{name: c, image: nginx}]}
`

func open(t *testing.T, lab *labtest.Lab) *trace.Lab {
	t.Helper()
	l, err := trace.Open(options(lab.Cluster().Status()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

func options(s cluster.Status) trace.Options {
	o := trace.Options{Runtime: s.Runtime, Kubeconfig: s.Kubeconfig}
	for _, n := range s.Nodes {
		o.Nodes = append(o.Nodes, trace.Node{Name: n.Name, Mode: n.Proxy.Mode, Layout: n.Proxy.Layout, Address: netip.MustParseAddr(n.Address), PodCIDR: netip.MustParsePrefix(n.PodCIDR)})
	}
	return o
}

// row is one path of the table of observable Service behaviour.
type row struct {
	name, from, to, proto string
	outcome, reason       string
	// path is the places, with * for a pod's name that is not known beforehand.
	path string
	// has are expressions that some step's sentence must match.
	has []string
	// hasNot must match none.
	hasNot []string
}

var rows = []row{
	{name: "cluster IP from a node", from: "master", to: "svc/web", outcome: "answered", reason: "ok", path: "master fabric node* pod/default/web-*",
		has: []string{`cluster IP of Service default/web \(port http\)`, `chance 1/|whoever is left`, `^DNAT: `, `^SNAT \(masquerade\)`, `undoes the translation`}},
	{name: "cluster IP from a pod, no masquerade", from: "pod/client", to: "svc/self", outcome: "answered", reason: "ok", path: "pod/default/client node2 fabric node1 pod/default/one",
		has: []string{`the only endpoint → 10\.244\..* \(pod default/one on node1, EndpointSlice self-`, `^DNAT: `, `by way of node node1`, `: pod default/one`}, hasNot: []string{`^SNAT`}},
	{name: "cluster IP on the same node", from: "node1", to: "svc/self", outcome: "answered", reason: "ok", path: "node1 pod/default/one"},
	{name: "hairpin", from: "pod/one", to: "svc/self", outcome: "answered", reason: "ok", path: "pod/default/one node1 pod/default/one",
		has: []string{`hairpin`, `^SNAT \(masquerade\)`}},
	{name: "nodePort, policy Cluster", from: "outside", to: "node/master:30123", outcome: "answered", reason: "ok", path: "outside fabric master fabric node* pod/default/web-*",
		has: []string{`nodePort of Service default/web`, `externalTrafficPolicy Cluster`, `^SNAT`, `undoes the translation: source .*, destination`}},
	{name: "nodePort, policy Local with an endpoint", from: "outside", to: "node/node1:30124", outcome: "answered", reason: "ok", path: "outside fabric node1 pod/default/one",
		has: []string{`olicy Local: only endpoints on this node`}, hasNot: []string{`^SNAT`}},
	{name: "nodePort, policy Local without", from: "outside", to: "node/node2:30124", outcome: "timeout", reason: "no-local-endpoints", path: "outside fabric node2",
		has: []string{`none on this node`}},
	{name: "internal policy Local without", from: "node2", to: "svc/here", outcome: "timeout", reason: "no-local-endpoints", path: "node2"},
	{name: "no endpoints", from: "pod/client", to: "svc/empty", outcome: "refused", reason: "no-endpoints", path: "pod/default/client node2",
		has: []string{`no endpoint that is ready`, `icmp .*port unreachable`}},
	{name: "nobody listens", from: "pod/client", to: "svc/wrong", outcome: "refused", reason: "no-listener", path: "pod/default/client node2 fabric node1 pod/default/one"},
	{name: "no such nodePort", from: "outside", to: "node/node1:30999", outcome: "refused", reason: "no-listener", path: "outside fabric node1"},
	{name: "outside has no way to a cluster IP", from: "outside", to: "svc/web", outcome: "unreachable", reason: "no-route", path: "outside"},
	{name: "UDP", from: "pod/client", to: "svc/echo", proto: "udp", outcome: "answered", reason: "ok", path: "pod/default/client node2 fabric node1 pod/default/echo",
		has: []string{`cluster IP of Service default/echo`, `^DNAT: `, `undoes the translation`}},
	{name: "UDP, nobody listens", from: "node2", to: "pod/one:99", proto: "udp", outcome: "refused", reason: "no-listener", path: "node2 fabric node1 pod/default/one"},
	{name: "a pod without any Service", from: "node2", to: "pod/one:80", outcome: "answered", reason: "ok", path: "node2 fabric node1 pod/default/one", hasNot: []string{`^DNAT`, `^SNAT`}},
	{name: "nodes have no name server", from: "node1", to: "web", outcome: "unresolved", reason: "no-resolver"},
	{name: "session affinity", from: "master", to: "svc/sticky", outcome: "answered", reason: "ok", path: "master fabric node* pod/default/web-*",
		has: []string{`session affinity`}},
}

// TestPaths traces each path in each mode.
func TestPaths(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{})
	lab.Apply(objects)
	lab.Settle()
	for _, mode := range []cluster.ProxyConfig{{Mode: "iptables"}, {Mode: "nftables"}, {Mode: "nftables", NFTLayout: "compact"}} {
		t.Run(strings.ReplaceAll(mode.String(), "/", "-"), func(t *testing.T) {
			if err := lab.Cluster().SetProxy(t.Context(), "", mode); err != nil {
				t.Fatal(err)
			}
			lab.Settle()
			l := open(t, lab)
			for _, r := range rows {
				t.Run(r.name, func(t *testing.T) { r.check(t, lab, l) })
			}
			nothingLeft(t, lab)
		})
	}
}

func (r row) check(t *testing.T, lab *labtest.Lab, l *trace.Lab) {
	t.Helper()
	count := 1
	if strings.HasPrefix(r.name, "session") {
		count = 2 // the second finds what the first left
	}
	rep, err := l.Run(t.Context(), trace.Request{From: r.from, To: r.to, Namespace: "default", Proto: r.proto, Count: count, Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	tr := rep.Traces[count-1]
	var text bytes.Buffer
	if err := (&trace.Report{Traces: []*trace.Trace{tr}}).WriteText(&text, trace.TextOptions{Reply: true, All: true}); err != nil {
		t.Fatal(err)
	}
	fail := func(format string, args ...any) { t.Errorf(format+"\n%s", append(args, text.String())...) }
	if tr.Verdict.Outcome != r.outcome || tr.Verdict.Reason != r.reason {
		fail("ended %s (%s), want %s (%s)", tr.Verdict.Outcome, tr.Verdict.Reason, r.outcome, r.reason)
	}
	var path []string
	for _, h := range tr.Path {
		path = append(path, h.Place)
	}
	if got := strings.Join(path, " "); !regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(r.path), `\*`, `.+`) + "$").MatchString(got) {
		fail("path %s, want %s", got, r.path)
	}
	matches := func(expr string) bool {
		re := regexp.MustCompile(expr)
		return slices.ContainsFunc(tr.Steps, func(s *trace.Step) bool { return re.MatchString(s.Text) })
	}
	for _, h := range r.has {
		if !matches(h) {
			fail("no step says %q", h)
		}
	}
	for _, h := range r.hasNot {
		if matches(h) {
			fail("a step says %q", h)
		}
	}
	for _, n := range tr.Notes {
		fail("note: %s", n)
	}
	rulesAreThere(t, lab, tr)
	if tr.Verdict.Outcome == "answered" && tr.Verdict.Pod != "" {
		// The pod says itself who it is.
		_, name, _ := strings.Cut(tr.Verdict.Pod, "/")
		last := tr.Steps[len(tr.Steps)-1].Text
		if strings.Contains(last, "X-Kplab-Pod") && !strings.Contains(last, "X-Kplab-Pod: "+name+";") {
			fail("the trace says pod %s, the answer %q", name, last)
		}
	}
	for i, s := range tr.Steps {
		if s.Kind == trace.KindRule && s.Chain == "" || s.Text == "" {
			fail("step %d says nothing: %+v", i+1, s)
		}
	}
}

// rulesAreThere compares the rules of a trace with what the tools list.
func rulesAreThere(t *testing.T, lab *labtest.Lab, tr *trace.Trace) {
	t.Helper()
	listed := map[string]string{}
	for _, s := range tr.Steps {
		if s.Rule == nil {
			continue
		}
		if s.Rule.Text == "" {
			t.Errorf("rule %d of %s %s has no words", s.Rule.Handle, s.Table, s.Chain)
			continue
		}
		if listed[s.Place] == "" {
			all := lab.Exec(s.Place, "iptables-save") + lab.Exec(s.Place, "nft", "-a", "list", "ruleset")
			listed[s.Place] = strings.Join(strings.Fields(all), " ")
		}
		if want := strings.Join(strings.Fields(s.Rule.Text), " "); !strings.Contains(listed[s.Place], want) {
			t.Errorf("%s has no rule %q", s.Place, want)
		}
	}
}

// nothingLeft looks whether a node still has a table of a trace.
func nothingLeft(t *testing.T, lab *labtest.Lab) {
	t.Helper()
	for _, n := range []string{"master", "node1", "node2"} {
		if out := lab.Exec(n, "nft", "list", "tables"); strings.Contains(out, "kplab-trace") {
			t.Errorf("%s still has %s", n, out)
		}
	}
}

// TestOthersAreLeftAlone compares what tcpdump sees with a trace, and the counters
// of rules that the traced flow does not meet before and after.
func TestOthersAreLeftAlone(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Config: cluster.Config{Proxy: cluster.ProxyConfig{Mode: "iptables"}}})
	lab.Apply(objects)
	lab.Settle()
	l := open(t, lab)
	others := func() string {
		var out []string
		for line := range strings.Lines(lab.Exec("node2", "iptables-save", "-c", "-t", "nat")) {
			if strings.Contains(line, "default/web") || strings.Contains(line, "default/sticky") {
				out = append(out, line)
			}
		}
		slices.Sort(out)
		return strings.Join(out, "")
	}
	before := others()
	if !strings.Contains(before, "default/web") {
		t.Fatalf("no rules to compare: %s", before)
	}
	dump := startTCPDump(t, lab, "node2")
	rep, err := l.Run(t.Context(), trace.Request{From: "pod/client", To: "svc/self", Namespace: "default", Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if after := others(); after != before {
		t.Errorf("counters of other Services were\n%s\nand are\n%s", before, after)
	}
	var want []string
	for _, s := range rep.Traces[0].Steps {
		if s.Kind == trace.KindDevice && s.Place == "node2" {
			dir := map[string]string{"in": "In", "out": "Out"}[s.Direction]
			want = append(want, fmt.Sprintf("%s %s IP %s > %s: Flags [%s]", s.Device, dir, dotted(s.Packet.Src), dotted(s.Packet.Dst), s.Packet.Flags))
		}
	}
	if len(want) != 4 {
		t.Fatalf("the trace has %d crossings in node2, want 4: %v", len(want), want)
	}
	nettest.Eventually(t, 20*time.Second, "tcpdump sees what the trace saw", func() error {
		got := strings.Join(strings.Fields(dump()), " ")
		for _, w := range want {
			if !strings.Contains(got, w) {
				return fmt.Errorf("no %q in %s", w, got)
			}
		}
		return nil
	})
}

func dotted(a netip.AddrPort) string { return fmt.Sprintf("%s.%d", a.Addr(), a.Port()) }

// startTCPDump captures in a place until the test ends, and returns what was seen.
func startTCPDump(t *testing.T, lab *labtest.Lab, where string) func() string {
	t.Helper()
	if _, err := exec.LookPath("tcpdump"); err != nil {
		t.Skip("tcpdump is not installed")
	}
	ns, err := lab.Cluster().NetNS(where)
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.CreateTemp(t.TempDir(), "dump")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, "tcpdump", "-i", "any", "-n", "-l", "-t", "tcp[tcpflags] & tcp-syn != 0")
	cmd.Stdout, cmd.Stderr = out, out
	if err := ns.Start(cmd); err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
		_ = out.Close()
	})
	read := func() string {
		data, err := os.ReadFile(out.Name())
		if err != nil {
			t.Error(err)
		}
		return string(data)
	}
	nettest.Eventually(t, 20*time.Second, "tcpdump listens", func() error {
		if !strings.Contains(read(), "listening on") {
			return fmt.Errorf("it says %q", read())
		}
		return nil
	})
	return read
}

// TestKilled looks for what a trace leaves that is killed while it waits.
func TestKilled(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{Nodes: 2})
	lab.Apply(objects)
	lab.Settle()
	s := lab.Cluster().Status()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s,%s", killedEnv, s.Runtime, s.Kubeconfig))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	t.Cleanup(func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	nettest.Eventually(t, 30*time.Second, "the trace marks", func() error {
		if tables := lab.Exec("node1", "nft", "list", "tables"); !strings.Contains(tables, "kplab-trace") {
			return fmt.Errorf("tables: %s", tables)
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	ended = true
	nettest.Eventually(t, 20*time.Second, "the kernel removes the table", func() error {
		if tables := lab.Exec("node1", "nft", "list", "tables"); strings.Contains(tables, "kplab-trace") {
			return fmt.Errorf("tables: %s", tables)
		}
		return nil
	})
}

// traceUntilKilled waits for an answer that never comes: the address is nobody's.
func traceUntilKilled(v string) {
	runtime, kubeconfig, _ := strings.Cut(v, ",")
	l, err := trace.Open(trace.Options{Runtime: runtime, Kubeconfig: kubeconfig, Nodes: []trace.Node{{Name: "node1", Mode: "iptables"}}})
	if err == nil {
		_, err = l.Run(context.Background(), trace.Request{From: "node1", To: "10.0.0.1:9", Timeout: 10 * time.Minute})
	}
	fmt.Println("ended:", err)
	os.Exit(1)
}
