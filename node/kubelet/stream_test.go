// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"

	"github.com/kplab/kplab/internal/nettest"
)

// serving returns the URL of the kubelet's handler on the loopback link.
func serving(t *testing.T, h *harness) *url.URL {
	t.Helper()
	srv := httptest.NewServer(h.kubelet.Handler())
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func TestExecOverAllProtocols(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.create(newTestPod("proc", "busybox", "sh", "-c", "echo mine > /tmp/f; while :; do sleep 1; done"))
	h.until("web", "ready", isReady)
	h.until("proc", "ready", isReady)
	base := serving(t, h)
	for _, c := range []struct {
		pod, script, in, out, err string
		code                      int
	}{
		{"web", "cat /usr/share/nginx/html/index.html | grep -c 'Welcome to nginx!' >/dev/null && hostname", "", "web\n", "", 0},
		{"web", "grep nameserver /etc/resolv.conf; tail -1 /etc/hosts", "", "nameserver 10.96.0.10\n10.244.", "", 0},
		{"proc", "cat /tmp/f; cat", "typed\n", "mine\ntyped\n", "", 0},
		{"proc", "echo to stderr >&2; exit 42", "", "", "to stderr\n", 42},
	} {
		for name, e := range executors(t, base, c.pod, remotecommand.StreamOptions{Stdin: strings.NewReader(c.in)}, "sh", "-c", c.script) {
			if c.in != "" && name == "WebSocket v4" {
				continue // it cannot say that the input ends
			}
			var out, errOut bytes.Buffer
			opts := remotecommand.StreamOptions{Stdin: strings.NewReader(c.in), Stdout: &out, Stderr: &errOut}
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			err := e.StreamWithContext(ctx, opts)
			cancel()
			var exit utilexec.CodeExitError
			code := 0
			if errors.As(err, &exit) {
				code = exit.Code
			} else if err != nil {
				t.Errorf("%s %q over %s: %v (%s)", c.pod, c.script, name, err, errOut.String())
				continue
			}
			if code != c.code || !strings.HasPrefix(out.String(), c.out) || errOut.String() != c.err {
				t.Errorf("%s %q over %s: exit %d, out %q, err %q", c.pod, c.script, name, code, out.String(), errOut.String())
			}
		}
	}
}

// executors are the ways in which clients open the streams of an exec.
func executors(t *testing.T, base *url.URL, pod string, o remotecommand.StreamOptions, command ...string) map[string]remotecommand.Executor {
	t.Helper()
	u := *base
	u.Path = "/exec/default/" + pod + "/main"
	q := url.Values{"command": command, "output": {"1"}}
	if o.Stdin != nil {
		q.Set("input", "1")
	}
	if o.Tty {
		q.Set("tty", "1")
	} else {
		q.Set("error", "1")
	}
	u.RawQuery = q.Encode()
	cfg := &rest.Config{Host: base.Host}
	viaSPDY, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, &u)
	if err != nil {
		t.Fatal(err)
	}
	viaV5, err := remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
	if err != nil {
		t.Fatal(err)
	}
	viaV4, err := remotecommand.NewWebSocketExecutorForProtocols(cfg, http.MethodGet, u.String(), "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	return map[string]remotecommand.Executor{"SPDY": viaSPDY, "WebSocket v5": viaV5, "WebSocket v4": viaV4}
}

// sizeOnce is a terminal of one size.
type sizeOnce chan remotecommand.TerminalSize

func (s sizeOnce) Next() *remotecommand.TerminalSize {
	size, ok := <-s
	if !ok {
		return nil
	}
	return &size
}

func TestTerminalHasTheClientsSize(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("proc", "busybox", "sleep", "1000"))
	h.until("proc", "ready", isReady)
	base := serving(t, h)
	const script = `until [ "$(stty size)" = "33 77" ]; do sleep 0.05; done; tty; exit 9`
	for name, e := range executors(t, base, "proc", remotecommand.StreamOptions{Tty: true}, "sh", "-c", script) {
		var out bytes.Buffer
		size := make(sizeOnce, 1)
		size <- remotecommand.TerminalSize{Width: 77, Height: 33}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &out, Tty: true, TerminalSizeQueue: size})
		cancel()
		close(size)
		var exit utilexec.CodeExitError
		if !errors.As(err, &exit) || exit.Code != 9 || !strings.Contains(out.String(), "/dev/pts/") {
			t.Errorf("over %s: %v, %q", name, err, out.String())
		}
	}
}

