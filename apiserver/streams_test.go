// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
	kubeletportforward "k8s.io/cri-streaming/pkg/streaming/portforward"
	kubeletcommand "k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// fakeKubelet speaks a kubelet's side of logs, exec and port-forward on the
// stock streaming library. It asks for a client certificate, as a kubelet does.
type fakeKubelet struct {
	started time.Time
	uid     func() types.UID // of the pod that has figures
}

// ExecInContainer echoes what it was asked and what it reads; a command "exit"
// ends with code 7.
func (fakeKubelet) ExecInContainer(_ context.Context, name, _, container string, cmd []string, in io.Reader, out, errw io.WriteCloser, _ bool, _ <-chan kubeletcommand.TerminalSize, _ time.Duration) error {
	fmt.Fprintf(out, "%s/%s: %v\n", name, container, cmd)
	if errw != nil {
		fmt.Fprint(errw, "to stderr\n")
	}
	if in != nil {
		if _, err := io.Copy(out, in); err != nil {
			return err
		}
	}
	if cmd[0] == "exit" {
		return utilexec.CodeExitError{Err: errors.New("command terminated with exit code 7"), Code: 7}
	}
	return nil
}

// PortForward answers each connection with its port and what it reads.
func (fakeKubelet) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	buf := make([]byte, 4)
	if _, err := io.ReadFull(stream, buf); err != nil {
		return err
	}
	_, err := fmt.Fprintf(stream, "%d %s", port, buf)
	return err
}

func (k fakeKubelet) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	q := r.URL.Query()
	switch parts[0] {
	case "containerLogs":
		if parts[2] == "waiting" {
			http.Error(w, `container "web" in pod "waiting" is waiting to start: ContainerCreating`, http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "log of %s, tail %s, follow %s\n", strings.Join(parts[1:], "/"), q.Get("tailLines"), q.Get("follow"))
	case "exec":
		kubeletcommand.ServeExec(w, r, k, parts[2], "", parts[3], q["command"], &kubeletcommand.Options{
			Stdin: q.Get("input") == "1", Stdout: q.Get("output") == "1", Stderr: q.Get("error") == "1", TTY: q.Get("tty") == "1",
		}, time.Minute, 10*time.Second, kubeletcommand.SupportedStreamingProtocols)
	case "stats":
		// A container that has had half a core since its start, ten seconds ago.
		now := time.Now()
		start := k.started
		fmt.Fprintf(w, `{"pods":[{"podRef":{"uid":%q},"containers":[{"name":"web","startTime":%q,"cpu":{"time":%q,"usageCoreNanoSeconds":%d},"memory":{"workingSetBytes":8388608}}]}]}`,
			k.uid(), start.Format(time.RFC3339Nano), now.Format(time.RFC3339Nano), now.Sub(start).Nanoseconds()/2)
	case "portForward":
		kubeletportforward.ServePortForward(w, r, k, parts[2], "", &kubeletportforward.V4Options{}, time.Minute, 10*time.Second, kubeletportforward.SupportedProtocols)
	default:
		http.NotFound(w, r)
	}
}

