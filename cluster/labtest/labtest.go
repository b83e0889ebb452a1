// SPDX-License-Identifier: Apache-2.0

// Package labtest starts a whole lab inside a Go test: a Kubernetes API, nodes
// and pods that are network namespaces, and a Service proxy that writes real
// rules, in about a second and without Docker.
//
//	func TestMyController(t *testing.T) {
//		lab := labtest.Start(t, labtest.Options{})
//		lab.Apply(manifest)
//		lab.Settle()
//		out := lab.Exec("master", "curl", "-s", lab.ClusterIP("default", "web"))
//		…
//	}
//
// The lab ends with the test, and the test fails when anything of it stays
// behind. Tests need root and Linux; [Start] skips with the reason where that is
// not so, and fails instead when KPLAB_REQUIRE contains "root".
//
// Use [Main] in TestMain: it runs the package's tests in a network namespace of
// their own, so that no packet can leave the machine.
package labtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/dns"
	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
)

// settleTimeout is how long Settle waits before the test fails. A lab settles in
// milliseconds; machines that run many tests at once are slower.
const settleTimeout = 60 * time.Second

// Options choose the lab. The zero value is the default lab: master, node1,
// node2, a client outside, proxy mode iptables.
type Options struct {
	// Config holds the settings; what is not set is the default.
	Config cluster.Config
	// Nodes is the number of nodes when Config names none; 0 means 3.
	Nodes int
	// Dir keeps the lab's state between two labs of one test; empty means a
	// directory of its own.
	Dir string
}

// Lab is a running lab. Its methods fail the test when they cannot do what they
// are asked.
type Lab struct {
	// Client speaks with the API as an administrator.
	Client kubernetes.Interface
	// REST is the same for clients of your own.
	REST *rest.Config
	// Kubeconfig is a file for kubectl.
	Kubeconfig string

	t     testing.TB
	lab   *cluster.Lab
	paths cluster.Paths
}

// Main runs the tests of a package in a network namespace that holds only a
// loopback. Call it as the one statement of TestMain. Cluster DNS of the labs is this
// program, too, under another name.
func Main(m *testing.M) {
	if dns.IsProgram(os.Args) {
		dns.Main()
		os.Exit(0)
	}
	nettest.Main(m)
}

// Start starts a lab and registers its end with t.
func Start(tb testing.TB, o Options) *Lab {
	tb.Helper()
	nettest.NeedRoot(tb)
	nettest.LeakCheck(tb)
	dir := o.Dir
	if dir == "" {
		// Not tb.TempDir: the path of a unix socket has at most 107 bytes.
		var err error
		if dir, err = os.MkdirTemp("", "kplab-"); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				tb.Error(err)
			}
		})
	}
	cfg := o.Config
	// A test's lab is thrown away: there is nothing to save from a power cut.
	cfg.Disposable = true
	cfg.SetDefaults(o.Nodes)
	if err := cfg.Validate(); err != nil {
		tb.Fatalf("settings of the lab: %v", err)
	}
	paths := cluster.Paths{
		State:   filepath.Join(dir, "state"),
		Runtime: filepath.Join(dir, "run"),
		Lock:    filepath.Join(dir, "lock"),
	}
	l := &Lab{t: tb, paths: paths, Kubeconfig: paths.Kubeconfig()}
	logFile := l.openLog()
	tb.Cleanup(l.end)
	lab, err := cluster.Start(context.Background(), cfg, paths, slog.New(slog.NewTextHandler(logFile, nil)), nil)
	if err != nil {
		tb.Fatalf("start the lab: %v", err)
	}
	l.lab = lab
	l.REST = lab.ClientConfig("system:admin", "system:masters")
	if l.Client, err = kubernetes.NewForConfig(l.REST); err != nil {
		tb.Fatal(err)
	}
	return l
}

// end stops the lab and removes what it made, also after a start that failed.
func (l *Lab) end() {
	var err error
	if l.lab != nil {
		err = l.lab.Stop()
	}
	if err := errors.Join(err, cluster.Remove(context.Background(), l.paths)); err != nil {
		l.t.Errorf("end the lab: %v", err)
	}
	if l.t.Failed() {
		l.showLog()
	}
}

func (l *Lab) openLog() io.Writer {
	if err := os.MkdirAll(l.paths.State, 0o700); err != nil {
		l.t.Fatal(err)
	}
	f, err := os.OpenFile(l.paths.Log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { f.Close() })
	return f
}

// showLog prints the end of the lab's log for a test that failed.
func (l *Lab) showLog() {
	data, err := os.ReadFile(l.paths.Log())
	if err != nil {
		return
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	l.t.Logf("the lab's log ends with:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
}

// Cluster is the lab itself, for what has no method here.
func (l *Lab) Cluster() *cluster.Lab { return l.lab }

// Settle waits until every controller, node and proxy has caught up.
func (l *Lab) Settle() {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	if err := l.lab.Settle(ctx); err != nil {
		l.t.Fatal(err)
	}
}

// Exec runs a program of this machine in the network of a node ("node1"), of
// "outside", or of a pod ("pod/NAME", "pod/NAMESPACE/NAME"), and returns what it
// printed. The test fails when the program does.
func (l *Lab) Exec(where, path string, args ...string) string {
	l.t.Helper()
	out, err := l.TryExec(where, path, args...)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

// TryExec is Exec for programs that may fail.
func (l *Lab) TryExec(where, path string, args ...string) (string, error) {
	l.t.Helper()
	ns, err := l.lab.NetNS(where)
	if err != nil {
		l.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	r, err := execx.In(ns).Run(ctx, execx.Cmd{Path: path, Args: args})
	if err != nil {
		return string(r.Stdout), fmt.Errorf("in %s: %w", where, err)
	}
	return string(r.Stdout), nil
}

// ClusterIP returns the address of a Service.
func (l *Lab) ClusterIP(namespace, name string) string {
	l.t.Helper()
	s, err := l.Client.CoreV1().Services(namespace).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		l.t.Fatal(err)
	}
	return s.Spec.ClusterIP
}
