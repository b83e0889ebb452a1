// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// replaceEnv makes this binary a program that replaces itself in the namespace at
// the path that it holds; see TestMain.
const replaceEnv = "KPLAB_TEST_REPLACE"

// becomeReadlink prints the namespace that the program finds itself in.
func becomeReadlink(path string) error {
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	program, err := exec.LookPath("readlink")
	if err != nil {
		return err
	}
	return ns.Replace(nil, program, []string{"readlink", "/proc/self/ns/net"}, os.Environ())
}

func TestReplace(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=/proc/%d/fd/%d", replaceEnv, os.Getpid(), ns.Fd()))
	out, err := cmd.CombinedOutput()
	if want := fmt.Sprintf("net:[%d]", ns.Inode()); err != nil || strings.TrimSpace(string(out)) != want {
		t.Errorf("the program is in %q, %v; want %s", out, err, want)
	}
}

// A Replace that fails leaves no thread in its mount namespace.
func TestReplaceFails(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	if err := ns.Replace(nil, "/nonexistent", []string{"x"}, nil); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a program that is not there: %v", err)
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, 5*time.Second, "all threads to see the same mounts", func() error {
		threads, err := filepath.Glob("/proc/self/task/*/ns/mnt")
		for _, path := range threads {
			if mnt, readErr := os.Readlink(path); readErr == nil && mnt != own {
				err = errors.Join(err, fmt.Errorf("%s is %s, not %s", path, mnt, own))
			}
		}
		return err
	})
}
