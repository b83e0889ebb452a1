// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/kplab/kplab/cni"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

func TestMain(m *testing.M) { nettest.Main(m) }

const patience = 20 * time.Second

// harness is a kubelet on a node of its own, with a fake API.
type harness struct {
	t      testing.TB
	dir    string
	client *fake.Clientset
	events *record.FakeRecorder

	runtime *sandbox.Runtime
	nodeNS  *netns.NS
	kubelet *Kubelet
	network *cni.Network
	cancel  context.CancelFunc
	done    chan error
}

var nodeIP = netip.MustParseAddr("10.0.0.132")

func newHarness(tb testing.TB) *harness {
	tb.Helper()
	nettest.NeedRoot(tb)
	nettest.LeakCheck(tb)
	dir := tb.TempDir()
	h := &harness{t: tb, dir: dir, client: fake.NewClientset(), events: record.NewFakeRecorder(10000)}
	h.events.IncludeObject = false
	tb.Cleanup(func() {
		h.stop()
		if err := sandbox.Destroy(context.Background(), filepath.Join(dir, "run")); err != nil {
			tb.Errorf("destroy: %v", err)
		}
	})
	h.start()
	return h
}

// start starts a daemon: it may be called again after stop.
func (h *harness) start() {
	h.t.Helper()
	must := func(err error) {
		h.t.Helper()
		if err != nil {
			h.t.Fatal(err)
		}
	}
	var err error
	h.runtime, err = sandbox.Open(sandbox.Config{Dir: filepath.Join(h.dir, "run")})
	must(err)
	h.nodeNS, err = h.runtime.CreateNetNS("node-n1")
	must(err)
	must(h.nodeNS.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(nodeIP.String() + "/32")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(lo), netlink.AddrReplace(lo, addr))
	}))
	conf := filepath.Join(h.dir, "net.d")
	must(cni.WriteConflist(conf, cni.Conflist{
		Subnet: netip.MustParsePrefix("10.244.0.0/16"), NodeIP: nodeIP, DataDir: filepath.Join(h.dir, "run", "addresses"),
	}))
	h.network, err = cni.Load(cni.Config{ConfDir: conf, StateDir: filepath.Join(h.dir, "run", "cache"), NodeNS: h.nodeNS})
	must(err)
	level := slog.LevelWarn
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	factory := informers.NewSharedInformerFactory(h.client, 0)
	h.kubelet, err = New(Config{
		NodeName: "n1", NodeIP: nodeIP, NodeNS: h.nodeNS, NodeNSName: "node-n1", Client: h.client, Informers: factory, Recorder: h.events,
		Runtime: h.runtime, Network: h.network, Dir: filepath.Join(h.dir, "state"), MemoryDir: filepath.Join(h.dir, "run", "memory"),
		ClusterDNS: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, ClusterDomain: "cluster.local",
		Log: slog.New(slog.NewTextHandler(h.t.Output(), &slog.HandlerOptions{Level: level})),
	})
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel, h.done = cancel, make(chan error, 1)
	factory.StartWithContext(ctx)
	go func() { h.done <- h.kubelet.Run(ctx) }()
}

// stop ends the daemon as a crash would leave things: what runs goes on.
func (h *harness) stop() {
	h.t.Helper()
	if h.cancel == nil {
		return
	}
	h.cancel()
	h.cancel = nil
	if err := <-h.done; err != nil {
		h.t.Errorf("kubelet: %v", err)
	}
	if err := errors.Join(h.network.Close(), h.runtime.Close()); err != nil {
		h.t.Errorf("close: %v", err)
	}
}

// newTestPod is a pod of one container on the node.
func newTestPod(name, image string, command ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{
			NodeName: "n1", RestartPolicy: corev1.RestartPolicyAlways,
			Containers: []corev1.Container{{Name: "main", Image: image, Command: command}},
		},
	}
}

