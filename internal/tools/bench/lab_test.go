// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/rawnet"
	"github.com/kplab/kplab/internal/rtnl"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// patience is how long anything may take before the benchmark fails.
const patience = 3 * time.Minute

// lab is a lab of the built program, a child process as a person has it.
type lab struct {
	b      *testing.B
	env    []string
	dir    string
	client kubernetes.Interface
	// said is what up printed.
	said string
}

// settings is the default lab with room for many pods, the control plane included.
const settings = `apiVersion: kplab/v1alpha1
kind: Lab
nodes:
- {name: master, role: control-plane, maxPods: 200}
- {name: node1, maxPods: 200}
- {name: node2, maxPods: 200}
`

// up starts a lab. It ends with the benchmark at the latest.
func up(b *testing.B) *lab {
	b.Helper()
	nettest.NeedRoot(b)
	nettest.LeakCheck(b)
	bin := os.Getenv("KPLAB_BIN")
	if bin == "" {
		b.Fatal("KPLAB_BIN names no directory with the program: run make bench")
	}
	// Short, because a socket's path is.
	dir, err := os.MkdirTemp("", "kb-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			b.Error(err)
		}
	})
	l := &lab{b: b, dir: dir, env: append(os.Environ(),
		"KPLAB_STATE="+dir+"/state", "KPLAB_RUN="+dir+"/run", "KPLAB_LAB=bench", "PATH="+bin+":"+os.Getenv("PATH"))}
	if err := os.WriteFile(dir+"/lab.yaml", []byte(settings), 0o600); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(l.end)
	l.said = l.kplab("up", "-d", "--config", dir+"/lab.yaml")
	cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "run", "bench", "kubeconfig"))
	if err != nil {
		b.Fatal(err)
	}
	cfg.QPS = -1
	cfg.ContentType = "application/vnd.kubernetes.protobuf"
	if l.client, err = kubernetes.NewForConfig(cfg); err != nil {
		b.Fatal(err)
	}
	return l
}

// end removes the lab; one that is gone is fine.
func (l *lab) end() {
	l.b.Helper()
	l.kplab("down", "--purge")
}

// kplab runs a command and returns what it said on stderr and stdout.
func (l *lab) kplab(args ...string) string {
	l.b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "kplab", args...)
	if cmd.Err != nil {
		cmd.Path, cmd.Err = filepath.Join(os.Getenv("KPLAB_BIN"), "kplab"), nil
	}
	cmd.Env = l.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		l.b.Fatalf("kplab %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// web creates a Deployment of a built-in web server.
func (l *lab) web(replicas int32) {
	l.b.Helper()
	selector := map[string]string{"app": "web"}
	zero := int64(0)
	_, err := l.client.AppsV1().Deployments("default").Create(l.b.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: selector},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: selector},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: &zero,
					Tolerations:                   []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
					Containers:                    []corev1.Container{{Name: "nginx", Image: "nginx"}},
				},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		l.b.Fatal(err)
	}
}

// scale changes the number of the Deployment's pods.
func (l *lab) scale(replicas int32) error {
	patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
	_, err := l.client.AppsV1().Deployments("default").Patch(l.b.Context(), "web", types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// watchPods calls each with every pod that is new or changed until it says that it
// is done or failed. begin runs once the watch stands. An informer, because a plain
// watch ends when its reader is slower than a burst.
func (l *lab) watchPods(begin func() error, each func(*corev1.Pod) (bool, error)) {
	l.b.Helper()
	ctx, cancel := context.WithTimeoutCause(l.b.Context(), patience, fmt.Errorf("the pods are not ready after %s", patience))
	defer cancel()
	factory := informers.NewSharedInformerFactory(l.client, 0)
	done := make(chan error, 1)
	finished := false
	on := func(obj any) {
		pod, ok := obj.(*corev1.Pod)
		if !ok || finished {
			return
		}
		end, err := each(pod)
		if end || err != nil {
			finished = true
			done <- err
		}
	}
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: on, UpdateFunc: func(_, obj any) { on(obj) },
	}); err != nil {
		l.b.Fatal(err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	defer cancel()
	if err := factory.WaitForCacheSyncWithContext(ctx).AsError(); err != nil {
		l.b.Fatal(err)
	}
	if err := begin(); err != nil {
		l.b.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			l.b.Fatal(err)
		}
	case <-ctx.Done():
		l.b.Fatal(context.Cause(ctx))
	}
}

// awaitReady returns when n pods are ready.
func (l *lab) awaitReady(n int, begin func() error) {
	l.b.Helper()
	ready := map[string]bool{}
	l.watchPods(begin, func(pod *corev1.Pod) (bool, error) {
		if isReady(pod) {
			ready[pod.Name] = true
		}
		return len(ready) >= n, nil
	})
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// get fetches a page from the network of a node, within timeout.
func (l *lab) get(node, url string, timeout time.Duration) error {
	ns, err := netns.Open(filepath.Join(l.dir, "run", "bench", "netns", "node-"+node))
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }() // a handle for reading
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			// The transport goes on dialling when the request is given up.
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return ns.Dial(ctx, network, addr)
		},
	}
	client := http.Client{Transport: transport, Timeout: timeout}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// stepLine is how up prints a step: mark, name, detail, time.
