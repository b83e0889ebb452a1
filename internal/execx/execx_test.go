// SPDX-License-Identifier: Apache-2.0

package execx_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

func TestRunGivesInputAndMinimalEnvironment(t *testing.T) {
	nettest.LeakCheck(t)
	t.Setenv("SECRET", "of the caller")
	res, err := execx.Host().Run(t.Context(), execx.Cmd{
		Path: "sh", Args: []string{"-c", "cat; env | sort; pwd; echo err >&2"},
		Env: []string{"LAB=x y"}, Stdin: []byte("input\n"),
	})
	if err != nil {
		t.Fatal(err)
	}
	out := string(res.Stdout)
	for _, want := range []string{"input\n", "LAB=x y\n", "LC_ALL=C\n", "HOME=/\n", "PATH=", "\n/\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "SECRET") {
		t.Errorf("the caller's environment came through:\n%s", out)
	}
	if string(res.Stderr) != "err\n" {
		t.Errorf("stderr %q", res.Stderr)
	}
}

func TestErrorIsPasteable(t *testing.T) {
	_, err := execx.Host().Run(t.Context(), execx.Cmd{
		Path: "sh", Args: []string{"-c", "echo \"it's wrong\" >&2; exit 3"}, Env: []string{"A=b c"},
	})
	var fail *execx.Error
	if !errors.As(err, &fail) {
		t.Fatalf("got %T %v", err, err)
	}
	if fail.ExitCode != 3 || fail.Stderr != "it's wrong\n" {
		t.Errorf("exit code %d, stderr %q", fail.ExitCode, fail.Stderr)
	}
	if want := `A='b c' sh -c 'echo "it'\''s wrong" >&2; exit 3'`; fail.Line != want {
		t.Errorf("line %s, want %s", fail.Line, want)
	}
	if !strings.Contains(err.Error(), fail.Line) {
		t.Errorf("message %q has no command line", err)
	}
	// The line, pasted, does the same.
	out, pasted := exec.CommandContext(t.Context(), "sh", "-c", fail.Line).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(pasted, &exit) || exit.ExitCode() != fail.ExitCode || string(out) != fail.Stderr {
		t.Errorf("pasted: %v, %q; run: %d, %q", pasted, out, fail.ExitCode, fail.Stderr)
	}
}

func TestMissingCommand(t *testing.T) {
	_, err := execx.Host().Run(t.Context(), execx.Cmd{Path: "kplab-no-such-tool"})
	var fail *execx.Error
	if !errors.Is(err, exec.ErrNotFound) || !errors.As(err, &fail) || fail.ExitCode != -1 {
		t.Fatalf("got %v", err)
	}
	if _, err = execx.Host().Run(t.Context(), execx.Cmd{Path: "/no/such/tool"}); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}

func TestContextKills(t *testing.T) {
	nettest.LeakCheck(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := execx.Host().Run(ctx, execx.Cmd{Path: "sleep", Args: []string{"60"}})
	var fail *execx.Error
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &fail) || fail.ExitCode != -1 {
		t.Fatalf("got %v", err)
	}
}

func TestInRunsInsideTheNamespace(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	ns := nettest.NewNS(t)
	res, err := execx.In(ns).Run(t.Context(), execx.Cmd{Path: "readlink", Args: []string{"/proc/self/ns/net"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("net:[%d]\n", ns.Inode()); string(res.Stdout) != want {
		t.Errorf("in %q, want %q", res.Stdout, want)
	}
}

func TestFake(t *testing.T) {
	run := func(f *execx.Fake, stdin string, line ...string) (execx.Result, error) {
		return f.Run(t.Context(), execx.Cmd{Path: line[0], Args: line[1:], Stdin: []byte(stdin)})
	}
	f := execx.NewFake(
		execx.Step{Line: "iptables-save -t nat", Stdout: "*nat\nCOMMIT\n"},
		execx.Step{Line: "iptables-restore --noflush", Stdin: execx.StdinHas("*nat", "COMMIT")},
		execx.Step{Line: "iptables -S", Stderr: "no such chain\n", ExitCode: 1},
		execx.Step{Line: "nft -f -", Err: exec.ErrNotFound},
	)
	if res, err := run(f, "", "iptables-save", "-t", "nat"); err != nil || string(res.Stdout) != "*nat\nCOMMIT\n" {
		t.Errorf("got %q, %v", res.Stdout, err)
	}
	if _, err := run(f, "*nat\nCOMMIT\n", "iptables-restore", "--noflush"); err != nil {
		t.Error(err)
	}
	var fail *execx.Error
	if _, err := run(f, "", "iptables", "-S"); !errors.As(err, &fail) || fail.ExitCode != 1 || fail.Stderr != "no such chain\n" {
		t.Errorf("got %v", err)
	}
	if err := f.Done(); err == nil || !strings.Contains(err.Error(), "did not come: nft -f -") {
		t.Errorf("got %v", err)
	}
	if _, err := run(f, "", "nft", "-f", "-"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if err := f.Done(); err != nil {
		t.Error(err)
	}
	if n := len(f.Ran()); n != 4 {
		t.Errorf("ran %d commands", n)
	}
	if _, err := run(f, "", "rm", "-rf", "/"); err == nil {
		t.Error("an unexpected command passed")
	}
	if err := f.Done(); err == nil {
		t.Error("the unexpected command is forgotten")
	}
	g := execx.NewFake(execx.Step{Line: "cat", Stdin: execx.StdinIs("a")})
	if _, err := run(g, "b", "cat"); err == nil || g.Done() == nil {
		t.Errorf("wrong input passed: %v", err)
	}
}
