// SPDX-License-Identifier: Apache-2.0

package tutorial_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/labs/tutorial"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// commands is how many commands each tutorial has.
var commands = map[string]int{"tutorial-1": 28, "tutorial-2": 90}

// TestEveryCommandIsListed holds the tables against the numbers of the commands.
func TestEveryCommandIsListed(t *testing.T) {
	for name, count := range commands {
		tut := load(t, name)
		if len(tut.Steps) != count {
			t.Errorf("%s: %d steps, want %d", name, len(tut.Steps), count)
		}
		for i, s := range tut.Steps {
			if want := fmt.Sprintf("S%s-%02d", strings.TrimPrefix(name, "tutorial-"), i+1); s.ID != want {
				t.Errorf("%s: step %d is %s, want %s", name, i+1, s.ID, want)
			}
		}
	}
}

func load(t *testing.T, name string) *tutorial.Tutorial {
	t.Helper()
	tut, err := tutorial.Load(filepath.Join("..", name))
	if err != nil {
		t.Fatal(err)
	}
	return tut
}

// TestTutorials runs both tutorials with the embedded kubectl, and with KPLAB_LONG=1
// also with that of Kubernetes 1.32. KPLAB_TUTORIALS_OUT names the page to write.
func TestTutorials(t *testing.T) {
	nettest.NeedRoot(t)
	bin := os.Getenv("KPLAB_BIN")
	if bin == "" {
		t.Skip("needs the built programs: KPLAB_BIN names their directory, as the Makefile does")
	}
	for _, tool := range []string{"bash", "jq", "netstat", "iptables", "curl", "dig", "busybox"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v: internal/tools/setup.sh installs it", err)
		}
	}
	clients := []string{""}
	if os.Getenv("KPLAB_LONG") != "" {
		clients = append(clients, filepath.Join(bin, "kubectl-1.32"))
	}
	page := head
	for _, name := range []string{"tutorial-1", "tutorial-2"} {
		for _, kubectl := range clients {
			client := "embedded"
			if kubectl != "" {
				client = filepath.Base(kubectl)
			}
			t.Run(name+"/"+client, func(t *testing.T) {
				text := run(t, name, bin, kubectl)
				if kubectl == "" {
					page += "\n" + text
				}
			})
		}
	}
	if out := os.Getenv("KPLAB_TUTORIALS_OUT"); out != "" && !t.Failed() {
		if err := os.WriteFile(out, []byte(page), 0o644); err != nil {
			t.Error(err)
		}
	}
}

const head = `# The tutorials, command by command

Written by a run of the tests (` + "`KPLAB_TUTORIALS_OUT=$PWD/docs/tutorials.md go test ./labs/tutorial`" + ` as root,
with KPLAB_BIN); do not edit. The tables are labs/tutorial-1/commands.yaml and
labs/tutorial-2/commands.yaml. To follow a tutorial yourself, start its lab, then open
a shell on its first node with ` + "`kplab shell master`" + ` or ` + "`kplab shell k8s-master1`" + `: kubectl,
iptables and curl work there as the tutorial has them.

Verdicts: *as in the tutorial*, word by word but for ages; *same shape*, with other
names and addresses; *as a current cluster*, where Kubernetes has changed since the
tutorial was written; *done as here*, for commands such as vim that are no part of
the cluster.
`

// run starts a lab and runs a tutorial in it; it returns the page's section.
func run(t *testing.T, name, bin, kubectl string) string {
	t.Helper()
	nettest.LeakCheck(t)
	tut := load(t, name)
	// Short, because a socket's path is.
	dir, err := os.MkdirTemp("", "kp-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	env := []string{"KPLAB_STATE=" + filepath.Join(dir, "state"), "KPLAB_RUN=" + filepath.Join(dir, "run"), "HOME=" + dir, "TERM=dumb"}
	for _, e := range os.Environ() {
		if path, ok := strings.CutPrefix(e, "PATH="); ok {
			env = append(env, "PATH="+path+":/usr/sbin:/sbin")
		}
	}
	kplab := filepath.Join(bin, "kplab")
	do := func(args ...string) {
		cmd := exec.Command(kplab, args...)
		cmd.Env = env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("kplab %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(dir, "state", name, "daemon.log"))
			lines := strings.Split(strings.TrimSpace(string(log)), "\n")
			t.Logf("the lab's log ends with:\n%s", strings.Join(lines[max(0, len(lines)-60):], "\n"))
		}
		do("down", "--purge", "--name", name)
	})
	if do("up", "-d", "--no-fsync", "--name", name, "--config", tut.Config); t.Failed() {
		return ""
	}
	work := filepath.Join(dir, "work")
	if err := os.Mkdir(work, 0o755); err != nil {
		t.Fatal(err)
	}
	results, err := tutorial.Run(t.Context(), tut, tutorial.Options{Kplab: kplab, Lab: name, Kubectl: kubectl, Dir: work, Env: env})
	if err != nil {
		t.Error(err)
	}
	for _, r := range results {
		if r.Err != nil {
			t.Errorf("%s: %s\n%v\noutput:\n%s%s", r.Step.ID, r.Ran, r.Err, r.Output, r.Stderr)
		}
	}
	return tutorial.Page(tut, results)
}