var stepLine = regexp.MustCompile(`(?m)^ \S (\S+) .* (\d\S*)$`)

// BenchmarkUp is the first minute of a person: up -d, a Deployment with a Service,
// and the first answer of its ClusterIP.
func BenchmarkUp(b *testing.B) {
	took := samples{}
	for b.Loop() {
		began, used := time.Now(), labCPU(b)
		l := up(b)
		took.add("s-up", time.Since(began).Seconds())
		took.add("s-cpu-up", (labCPU(b) - used).Seconds())
		l.web(1)
		svc, err := l.client.CoreV1().Services("default").Create(b.Context(), &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: corev1.ServiceSpec{
				Selector: map[string]string{"app": "web"},
				Ports:    []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(80)}},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		nettest.Eventually(b, patience, "the ClusterIP answers", func() error {
			// Short: a connection begun before the rules are there stays unanswered.
			return l.get("master", "http://"+svc.Spec.ClusterIP, 100*time.Millisecond)
		})
		took.add("s-wall", time.Since(began).Seconds())
		took.add("s-cpu", (labCPU(b) - used).Seconds())
		for _, m := range stepLine.FindAllStringSubmatch(l.said, -1) {
			if d, err := time.ParseDuration(m[2]); err == nil {
				took.add("ms-"+m[1], d.Seconds()*1000)
			}
		}
		l.end()
	}
	took.report(b)
}

// BenchmarkIdle is what a lab takes that nobody uses.
func BenchmarkIdle(b *testing.B) {
	const window = 20 * time.Second
	for b.Loop() {
		l := up(b)
		l.kplab("settle")
		began, used := time.Now(), labCPU(b)
		<-time.After(window)
		share := (labCPU(b) - used).Seconds() / time.Since(began).Seconds()
		b.ReportMetric(share*100, "%-cpu")
		b.ReportMetric(window.Seconds(), "s-window")
		m := labMemory(b)
		b.ReportMetric(m.pss, "MB-pss")
		b.ReportMetric(m.rss, "MB-rss")
		b.ReportMetric(m.anon, "MB-anon")
		b.ReportMetric(float64(m.processes), "processes")
		l.end()
	}
}

// BenchmarkFirstPacket takes the time from the moment a client sees that a pod is
// ready to the pod's first answer, from another node, pod by pod.
func BenchmarkFirstPacket(b *testing.B) {
	const pods = 30
	for b.Loop() {
		l := up(b)
		l.web(0)
		took := samples{}
		seen := map[string]bool{}
		l.watchPods(func() error { return l.scale(1) }, func(pod *corev1.Pod) (bool, error) {
			if !isReady(pod) || seen[pod.Name] {
				return false, nil
			}
			began := time.Now()
			if err := l.get(otherNode(pod.Spec.NodeName), "http://"+pod.Status.PodIP, 10*time.Second); err != nil {
				return false, fmt.Errorf("the first packet to %s: %w", pod.Name, err)
			}
			took.add("ms-p50", time.Since(began).Seconds()*1000)
			seen[pod.Name] = true
			if len(seen) == pods {
				return true, nil
			}
			return false, l.scale(int32(len(seen) + 1))
		})
		b.ReportMetric(slices.Max(took["ms-p50"]), "ms-max")
		took.report(b)
		l.end()
	}
}