// relay passes connections on to a server until it is cut.
type relay struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
	work  sync.WaitGroup
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{Listener: l}
	r.work.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				t.Error(err)
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, in, out)
			r.mu.Unlock()
			r.work.Go(func() { _, _ = io.Copy(out, in) }) // ends by the cut
			r.work.Go(func() { _, _ = io.Copy(in, out) })
		}
	})
	return r
}

// cut closes everything.
func (r *relay) cut() {
	_ = r.Close() // it was only listening
	r.mu.Lock()
	for _, c := range r.conns {
		_ = c.Close() // one may be closed
	}
	r.mu.Unlock()
	r.work.Wait()
}

// A connection that breaks ends the program, whichever protocol it was, and is no
// success for the client.
func TestBrokenConnectionEndsTheProgram(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("proc", "busybox", "sleep", "1000"))
	h.until("proc", "ready", isReady)
	base := serving(t, h)
	for name, open := range map[string]func(cfg *rest.Config, u *url.URL) (remotecommand.Executor, error){
		"SPDY": func(cfg *rest.Config, u *url.URL) (remotecommand.Executor, error) {
			return remotecommand.NewSPDYExecutor(cfg, http.MethodPost, u)
		},
		"WebSocket v5": func(cfg *rest.Config, u *url.URL) (remotecommand.Executor, error) {
			return remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
		},
	} {
		way := newRelay(t, base.Host)
		u := *base
		u.Host = way.Addr().String()
		u.Path = "/exec/default/proc/main"
		u.RawQuery = url.Values{"command": {"sh", "-c", "echo up; exec sleep 777"}, "output": {"1"}}.Encode()
		e, err := open(&rest.Config{Host: u.Host}, &u)
		if err != nil {
			t.Fatal(err)
		}
		r, w := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			ended <- e.StreamWithContext(context.Background(), remotecommand.StreamOptions{Stdout: w})
			_ = w.Close() // a pipe's Close has no error
		}()
		if _, err := io.ReadFull(r, make([]byte, 3)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		h.eventuallyExec("proc", []string{"sh", "-c", "ps | grep -c '[s]leep 777'; true"}, "1\n")
		way.cut()
		go func() { _, _ = io.Copy(io.Discard, r) }() // ends with the pipe
		err = <-ended
		// The client's SPDY has no word for it: an end without a status is success.
		if name != "SPDY" && err == nil {
			t.Errorf("over %s a cut connection is success", name)
		}
		h.eventuallyExec("proc", []string{"sh", "-c", "ps | grep -c '[s]leep 777'; true"}, "0\n")
	}
}

// What exec writes into a built-in image's files is what its server serves.
func TestExecAndServerSeeTheSameFiles(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	p := h.until("web", "ready", isReady)
	kp := h.kubelet.find("default", "web")
	code, err := h.kubelet.exec(context.Background(), kp, kp.object(), &kp.object().Spec.Containers[0],
		execArgs{args: []string{"sh", "-c", "echo changed > /usr/share/nginx/html/index.html"}})
	if err != nil || code != 0 {
		t.Fatalf("exec: %d, %v", code, err)
	}
	nettest.Eventually(t, patience, "the changed page", func() error {
		_, body, err := h.fetch(p.Status.PodIP)
		if err == nil && body != "changed\n" {
			err = errors.New(body)
		}
		return err
	})
}

