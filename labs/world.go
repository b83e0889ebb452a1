// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/internal/execx"
)

// settleTimeout is how long a lab may take to come to rest. One that does not is
// looked at all the same: a frozen proxy may be the exercise.
const settleTimeout = 15 * time.Second

// errNoPlace says that a command had no place to run in.
var errNoPlace = errors.New("not there")

// Target says which cluster a lab runs on.
type Target struct {
	// Name of the lab of kplab.
	Name string
	// Kubeconfig is a file that leads to a cluster that need not be kplab's; then
	// Name does not count.
	Kubeconfig string
	// Program is the file of kplab, which commands call.
	Program string
	// Called is how the person calls it.
	Called string
}

// World is the cluster that a lab runs on.
type World struct {
	Target
	// Status of the lab of kplab; zero on other clusters.
	Status cluster.Status

	daemon    *cluster.Client
	rest      *rest.Config
	client    kubernetes.Interface
	dynamic   dynamic.Interface
	discovery *memCache
	dir       string // where progress and the files below are kept
	namespace string // the current lab's
}

// Output is what a command did.
type Output struct {
	Stdout, Stderr string
	Exit           int
}

// Open connects to the cluster. The error wraps [cluster.ErrNotRunning] when the lab
// of kplab does not run.
func Open(ctx context.Context, t Target) (*World, error) {
	w := &World{Target: t}
	path := t.Kubeconfig
	if path == "" {
		var err error
		if w.daemon, err = cluster.Connect(t.Name); err != nil {
			return nil, err
		}
		if w.Status, err = w.daemon.Status(ctx); err != nil {
			return nil, err
		}
		path = w.Status.Kubeconfig
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	cfg.QPS, cfg.Burst = 200, 400
	cfg.WarningHandler = rest.NoWarnings{}
	w.rest = cfg
	if w.client, err = kubernetes.NewForConfig(cfg); err != nil {
		return nil, err
	}
	if w.dynamic, err = dynamic.NewForConfig(cfg); err != nil {
		return nil, err
	}
	cache := memory.NewMemCacheClient(w.client.Discovery())
	w.discovery = &memCache{CachedDiscoveryInterface: cache, mapper: restmapper.NewDeferredDiscoveryRESTMapper(cache)}
	w.dir = stateDir(t, cfg.Host)
	return w, nil
}

// Foreign says that the cluster is not a lab of kplab: nobody can enter its nodes.
func (w *World) Foreign() bool { return w.daemon == nil }

// bind makes namespace the one that commands mean, and writes what they need for it.
func (w *World) bind(namespace string) error {
	w.namespace = namespace
	source := w.Kubeconfig
	if source == "" {
		source = w.Status.Kubeconfig
	}
	cfg, err := clientcmd.LoadFromFile(source)
	if err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	if err := useNamespace(cfg, namespace); err != nil {
		return fmt.Errorf("kubeconfig %s: %w", source, err)
	}
	if err := clientcmdapi.FlattenConfig(cfg); err != nil {
		return fmt.Errorf("kubeconfig %s: %w", source, err)
	}
	data, err := clientcmd.Write(*cfg)
	if err != nil {
		return err
	}
	bin := filepath.Join(w.dir, "bin")
	if err := os.MkdirAll(bin, 0o700); err != nil {
		return fmt.Errorf("make the directory of the labs' progress: %w", err)
	}
	script := func(args string) []byte {
		return []byte("#!/bin/sh\nexec " + shellWord(w.Program) + args + ` "$@"` + "\n")
	}
	for _, f := range []struct {
		path string
		data []byte
		mode os.FileMode
	}{
		{w.KubeconfigCopy(), data, 0o600},
		{filepath.Join(bin, "kubectl"), script(" kubectl --kubeconfig " + shellWord(w.KubeconfigCopy())), 0o700},
		{filepath.Join(bin, "kplab"), script(""), 0o700},
	} {
		if err := replaceFile(f.path, f.data, f.mode); err != nil {
			return err
		}
	}
	return nil
}

// KubeconfigCopy is a kubeconfig whose namespace is the current lab's.
func (w *World) KubeconfigCopy() string { return filepath.Join(w.dir, "kubeconfig") }

// enter makes namespace the one that `kplab kubectl` means, as `kubectl config
// set-context --current --namespace` does; "" goes back to the default one. On other
// clusters nothing is changed: the person exports [World.KubeconfigCopy].
func (w *World) enter(namespace string) error {
	if w.Foreign() {
		return nil
	}
	cfg, err := clientcmd.LoadFromFile(w.Status.Kubeconfig)
	if err != nil {
		return fmt.Errorf("read the lab's kubeconfig: %w", err)
	}
	if c := cfg.Contexts[cfg.CurrentContext]; c != nil && c.Namespace == namespace {
		return nil
	}
	if err := useNamespace(cfg, namespace); err != nil {
		return err
	}
	data, err := clientcmd.Write(*cfg)
	if err != nil {
		return err
	}
	// Written in place: the file may belong to who called sudo.
	if err := os.WriteFile(w.Status.Kubeconfig, data, 0o600); err != nil {
		return fmt.Errorf("choose namespace %s in the lab's kubeconfig: %w", namespace, err)
	}
	return nil
}

func useNamespace(cfg *clientcmdapi.Config, namespace string) error {
	c := cfg.Contexts[cfg.CurrentContext]
	if c == nil {
		return fmt.Errorf("no context is current; choose one with `kubectl config use-context`")
	}
	c.Namespace = namespace
	return nil
}

// mode is the proxy mode of the nodes; "" on other clusters.
func (w *World) mode() string {
	for _, n := range w.Status.Nodes {
		return w.Status.ProxyModes[n.Name]
	}
	return ""
}

// SetMode changes the proxy mode of every node.
func (w *World) SetMode(ctx context.Context, mode string) error {
	if err := w.daemon.SetProxy(ctx, "", cluster.ProxyConfig{Mode: mode}); err != nil {
		return err
	}
	return w.refresh(ctx)
}

func (w *World) refresh(ctx context.Context) (err error) {
	if w.Foreign() {
		return nil
	}
	w.Status, err = w.daemon.Status(ctx)
	return err
}

// values are those that kplab gives to templates.
func (w *World) values(l *Lab, seed uint64) map[string]any {
	out := placeholders()
	for k, v := range l.Values.draw(l.Name, seed) {
		out[k] = v
	}
	out["namespace"], out["seed"], out["mode"] = l.Namespace(), fmt.Sprint(seed), w.mode()
	if w.Foreign() {
		return out
	}
	out["lab"], out["outside_ip"] = w.Status.Name, w.Status.Outside
	if c, err := cluster.KeptConfig(w.Status.Name); err == nil {
		out["domain"] = c.Networking.DNSDomain
	}
	worker := 0
	for _, n := range w.Status.Nodes {
		key := "master"
		if n.Role != cluster.ControlPlane {
			worker++
			key = fmt.Sprintf("node%d", worker)
		}
		out[key], out[key+"_ip"], out[key+"_pods"] = n.Name, n.Address, n.PodCIDR
	}
	return out
}

// Run runs a line of sh at a place: a node, outside, pod/[NAMESPACE/]NAME, or here,
// where kubectl and kplab are bound to the lab. The error wraps errNoPlace when there
// is no such place; an exit code is no error.
func (w *World) Run(ctx context.Context, in, line string, stdin []byte) (Output, error) {
	if pod, ok := strings.CutPrefix(in, "pod/"); ok {
		return w.runInPod(ctx, pod, line, stdin)
	}
	c := execx.Cmd{Path: "/bin/sh", Args: []string{"-c", line}, Stdin: stdin}
	if in != "" {
		if w.Foreign() {
			return Output{}, fmt.Errorf("%s: %w: only a lab of kplab lets one enter nodes", in, errNoPlace)
		}
		if in != "outside" && !slices.ContainsFunc(w.Status.Nodes, func(n cluster.NodeStatus) bool { return n.Name == in }) {
			return Output{}, fmt.Errorf("node %s: %w", in, errNoPlace)
		}
		c.Path, c.Args = w.Program, []string{"--name", w.Name, "exec", in, "--", "/bin/sh", "-c", line}
	}
	c.Env = append([]string{
		"PATH=" + filepath.Join(w.dir, "bin") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + w.dir, "KUBECONFIG=" + w.KubeconfigCopy(), "KPLAB_LAB=" + w.Name, "NAMESPACE=" + w.namespace,
	}, keptEnv()...)
	r, err := execx.Host().Run(ctx, c)
	out := Output{Stdout: string(r.Stdout), Stderr: string(r.Stderr)}
	var failed *execx.Error
	if errors.As(err, &failed) && failed.ExitCode > 0 && ctx.Err() == nil {
		out.Exit, err = failed.ExitCode, nil
	}
	return out, err
}

// keptEnv are the variables that say where labs are, for the commands of a lab.
func keptEnv() (env []string) {
	for _, name := range []string{"KPLAB_STATE", "KPLAB_RUN", "SUDO_UID", "SUDO_GID"} {
		if v := os.Getenv(name); v != "" {
			if abs, err := filepath.Abs(v); err == nil && strings.HasPrefix(name, "KPLAB_") {
				v = abs
			}
			env = append(env, name+"="+v)
		}
	}
	return env
}

// runInPod runs sh in the first container of a pod, as kubectl exec does.
func (w *World) runInPod(ctx context.Context, pod, line string, stdin []byte) (Output, error) {
	namespace, name, ok := strings.Cut(pod, "/")
	if !ok {
		namespace, name = w.namespace, pod
	}
	req := w.client.CoreV1().RESTClient().Post().Namespace(namespace).Resource("pods").Name(name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Command: []string{"/bin/sh", "-c", line}, Stdin: stdin != nil, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	stream, err := remotecommand.NewWebSocketExecutor(w.rest, "GET", req.URL().String())
	if err != nil {
		return Output{}, err
	}
	if p, err := w.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
		return Output{}, fmt.Errorf("pod %s/%s: %w: %w", namespace, name, errNoPlace, err)
	} else if p.Status.Phase != corev1.PodRunning {
		return Output{}, fmt.Errorf("pod %s/%s: %w: it is %s", namespace, name, errNoPlace, p.Status.Phase)
	}
	var stdout, stderr bytes.Buffer
	o := remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr}
	if stdin != nil {
		o.Stdin = io.Reader(bytes.NewReader(stdin))
	}
	err = stream.StreamWithContext(ctx, o)
	out := Output{Stdout: stdout.String(), Stderr: stderr.String()}
	var exit utilexec.CodeExitError
	if errors.As(err, &exit) {
		out.Exit, err = exit.Code, nil
	}
	if err != nil {
		err = fmt.Errorf("run a command in pod %s/%s: %w", namespace, name, err)
	}
	return out, err
}

