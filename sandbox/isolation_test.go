// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/sandbox"
)

// Each attempt is a script that must print "kept" when the container cannot do
// what it tries. They run in both kinds of container: one with a process, joined,
// and one without.
func attempts(hostPid string) map[string]string {
	refuse := func(command string) string { return "if " + command + "; then echo broke out; else echo kept; fi 2>&1" }
	return map[string]string{
		"write /usr":            refuse("touch /usr/x 2>/dev/null"),
		"write a program":       refuse("sh -c ': >> /usr/bin/env' 2>/dev/null"),
		"remount /usr":          refuse("mount -o remount,rw,bind /usr 2>/dev/null"),
		"mount a tmpfs":         refuse("mount -t tmpfs x /mnt 2>/dev/null"),
		"unmount a mask":        refuse("umount /proc/kcore 2>/dev/null"),
		"new user namespace":    refuse("unshare -Ur true 2>/dev/null"),
		"new mount namespace":   refuse("unshare -m true 2>/dev/null"),
		"see the host's home":   refuse("ls -A /root /home | grep -v '^/' | grep -q ."),
		"see /work or /farm":    refuse("ls -d /work /farm /boot /media /var/lib/dpkg /lost+found 2>/dev/null"),
		"read shadow":           refuse("cat /etc/shadow /etc/gshadow /etc/machine-id /etc/fstab 2>/dev/null"),
		"see ssl keys":          refuse("ls /etc/ssl/private 2>/dev/null"),
		"host users":            refuse("grep -q sshd /etc/passwd"),
		"see the host's run":    refuse("ls -A /run | grep -v -x -e lock -e mount | grep -q ."),
		"see host processes":    refuse("ls -d /proc/" + hostPid + " 2>/dev/null"),
		"signal a host process": refuse("kill -0 " + hostPid + " 2>/dev/null"),
		"leave by /proc/1/root": refuse("ls /proc/1/root/work 2>/dev/null"),
		"use a host disk":       refuse("sh -c 'mknod /tmp/d b 254 0 && head -c1 /tmp/d' 2>/dev/null"),
		"make a device in /dev": refuse("mknod /dev/d b 254 0 2>/dev/null"),
		"device on shm":         refuse("sh -c 'mknod /dev/shm/n c 1 5 && head -c1 /dev/shm/n' 2>/dev/null"),
		"write sysctls":         refuse("sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward' 2>/dev/null"),
		"write sysrq":           refuse("sh -c 'echo h > /proc/sysrq-trigger' 2>/dev/null"),
		"write core_pattern":    refuse("sh -c 'echo x > /proc/sys/kernel/core_pattern' 2>/dev/null"),
		"write /sys":            refuse("sh -c 'echo 1 > /sys/kernel/profiling || touch /sys/x' 2>/dev/null"),
		"read kernel memory":    refuse("sh -c 'head -c1 /proc/kcore | grep -q .' 2>/dev/null"),
		"see cgroups":           refuse("ls -A /sys/fs/cgroup 2>/dev/null | grep -q ."),
		"read firmware":         refuse("ls -A /sys/firmware | grep -q ."),
		"load a module":         refuse("modprobe dummy 2>/dev/null"),
		"change the clock":      refuse("date -s 2001-01-01 2>/dev/null >/dev/null"),
		"change the host name":  refuse("hostname other 2>/dev/null"),
		"raise capabilities":    refuse("grep -E '^Cap(Inh|Amb)' /proc/self/status | grep -qv 0000000000000000$"),
	}
}