// otherNode names a node that a packet has to leave.
func otherNode(name string) string {
	if name == "node1" {
		return "node2"
	}
	return "node1"
}

// BenchmarkPods asks for 500 pods at once, by a Deployment, and waits until the last
// is ready. Before and after, the kernel alone makes and wires as many namespaces as
// it can.
func BenchmarkPods(b *testing.B) {
	const pods, rawPods = 500, 150
	for b.Loop() {
		l := up(b)
		l.web(0)
		raw := rawPodsOf(b, rawPods)
		var began time.Time
		var used time.Duration
		revision := l.revision()
		l.awaitReady(pods, func() error {
			began, used = time.Now(), labCPU(b)
			return l.scale(pods)
		})
		took, cpu := time.Since(began), labCPU(b)-used
		writes := l.revision() - revision
		raw = raw.plus(rawPodsOf(b, rawPods))
		rate, rawRate := pods/took.Seconds(), 2*rawPods/raw.wall.Seconds()
		b.ReportMetric(rate, "pods/s")
		b.ReportMetric(rawRate, "raw-pods/s")
		b.ReportMetric(rate/rawRate, "x-raw")
		b.ReportMetric(cpu.Seconds()*1000/pods, "cpu-ms/pod")
		b.ReportMetric(raw.cpu.Seconds()*1000/(2*rawPods), "raw-cpu-ms/pod")
		b.ReportMetric(float64(writes)/pods, "writes/pod")
		l.end()
	}
}

// revision is the number of writes that the lab has seen.
func (l *lab) revision() int {
	l.b.Helper()
	list, err := l.client.CoreV1().Nodes().List(l.b.Context(), metav1.ListOptions{})
	if err != nil {
		l.b.Fatal(err)
	}
	var n int
	if _, err := fmt.Sscan(list.ResourceVersion, &n); err != nil {
		l.b.Fatal(err)
	}
	return n
}

// spent is time by the clock and of the processor.
type spent struct{ wall, cpu time.Duration }

func (s spent) plus(t spent) spent { return spent{s.wall + t.wall, s.cpu + t.cpu} }

// rawPodsOf makes n namespaces one after the other and wires each to one node.
func rawPodsOf(b *testing.B, n int) spent {
	b.Helper()
	node := nettest.NewNS(b)
	conn, err := rtnl.DialIn(node)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	var made []*netns.NS
	defer func() {
		for _, ns := range made {
			_ = ns.Close()
		}
	}()
	began, used := time.Now(), ownCPU(b)
	ip := netip.MustParseAddr("10.244.1.1")
	for i := range n {
		ns, err := netns.New()
		if err != nil {
			b.Fatal(err)
		}
		made = append(made, ns)
		pod, err := rtnl.DialIn(ns)
		if err != nil {
			b.Fatal(err)
		}
		ip = ip.Next()
		err = rawnet.Wire(conn, pod, ns, fmt.Sprintf("v%d", i), ip, netip.Addr{})
		if err := errors.Join(err, pod.Close()); err != nil {
			b.Fatal(err)
		}
	}
	return spent{time.Since(began), ownCPU(b) - used}
}

// BenchmarkDown ends a lab with 100 pods.
func BenchmarkDown(b *testing.B) {
	const pods = 100
	for b.Loop() {
		l := up(b)
		l.web(0)
		l.awaitReady(pods, func() error { return l.scale(pods) })
		l.kplab("settle", "--timeout", "60s")
		began, used := time.Now(), labCPU(b)
		l.kplab("down")
		b.ReportMetric(time.Since(began).Seconds(), "s-down")
		b.ReportMetric((labCPU(b) - used).Seconds(), "s-cpu")
	}
}

// samples are the values of each metric, one a round.
type samples map[string][]float64

func (s samples) add(metric string, v float64) { s[metric] = append(s[metric], v) }

// report gives the benchmark the median of each metric.
func (s samples) report(b *testing.B) {
	b.Helper()
	for metric, values := range s {
		slices.Sort(values)
		b.ReportMetric(values[len(values)/2], metric)
	}
}