// Settle waits until the lab has come to rest, as far as it does.
func (w *World) Settle(ctx context.Context) error {
	if w.Foreign() {
		return nil
	}
	err := w.daemon.Settle(ctx, settleTimeout)
	var behind *cluster.UnsettledError
	if errors.As(err, &behind) {
		return nil
	}
	return err
}

// act does one action.
func (w *World) act(ctx context.Context, l *Lab, a Action, values map[string]any) error {
	line, stdin := a.Run, []byte(nil)
	if a.Apply != "" {
		text, err := l.manifest(a.Apply, values)
		if err != nil {
			return &BrokenError{Err: err}
		}
		line, stdin = "kubectl apply -f -", []byte(text)
	}
	r, err := w.Run(ctx, a.In, line, stdin)
	if err != nil {
		return fmt.Errorf("%s:%d: %s: %w", l.file("lab.yaml"), a.Line, a.describe(), err)
	}
	if r.Exit != 0 {
		return fmt.Errorf("%s:%d: %s: exit code %d: %s", l.file("lab.yaml"), a.Line, a.describe(), r.Exit, orNothing(r.Stderr, r.Stdout))
	}
	return nil
}

// describe is the action as a person would type it.
func (a Action) describe() string {
	switch {
	case a.Apply != "" && strings.Contains(a.Apply, "\n"):
		return "kubectl apply -f - <<'EOF'\n" + strings.TrimRight(a.Apply, "\n") + "\nEOF"
	case a.Apply != "":
		return "kubectl apply -f " + a.Apply
	case a.In != "":
		return "kplab exec " + a.In + " -- " + inShell(strings.TrimSpace(a.Run))
	}
	return strings.TrimSpace(a.Run)
}

// inShell wraps a line that is more than a plain command.
func inShell(line string) string {
	if !strings.ContainsAny(line, "\n|&;<>$`*?(){}'\"") {
		return line
	}
	return "sh -c " + shellWord(line)
}

func shellWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
