// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox/workload"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// output collects what a server writes.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// world is a pod and a client, joined by a wire.
type world struct {
	pod, client *netns.NS
	out, err    output
}

const podIP, podIP2, clientIP, podIP6 = "10.244.1.5", "10.244.1.6", "10.244.2.9", "fd00::5"

func newWorld(t *testing.T) *world {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	w := &world{pod: nettest.NewNS(t), client: nettest.NewNS(t)}
	nettest.Veth(t,
		nettest.End{NS: w.pod, Name: "eth0", Addrs: prefixes(podIP+"/16", podIP2+"/16", podIP6+"/64")},
		nettest.End{NS: w.client, Name: "eth0", Addrs: prefixes(clientIP+"/16", "fd00::9/64")})
	return w
}

func prefixes(s ...string) (p []netip.Prefix) {
	for _, one := range s {
		p = append(p, netip.MustParsePrefix(one))
	}
	return p
}

// run starts an image's server and returns what its Run returned, once.
func (w *world) run(t *testing.T, image string, args []string, change ...func(*workload.Context)) (stop func() error) {
	t.Helper()
	img, ok := workload.Lookup(image)
	if !ok {
		t.Fatalf("no image %s", image)
	}
	c := workload.Context{
		Pod:   workload.Pod{Namespace: "default", Name: "web-1", UID: "uid", IP: podIP, Node: "node1"},
		Image: image, Container: "web", Args: args, NetNS: w.pod, Stdout: &w.out, Stderr: &w.err,
	}
	for _, f := range change {
		f(&c)
	}
	s, err := img.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	var once sync.Once
	var result error
	stop = func() error {
		once.Do(func() {
			cancel()
			select {
			case result = <-done:
			case <-time.After(10 * time.Second):
				t.Error("the server does not end")
			}
		})
		return result
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

// dial connects from the client, as soon as the server listens.
func (w *world) dial(t *testing.T, address string) net.Conn {
	t.Helper()
	var c net.Conn
	nettest.Eventually(t, 10*time.Second, "connection to "+address, func() (err error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, err = w.client.Dial(ctx, "tcp", address)
		return err
	})
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// get asks for a page from the client.
func (w *world) get(t *testing.T, url string) (*http.Response, string) {
	t.Helper()
	client := &http.Client{
		Transport:     &http.Transport{DialContext: w.client.Dial, DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       10 * time.Second,
	}
	var resp *http.Response
	var body []byte
	nettest.Eventually(t, 10*time.Second, "answer from "+url, func() error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		req.Header.Set("User-Agent", "tester/1")
		if resp, err = client.Do(req); err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		body, err = io.ReadAll(resp.Body)
		return err
	})
	return resp, string(body)
}

func TestLookup(t *testing.T) {
	for image, want := range map[string]string{
		"nginx": "nginx", "nginx:latest": "nginx", "docker.io/library/nginx:1.27": "nginx", "nginx@sha256:0123": "nginx",
		"localhost:5000/nginx": "nginx", "registry.k8s.io/e2e-test-images/agnhost:2.39": "agnhost", "busybox:1.28": "busybox",
		"mysql:8": "mariadb", "registry.k8s.io/kube-proxy:v1.37.2": "etcd", "registry.k8s.io/pause:3.10": "pause", "my-nginx": "", "nginx/other": "", "": "",
	} {
		img, ok := workload.Lookup(image)
		if ok != (want != "") || ok && img.Names[0] != want {
			t.Errorf("%q: %v, %v, want %q", image, img.Names, ok, want)
		}
	}
	if b, _ := workload.Lookup("busybox"); !b.Process || b.New != nil || len(b.DefaultArgs) == 0 {
		t.Error("busybox is no process")
	}
	if got := strings.Join(workload.Images(), " "); got != "agnhost alpine busybox coredns debian httpd mariadb mysql netshoot nginx nginx-slim pause redis ubuntu udp-echo" {
		t.Errorf("images: %s", got)
	}
}

// Arguments may name another program than the image's server, which then is a real
// process.
func TestMissingTag(t *testing.T) {
	for image, want := range map[string]bool{
		"nginx": false, "nginx:latest": false, "nginx:1.27.5": false, "nginx:1.161": true, "nginx:1.161-alpine": true, "nginx:999": true,
		"ubuntu:22.04": false, "debian:bookworm-20240513": false, "ubuntu:20240605": false, "mysql:8.0.36": false, "redis:7": false,
		"localhost:5000/nginx": false, "localhost:5000/nginx:1.100.0": true, "busybox:v1.28": false, "nginx:1.27@sha256:0123": false,
	} {
		if got := workload.MissingTag(image); got != want {
			t.Errorf("%s: %t", image, got)
		}
	}
}

func TestArgumentsThatNameAProgram(t *testing.T) {
	for _, c := range []struct {
		image string
		args  []string
		want  bool
	}{
		{"nginx", nil, false}, {"nginx", []string{"bash"}, true}, {"nginx", []string{"nginx", "-g", "daemon off;"}, false},
		{"nginx", []string{"/usr/sbin/nginx"}, false}, {"redis", []string{"--appendonly", "yes"}, false}, {"redis", []string{"/etc/redis.conf"}, false},
		{"httpd", []string{"sh", "-c", "true"}, true}, {"agnhost", []string{"netexec"}, false}, {"pause", []string{"sh"}, false},
	} {
		image, ok := workload.Lookup(c.image)
		if got := image.Runs(c.args); !ok || got != c.want {
			t.Errorf("%s %q: %v, %v", c.image, c.args, got, ok)
		}
	}
}

func TestNginx(t *testing.T) {
	w := newWorld(t)
	w.run(t, "nginx:1.25.3", nil)
	resp, body := w.get(t, "http://"+podIP+"/")
	for _, want := range []string{"<title>Welcome to nginx!</title>", "<h1>Welcome to nginx!</h1>", "html { color-scheme: light dark; }"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q in the page", want)
		}
	}
	for header, want := range map[string]string{
		"Server": "nginx/1.25.3", "X-Kplab-Pod": "web-1", "X-Kplab-Node": "node1", "X-Kplab-Client": clientIP, "Content-Type": "text/html",
	} {
		if got := resp.Header.Get(header); got != want {
			t.Errorf("%s: %q, want %q", header, got, want)
		}
	}
	if resp, body := w.get(t, "http://"+podIP+"/no/such"); resp.StatusCode != 404 || !strings.Contains(body, "404 Not Found") || !strings.Contains(body, "nginx/1.25.3") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if resp, _ := w.get(t, "http://["+podIP6+"]/50x.html"); resp.StatusCode != 200 || resp.Header.Get("X-Kplab-Client") != "fd00::9" {
		t.Errorf("IPv6: %d from %s", resp.StatusCode, resp.Header.Get("X-Kplab-Client"))
	}
	line := regexp.MustCompile(`(?m)^10\.244\.2\.9 - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "GET / HTTP/1\.1" 200 \d+ "-" "tester/1" "-"$`)
	nettest.Eventually(t, 5*time.Second, "access log", func() error {
		if !line.MatchString(w.out.String()) {
			return fmt.Errorf("log:\n%s", w.out.String())
		}
		return nil
	})
}

func TestNginxServesAVolume(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("index.html", "mine\n")
	write("..data/app.js", "js\n") // as a ConfigMap volume has it
	write("empty/x", "")
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{"app.js": "..data/app.js", "leak": secret, "up": "../../../../../../etc/passwd"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	one := filepath.Join(t.TempDir(), "one.html")
	if err := os.WriteFile(one, []byte("one\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	w.run(t, "nginx", nil, func(c *workload.Context) {
		c.Volumes = map[string]string{"/usr/share/nginx/html": dir, "/usr/share/nginx/html/one.html": one}
		c.Ports = []workload.Port{{Number: 8000}, {Number: 8001, Protocol: "TCP"}, {Number: 53, Protocol: "UDP"}}
	})
	for path, want := range map[string]string{
		"/": "200 mine\n", "/index.html": "200 mine\n", "/app.js": "200 js\n", "/one.html": "200 one\n",
		"/leak": "403", "/up": "403", "/pipe": "403", "/empty/": "403", "/empty": "301", "/../../etc/passwd": "404", "/%2e%2e/x": "404",
	} {
		for _, port := range []string{":8000", ":8001"} {
			resp, body := w.get(t, "http://"+podIP+port+path)
			got := fmt.Sprint(resp.StatusCode)
			if resp.StatusCode == 200 {
				got += " " + body
			}
			if got != want {
				t.Errorf("%s%s: %q, want %q", port, path, got, want)
			}
		}
	}
	write("index.html", "changed\n")
	if _, body := w.get(t, "http://"+podIP+":8000/"); body != "changed\n" {
		t.Errorf("after a change: %q", body)
	}
}

func TestPortInUse(t *testing.T) {
	w := newWorld(t)
	l, err := w.pod.Listen(t.Context(), "tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	img, _ := workload.Lookup("nginx")
	s, err := img.New(workload.Context{Image: "nginx", NetNS: w.pod, Stdout: io.Discard, Stderr: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("got %v", err)
	}
}

// The end resets connections, so that nothing of the pod lingers in the kernel.
func TestEndResets(t *testing.T) {
	w := newWorld(t)
	for _, image := range []string{"nginx", "redis"} {
		stop := w.run(t, image, nil)
		port := map[string]string{"nginx": ":80", "redis": ":6379"}[image]
		c := w.dial(t, podIP+port)
		if image == "redis" {
			if _, err := io.WriteString(c, "PING\r\n"); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 7)); err != nil {
				t.Fatal(err)
			}
		} else if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		} else if _, err := c.Read(make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: the client saw %v", image, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		if _, err := w.client.Dial(ctx, "tcp", podIP+port); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: after the end: %v", image, err)
		}
		cancel()
		err := w.pod.Do(func() error {
			left, err := netlink.SocketDiagTCP(syscall.AF_INET6)
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("%d sockets are left in the pod", len(left))
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", image, err)
		}
	}
}

func TestHttpd(t *testing.T) {
	w := newWorld(t)
	w.run(t, "httpd:2.4", nil)
	resp, body := w.get(t, "http://"+podIP+"/")
	if !strings.Contains(body, "It works!") || !strings.HasPrefix(resp.Header.Get("Server"), "Apache/2.4") || resp.Header.Get("X-Kplab-Pod") != "web-1" {
		t.Errorf("%v %s", resp.Header, body)
	}
}

// ask sends a datagram from the client and returns the reply and its source.
func (w *world) ask(t *testing.T, address, data string) (reply string, from string) {
	t.Helper()
	c, err := w.client.ListenPacket(t.Context(), "udp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address))
	buf := make([]byte, 2048)
	nettest.Eventually(t, 10*time.Second, "datagram from "+address, func() error {
		if err := c.SetDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
			return err
		}
		if _, err := c.WriteTo([]byte(data), to); err != nil {
			return err
		}
		n, source, err := c.ReadFrom(buf)
		if err == nil {
			reply, from = string(buf[:n]), source.String()
		}
		return err
	})
	return reply, from
}

func TestUDPAnswersFromTheAddressAsked(t *testing.T) {
	w := newWorld(t)
	w.run(t, "udp-echo", nil)
	for _, address := range []string{podIP + ":7", podIP2 + ":7", "[" + podIP6 + "]:7"} {
		if reply, from := w.ask(t, address, "hello"); reply != "hello" || from != address {
			t.Errorf("%s: %q from %s", address, reply, from)
		}
	}
}

func TestNetexec(t *testing.T) {
	w := newWorld(t)
	stop := w.run(t, "registry.k8s.io/e2e-test-images/agnhost:2.39", []string{"netexec", "--http-port=8080", "--udp-port", "9001,9002"})
	base := "http://" + podIP + ":8080"
	for path, want := range map[string]string{
		"/hostname": "^web-1$", "/hostName": "^web-1$", "/echo?msg=a+b": "^a b$", "/clientip": `^10\.244\.2\.9:\d+$`, "/header?key=User-Agent": "^tester/1$",
		"/healthz": "^$", "/": "^NOW: ", "/dial?host=127.0.0.1&port=8080&request=hostname&tries=2": `^\{"responses":\["web-1","web-1"\]\}$`,
		"/dial?host=127.0.0.1&port=9001&protocol=udp&request=echo%20x": `^\{"responses":\["x"\]\}$`,
		"/dial?host=127.0.0.1&port=9&request=x":                        `"errors":\[".*refused"\]`,
	} {
		if _, body := w.get(t, base+path); !regexp.MustCompile(want).MatchString(body) {
			t.Errorf("%s: %q, want %s", path, body, want)
		}
	}
	if resp, _ := w.get(t, base+"/echo?msg=x&code=418"); resp.StatusCode != 418 {
		t.Errorf("code %d", resp.StatusCode)
	}
	for request, want := range map[string]string{"hostname": "^web-1$", "echo some text": "^some text$", "clientip": `^10\.244\.2\.9:\d+$`} {
		for _, port := range []string{":9001", ":9002"} {
			if reply, _ := w.ask(t, podIP+port, request); !regexp.MustCompile(want).MatchString(reply) {
				t.Errorf("%s: %q", request, reply)
			}
		}
	}
	c := w.dial(t, podIP+":8080")
	if _, err := io.WriteString(c, "GET /exit?code=3 HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, c)
	var exit *workload.ExitError
	if err := stop(); !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("exit: %v", err)
	}
}

func TestAgnhostPrograms(t *testing.T) {
	w := newWorld(t)
	w.run(t, "agnhost", []string{"serve-hostname", "--tcp", "--port=9000"})
	c := w.dial(t, podIP+":9000")
	if data, err := io.ReadAll(c); err != nil || string(data) != "web-1" {
		t.Errorf("serve-hostname: %q, %v", data, err)
	}
	w.run(t, "agnhost", []string{"serve-hostname", "--udp", "--http=false"})
	if reply, _ := w.ask(t, podIP+":9376", "x"); reply != "web-1" {
		t.Errorf("serve-hostname: %q", reply)
	}
	w.run(t, "agnhost", []string{"porter"}, func(c *workload.Context) { c.Env = []string{"SERVE_PORT_81=one", "SERVE_PORT_82=two"} })
	for port, want := range map[string]string{"81": "one", "82": "two"} {
		if _, body := w.get(t, "http://"+podIP+":"+port); body != want {
			t.Errorf("porter %s: %q", port, body)
		}
	}
	if err := w.run(t, "agnhost", []string{"pause"})(); err != nil {
		t.Error(err)
	}
	img, _ := workload.Lookup("agnhost")
	for _, args := range [][]string{{"fly"}, {"netexec", "--no-such-flag"}, {"connect"}, {"porter"}} {
		if _, err := img.New(workload.Context{Args: args}); err == nil {
			t.Errorf("%v was accepted", args)
		}
	}
	// One-shot programs end by themselves.
	for _, tc := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"connect", podIP + ":9000"}, 0, ""},
		{[]string{"connect", podIP + ":1", "--timeout=2s"}, 1, "REFUSED"},
		{[]string{"connect", "--timeout=150ms", "10.244.3.3:1"}, 1, "TIMEOUT"},
		{[]string{"connect", podIP + ":9376", "--protocol", "udp", "--timeout", "2s"}, 0, ""},
	} {
		var said output
		s, err := img.New(workload.Context{Args: tc.args, NetNS: w.client, Stdout: io.Discard, Stderr: &said})
		if err != nil {
			t.Fatal(err)
		}
		err = s.Run(t.Context())
		var exit *workload.ExitError
		code := 0
		if errors.As(err, &exit) {
			code = exit.Code
		}
		if code != tc.code || strings.TrimSpace(said.String()) != tc.want {
			t.Errorf("%v: code %d (%v), said %q", tc.args, code, err, said.String())
		}
	}
}

