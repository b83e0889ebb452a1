// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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

func TestExecOverBothProtocols(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.create(newTestPod("proc", "busybox", "sh", "-c", "echo mine > /tmp/f; while :; do sleep 1; done"))
	h.until("web", "ready", isReady)
	h.until("proc", "ready", isReady)
	base := serving(t, h)
	for _, c := range []struct {
		pod, script, in, out string
		code                 int
	}{
		{"web", "cat /usr/share/nginx/html/index.html | grep -c 'Welcome to nginx!' >/dev/null && hostname", "", "web\n", 0},
		{"web", "grep nameserver /etc/resolv.conf; tail -1 /etc/hosts", "", "nameserver 10.96.0.10\n10.244.", 0},
		{"proc", "cat /tmp/f; cat", "typed\n", "mine\ntyped\n", 0},
		{"proc", "exit 42", "", "", 42},
	} {
		u := *base
		u.Path = "/exec/default/" + c.pod + "/main"
		q := url.Values{"command": {"sh", "-c", c.script}, "output": {"1"}, "error": {"1"}}
		if c.in != "" {
			q.Set("input", "1")
		}
		u.RawQuery = q.Encode()
		cfg := &rest.Config{Host: base.Host}
		viaSPDY, err := remotecommand.NewSPDYExecutor(cfg, http.MethodPost, &u)
		if err != nil {
			t.Fatal(err)
		}
		viaWS, err := remotecommand.NewWebSocketExecutorForProtocols(cfg, http.MethodGet, u.String(), "v4.channel.k8s.io")
		if err != nil {
			t.Fatal(err)
		}
		for name, e := range map[string]remotecommand.Executor{"SPDY": viaSPDY, "WebSocket": viaWS} {
			if c.in != "" && name == "WebSocket" {
				continue // version 4 cannot say that the input ends; the API server speaks SPDY
			}
			var out, errOut bytes.Buffer
			opts := remotecommand.StreamOptions{Stdout: &out, Stderr: &errOut}
			if c.in != "" {
				opts.Stdin = strings.NewReader(c.in)
			}
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
			if code != c.code || !strings.HasPrefix(out.String(), c.out) {
				t.Errorf("%s %q over %s: exit %d, out %q, err %q", c.pod, c.script, name, code, out.String(), errOut.String())
			}
		}
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

func TestPortForward(t *testing.T) {
	h := newHarness(t)
	h.create(newTestPod("web", "nginx"))
	h.until("web", "ready", isReady)
	u := *serving(t, h)
	u.Path = "/portForward/default/web"
	rt, up, err := spdy.RoundTripperFor(&rest.Config{Host: u.Host})
	if err != nil {
		t.Fatal(err)
	}
	dialer := spdy.NewDialer(up, &http.Client{Transport: rt}, http.MethodPost, &u)
	stop, ready := make(chan struct{}), make(chan struct{})
	fw, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:80"}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- fw.ForwardPorts() }()
	<-ready
	ports, err := fw.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	res, err := client.Get("http://127.0.0.1:" + strconv.Itoa(int(ports[0].Local)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.Header.Get("X-Kplab-Pod") != "web" || res.Header.Get("X-Kplab-Client") != "127.0.0.1" {
		t.Errorf("headers are %v", res.Header)
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Errorf("forwarding ended with %v", err)
	}
}