func TestLogs(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("talk", "busybox", "sh", "-c", "echo 1; echo 2; echo 3; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo 4; exit 0"))
	p := h.until("talk", "ready", isReady)
	nettest.Eventually(t, patience, "three lines", func() error {
		if !strings.Contains(h.log(p), "3\n") {
			return errors.New("not yet")
		}
		return nil
	})
	base := serving(t, h)
	get := func(query string) (string, int) {
		t.Helper()
		res, err := http.Get(base.String() + "/containerLogs/default/talk/main?" + query)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body), res.StatusCode
	}
	for _, c := range []struct{ query, want string }{
		{"", "1\n2\n3\n"}, {"tailLines=2", "2\n3\n"}, {"tailLines=0", ""}, {"tailLines=9", "1\n2\n3\n"}, {"limitBytes=3", "1\n2"},
		{"sinceSeconds=3600", "1\n2\n3\n"}, {"sinceTime=2999-01-01T00:00:00Z", ""}, {"stream=Stderr", ""}, {"stream=Stdout", "1\n2\n3\n"},
	} {
		if got, code := get(c.query); got != c.want || code != 200 {
			t.Errorf("%q gave %d %q, want %q", c.query, code, got, c.want)
		}
	}
	if got, _ := get("timestamps=true&tailLines=1"); len(got) < 30 || !strings.HasSuffix(got, "Z 3\n") {
		t.Errorf("with timestamps: %q", got)
	}
	for _, q := range []string{"previous=true", "tailLines=x"} {
		if got, code := get(q); code != http.StatusBadRequest {
			t.Errorf("%q gave %d %q", q, code, got)
		}
	}
	// Follow ends with the container, and has its last line.
	type answer struct {
		body string
		err  error
	}
	followed := make(chan answer, 1)
	go func() {
		res, err := http.Get(base.String() + "/containerLogs/default/talk/main?follow=true&tailLines=1")
		if err != nil {
			followed <- answer{err: err}
			return
		}
		defer func() { _ = res.Body.Close() }()
		body, err := io.ReadAll(res.Body)
		followed <- answer{string(body), err}
	}()
	kp := h.kubelet.find("default", "talk")
	if code, err := h.kubelet.exec(context.Background(), kp, kp.object(), &kp.object().Spec.Containers[0], execArgs{args: []string{"touch", "/tmp/go"}}); err != nil || code != 0 {
		t.Fatalf("exec: %d, %v", code, err)
	}
	select {
	case a := <-followed:
		if a.err != nil || !strings.HasSuffix(a.body, "4\n") {
			t.Errorf("followed %q, %v", a.body, a.err)
		}
	case <-time.After(patience):
		t.Fatal("follow does not end with the container")
	}
	h.until("talk", "restarted", func(p *corev1.Pod) bool { return status0(p).RestartCount > 0 })
	if got, code := get("previous=true"); code != 200 || !strings.HasSuffix(got, "3\n4\n") {
		t.Errorf("previous gave %d %q", code, got)
	}
}

// forward opens a port-forward over a protocol and returns the local ports and what
// ends it.
func forward(t *testing.T, base *url.URL, pod, protocol string, ports ...string) (local []int, ended chan error, stop func()) {
	t.Helper()
	u := *base
	u.Path = "/portForward/default/" + pod
	cfg := &rest.Config{Host: u.Host}
	dialer, err := portforward.NewSPDYOverWebsocketDialer(&u, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if protocol == "SPDY" {
		rt, up, err := spdy.RoundTripperFor(cfg)
		if err != nil {
			t.Fatal(err)
		}
		dialer = spdy.NewDialer(up, &http.Client{Transport: rt}, http.MethodPost, &u)
	}
	quit, ready := make(chan struct{}), make(chan struct{})
	fw, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, ports, quit, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended = make(chan error, 1)
	go func() { ended <- fw.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatalf("over %s: %v", protocol, err)
	}
	forwarded, err := fw.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range forwarded {
		local = append(local, int(p.Local))
	}
	return local, ended, func() { close(quit) }
}

func TestPortForward(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	p := newTestPod("two", "nginx")
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second", Image: "httpd", Ports: []corev1.ContainerPort{{ContainerPort: 8080}}})
	h.create(p)
	h.until("web", "ready", isReady)
	h.until("two", "ready", isReady)
	base := serving(t, h)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	get := func(port int) (*http.Response, error) {
		res, err := client.Get("http://127.0.0.1:" + strconv.Itoa(port))
		if err != nil {
			return nil, err
		}
		_, err = io.Copy(io.Discard, res.Body)
		return res, errors.Join(err, res.Body.Close())
	}
	for _, protocol := range []string{"SPDY", "WebSocket"} {
		t.Run(protocol, func(t *testing.T) {
			local, ended, stop := forward(t, base, "two", protocol, "0:80", "0:8080")
			// Several connections at once, to both ports.
			var wg sync.WaitGroup
			for i := range 10 {
				wg.Go(func() {
					res, err := get(local[i%2])
					if err != nil {
						t.Error(err)
					} else if res.Header.Get("X-Kplab-Pod") != "two" || res.Header.Get("X-Kplab-Client") != "127.0.0.1" {
						t.Errorf("headers are %v", res.Header)
					}
				})
			}
			wg.Wait()
			// One that is reset by the client, in the middle, is only its own end.
			conn, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(local[0]))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\n"); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(conn.(*net.TCPConn).SetLinger(0), conn.Close()); err != nil {
				t.Fatal(err)
			}
			if _, err := get(local[1]); err != nil {
				t.Errorf("after a reset: %v", err)
			}
			stop()
			if err := <-ended; err != nil {
				t.Errorf("forwarding ended with %v", err)
			}
			// Where nobody listens the client is told, which ends its forward.
			local, ended, _ = forward(t, base, "web", protocol, "0:81")
			if _, err := get(local[0]); err == nil {
				t.Error("port 81 answered")
			}
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "lost connection to pod") {
				t.Errorf("forwarding ended with %v", err)
			}
		})
	}
}

