// SPDX-License-Identifier: Apache-2.0

// Package clients runs programs that nobody here wrote against a lab: Helm,
// controller-runtime, client-go's leader election and upstream's own kube-proxy. It is a
// module of its own so that what they depend on is not what kplab depends on.
package clients

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	applycorev1 "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// patience is for slow machines; nothing waits that long on a quick one.
const patience = 2 * time.Minute

// lab is a lab that kplab brought up for one test.
type lab struct {
	t                  *testing.T
	name, kplab, tools string
	kubeconfig         string
}

func newLab(t *testing.T, name string, args ...string) *lab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("a lab needs root: run with sudo")
	}
	bin := os.Getenv("KPLAB_BIN")
	if bin == "" {
		t.Fatal("KPLAB_BIN names no directory with kplab, helm and kube-proxy: run `make test-clients`")
	}
	// Short, because a socket's path is.
	dir, err := os.MkdirTemp("", "kp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	t.Setenv("KPLAB_STATE", filepath.Join(dir, "state"))
	t.Setenv("KPLAB_RUN", filepath.Join(dir, "run"))
	t.Setenv("HOME", dir)
	l := &lab{t: t, name: name, kplab: filepath.Join(bin, "kplab"), tools: bin}
	t.Cleanup(func() { l.run(l.kplab, "down", "--name", name, "--purge", "--prove") })
	l.run(l.kplab, append([]string{"up", "-d", "--name", name}, args...)...)
	l.kubeconfig = strings.TrimSpace(l.run(l.kplab, "kubeconfig", "--name", name))
	t.Setenv("KUBECONFIG", l.kubeconfig)
	return l
}

func (l *lab) try(program string, args ...string) (string, error) {
	// Not the test's own context: clean-up runs after that has ended.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	var out, talk bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &talk
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(program), strings.Join(args, " "), err, out.String(), talk.String())
	}
	return out.String(), nil
}

func (l *lab) run(program string, args ...string) string {
	l.t.Helper()
	out, err := l.try(program, args...)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

func (l *lab) helm(args ...string) string {
	l.t.Helper()
	return l.run(filepath.Join(l.tools, "helm"), args...)
}

func (l *lab) kubectl(args ...string) string {
	l.t.Helper()
	return l.run(l.kplab, append([]string{"kubectl", "--name", l.name}, args...)...)
}

func (l *lab) until(what string, f func() error) {
	l.t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("%s: %v", what, err)
		}
		<-tick.C
	}
}

func wantText(t *testing.T, out string, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// TestHelm walks a release through its life.
func TestHelm(t *testing.T) {
	l := newLab(t, "helm")
	wantText(t, l.helm("install", "hi", "./chart", "--wait", "--timeout", "90s"), "STATUS: deployed")
	wantText(t, l.helm("list"), "hi", "deployed", "hello-0.1.0")
	wantText(t, l.kubectl("get", "deployment", "hi"), "2/2")
	wantText(t, l.helm("test", "hi", "--timeout", "90s"), "Phase:", "Succeeded")
	wantText(t, l.helm("upgrade", "hi", "./chart", "--set", "greeting=servus,replicas=3", "--wait", "--timeout", "90s"), "REVISION: 2")
	wantText(t, l.kubectl("get", "deployment", "hi"), "3/3")
	wantText(t, l.kubectl("exec", "deploy/hi", "--", "curl", "-s", "-m", "20", "http://hi"), "servus")
	wantText(t, l.helm("history", "hi"), "superseded", "deployed")
	l.helm("rollback", "hi", "1", "--wait", "--timeout", "90s")
	wantText(t, l.kubectl("get", "deployment", "hi"), "2/2")
	wantText(t, l.helm("get", "manifest", "hi"), "kind: Deployment")
	wantText(t, l.helm("status", "hi"), "STATUS: deployed", "REVISION: 3")
	l.helm("uninstall", "hi", "--wait", "--timeout", "90s")
	// Helm waits for what it made; the pods of a Deployment follow it.
	l.until("nothing of the release", func() error {
		out := l.kubectl("get", "all,configmaps,secrets", "-o", "name")
		if strings.Contains(out, "/hi") {
			return errors.New(out)
		}
		return nil
	})
}

// mirror is a reconciler that keeps a ConfigMap with the number of ready replicas
// beside each Deployment, by server-side apply.
type mirror struct{ client.Client }

func (m mirror) Reconcile(ctx context.Context, r reconcile.Request) (reconcile.Result, error) {
	var d appsv1.Deployment
	if err := m.Get(ctx, r.NamespacedName, &d); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	want := applycorev1.ConfigMap(d.Name+"-ready", d.Namespace).WithData(map[string]string{"ready": fmt.Sprint(d.Status.ReadyReplicas)})
	return reconcile.Result{}, m.Apply(ctx, want, client.FieldOwner("mirror"), client.ForceOwnership)
}

// TestControllerRuntime runs two managers of which one leads, and a reconciler on the
// cache of the one that does; when it ends, the other takes over.
func TestControllerRuntime(t *testing.T) {
	l := newLab(t, "crt")
	log.SetLogger(logr.Discard())
	cfg, err := clientcmd.BuildConfigFromFlags("", l.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	first, endFirst := startManager(t, cfg)
	<-first.Elected()
	second, endSecond := startManager(t, cfg)
	l.kubectl("create", "deployment", "web", "--image=nginx", "--replicas=2")
	ready := func(n string) func() error {
		return func() error {
			out, err := l.try(l.kplab, "kubectl", "--name", l.name, "get", "configmap", "web-ready", "-o", "jsonpath={.data.ready}")
			if err == nil && out != n {
				err = fmt.Errorf("%q replicas are ready, want %s", out, n)
			}
			return err
		}
	}
	l.until("the reconciler", ready("2"))
	var web appsv1.Deployment
	if err := first.GetClient().Get(t.Context(), types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: "web"}, &web); err != nil || web.Status.ReadyReplicas != 2 {
		t.Errorf("the cache has %d ready replicas: %v", web.Status.ReadyReplicas, err)
	}
	select {
	case <-second.Elected():
		t.Error("two lead at once")
	default:
	}
	endFirst()
	<-second.Elected()
	l.kubectl("scale", "deployment", "web", "--replicas=3")
	l.until("the reconciler of the second", ready("3"))
	var pods corev1.PodList
	if err := second.GetAPIReader().List(t.Context(), &pods, client.InNamespace("default"), client.Limit(2)); err != nil || len(pods.Items) != 2 || pods.Continue == "" {
		t.Errorf("a page of %d pods, continue %q: %v", len(pods.Items), pods.Continue, err)
	}
	endSecond()
}

func startManager(t *testing.T, cfg *rest.Config) (manager.Manager, func()) {
	t.Helper()
	m, err := ctrl.NewManager(cfg, manager.Options{
		LeaderElection: true, LeaderElectionID: "mirror.example.com", LeaderElectionNamespace: "default", LeaderElectionReleaseOnCancel: true,
		Metrics: server.Options{BindAddress: "0"},
	})
	if err != nil {
		t.Fatal(err)
	}
	twice := true // two managers of one process may have controllers of one name
	if err := ctrl.NewControllerManagedBy(m).For(&appsv1.Deployment{}).WithOptions(controller.Options{SkipNameValidation: &twice}).Complete(mirror{m.GetClient()}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Start(ctx) }()
	ended := false
	end := func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("manager: %v", err)
		}
	}
	t.Cleanup(end)
	return m, end
}