func (h *harness) create(p *corev1.Pod) {
	h.t.Helper()
	if _, err := h.client.CoreV1().Pods(p.Namespace).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) get(name string) (*corev1.Pod, error) {
	return h.client.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
}

// until waits for a pod to satisfy cond and returns it.
func (h *harness) until(name, what string, cond func(p *corev1.Pod) bool) *corev1.Pod {
	h.t.Helper()
	var got *corev1.Pod
	nettest.Eventually(h.t, patience, "pod "+name+" to be "+what, func() error {
		p, err := h.get(name)
		if err != nil {
			return err
		}
		got = p
		if !cond(p) {
			return fmt.Errorf("status is %s %+v", p.Status.Phase, p.Status.ContainerStatuses)
		}
		return nil
	})
	return got
}

func isReady(p *corev1.Pod) bool {
	c := condition(&p.Status, corev1.PodReady)
	return p.Status.Phase == corev1.PodRunning && c != nil && c.Status == corev1.ConditionTrue
}

func status0(p *corev1.Pod) corev1.ContainerStatus {
	if len(p.Status.ContainerStatuses) == 0 {
		return corev1.ContainerStatus{}
	}
	return p.Status.ContainerStatuses[0]
}

// delete asks for a graceful deletion, which the fake API does not know.
func (h *harness) delete(name string, grace int64) {
	h.t.Helper()
	p, err := h.get(name)
	if err != nil {
		h.t.Fatal(err)
	}
	p = p.DeepCopy()
	now := metav1.NewTime(time.Now().Add(time.Duration(grace) * time.Second))
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
	if _, err := h.client.CoreV1().Pods("default").Update(context.Background(), p, metav1.UpdateOptions{}); err != nil {
		h.t.Fatal(err)
	}
}

func (h *harness) untilGone(name string) {
	h.t.Helper()
	nettest.Eventually(h.t, patience, "pod "+name+" to be gone", func() error {
		if _, err := h.get(name); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
}

// fetch asks the pod's web server from the node.
func (h *harness) fetch(ip string) (*http.Response, string, error) {
	client := &http.Client{Transport: &http.Transport{DialContext: h.nodeNS.Dial, DisableKeepAlives: true}, Timeout: 3 * time.Second}
	res, err := client.Get("http://" + ip + "/")
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	return res, string(body), err
}

// recorded returns the events so far.
func (h *harness) recorded() []string {
	var all []string
	for {
		select {
		case e := <-h.events.Events:
			all = append(all, e)
		default:
			return all
		}
	}
}

func hasEvent(all []string, text string) bool {
	return slices.ContainsFunc(all, func(e string) bool { return strings.Contains(e, text) })
}

// log returns what the first attempt of the first container has written.
func (h *harness) log(p *corev1.Pod) string {
	return logTail(h.kubelet.logFileOf(p.UID, p.Spec.Containers[0].Name, 0), 1000, 1<<20)
}

// eventuallyLog waits until the first container has written exactly this.
func (h *harness) eventuallyLog(p *corev1.Pod, want string) {
	h.t.Helper()
	nettest.Eventually(h.t, patience, "the output", func() error {
		if got := h.log(p); got != want {
			return fmt.Errorf("it is %q, want %q", got, want)
		}
		return nil
	})
}

// eventuallyExec waits until a command in the first container prints this.
func (h *harness) eventuallyExec(pod string, args []string, want string) {
	h.t.Helper()
	nettest.Eventually(h.t, patience, "the output of a command", func() error {
		kp := h.kubelet.find("default", pod)
		if kp == nil {
			return errors.New("the kubelet has no such pod yet")
		}
		var out bytes.Buffer
		code, err := h.kubelet.exec(context.Background(), kp, kp.object(), &kp.object().Spec.Containers[0], execArgs{args: args, stdout: &out, stderr: &out})
		if err != nil {
			return err
		}
		if code != 0 || out.String() != want {
			return fmt.Errorf("exit %d, %q", code, out.String())
		}
		return nil
	})
}