// A forward lasts as long as its pod, also when nothing goes through it.
func TestPortForwardEndsWithThePod(t *testing.T) {
	h := newHarness(t)
	base := serving(t, h)
	host := newTestPod("host", "nginx")
	host.Spec.HostNetwork = true
	done := newTestPod("done", "busybox", "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.05; done")
	done.Spec.RestartPolicy = corev1.RestartPolicyNever
	for _, p := range []*corev1.Pod{newTestPod("web", "nginx"), host, done} {
		h.create(p)
		h.until(p.Name, "ready", isReady)
	}
	ends := map[string]chan error{}
	for _, pod := range []string{"web", "host", "done"} {
		for _, protocol := range []string{"SPDY", "WebSocket"} {
			_, ends[pod+" over "+protocol], _ = forward(t, base, pod, protocol, "0:80")
		}
	}
	h.delete("web", 0)
	h.delete("host", 0)
	h.eventuallyExec("done", []string{"touch", "/tmp/go"}, "")
	for what, ended := range ends {
		select {
		case err := <-ended:
			if !errors.Is(err, portforward.ErrLostConnectionToPod) {
				t.Errorf("%s: forwarding ended with %v", what, err)
			}
		case <-time.After(patience):
			t.Errorf("%s: forwarding goes on", what)
		}
	}
}

// The node's root, mounted whole, is one to change into, and is no other node's.
func TestNodeRoot(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("look", "busybox", "sleep", "1000")
	p.Spec.HostNetwork = true
	p.Spec.Volumes = []corev1.Volume{{Name: "root", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "root", MountPath: "/host"}}
	h.create(p)
	h.until("look", "ready", isReady)
	h.eventuallyExec("look", []string{"hostname"}, "n1\n")
	h.eventuallyExec("look", []string{"chroot", "/host", "sh", "-c", "cat /etc/hostname; echo left >/left"}, "n1\n")
	h.eventuallyExec("look", []string{"sh", "-c", "cat /host/left; touch /host/usr/x 2>&1 | grep -c Read-only"}, "left\n1\n")
}

// What people leave in a built-in server's root is there when they look again, and
// gone with the attempt.
func TestViewOfABuiltInServerStays(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.until("web", "ready", isReady)
	h.eventuallyExec("web", []string{"sh", "-c", "echo kept > /tmp/f; cat /tmp/f"}, "kept\n")
	h.eventuallyExec("web", []string{"cat", "/tmp/f"}, "kept\n")
	// The next daemon finds it.
	h.stop()
	h.start()
	h.until("web", "ready", isReady)
	h.eventuallyExec("web", []string{"cat", "/tmp/f"}, "kept\n")
	kp := h.kubelet.find("default", "web")
	kp.mu.Lock()
	run := kp.containers["main"].run
	kp.mu.Unlock()
	run.kill()
	p := h.until("web", "restarted", func(p *corev1.Pod) bool { return isReady(p) && status0(p).RestartCount >= 1 })
	if n := status0(p).RestartCount; n != 1 {
		t.Errorf("it took %d starts: %s", n, logTail(h.kubelet.logFileOf(p.UID, "main", 1), 100, 1<<12))
	}
	h.eventuallyExec("web", []string{"sh", "-c", "ls /tmp"}, "")
}

