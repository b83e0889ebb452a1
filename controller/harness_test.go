// SPDX-License-Identifier: Apache-2.0

package controller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/controller"
	"github.com/kplab/kplab/controller/cronjob"
	"github.com/kplab/kplab/controller/job"
	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/podgc"
	"github.com/kplab/kplab/controller/ttlafterfinished"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/settle"
)

// patience is how long a test waits for what has to happen.
const patience = 30 * time.Second

// TestMain silences the API server's own log: what a test wants to know is in its
// failure.
func TestMain(m *testing.M) {
	klog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// bench is a real API server with all controllers and a kubelet that only pretends:
// pods become ready, and go when they are deleted.
type bench struct {
	t      testing.TB
	server *apiserver.Server
	// services is the range of cluster IPs that the API was started with.
	services netip.Prefix
	client   kubernetes.Interface
	loops    []interface{ Witness() *settle.Witness }
	kubelet  *kubelet
	halt     func() // stops controllers and kubelet; the API stays
	// clock is the time of the controllers that wait for long, when a test rules it.
	clock *clocktesting.FakeClock
}

func newBench(t *testing.T, opts ...func(*bench)) *bench {
	t.Helper()
	b := &bench{t: t, services: netip.MustParsePrefix("10.96.0.0/12")}
	for _, o := range opts {
		o(b)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server, err := apiserver.New(apiserver.Config{
		StateDir: t.TempDir(), Listeners: []net.Listener{listener},
		ServiceCIDR: b.services,
		NoFsync:     true, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Run(ctx); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); serving.Wait() })
	ready, done := context.WithTimeout(ctx, patience)
	defer done()
	if err := server.Ready(ready); err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(server.ClientConfig("test", "system:masters"))
	if err != nil {
		t.Fatal(err)
	}
	b.server, b.client = server, client
	b.start()
	b.addNode("master", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
	})
	for i := range 2 {
		b.addNode(fmt.Sprintf("node%d", i+1))
	}
	b.settle()
	return b
}