func TestRedis(t *testing.T) {
	w := newWorld(t)
	w.run(t, "redis:7.2.1-alpine", nil)
	c := w.dial(t, podIP+":6379")
	for _, tc := range []struct{ send, want string }{
		{"PING\r\n", "+PONG\r\n"},
		{"*1\r\n$4\r\nPING\r\n", "+PONG\r\n"},
		{"*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\n", "$2\r\nhi\r\n"},
		{"GET k\r\n", "$-1\r\n"},
		{"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3\r\na\r\n\r\n", "+OK\r\n"},
		{"GET k\r\n", "$3\r\na\r\n\r\n"},
		{"INCR n\r\nINCR n\r\n", ":1\r\n:2\r\n"},
		{"DEL k n x\r\n", ":2\r\n"},
		{"SET\r\n", "-ERR wrong number of arguments for 'set' command\r\n"},
	} {
		if _, err := io.WriteString(c, tc.send); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(tc.want))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != tc.want {
			t.Errorf("%q: %q, %v, want %q", tc.send, got, err, tc.want)
		}
	}
	if _, err := io.WriteString(c, "*9999999\r\n"); err != nil {
		t.Fatal(err)
	}
	if data, err := io.ReadAll(c); err != nil || !strings.Contains(string(data), "Protocol error") {
		t.Errorf("bad input: %q, %v", data, err)
	}
}

func TestMysqlGreets(t *testing.T) {
	w := newWorld(t)
	w.run(t, "mysql:5.7", nil)
	c := w.dial(t, podIP+":3306")
	buf := make([]byte, 512)
	n, err := c.Read(buf)
	if err != nil || n < 20 || buf[4] != 10 || !bytes.HasPrefix(buf[5:n], []byte("5.5.68-MariaDB\x00")) {
		t.Fatalf("greeting %q, %v", buf[:n], err)
	}
	// The answer of a 4.1 client: flags, sizes, character set, name, password.
	login := append([]byte{0x05, 0xa6, 0x03, 0x00, 0, 0, 0, 1, 33}, make([]byte, 23)...)
	login = append(login, "root\x00\x00"...)
	if _, err := c.Write(append([]byte{byte(len(login)), 0, 0, 1}, login...)); err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(c)
	want := "\xff\x15\x04#28000Access denied for user 'root'@'" + clientIP + "' (using password: NO)"
	if err != nil || len(data) < 5 || string(data[4:]) != want || data[3] != 2 {
		t.Errorf("got %q, %v, want %q", data, err, want)
	}
}
