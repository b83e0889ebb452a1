// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
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
func startServer(t testing.TB, dir string, change ...func(*Config)) *testServer {
	t.Helper()
	if dir == "" {
		dir = t.TempDir()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		StateDir: dir, Listeners: []net.Listener{l},
		ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
		NoFsync:     true, Version: "v0.0.1-test",
		Log: slog.New(slog.DiscardHandler),
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
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
				t.Errorf("stop: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the server does not stop")
		}
	}
	t.Cleanup(stop)
	ready, cancelReady := context.WithTimeout(ctx, 20*time.Second)
	defer cancelReady()
	if err := s.Ready(ready); err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(s.ClientConfig("system:admin", "system:masters"))
	if err != nil {
		t.Fatal(err)
	}
	data, err := s.AdminKubeconfig("test", "https://"+l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return &testServer{Server: s, client: client, kubeconfig: kubeconfig, dir: dir, stop: stop}
}

// makeNamespace creates a namespace with the service account that a controller
// would make.
func makeNamespace(t testing.TB, s *testServer, name string) {
	t.Helper()
	ctx := t.Context()
	if _, err := s.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.CoreV1().ServiceAccounts(name).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}