func TestIsolation(t *testing.T) {
	r := open(t)
	s := create(t, r, "jail")
	listenAbstract(t)
	start(t, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	hostPid := strconv.Itoa(os.Getpid())
	for _, container := range []string{"app", "web"} {
		in := func(spec *sandbox.ExecSpec) { spec.Container = container }
		// All in one shell: what one attempt breaks, the next ones may use.
		var all strings.Builder
		tries := attempts(hostPid)
		for name, script := range tries {
			fmt.Fprintf(&all, "echo '%s:' $(%s)\n", strings.ReplaceAll(name, "'", ""), script)
		}
		out := run(t, s, all.String(), in)
		if n := strings.Count(out, ": kept\n"); n != len(tries) || strings.Count(out, "\n") != n {
			t.Errorf("%s: %d of %d attempts were stopped:\n%s", container, n, len(tries), out)
		}
		t.Run(container+"/capabilities", func(t *testing.T) {
			out := run(t, s, "grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp):' /proc/self/status", in)
			for _, want := range []string{"CapPrm:\t00000000a80425fb", "CapEff:\t00000000a80425fb", "CapBnd:\t00000000a80425fb", "NoNewPrivs:\t1", "Seccomp:\t2"} {
				if !strings.Contains(out, want) {
					t.Errorf("no %q in:\n%s", want, out)
				}
			}
		})
		t.Run(container+"/links", func(t *testing.T) {
			if out := run(t, s, "ls /sys/class/net; sed 1,2d /proc/net/dev | wc -l", in); out != "lo\n1\n" {
				t.Errorf("links:\n%s", out)
			}
		})
		t.Run(container+"/abstract sockets", func(t *testing.T) {
			if out := run(t, s, "grep -c kplab-test-abstract /proc/net/unix", in); out != "0\nexit code 1\n" {
				t.Errorf("host sockets:\n%s", out)
			}
		})
		t.Run(container+"/descriptors", func(t *testing.T) {
			if out := run(t, s, "ls /proc/self/fd | wc -l", in); out != "4\n" { // and the directory
				t.Errorf("open descriptors: %s", out)
			}
		})
		t.Run(container+"/program", func(t *testing.T) {
			// The container's program is this executable: it must not be writable.
			var out bytes.Buffer
			code, err := s.Exec(t.Context(), sandbox.ExecSpec{
				Container: container, Args: []string{"/bin/sh", "-c", "for p in /proc/[0-9]*; do : >> $p/exe; done"}, Stderr: &out,
			})
			if err != nil || code == 0 {
				t.Errorf("code %d, %v: %s", code, err, out.String())
			}
		})
	}
}

// A container whose program is /proc/self/exe becomes a second kplab inside. It
// must not be able to change the file.
func TestOwnProgramIsReadOnly(t *testing.T) {
	r := open(t)
	var st unix.Statfs_t
	path := filepath.Join(r.Dir(), "netns", ".exe")
	if err := unix.Statfs(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Flags&unix.ST_RDONLY == 0 {
		t.Error("the program can be written where containers are started from")
	}
	if f, err := os.OpenFile(path, os.O_WRONLY, 0); err == nil {
		_ = f.Close()
		t.Error("opened for writing")
	}
}

func TestWhatAContainerHas(t *testing.T) {
	r := open(t)
	s := create(t, r, "tools")
	start(t, s, sandbox.ProcessSpec{Container: "app"}, "exec sleep 1000")
	for _, container := range []string{"app", "web"} {
		in := func(spec *sandbox.ExecSpec) { spec.Container = container }
		for script, want := range map[string]string{
			"ls /dev | tr '\\n' ' '":                               "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero ",
			"echo x > /tmp/f && cat /tmp/f":                        "x\n",
			"echo x > /dev/shm/f && cat /dev/shm/f":                "x\n",
			"echo x > /f && mkdir /data && echo ok":                "ok\n",
			"head -c 3 /dev/zero | od -An -tx1":                    " 00 00 00\n",
			"stat -c %a /tmp /root":                                "1777\n700\n",
			"umask; ulimit -c":                                     "0022\n0\n",
			"env | sort | grep -v -E '^(PWD|OLDPWD|SHLVL|_)='":     "HOME=/root\nHOSTNAME=tools\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
			"cat /etc/nsswitch.conf | head -1; id -un":             "passwd: files\nroot\n",
			"awk 'BEGIN{print 1+1}'":                               "2\n",
			"ls /proc | grep -c '^[0-9]*$' | awk '{print ($1<9)}'": "1\n",
		} {
			if out := run(t, s, script, in); out != want {
				t.Errorf("%s: %s:\ngot  %q\nwant %q", container, script, out, want)
			}
		}
	}
}

func TestRightsOnDemand(t *testing.T) {
	r := open(t)
	s := create(t, r, "rights")
	caps := "grep -E '^CapEff' /proc/self/status | cut -f2"
	for _, tc := range []struct {
		name, script, want string
		change             func(*sandbox.ExecSpec)
	}{
		{"drop all", caps, "0000000000000000\n", func(s *sandbox.ExecSpec) { s.Capabilities.Drop = []string{"ALL"} }},
		{"drop all add one", caps, "0000000000000400\n", func(s *sandbox.ExecSpec) {
			s.Capabilities = sandbox.Capabilities{Drop: []string{"all"}, Add: []string{"net_bind_service"}}
		}},
		{"add", caps, "00000000a80435fb\n", func(s *sandbox.ExecSpec) { s.Capabilities.Add = []string{"CAP_NET_ADMIN"} }},
		{"user", "id; " + caps + "; cat /proc/self/status | grep CapBnd | cut -f2; echo $HOME", "uid=1000(user) gid=2000(user) groups=2000(user),3000\n0000000000000000\n00000000a80425fb\n/\n",
			func(s *sandbox.ExecSpec) { s.User = sandbox.User{UID: 1000, GID: 2000, Groups: []uint32{3000}} }},
		{"chown", "touch /f && chown 1:1 /f && stat -c %u /f", "1\n", func(*sandbox.ExecSpec) {}},
		{"a user may bind port 80", `perl -MIO::Socket::INET -e 'print IO::Socket::INET->new(LocalPort => 80, Listen => 1) ? "bound\n" : "refused: $!\n"'`, "bound\n",
			func(s *sandbox.ExecSpec) { s.User = sandbox.User{UID: 1000, GID: 1000} }},
		{"escalation", "grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status; unshare -Ur true 2>/dev/null || echo refused", "NoNewPrivs:\t0\nSeccomp:\t2\nrefused\n", func(s *sandbox.ExecSpec) { s.AllowPrivilegeEscalation = true }},
		{"privileged", "mount -t tmpfs x /mnt && echo 1 > /proc/sys/net/ipv4/ip_forward && cat /proc/sys/net/ipv4/ip_forward", "1\n",
			func(s *sandbox.ExecSpec) { s.Privileged = true }},
		{"read-only root", "touch /x 2>/dev/null || echo refused", "refused\n", func(s *sandbox.ExecSpec) { s.ReadOnlyRoot = true }},
		{"working directory", "pwd", "/a/b\n", func(s *sandbox.ExecSpec) { s.WorkingDir = "/a/b" }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if strings.Contains(tc.name, "user") || tc.name == "chown" {
				nettest.Need(t, "users")
			}
			if out := run(t, s, tc.script, tc.change); out != tc.want {
				t.Errorf("got %q, want %q", out, tc.want)
			}
		})
	}
	if _, err := s.Exec(t.Context(), sandbox.ExecSpec{Container: "web", Args: []string{"true"}, Capabilities: sandbox.Capabilities{Add: []string{"FLY"}}}); err == nil || !strings.Contains(err.Error(), "FLY") {
		t.Errorf("an unknown capability: %v", err)
	}
}

func TestFilesAndMounts(t *testing.T) {
	r := open(t)
	s := create(t, r, "files")
	volume := t.TempDir()
	if err := os.WriteFile(filepath.Join(volume, "index.html"), []byte("from the volume\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(t.TempDir(), "log")
	p := start(t, s, sandbox.ProcessSpec{
		LogPath: log,
		Files: map[string][]byte{
			"/etc/hosts": []byte("10.0.0.9 files\n"), "/etc/resolv.conf": []byte("nameserver 10.96.0.10\n"), "/etc/hostname": []byte("files\n"),
		},
		Mounts: []sandbox.Mount{
			{Source: volume, Target: "/usr/share/nginx/html"},
			{Source: volume, Target: "/ro", ReadOnly: true},
			{Source: filepath.Join(volume, "index.html"), Target: "/etc/one.file", ReadOnly: true},
		},
	}, `cat /etc/hosts /etc/resolv.conf /etc/hostname /usr/share/nginx/html/index.html /etc/one.file
		echo new > /usr/share/nginx/html/new; touch /ro/x 2>/dev/null || echo refused
		ls -d /usr/share/zoneinfo; touch /usr/share/zoneinfo/x 2>/dev/null || echo refused`)
	await(t, p)
	want := "stdout F 10.0.0.9 files|stdout F nameserver 10.96.0.10|stdout F files|stdout F from the volume|stdout F from the volume|stdout F refused|stdout F /usr/share/zoneinfo|stdout F refused"
	if got := strings.Join(logOf(t, log), "|"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if data, err := os.ReadFile(filepath.Join(volume, "new")); err != nil || string(data) != "new\n" {
		t.Errorf("the container's write to the volume: %q, %v", data, err)
	}
	for _, m := range []sandbox.Mount{{Source: "x", Target: "/y"}, {Source: "/tmp", Target: "/"}, {Source: "/does/not/exist", Target: "/y"}} {
		_, err := s.Start(t.Context(), sandbox.ProcessSpec{Container: "bad", Args: []string{"true"}, Mounts: []sandbox.Mount{m}})
		if err == nil {
			t.Errorf("mount %+v was accepted", m)
		}
	}
}

func TestBusybox(t *testing.T) {
	nettest.Need(t, "busybox")
	r := open(t)
	s := create(t, r, "box")
	start(t, s, sandbox.ProcessSpec{Container: "app", Busybox: true, Files: map[string][]byte{"/etc/hosts": []byte("127.0.0.1 localhost\n127.0.0.7 seven\n")}}, "exec sleep 1000")
	for _, tc := range []struct{ script, want string }{
		{"busybox | head -1 | cut -c1-7", "BusyBox\n"},
		{"readlink -f /usr/bin/ls; readlink -f /sbin/ip", "/usr/bin/busybox\n/sbin/busybox\n"},
		{"ls --help 2>&1 | head -1 | cut -c1-7", "BusyBox\n"},
		{"command -v curl bash python3 perl || echo none", "none\n"},
		{"ping -c1 -W1 seven >/dev/null && echo pinged", "pinged\n"},
		{"nc -l -p 81 -e echo hi & until wget -qO- http://127.0.0.1:81 2>/dev/null | grep -q x || [ $? = 1 ]; do :; done; echo up", "up\n"},
	} {
		out := run(t, s, tc.script, func(spec *sandbox.ExecSpec) {
			spec.Container = "app"
			spec.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin"}
		})
		if out != tc.want {
			t.Errorf("%s: got %q, want %q", tc.script, out, tc.want)
		}
	}
	if out := run(t, s, "ls -l /bin/sh | grep -c busybox", func(spec *sandbox.ExecSpec) { spec.Busybox = true }); out != "1\n" {
		t.Errorf("/bin/sh: %s", out)
	}
}

// listenAbstract opens an abstract socket in the test's own namespace.
func listenAbstract(t *testing.T) {
	t.Helper()
	l, err := net.Listen("unix", "@kplab-test-abstract")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
}