// An ephemeral container sees the processes of its target, a server's view too, and
// ends once.
func TestEphemeralContainers(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("proc", "busybox", "sleep", "7654"))
	h.create(newTestPod("web", "nginx"))
	for name, sees := range map[string]string{"proc": "sleep 7654", "web": "runs in the lab's daemon"} {
		p := h.until(name, "ready", isReady).DeepCopy()
		p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{
			EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", Image: "busybox", Command: []string{"sh", "-c", "ps; exit 3"}},
			TargetContainerName:      "main",
		}}
		if _, err := h.client.CoreV1().Pods("default").Update(context.Background(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		p = h.until(name, "debugged", func(p *corev1.Pod) bool {
			return len(p.Status.EphemeralContainerStatuses) == 1 && p.Status.EphemeralContainerStatuses[0].State.Terminated != nil
		})
		st := p.Status.EphemeralContainerStatuses[0]
		if st.State.Terminated.ExitCode != 3 || st.RestartCount != 0 || !isReady(p) {
			t.Errorf("pod %s: %+v", name, st)
		}
		if log := logTail(h.kubelet.logFileOf(p.UID, "debug", 0), 100, 1<<16); !strings.Contains(log, sees) {
			t.Errorf("pod %s: no %q in %q", name, sees, log)
		}
	}
}

// Containers that share a process namespace see each other, and end one by one.
func TestSharedProcessNamespace(t *testing.T) {
	h := newHarness(t)
	p := newTestPod("both", "busybox", "sleep", "7654")
	share := true
	p.Spec.ShareProcessNamespace = &share
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "other", Image: "busybox", Command: []string{"sh", "-c", "grep -q kplab /proc/1/cmdline && exec sleep 4567"}})
	h.create(p)
	h.until("both", "ready", isReady)
	h.eventuallyExec("both", []string{"sh", "-c", "ps | grep -c '[s]leep 4567'"}, "1\n")
	h.eventuallyExec("both", []string{"sh", "-c", "kill $(pidof sleep | tr ' ' '\\n' | while read p; do grep -q 4567 /proc/$p/cmdline && echo $p; done)"}, "")
	h.until("both", "restarted in part", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) == 2 && p.Status.ContainerStatuses[0].RestartCount == 0 && p.Status.ContainerStatuses[1].RestartCount > 0
	})
}

// Attaching to a built-in server says what it is and shows its log.
func TestAttachToABuiltInServer(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	p := h.until("web", "ready", isReady)
	base := serving(t, h)
	u := *base
	u.Path, u.RawQuery = "/attach/default/web/main", "output=1&error=1"
	e, err := remotecommand.NewWebSocketExecutor(&rest.Config{Host: base.Host}, http.MethodGet, u.String())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	out, w := io.Pipe()
	errOut, errW := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- e.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: w, Stderr: errW}) }()
	note, err := bufio.NewReader(errOut).ReadString('\n')
	if err != nil || !strings.Contains(note, "container main (image nginx) is a server inside of the lab's daemon") {
		t.Errorf("note %q, %v", note, err)
	}
	lines := make(chan string)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n') // an error leaves it empty
		lines <- line
	}()
	nettest.Eventually(t, patience, "the log of a request", func() error {
		if _, _, err := h.fetch(p.Status.PodIP); err != nil {
			return err
		}
		select {
		case line := <-lines:
			if !strings.Contains(line, `"GET / HTTP/1.1" 200`) {
				t.Errorf("the log begins with %q", line)
			}
			return nil
		default:
			return errors.New("nothing yet")
		}
	})
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ended with %v", err)
	}
}