// startWithKubelet runs a server, and a fake kubelet that its node1 points to. A
// pod "a" runs there.
func startWithKubelet(t *testing.T) *testServer {
	t.Helper()
	var kubeletAddr string
	var dialed []string
	s := startServer(t, "", func(c *Config) {
		c.KubeletDial = func(ctx context.Context, node, addr string) (net.Conn, error) {
			dialed = append(dialed, node+" "+addr)
			return new(net.Dialer).DialContext(ctx, "tcp", kubeletAddr)
		}
	})
	t.Cleanup(func() {
		if len(dialed) == 0 || dialed[0] != "node1 10.0.0.132:10250" {
			t.Errorf("the kubelet was dialed as %q", dialed)
		}
	})
	cert, err := s.IssueServing("system:node:node1", []string{"node1"}, []netip.Addr{netip.MustParseAddr("10.0.0.132")})
	if err != nil {
		t.Fatal(err)
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientCAs: s.ClientAuthorities(),
		ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12,
	})
	if err != nil {
		t.Fatal(err)
	}
	kubeletAddr = l.Addr().String()
	kubelet := &http.Server{Handler: fakeKubelet{time.Now().Add(-10 * time.Second), func() types.UID {
		pod, err := s.client.CoreV1().Pods("default").Get(t.Context(), "a", metav1.GetOptions{})
		if err != nil {
			return ""
		}
		return pod.UID
	}}, ReadHeaderTimeout: waitTime}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := kubelet.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("fake kubelet: %v", err)
		}
	}()
	t.Cleanup(func() {
		if err := kubelet.Close(); err != nil {
			t.Errorf("stop the fake kubelet: %v", err)
		}
		<-done
	})
	makeNamespace(t, s, "default")
	ctx := t.Context()
	if _, err := s.client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node1"},
		Status: corev1.NodeStatus{
			Addresses:       []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.132"}},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: 10250}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "waiting"} {
		p := testPod(name)
		p.Spec.NodeName = "node1"
		if _, err := s.client.CoreV1().Pods("default").Create(ctx, p, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// jsonConfig is how kubectl talks to the server.
func jsonConfig(s *testServer) *rest.Config {
	c := s.ClientConfig("admin", "system:masters")
	c.ContentConfig = rest.ContentConfig{}
	return c
}

func TestLogs(t *testing.T) {
	s := startWithKubelet(t)
	ctx := t.Context()
	pods := s.client.CoreV1().Pods("default")
	tail := int64(5)
	body, err := pods.GetLogs("a", &corev1.PodLogOptions{TailLines: &tail, Follow: true}).DoRaw(ctx)
	if want := "log of default/a/web, tail 5, follow true\n"; err != nil || string(body) != want {
		t.Errorf("logs: %v %q, want %q", err, body, want)
	}
	err = pods.GetLogs("waiting", &corev1.PodLogOptions{}).Do(ctx).Error()
	wantError(t, "waiting", err, apierrors.IsBadRequest, `container "web" in pod "waiting" is waiting to start: ContainerCreating`)
	err = pods.GetLogs("a", &corev1.PodLogOptions{Container: "x"}).Do(ctx).Error()
	wantError(t, "container", err, apierrors.IsBadRequest, "container x is not valid for pod a")
	err = pods.GetLogs("none", &corev1.PodLogOptions{}).Do(ctx).Error()
	wantError(t, "pod", err, apierrors.IsNotFound, `pods "none" not found`)
	negative := int64(-1)
	err = pods.GetLogs("a", &corev1.PodLogOptions{TailLines: &negative}).Do(ctx).Error()
	wantError(t, "tail", err, apierrors.IsInvalid, "tailLines: Invalid value: -1")
}

// TestExec runs commands over both protocols that clients speak. The server passes
// on what is spoken, so the fake kubelet's version 4 of the WebSocket protocol will
// do, which cannot say that the input ends.
func TestExec(t *testing.T) {
	s := startWithKubelet(t)
	config := jsonConfig(s)
	for name, dial := range map[string]func(o *corev1.PodExecOptions) (remotecommand.Executor, error){
		"WebSocket": func(o *corev1.PodExecOptions) (remotecommand.Executor, error) {
			return remotecommand.NewWebSocketExecutorForProtocols(config, "GET", execURL(t, s, o), "v4.channel.k8s.io")
		},
		"SPDY": func(o *corev1.PodExecOptions) (remotecommand.Executor, error) {
			req := s.client.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name("a").SubResource("exec").VersionedParams(o, scheme.ParameterCodec)
			return remotecommand.NewSPDYExecutor(config, "POST", req.URL())
		},
	} {
		t.Run(name, func(t *testing.T) {
			typed := ""
			if name == "SPDY" {
				typed = "typed"
			}
			run := func(command ...string) (string, string, error) {
				e, err := dial(&corev1.PodExecOptions{Container: "web", Command: command, Stdin: typed != "", Stdout: true, Stderr: true})
				if err != nil {
					t.Fatal(err)
				}
				var out, errs bytes.Buffer
				opts := remotecommand.StreamOptions{Stdout: &out, Stderr: &errs}
				if typed != "" {
					opts.Stdin = strings.NewReader(typed)
				}
				err = e.StreamWithContext(t.Context(), opts)
				return out.String(), errs.String(), err
			}
			out, errs, err := run("ls", "-l")
			if err != nil || out != "a/web: [ls -l]\n"+typed || errs != "to stderr\n" {
				t.Errorf("exec: %v, out %q, err %q", err, out, errs)
			}
			_, _, err = run("exit")
			var code utilexec.ExitError
			if !errors.As(err, &code) || code.ExitStatus() != 7 {
				t.Errorf("exit code: %v", err)
			}
		})
	}
}

func execURL(t *testing.T, s *testServer, o *corev1.PodExecOptions) string {
	t.Helper()
	return s.client.CoreV1().RESTClient().Get().Namespace("default").Resource("pods").Name("a").SubResource("exec").VersionedParams(o, scheme.ParameterCodec).URL().String()
}

// TestPortForward forwards a port.
func TestPortForward(t *testing.T) {
	s := startWithKubelet(t)
	config := jsonConfig(s)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	target := client.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name("a").SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		t.Fatal(err)
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, target)
	stop, ready := make(chan struct{}), make(chan struct{})
	f, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:8080"}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- f.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatalf("forward: %v", err)
	case <-time.After(waitTime):
		t.Fatal("forwarding does not start")
	}
	ports, err := f.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 9)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "8080 ping" {
		t.Errorf("through the forward: %v %q", err, buf)
	}
	close(stop)
	if err := <-done; err != nil {
		t.Errorf("end of the forward: %v", err)
	}
}
