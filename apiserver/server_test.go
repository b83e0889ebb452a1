// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// TestMain silences the generic server's own log: what a test wants to know is
// in its failure.
func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

// testServer is a running server and what a test needs to talk to it.
type testServer struct {
	*Server
	client     kubernetes.Interface
	kubeconfig string
	dir        string
	stop       func()
}

// startServer runs a server on a free port of 127.0.0.1 until the test ends. dir
// "" means a new directory.
func startServer(tb testing.TB, dir string, change ...func(*Config)) *testServer {
	tb.Helper()
	cfg := testConfig(tb)
	if dir != "" {
		cfg.StateDir = dir
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				tb.Errorf("stop: %v", err)
			}
		case <-time.After(20 * time.Second):
			tb.Error("the server does not stop")
		}
	}
	tb.Cleanup(stop)
	ready, cancelReady := context.WithTimeout(ctx, 20*time.Second)
	defer cancelReady()
	if err := s.Ready(ready); err != nil {
		tb.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(s.ClientConfig("system:admin", "system:masters"))
	if err != nil {
		tb.Fatal(err)
	}
	data, err := s.AdminKubeconfig("test", "https://"+cfg.Listeners[0].Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	kubeconfig := filepath.Join(tb.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		tb.Fatal(err)
	}
	return &testServer{Server: s, client: client, kubeconfig: kubeconfig, dir: cfg.StateDir, stop: stop}
}

// testConfig is a server on a free port of 127.0.0.1 with a new directory. The
// port is free again when the test ends, also without a server.
func testConfig(tb testing.TB) Config {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	return Config{
		StateDir: tb.TempDir(), Listeners: []net.Listener{l},
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
		NoFsync:     true, Version: "v0.0.1-test",
		Log: slog.New(slog.DiscardHandler),
	}
}

// makeNamespace creates a namespace with the service account that a controller
// would make.
func makeNamespace(tb testing.TB, s *testServer, name string) {
	tb.Helper()
	ctx := tb.Context()
	if _, err := s.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		tb.Fatal(err)
	}
	if _, err := s.client.CoreV1().ServiceAccounts(name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
		tb.Fatal(err)
	}
}

// watchers is how many watches of a resource the server has, by its own metric.
func (s *testServer) watchers(resource string) int {
	body, err := s.client.CoreV1().RESTClient().Get().AbsPath("/metrics").SetHeader("Accept", "text/plain").DoRaw(context.Background())
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(body)) {
		if !strings.HasPrefix(line, "apiserver_longrunning_requests{") || !strings.Contains(line, `resource="`+resource+`"`) || !strings.Contains(line, `verb="WATCH"`) {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(line[strings.LastIndex(line, " "):])); err == nil {
			return n
		}
	}
	return 0
}

func (s *testServer) moreWatchers(resource string, than int) error {
	if n := s.watchers(resource); n <= than {
		return fmt.Errorf("%d watches of %s", n, resource)
	}
	return nil
}
