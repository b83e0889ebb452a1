// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kplab/kplab/internal/nettest"
)

// TestLabsVerify proves labs as their authors do: checks fail before the solution and
// after each wrong answer, and pass after the solution. The normal run takes two labs
// in one mode, the long one all labs in all modes that they name.
func TestLabsVerify(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"lab", "verify", "01", "08", "--mode", "iptables"}
	if os.Getenv("KPLAB_LONG") != "" {
		args = []string{"lab", "verify", "--all"}
	}
	dir, err := os.MkdirTemp("", "kp-") //nolint:usetesting // the paths of sockets are short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	cmd := exec.Command(filepath.Join(bin, "kplab"), args...)
	cmd.Env = append(os.Environ(), "KPLAB_STATE="+filepath.Join(dir, "state"), "KPLAB_RUN="+filepath.Join(dir, "run"), "KPLAB_LAB=", "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kplab %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	if !strings.Contains(string(out), "passes after") {
		t.Errorf("nothing was proved:\n%s", out)
	}
	t.Logf("%s", out)
}
