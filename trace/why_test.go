// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/cluster/labtest"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/trace"
)

// patients are Services that work.
const patients = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}]
      containers: [{name: c, image: nginx, ports: [{name: http, containerPort: 80}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}
---
apiVersion: v1
kind: Service
metadata: {name: np}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30180}]}
---
apiVersion: v1
kind: Service
metadata: {name: lb}
spec: {type: LoadBalancer, selector: {app: web}, ports: [{port: 80, nodePort: 30181}]}
---
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec: {selector: {app: web}, sessionAffinity: ClientIP, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: local}
spec: {type: NodePort, selector: {app: one}, externalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30182}]}
---
apiVersion: v1
kind: Service
metadata: {name: headless}
spec: {clusterIP: None, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: web.default.svc.cluster.local}
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
spec: {nodeName: node2, terminationGracePeriodSeconds: 0, containers: [{name: c, image: nginx}]}
`

// ward is a lab in which things are broken and mended.
type ward struct {
	*labtest.Lab
	t *testing.T
}

func (w ward) patch(name, json string) {
	w.t.Helper()
	if _, err := w.Client.CoreV1().Services("default").Patch(w.t.Context(), name, types.JSONPatchType, []byte(json), metav1.PatchOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w ward) patchWeb(json string) {
	w.t.Helper()
	if _, err := w.Client.AppsV1().Deployments("default").Patch(w.t.Context(), "web", types.StrategicMergePatchType, []byte(json), metav1.PatchOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w ward) fault(f cluster.Fault) {
	w.t.Helper()
	if _, err := w.Cluster().AddFault(w.t.Context(), f); err != nil {
		w.t.Fatal(err)
	}
}

// ip runs `ip` on a node.
func (w ward) ip(where string, args ...string) {
	w.t.Helper()
	w.Exec(where, "ip", args...)
}

func (w ward) podIP(name string) string {
	w.t.Helper()
	p, err := w.Client.CoreV1().Pods("default").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p.Status.PodIP
}

// health is what the objects were like when all was well.
type health struct {
	web      *appsv1.Deployment
	services []corev1.Service
}

func (w ward) remember() health {
	w.t.Helper()
	web, err := w.Client.AppsV1().Deployments("default").Get(w.t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	services, err := w.Client.CoreV1().Services("default").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return health{web, services.Items}
}

// restore gives the objects the specs that they had.
func (w ward) restore(h health) {
	w.t.Helper()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		d, err := w.Client.AppsV1().Deployments("default").Get(w.t.Context(), "web", metav1.GetOptions{})
		if err == nil {
			d.Spec = h.web.Spec
			_, err = w.Client.AppsV1().Deployments("default").Update(w.t.Context(), d, metav1.UpdateOptions{})
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, old := range h.services {
		s, err := w.Client.CoreV1().Services("default").Get(w.t.Context(), old.Name, metav1.GetOptions{})
		if err == nil {
			s.Spec = old.Spec
			_, err = w.Client.CoreV1().Services("default").Update(w.t.Context(), s, metav1.UpdateOptions{})
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// injury is one thing that is wrong, and what has to be said of it.
type injury struct {
	name string
	// injure breaks it; what it returns mends what applying the manifest again does not.
	injure func(w ward) func()
	// service and from are what is asked about; web, from node2.
	service, from string
	// want is the cause, also a second one that has to be seen.
	want, also string
	// says are parts of the cause's sentence or its fix.
	says []string
	// unsettled: the lab does not settle with it.
	unsettled bool
	// long is only for KPLAB_LONG.
	long bool
}

func injuries() []injury {
	patch := func(name, json string) func(ward) func() {
		return func(w ward) func() { w.patch(name, json); return nil }
	}
	replace := func(path, value string) string {
		return fmt.Sprintf(`[{"op":"replace","path":%q,"value":%s}]`, path, value)
	}
	template := func(json string) func(ward) func() {
		return func(w ward) func() {
			w.patchWeb(`{"spec":{"strategy":{"type":"Recreate","rollingUpdate":null},"template":{"spec":` + json + `}}}`)
			return nil
		}
	}
	faults := func(all ...cluster.Fault) func(ward) func() {
		return func(w ward) func() {
			for _, f := range all {
				w.fault(f)
			}
			return func() {
				if _, err := w.Cluster().ClearFaults(context.Background(), true); err != nil {
					w.t.Error(err)
				}
			}
		}
	}
	return []injury{
		{name: "no such Service", service: "svc/webb", want: "no-service", says: []string{"did you mean web"}},
		{name: "in another namespace", service: "svc/kube-dns", want: "other-namespace", says: []string{"kube-system"}},
		{name: "no such port", service: "svc/web:8080", want: "no-port", says: []string{"http 80/tcp"}},
		{name: "the nodePort for the port", service: "svc/np:30180", want: "no-port", says: []string{"use port 80"}},
		{name: "a wrong selector", injure: patch("web", replace("/spec/selector/app", `"wep"`)), want: "selector-matches-nothing", says: []string{"app=web", "set selector service web app=web"}},
		{name: "a selector with one label too many", injure: patch("web", `[{"op":"add","path":"/spec/selector/tier","value":"front"}]`), want: "selector-matches-nothing", says: []string{"the nearest is pod web-"}},
		{name: "a wrong target port", injure: patch("web", replace("/spec/ports/0/targetPort", "8080")), want: "no-listener", says: []string{"8080", ":80"}},
		{name: "a name of a port that no pod has", injure: patch("web", replace("/spec/ports/0/targetPort", `"web"`)), want: "named-port-missing", says: []string{"http 80/tcp"}},
		{name: "no pods", injure: func(w ward) func() { w.patchWeb(`{"spec":{"replicas":0}}`); return nil }, want: "selector-matches-nothing"},
		{name: "an image that is not there", injure: template(`{"containers":[{"name":"c","image":"nosuchimage"}]}`), want: "image", says: []string{"nosuchimage"}},
		{name: "a program that fails", injure: template(`{"containers":[{"name":"c","image":"busybox","command":["false"]}]}`), want: "pods-crash"},
		{name: "a probe that fails", injure: template(`{"containers":[{"name":"c","image":"nginx","readinessProbe":{"httpGet":{"path":"/missing","port":80},"periodSeconds":1}}]}`), want: "probe-fails", says: []string{"404"}},
		{name: "pods that no node takes", injure: template(`{"nodeSelector":{"disk":"gold"}}`), want: "pods-unschedulable"},
		{name: "a program on the loopback only", injure: template(`{"containers":[{"name":"c","image":"busybox","command":["busybox","httpd","-f","-p","127.0.0.1:80"]}]}`), want: "listens-on-loopback"},
		{name: "a Service without a selector and endpoints", service: "svc/bare", injure: func(w ward) func() {
			w.Apply(`{apiVersion: v1, kind: Service, metadata: {name: bare}, spec: {ports: [{port: 80}]}}`)
			return func() {
				if err := w.Client.CoreV1().Services("default").Delete(context.Background(), "bare", metav1.DeleteOptions{}); err != nil {
					w.t.Error(err)
				}
			}
		}, want: "no-endpoints-object"},
		{name: "a cluster IP from outside", from: "outside", want: "cluster-ip-from-outside", says: []string{"kplab expose"}},
		{name: "an alias for nothing", service: "svc/alias", injure: patch("alias", replace("/spec/externalName", `"no.such.name.example"`)), want: "external-name-unresolved"},
		{name: "an alias that is an address", service: "svc/alias", injure: patch("alias", replace("/spec/externalName", `"10.0.0.9"`)), want: "external-name-is-address"},
		{name: "internal policy Local without an endpoint", service: "svc/local", injure: patch("local", replace("/spec/internalTrafficPolicy", `"Local"`)), want: "no-local-endpoints", says: []string{"internalTrafficPolicy"}},
		{name: "rules gone", injure: faults(cluster.Fault{Kind: cluster.RulesFlushed, Node: "node2"}), want: "rules-flushed", says: []string{"kplab fault clear"}},
		{name: "a frozen proxy", injure: func(w ward) func() {
			mend := faults(cluster.Fault{Kind: cluster.ProxyFrozen})(w)
			w.patchWeb(`{"spec":{"replicas":0}}`)
			w.Settle()
			w.patchWeb(`{"spec":{"replicas":2}}`)
			return mend
		}, want: "proxy-frozen", says: []string{"kplab fault clear proxy-frozen"}},
		{name: "dead DNS", injure: faults(cluster.Fault{Kind: cluster.DNSDead}), from: "pod/client", want: "dns-dead"},
		{name: "no connection left", injure: faults(cluster.Fault{Kind: cluster.ConnLimit, Node: "node2", Max: 1}), want: "conn-limit", unsettled: true, long: true},
		{name: "a link that is down", injure: func(w ward) func() {
			if _, err := w.Cluster().SetLink(w.t.Context(), "node1", cluster.LinkFaults{Down: true}); err != nil {
				w.t.Fatal(err)
			}
			return faults()(w)
		}, want: "link", says: []string{"node1"}, unsettled: true},
		{name: "a link that is down, and one that loses a little", injure: func(w ward) func() {
			for node, f := range map[string]cluster.LinkFaults{"node1": {Down: true}, "node2": {Loss: "1%"}} {
				if _, err := w.Cluster().SetLink(w.t.Context(), node, f); err != nil {
					w.t.Fatal(err)
				}
			}
			return faults()(w)
		}, want: "link", says: []string{"link/node1"}, unsettled: true},
		{name: "the cluster's DNS, dead", service: "svc/kube-system/kube-dns:dns", injure: faults(cluster.Fault{Kind: cluster.DNSDead}), want: "dns-dead"},
		{name: "a way that loses everything", injure: func(w ward) func() {
			if _, err := w.Cluster().SetLink(w.t.Context(), "node1", cluster.LinkFaults{To: "node2", Drop: "in"}); err != nil {
				w.t.Fatal(err)
			}
			return faults()(w)
		}, want: "link", unsettled: true},
		{name: "a route that is missing", injure: func(w ward) func() {
			ip := w.podIP("one")
			w.patch("web", replace("/spec/selector/app", `"one"`))
			w.patch("web", replace("/spec/ports/0/targetPort", "80"))
			w.ip("node1", "rule", "add", "to", ip, "unreachable", "pref", "1")
			return func() { w.ip("node1", "rule", "del", "pref", "1") }
		}, want: "no-route", unsettled: true, long: true},
		{name: "a device with a smaller MTU", injure: func(w ward) func() {
			w.ip("node2", "link", "set", "eth0", "mtu", "1300")
			return func() { w.ip("node2", "link", "set", "eth0", "mtu", "1500") }
		}, from: "pod/client", want: "mtu", says: []string{"1300"}},
		{name: "a NetworkPolicy", injure: func(w ward) func() {
			w.Apply(`{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: nobody}, spec: {podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]}}`)
			return func() {
				if err := w.Client.NetworkingV1().NetworkPolicies("default").Delete(context.Background(), "nobody", metav1.DeleteOptions{}); err != nil {
					w.t.Error(err)
				}
			}
		}, from: "pod/client", want: "network-policy", says: []string{"default/nobody"}},
		{name: "rules that somebody removed", injure: func(w ward) func() {
			w.Exec("node2", "iptables", "-w", "-t", "nat", "-F", "KUBE-SERVICES")
			return nil
		}, want: "rules-altered", unsettled: true},
		{name: "two at once: selector and target port", injure: func(w ward) func() {
			w.patch("web", replace("/spec/selector/app", `"wep"`))
			w.patch("web", replace("/spec/ports/0/targetPort", "8080"))
			return nil
		}, want: "selector-matches-nothing"},
		{name: "two at once: target port and dead DNS", injure: func(w ward) func() {
			w.patch("web", replace("/spec/ports/0/targetPort", "8080"))
			return faults(cluster.Fault{Kind: cluster.DNSDead})(w)
		}, from: "pod/client", want: "no-listener", also: "dns-dead"},
		{name: "two at once: MTU and rules gone", injure: func(w ward) func() {
			w.ip("node2", "link", "set", "eth0", "mtu", "1300")
			mend := faults(cluster.Fault{Kind: cluster.RulesFlushed, Node: "node2"})(w)
			return func() {
				mend()
				w.ip("node2", "link", "set", "eth0", "mtu", "1500")
			}
		}, from: "pod/client", want: "rules-flushed", also: "mtu"},
	}
}

// TestWhy breaks a lab in one way after the other, and asks why; after each, nothing may
// be found any more.
func TestWhy(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{})
	lab.Apply(patients)
	lab.Settle()
	before := ward{lab, t}.remember()
	for _, in := range injuries() {
		t.Run(in.name, func(t *testing.T) {
			if in.long && os.Getenv("KPLAB_LONG") == "" {
				t.Skip("with KPLAB_LONG only: other faults of the same kind run")
			}
			w := ward{lab, t}
			var mend func()
			if in.injure != nil {
				mend = in.injure(w)
				if !in.unsettled {
					w.Settle()
				}
			}
			if in.service == "" {
				in.service = "svc/web"
			}
			if in.from == "" {
				in.from = "node2"
			}
			// What a pod comes to takes its time, a failing probe the second try.
			nettest.Eventually(t, 30*time.Second, "the right cause", func() error { return in.judge(w) })
			if mend != nil {
				mend()
			}
			w.restore(before)
			nettest.Eventually(t, 30*time.Second, "a healthy Service", func() error { return healthy(w, "svc/web", "node2") })
		})
	}
}

// judge says what is wrong with the diagnosis.
func (in injury) judge(w ward) error {
	d, text, err := diagnose(w, in.service, in.from)
	if err != nil {
		return err
	}
	if d.Healthy || d.Causes[0].Reason != in.want {
		return fmt.Errorf("want %s:\n%s", in.want, text)
	}
	said := d.Causes[0].Text + "\n" + d.Causes[0].Fix
	for _, s := range in.says {
		if !strings.Contains(said, s) {
			return fmt.Errorf("%q is not said:\n%s", s, text)
		}
	}
	if in.also != "" && !slices.ContainsFunc(d.Causes, func(c trace.Cause) bool { return c.Reason == in.also }) {
		return fmt.Errorf("%s is not seen:\n%s", in.also, text)
	}
	if d.Causes[0].Fix == "" {
		return fmt.Errorf("no fix:\n%s", text)
	}
	return nil
}

func diagnose(w ward, service, from string) (*trace.Diagnosis, string, error) {
	l, err := trace.Open(options(w.Cluster().Status()))
	if err != nil {
		return nil, "", err
	}
	defer l.Close()
	r := trace.WhyRequest{Service: service, From: from, Namespace: "default"}
	for _, f := range w.Cluster().Faults() {
		r.Known = append(r.Known, trace.KnownFault{ID: f.ID, Kind: string(f.Kind), Node: f.Node, Says: f.Says})
	}
	d, err := l.Why(w.t.Context(), r)
	if err != nil {
		return nil, "", err
	}
	var text bytes.Buffer
	err = d.WriteText(&text)
	return d, text.String(), err
}

func healthy(w ward, service, from string) error {
	d, _, err := diagnose(w, service, from)
	if err != nil {
		return err
	}
	if !d.Healthy {
		return fmt.Errorf("%s from %s: %+v", service, from, d.Causes)
	}
	if d.Probe == nil && service != "svc/alias" {
		return fmt.Errorf("%s from %s: no request was sent", service, from)
	}
	return nil
}

// TestWhyRaisesNoAlarm asks about Services that work, in each mode.
func TestWhyRaisesNoAlarm(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{})
	lab.Apply(patients)
	for _, mode := range []cluster.ProxyConfig{{Mode: "iptables"}, {Mode: "nftables"}, {Mode: "nftables", NFTLayout: "compact"}, {Mode: "userspace"}} {
		t.Run(strings.ReplaceAll(mode.String(), "/", "-"), func(t *testing.T) {
			if err := lab.Cluster().SetProxy(t.Context(), "", mode); err != nil {
				t.Fatal(err)
			}
			lab.Settle()
			w := ward{lab, t}
			for _, c := range [][2]string{
				{"svc/web", "node2"}, {"svc/web", "master"}, {"svc/web:http", "pod/client"}, {"svc/np", "outside"}, {"svc/np", "node1"}, {"svc/lb", "outside"},
				{"svc/sticky", "pod/client"}, {"svc/local", "outside"}, {"svc/local", "node2"}, {"svc/headless", "pod/client"}, {"svc/alias", "pod/client"},
				{"svc/echo", "pod/client"}, {"svc/kube-system/kube-dns:dns", "node1"}, {"svc/kubernetes", "node2"},
			} {
				if err := healthy(w, c[0], c[1]); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
