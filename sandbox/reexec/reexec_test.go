// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCapabilitySet(t *testing.T) {
	const byDefault = 0xa80425fb
	for _, tc := range []struct {
		add, drop []string
		want      uint64
	}{
		{nil, nil, byDefault},
		{[]string{"NET_ADMIN"}, nil, byDefault | 1<<unix.CAP_NET_ADMIN},
		{[]string{"cap_net_admin"}, []string{"ALL"}, 1 << unix.CAP_NET_ADMIN},
		{nil, []string{"all"}, 0},
		{nil, []string{"NET_RAW", "CAP_CHOWN"}, byDefault &^ (1<<unix.CAP_NET_RAW | 1<<unix.CAP_CHOWN)},
		{[]string{"ALL"}, nil, AllCapabilities()},
		{[]string{"ALL"}, []string{"SYS_ADMIN"}, AllCapabilities() &^ (1 << unix.CAP_SYS_ADMIN)},
	} {
		if got, err := CapabilitySet(tc.add, tc.drop); err != nil || got != tc.want {
			t.Errorf("add %v drop %v: %x, %v, want %x", tc.add, tc.drop, got, err, tc.want)
		}
	}
	if _, err := CapabilitySet([]string{"FLY"}, nil); err == nil {
		t.Error("FLY was accepted")
	}
	if n := len(capabilityNames()); n != unix.CAP_LAST_CAP+1 {
		t.Errorf("%d names for %d capabilities", n, unix.CAP_LAST_CAP+1)
	}
}

func TestLogRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, err := openLog(path)
	if err != nil {
		t.Fatal(err)
	}
	s := log.stream("stdout")
	for _, part := range []string{"one\ntw", "o\n\n", strings.Repeat("x", maxLine), "\n", strings.Repeat("y", maxLine+1) + "\nrest"} {
		s.write([]byte(part))
	}
	s.end()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.SplitSeq(strings.TrimSuffix(string(data), "\n"), "\n") {
		at, rest, _ := strings.Cut(line, " ")
		if _, err := time.Parse(time.RFC3339Nano, at); err != nil {
			t.Error(err)
		}
		got = append(got, rest)
	}
	want := []string{
		"stdout F one", "stdout F two", "stdout F ", "stdout F " + strings.Repeat("x", maxLine),
		"stdout P " + strings.Repeat("y", maxLine), "stdout F y", "stdout P rest",
	}
	if strings.Join(got, "|") != strings.Join(want, "|") {
		t.Errorf("got %d records:\n%.300q\nwant\n%.300q", len(got), got, want)
	}
}

// TestFilter runs the filter on made-up system calls, as the kernel would.
func TestFilter(t *testing.T) {
	arch, ok := auditArch()
	if !ok {
		t.Skip("no filter on this architecture")
	}
	refuse := uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.EPERM)
	absent := uint32(unix.SECCOMP_RET_ERRNO) | uint32(unix.ENOSYS)
	for _, tc := range []struct {
		name     string
		nr, arch uint32
		arg      uint32
		want     uint32
	}{
		{"read", unix.SYS_READ, arch, 0, unix.SECCOMP_RET_ALLOW},
		{"execve", unix.SYS_EXECVE, arch, 0, unix.SECCOMP_RET_ALLOW},
		{"keyctl", unix.SYS_KEYCTL, arch, 0, refuse},
		{"mount", unix.SYS_MOUNT, arch, 0, refuse},
		{"fork", unix.SYS_CLONE, arch, uint32(unix.SIGCHLD), unix.SECCOMP_RET_ALLOW},
		{"thread", unix.SYS_CLONE, arch, unix.CLONE_VM | unix.CLONE_FS | unix.CLONE_THREAD, unix.SECCOMP_RET_ALLOW},
		{"user namespace by clone", unix.SYS_CLONE, arch, unix.CLONE_NEWUSER | uint32(unix.SIGCHLD), refuse},
		{"user namespace by unshare", unix.SYS_UNSHARE, arch, unix.CLONE_NEWUSER, refuse},
		{"unshare files", unix.SYS_UNSHARE, arch, unix.CLONE_FILES, unix.SECCOMP_RET_ALLOW},
		{"clone3", unix.SYS_CLONE3, arch, 0, absent},
		{"another architecture", unix.SYS_READ, unix.AUDIT_ARCH_I386, 0, absent},
		{"the last one refused", refused()[len(refused())-1], arch, 0, refuse},
	} {
		data := make([]byte, 64)
		binary.LittleEndian.PutUint32(data[dataNumber:], tc.nr)
		binary.LittleEndian.PutUint32(data[dataArch:], tc.arch)
		binary.LittleEndian.PutUint32(data[dataArg0:], tc.arg)
		if got := interpret(t, program(arch), data); got != tc.want {
			t.Errorf("%s: %x, want %x", tc.name, got, tc.want)
		}
	}
}

// interpret runs a filter.
func interpret(t *testing.T, p []unix.SockFilter, data []byte) uint32 {
	t.Helper()
	var acc uint32
	for pc := 0; pc < len(p); pc++ {
		in := p[pc]
		yes := false
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			acc = binary.LittleEndian.Uint32(data[in.K:])
			continue
		case unix.BPF_RET | unix.BPF_K:
			return in.K
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			yes = acc == in.K
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			yes = acc >= in.K
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			yes = acc&in.K != 0
		default:
			t.Fatalf("instruction %x", in.Code)
		}
		if yes {
			pc += int(in.Jt)
		} else {
			pc += int(in.Jf)
		}
	}
	t.Fatal("ran off the end")
	return 0
}

func TestIdentify(t *testing.T) {
	id, err := Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	fd, err := id.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
	other := ID{Pid: id.Pid, Start: id.Start + 1}
	if _, err := other.Open(); err == nil {
		t.Error("opened a process that started at another time")
	}
	if err := (ID{}).Signal(0); err == nil {
		t.Error("signalled nobody")
	}
}

func TestEnvironment(t *testing.T) {
	env := environment(&Process{Env: []string{"A=1", "PATH=/x"}, UID: 5, TTY: true}, "host")
	got := strings.Join(env, " ")
	if got != "A=1 PATH=/x HOSTNAME=host HOME=/ TERM=xterm" {
		t.Errorf("got %s", got)
	}
}

func TestNothingOfTheHostsSecrets(t *testing.T) {
	for _, p := range sharedEtc() {
		for _, secret := range []string{"/etc/shadow", "/etc/ssl/private", "/etc/passwd", "/etc/ssh", "/etc/machine-id"} {
			if p == secret || strings.HasPrefix(secret, p+"/") {
				t.Errorf("%s shares %s", p, secret)
			}
		}
	}
	if !bytes.Contains([]byte(passwd(1234, 1)), []byte("user:x:1234:1:")) {
		t.Error("a numeric user has no name")
	}
}
