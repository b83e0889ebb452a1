// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
)

// rig runs kplab against a state of its own.
type rig struct {
	t       *testing.T
	kplab   string
	dir     string
	run     string // the runtime directory of the default lab
	environ []string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "kp-") //nolint:usetesting // short, because a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, kplab: filepath.Join(bin, "kplab"), dir: dir, run: filepath.Join(dir, "run", "kplab")}
	r.environ = append(os.Environ(), "KPLAB_STATE="+filepath.Join(dir, "state"), "KPLAB_RUN="+filepath.Join(dir, "run"), "KPLAB_LAB=kplab")
	t.Cleanup(func() {
		if out, err := r.try("down", "--purge"); err != nil {
			t.Errorf("end the lab: %v\n%s", err, out)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return r
}

func (r *rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(r.kplab, args...)
	cmd.Env = r.environ
	return cmd
}

// try runs kplab and returns all that it says.
func (r *rig) try(args ...string) (string, error) {
	out, err := r.command(args...).CombinedOutput()
	return string(out), err
}

func (r *rig) must(args ...string) string {
	r.t.Helper()
	out, err := r.try(args...)
	if err != nil {
		r.t.Fatalf("kplab %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// start runs kplab and returns what waits for its end.
func (r *rig) start(args ...string) (cmd *exec.Cmd, wait func() string) {
	r.t.Helper()
	cmd = r.command(args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return cmd, func() string {
		err := cmd.Wait() // it may fail: it was disturbed
		return fmt.Sprintf("kplab %s: %v\n%s", strings.Join(args, " "), err, out.String())
	}
}

// kill ends the lab's daemon as a crash would, when there is one.
func (r *rig) kill() (killed bool) {
	var d struct {
		PID int `json:"pid"`
	}
	data, err := os.ReadFile(filepath.Join(r.run, "daemon.json"))
	if err != nil || json.Unmarshal(data, &d) != nil {
		return false // it has not come that far, or is past it
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", d.PID))
	if err != nil || !bytes.HasPrefix(comm, []byte("kplab\x00up\x00")) {
		return false
	}
	return unix.Kill(d.PID, unix.SIGKILL) == nil
}

// prove ends the lab and fails unless the host is as it was before.
func (r *rig) prove(when string) {
	r.t.Helper()
	out, err := r.try("down", "--prove", "--purge")
	if err != nil || strings.Contains(out, " differ\n") {
		log, _ := os.ReadFile(filepath.Join(r.dir, "state", "kplab", "daemon.log"))
		r.t.Fatalf("%s: down --prove: %v\n%s\n%s", when, err, out, log)
	}
	if left, err := os.ReadDir(filepath.Join(r.dir, "run")); err == nil && len(left) > 0 {
		r.t.Fatalf("%s: %v stays in the runtime directory", when, left)
	}
}

// pause waits for a part of most that chance chooses: this is a test of when things
// happen.
func pause(rnd *rand.Rand, most time.Duration) time.Duration {
	d := time.Duration(rnd.Int64N(int64(most)))
	<-time.After(d)
	return d
}

// TestKilledAtRandom kills the daemon at points that chance chooses, of its start, of its
// work and of its end. Whatever it was doing, down leaves the host as it was.
func TestKilledAtRandom(t *testing.T) {
	rounds := 10
	if os.Getenv("KPLAB_LONG") != "" {
		rounds = 100
	}
	r := newRig(t)
	began := time.Now()
	r.must("up", "-d")
	upTakes := time.Since(began)
	r.prove("undisturbed")

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, a start takes %s", seed, upTakes)
	rnd := rand.New(rand.NewPCG(seed, 0))
	kills := 0
	for round := range rounds {
		phase := []string{"start", "work", "end"}[round%3]
		if phase == "start" {
			_, wait := r.start("up", "-d")
			at := pause(rnd, upTakes)
			killed := r.kill()
			said := wait()
			if killed {
				kills++
			}
			t.Logf("round %d: killed %t, %s into the start", round, killed, at)
			r.prove(fmt.Sprintf("round %d, %s into the start\n%s", round, at, said))
			continue
		}
		r.must("up", "-d")
		if phase == "work" {
			var waits []func() string
			for _, args := range [][]string{
				{"kubectl", "create", "deployment", "web", "--image=nginx", "--replicas=6"},
				{"kubectl", "create", "deployment", "shell", "--image=busybox", "--replicas=3", "--", "sleep", "1000"},
				{"node", "kill", "node1"},
				{"fault", "add", "rules-flushed"},
				{"link", "set", "node2", "--loss", "50%"},
				{"node", "add"},
			} {
				_, wait := r.start(args...)
				waits = append(waits, wait)
			}
			at := pause(rnd, 2*time.Second)
			if r.kill() {
				kills++
			}
			var said []string
			for _, wait := range waits {
				said = append(said, wait())
			}
			t.Logf("round %d: killed %s into the work", round, at)
			// Every second time the next daemon takes over first.
			if rnd.IntN(2) == 0 {
				r.must("up", "-d")
				r.must("fault", "clear", "--all")
				r.must("settle")
			}
			r.prove(fmt.Sprintf("round %d, %s into the work\n%s", round, at, strings.Join(said, "\n")))
			continue
		}
		cmd, wait := r.start("down")
		at := pause(rnd, 300*time.Millisecond)
		if r.kill() {
			kills++
		}
		if rnd.IntN(2) == 0 {
			_ = cmd.Process.Kill() // it may have ended
		}
		said := wait()
		t.Logf("round %d: killed %s into the end", round, at)
		r.endAnyway(fmt.Sprintf("round %d, %s into the end\n%s", round, at, said))
	}
	if kills == 0 {
		t.Error("nothing was killed: this proves nothing")
	}
}

// endAnyway is prove for a lab that may be down already.
func (r *rig) endAnyway(when string) {
	r.t.Helper()
	if _, err := os.Stat(r.run); errors.Is(err, fs.ErrNotExist) {
		r.must("down", "--purge")
		return
	}
	r.prove(when)
}

// TestDownDuringUp ends a lab while it starts: one of the two wins, and there is no half
// a lab.
func TestDownDuringUp(t *testing.T) {
	r := newRig(t)
	for _, wait := range []time.Duration{0, 50 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond} {
		_, up := r.start("up", "-d")
		<-time.After(wait)
		_, down := r.start("down")
		saidDown, saidUp := down(), up()
		if strings.Contains(saidUp, "up -d: <nil>") {
			if _, err := r.try("status"); err == nil {
				r.must("settle") // up came last, and is whole
			} else if !strings.Contains(saidDown, "down: <nil>") {
				t.Errorf("up and down after %s: neither has won\n%s\n%s", wait, saidUp, saidDown)
			}
		}
		r.endAnyway(fmt.Sprintf("down %s after up\n%s\n%s", wait, saidUp, saidDown))
	}
}

// TestDamagedRecords writes nonsense over what a killed daemon has left.
func TestDamagedRecords(t *testing.T) {
	r := newRig(t)
	for _, again := range []bool{false, true} {
		r.must("up", "-d")
		r.must("kubectl", "run", "shell", "--image=busybox", "--restart=Never", "--", "sleep", "1000")
		r.must("kubectl", "wait", "--for=condition=Ready", "pod/shell", "--timeout=60s")
		r.must("fault", "add", "rules-flushed", "--node", "node1")
		r.kill()
		for _, file := range []string{"faults.json", "nodes/node1/proxy.json"} {
			path := filepath.Join(r.run, file)
			if _, err := os.Stat(path); err != nil && file == "faults.json" {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte("{\"faults\": [{\"kind\": \x00"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if again {
			r.must("up", "-d")
			if out := r.must("fault", "list"); !strings.Contains(out, "no faults") {
				t.Errorf("a damaged journal, and faults: %s", out)
			}
			r.must("settle")
			if out := r.must("exec", "node1", "--", "iptables-save", "-t", "nat"); !strings.Contains(out, "KUBE-SVC-") {
				t.Errorf("nothing is broken, and node1 has no rules:\n%s", out)
			}
		}
		r.prove("damaged records")
	}
}

// TestReboot takes away what a reboot takes: processes, namespaces, and the runtime
// directory. The state is kept.
func TestReboot(t *testing.T) {
	r := newRig(t)
	config := filepath.Join(r.dir, "lab.yaml")
	// Without processes of its own: those of a pod would have to be ended here.
	if err := os.WriteFile(config, []byte("apiVersion: kplab/v1alpha1\nkind: Lab\nname: kplab\ndns: {provider: none}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r.must("up", "-d", "--config", config)
	r.must("kubectl", "create", "deployment", "web", "--image=nginx", "--replicas=2")
	r.must("kubectl", "rollout", "status", "deployment", "web")
	r.must("node", "add")
	r.must("fault", "add", "conn-limit")
	r.must("settle")
	if !r.kill() {
		t.Fatal("no daemon to kill")
	}
	nettest.Eventually(t, 10*time.Second, "the mount of the dead lab to go", func() error {
		if err := unix.Unmount(filepath.Join(r.run, "netns"), unix.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			return err
		}
		return os.RemoveAll(filepath.Join(r.dir, "run"))
	})
	r.must("up", "-d")
	if out := r.must("node", "list"); !strings.Contains(out, "node3") {
		t.Errorf("the node that was added is gone:\n%s", out)
	}
	if out := r.must("fault", "list"); !strings.Contains(out, "no faults") {
		t.Errorf("faults outlive a reboot: %s", out)
	}
	r.must("kubectl", "rollout", "status", "deployment", "web")
	r.must("settle")
	r.prove("after the reboot")
}
