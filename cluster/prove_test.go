// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox/reexec"
)

func TestCompareHosts(t *testing.T) {
	before := HostState{
		factLinks:   {"1 lo", "2 eth0"},
		factSysctls: {"net.a = 1", "net.gone = 1"},
		factModules: {"bridge"},
	}
	now := HostState{
		factLinks:   {"1 lo", "3 veth0"},
		factSysctls: {"net.a = 2", "net.new = 1"},
		factModules: {"bridge", "veth"},
	}
	got := before.Compare(now)
	if want := []string{"+ 3 veth0", "- 2 eth0"}; !slices.Equal(got[factLinks], want) {
		t.Errorf("links: %q, want %q", got[factLinks], want)
	}
	// What came with a module is not of the lab; a value that changed is.
	if want := []string{"+ net.a = 2", "- net.a = 1"}; !slices.Equal(got[factSysctls], want) {
		t.Errorf("sysctls: %q, want %q", got[factSysctls], want)
	}
	if len(got[factModules]) > 0 {
		t.Errorf("modules count as a difference: %q", got[factModules])
	}
	if same := before.Compare(before); len(same) > 0 {
		t.Errorf("a host differs from itself: %v", same)
	}
}

// Processes are the lab's by its records, whatever they are called.
func TestProcessesAreFoundByRecord(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	running := true
	end := func() {
		if running {
			running = false
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()         // its error is the kill
		}
	}
	t.Cleanup(end)
	id, err := reexec.Identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	another := reexec.ID{Pid: os.Getpid(), Start: 1} // a pid that was reused
	l := labs{mine: Owned{Processes: []reexec.ID{id, another}}}
	got, err := l.hostProcesses()
	if err != nil || len(got) != 1 || !strings.HasPrefix(got[0], strconv.Itoa(id.Pid)+" ") {
		t.Errorf("processes %q, %v", got, err)
	}
	// Dead, and nobody has waited for it: what is left is no process of the lab.
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 10*time.Second, "the dead process is gone from the list", func() error {
		got, err := l.hostProcesses()
		if err == nil && len(got) > 0 {
			err = fmt.Errorf("still there: %q", got)
		}
		return err
	})
	end()
	if got, err := l.hostProcesses(); err != nil || len(got) > 0 {
		t.Errorf("after its end: %q, %v", got, err)
	}
}
