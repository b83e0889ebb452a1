// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// programs returns the directory with the built programs: the one that the
// Makefile filled, or one that is filled now.
var programs = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("KPLAB_BIN"); dir != "" {
		return dir, nil
	}
	dir, err := os.MkdirTemp("", "kplab-bin-")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "kplab"), ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build kplab: %w\n%s", err, out)
	}
	return dir, nil
})

// aboutKubectl are the scripts whose words depend most on which kubectl says them.
var aboutKubectl = regexp.MustCompile(`^(kubectl-(apply|output|streams)|tutorial)`)

// TestScripts runs the transcripts: what a person types, and what they then see.
// Each runs with the embedded kubectl; those about kubectl itself run with the stock
// one of Kubernetes 1.32 as well, and with KPLAB_LONG all of them do.
func TestScripts(t *testing.T) {
	nettest.NeedRoot(t)
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	manifests, err := filepath.Abs("testdata/manifests")
	if err != nil {
		t.Fatal(err)
	}
	scripts, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	clients := map[string]string{"embedded": "", "1.32": filepath.Join(bin, "kubectl-1.32")}
	if _, err := os.Stat(clients["1.32"]); err != nil {
		if os.Getenv("KPLAB_BIN") != "" {
			t.Fatalf("the Makefile builds it: %v", err)
		}
		t.Logf("without kubectl 1.32: %v (make bin/kubectl-1.32 builds it)", err)
		delete(clients, "1.32")
	}
	for version, kubectl := range clients {
		t.Run("kubectl-"+version, func(t *testing.T) {
			nettest.LeakCheck(t)
			// One after the other: the proof that the host is as it was needs a
			// host on which nothing else begins and ends.
			for _, file := range scripts {
				if kubectl != "" && os.Getenv("KPLAB_LONG") == "" && !aboutKubectl.MatchString(filepath.Base(file)) {
					continue
				}
				t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
					testscript.Run(t, testscript.Params{
						Files:               []string{file},
						RequireExplicitExec: true,
						Setup: func(env *testscript.Env) error {
							return setUp(env, bin, manifests, kubectl)
						},
						Condition: func(cond string) (bool, error) {
							if cond == "embedded" {
								return kubectl == "", nil
							}
							if cond == "ipvs" {
								_, err := os.Stat("/proc/net/ip_vs")
								return err == nil, nil
							}
							return false, fmt.Errorf("unknown condition %q", cond)
						},
						Cmds: map[string]func(*testscript.TestScript, bool, []string){
							"exits":   exits,
							"kubectl": runKubectl,
							"spread":  spread,
							"kill9":   kill9,
							"capture": capture,
							"retry":   retry,
						},
					})
				})
			}
		})
	}
}