// TestKubeProxy gives one node upstream's own proxy, in each of its modes that this
// kernel has, and asks a Service from there.
func TestKubeProxy(t *testing.T) {
	l := newLab(t, "real", "--proxy-mode", "none")
	l.kubectl("create", "deployment", "web", "--image=nginx", "--replicas=2")
	l.kubectl("expose", "deployment", "web", "--port=80")
	l.kubectl("rollout", "status", "deployment", "web", "--timeout=90s")
	address := l.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			l := &lab{t: t, name: l.name, kplab: l.kplab, tools: l.tools, kubeconfig: l.kubeconfig}
			if out, err := l.try(l.kplab, "exec", "--name", l.name, "node1", "--", "curl", "-s", "-m", "1", "http://"+address); err == nil {
				t.Fatalf("a Service answers without a proxy: %s", out)
			}
			// The node's own path to the API: there is no Service path yet.
			out, err := os.CreateTemp(t.TempDir(), "log")
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			proxy := []string{filepath.Join(l.tools, "kube-proxy"), "--kubeconfig", l.nodeConfig(), "--hostname-override", "node1", "--proxy-mode", mode, "--cluster-cidr", "10.244.0.0/16", "--conntrack-max-per-core", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0"}
			cmd := exec.Command(l.kplab, append([]string{"exec", "--name", l.name, "node1", "--"}, proxy...)...)
			cmd.Stdout, cmd.Stderr = out, out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = cmd.Process.Signal(os.Interrupt)
				_ = cmd.Wait()
				l.run(l.kplab, append([]string{"exec", "--name", l.name, "node1", "--"}, append(proxy, "--cleanup")...)...)
				if t.Failed() {
					text, _ := os.ReadFile(out.Name())
					t.Logf("kube-proxy said:\n%s", text)
				}
			}()
			l.until("a Service through upstream's proxy", func() error {
				body, err := l.try(l.kplab, "exec", "--name", l.name, "node1", "--", "curl", "-s", "-m", "5", "http://"+address)
				if err == nil && !strings.Contains(body, "nginx") {
					err = fmt.Errorf("answer %q", body)
				}
				return err
			})
		})
	}
}

// nodeConfig is the kubeconfig with the API's address on the node network.
func (l *lab) nodeConfig() string {
	l.t.Helper()
	cfg, err := clientcmd.LoadFromFile(l.kubeconfig)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, c := range cfg.Clusters {
		c.Server = "https://10.0.0.131:6443"
	}
	file := filepath.Join(l.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, file); err != nil {
		l.t.Fatal(err)
	}
	return file
}