// start runs a fresh set of controllers and a kubelet.
func (b *bench) start() {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	config := b.server.ClientConfig("system:kplab:controllers", "system:masters")
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		b.t.Fatal(err)
	}
	meta, err := metadata.NewForConfig(config)
	if err != nil {
		b.t.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	recorders := controller.NewRecorders(ctx, client)
	deps := controller.Deps{
		Client: client, Metadata: meta, Informers: factory, Recorder: recorders.For,
		Config: controller.Config{
			ClusterDomain: "cluster.local",
			APIAddresses:  []netip.AddrPort{netip.MustParseAddrPort("10.0.0.131:6443")},
			ServiceCIDR:   b.services,
			CACert:        []byte("CERTIFICATE"),
			Addresses:     controller.AddressPlan{NodeSubnets: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}},
		},
		Log: slog.New(slog.NewTextHandler(testWriter{b.t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	var running sync.WaitGroup
	b.loops = nil
	for _, c := range b.controllers(deps) {
		b.loops = append(b.loops, c)
		running.Go(func() {
			if err := c.Run(ctx); err != nil {
				b.t.Errorf("%s: %v", c.Name(), err)
			}
		})
	}
	b.kubelet = newKubelet(deps)
	b.loops = append(b.loops, b.kubelet.loop)
	running.Go(func() { _ = b.kubelet.loop.Run(ctx) })
	factory.Start(ctx.Done())
	var once sync.Once
	b.halt = func() {
		once.Do(func() { cancel(); running.Wait(); factory.Shutdown(); recorders.Close() })
	}
	b.t.Cleanup(b.halt)
}

// controllers makes all controllers. With a clock of the test, those have it that wait for
// long.
func (b *bench) controllers(deps controller.Deps) []controller.Controller {
	all := controller.All(deps)
	if b.clock == nil {
		return all
	}
	deps.Clock = b.clock
	timed := map[string]controller.Controller{}
	for _, c := range []controller.Controller{job.New(deps), cronjob.New(deps), ttlafterfinished.New(deps), podgc.New(deps)} {
		timed[c.Name()] = c
	}
	for i, c := range all {
		if t := timed[c.Name()]; t != nil {
			all[i] = t
		}
	}
	return all
}

// testWriter shows a controller's warnings with the test's own output.
type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

// unsettled says which loop has not caught up with what is stored.
func (b *bench) unsettled() error {
	newest := b.server.NewestRevisions()
	for _, l := range b.loops {
		p := l.Witness().Snapshot()
		if p.Pending > 0 {
			return fmt.Errorf("%s has %d pending", p.Name, p.Pending)
		}
		for res, rev := range p.Revs {
			if rev < newest[res] {
				return fmt.Errorf("%s has seen %s up to %d of %d", p.Name, res, rev, newest[res])
			}
		}
	}
	return nil
}

// settle waits until everything has caught up, twice in a row with no write between.
func (b *bench) settle() {
	b.t.Helper()
	last := ""
	nettest.Eventually(b.t, patience, "settle", func() error {
		if err := b.unsettled(); err != nil {
			last = ""
			return err
		}
		now := b.revisions()
		if now != last {
			last = now
			return fmt.Errorf("something was written")
		}
		return nil
	})
}

// revisions is the state of the store, events left out: those are written later, by
// a queue of their own.
func (b *bench) revisions() string {
	newest := b.server.NewestRevisions()
	delete(newest, "events")
	return fmt.Sprint(newest)
}

func (b *bench) addNode(name string, opts ...func(*corev1.Node)) {
	b.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}}
	for _, f := range opts {
		f(n)
	}
	made, err := b.client.CoreV1().Nodes().Create(b.t.Context(), n, metav1.CreateOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	made.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady"}}
	made.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("300")}
	made.Status.Capacity = made.Status.Allocatable
	if _, err := b.client.CoreV1().Nodes().UpdateStatus(b.t.Context(), made, metav1.UpdateOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// pods returns the pods of a namespace that match a selector.
func (b *bench) pods(namespace, selector string) []corev1.Pod {
	b.t.Helper()
	list, err := b.client.CoreV1().Pods(namespace).List(b.t.Context(), metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		b.t.Fatal(err)
	}
	return list.Items
}

// kubelet pretends to run the pods of every node.
type kubelet struct {
	loop   *loop.Loop[loop.Key]
	client kubernetes.Interface
	next   atomic.Uint32
	// unready are the images whose pods start and never become ready.
	unready sync.Map
	// frozen keeps deleted pods in their place while true.
	frozen atomic.Bool
}

func newKubelet(d loop.Deps) *kubelet {
	pods := d.Informers.Core().V1().Pods()
	k := &kubelet{client: d.Client}
	k.loop = loop.New(loop.Options[loop.Key]{Name: "kubelet", Workers: 16, Deps: d, Sync: func(ctx context.Context, key loop.Key) error {
		pod, err := pods.Lister().Pods(key.Namespace).Get(key.Name)
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return k.sync(ctx, pod)
	}})
	loop.Watch(k.loop, "pods", pods.Informer(), func(_, cur *corev1.Pod) {
		if cur != nil && cur.Spec.NodeName != "" {
			k.loop.Add(loop.KeyOf(cur))
		}
	})
	return k
}

func (k *kubelet) sync(ctx context.Context, pod *corev1.Pod) error {
	if pod.DeletionTimestamp != nil {
		if k.frozen.Load() {
			return nil
		}
		now := int64(0)
		err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
		})
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil
		}
		return err
	}
	if pod.Status.PodIP != "" {
		return nil
	}
	n := k.next.Add(1)
	ip := fmt.Sprintf("10.244.%d.%d", n/200, n%200+2)
	ready := corev1.ConditionTrue
	if _, bad := k.unready.Load(pod.Spec.Containers[0].Image); bad {
		ready = corev1.ConditionFalse
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"phase": corev1.PodRunning, "podIP": ip, "podIPs": []any{map[string]string{"ip": ip}},
		"conditions": []any{map[string]any{"type": corev1.PodReady, "status": ready, "lastTransitionTime": metav1.Now()}},
	}})
	if err != nil {
		return err
	}
	_, err = k.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