// setUp gives each script a state of its own and ends its labs.
func setUp(env *testscript.Env, bin, manifests, kubectl string) error {
	// Short, because a socket's path is.
	dir, err := os.MkdirTemp("", "kp-")
	if err != nil {
		return err
	}
	env.Setenv("KPLAB_STATE", filepath.Join(dir, "state"))
	env.Setenv("KPLAB_RUN", filepath.Join(dir, "run"))
	env.Setenv("PATH", bin+":"+env.Getenv("PATH")+":/usr/sbin:/sbin")
	env.Setenv("HOME", dir)
	env.Setenv("MANIFESTS", manifests)
	env.Setenv("KUBECTL", kubectl)
	env.Setenv("RUN", filepath.Join(dir, "run"))
	env.Setenv("STATE", filepath.Join(dir, "state"))
	env.Defer(func() {
		entries, _ := os.ReadDir(filepath.Join(dir, "run"))
		for _, e := range entries {
			if !e.IsDir() {
				continue
			}
			cmd := exec.Command(filepath.Join(bin, "kplab"), "down", "--purge", "--name", e.Name())
			cmd.Env = env.Vars
			if out, err := cmd.CombinedOutput(); err != nil {
				env.T().Log(fmt.Sprintf("end lab %s: %v\n%s", e.Name(), err, out))
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			env.T().Log(fmt.Sprintf("remove the script's directory: %v", err))
		}
	})
	return nil
}

// exits CODE PROGRAM ARG… checks the exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM [ARG…]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	got := 0
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%s: %v", args[1], err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// kubectl ARG… runs the kubectl that this pass of the scripts is about, against
// the lab of $LAB or the default one.
func runKubectl(ts *testscript.TestScript, neg bool, args []string) {
	var err error
	name := ts.Getenv("LAB")
	if name == "" {
		name = "kplab"
	}
	if stock := ts.Getenv("KUBECTL"); stock != "" {
		err = ts.Exec(stock, append([]string{"--kubeconfig", filepath.Join(ts.Getenv("RUN"), name, "kubeconfig")}, args...)...)
	} else {
		err = ts.Exec("kplab", append([]string{"--name", name, "kubectl"}, args...)...)
	}
	switch {
	case neg && err == nil:
		ts.Fatalf("kubectl succeeded, and should not")
	case !neg && err != nil:
		ts.Fatalf("kubectl: %v", err)
	}
}

var answeredBy = regexp.MustCompile(`(?i)(?m)^X-Kplab-Pod: (\S+)\r?$`)

// spread WHERE URL REQUESTS BACKENDS sends requests, each on a connection of its
// own, and checks that exactly so many different pods answered.
func spread(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: spread WHERE URL REQUESTS BACKENDS")
	}
	ts.Check(ts.Exec("kplab", "exec", args[0], "--", "curl", "-sS", "-m", "20", "-o", "/dev/null", "-D", "-",
		"-H", "Connection: close", args[1]+"/?[1-"+args[2]+"]"))
	answers := answeredBy.FindAllStringSubmatch(ts.ReadFile("stdout"), -1)
	if want, _ := strconv.Atoi(args[2]); len(answers) != want {
		ts.Fatalf("%d of %s requests were answered", len(answers), args[2])
	}
	pods := map[string]int{}
	for _, a := range answers {
		pods[a[1]]++
	}
	if want, _ := strconv.Atoi(args[3]); len(pods) != want {
		ts.Fatalf("%d backends answered, want %d: %v", len(pods), want, pods)
	}
	ts.Logf("%v", pods)
}

// kill9 LAB kills a lab's daemon as a crash would.
func kill9(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: kill9 LAB")
	}
	var d struct {
		PID int `json:"pid"`
	}
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(filepath.Join(ts.Getenv("RUN"), args[0], "daemon.json"))), &d))
	ts.Check(syscall.Kill(d.PID, syscall.SIGKILL))
	// The daemon is a child of the test's subreaper; it is gone when its state
	// is zombie or its directory is.
	nettest.Until(script{ts: ts}, 10*time.Second, fmt.Sprintf("the end of pid %d", d.PID), func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.PID))
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
}

// script lets nettest wait for a script, whose failure is not that of the Go
// test around it.
type script struct {
	testing.TB
	ts *testscript.TestScript
}

func (s script) Helper()                           {}
func (s script) Fatalf(format string, args ...any) { s.ts.Fatalf(format, args...) }

// capture NAME PROGRAM ARG… puts what a program printed into a variable.
func capture(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: capture NAME PROGRAM [ARG…]")
	}
	if args[1] == "kubectl" {
		runKubectl(ts, false, args[2:])
	} else {
		ts.Check(ts.Exec(args[1], args[2:]...))
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}

// retry PROGRAM ARG… waits until a program succeeds, for things outside of what
// `kplab settle` awaits.
func retry(ts *testscript.TestScript, neg bool, args []string) {
	nettest.Eventually(script{ts: ts}, 30*time.Second, strings.Join(args, " "), func() error {
		err := ts.Exec(args[0], args[1:]...)
		if !neg {
			return err
		}
		if err == nil {
			return errors.New("still succeeds")
		}
		return nil
	})
}
