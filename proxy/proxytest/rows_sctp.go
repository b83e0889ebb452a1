// SPDX-License-Identifier: Apache-2.0

//nolint:thelper // a row is a test and not a helper: its own lines are what a failure names
package proxytest

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/nettest"
)

// sctpRows are about the third protocol of Services. The standard library does not know
// it, so these use the kernel's sockets.
func sctpRows() []Row {
	const port = 9393
	overSCTP := func(s *corev1.Service) {
		for i := range s.Spec.Ports {
			s.Spec.Ports[i].Protocol = corev1.ProtocolSCTP
		}
	}
	return []Row{
		{ID: "C23", Title: "SCTP by cluster address and nodePort", Run: func(t *testing.T, l *Lab) {
			l.notIn(t, "userspace", "the mode never knew SCTP")
			if err := nettest.Lacks(t.Context(), "sctp"); err != nil {
				l.reason = fmt.Sprintf("needs sctp: %v", err)
				nettest.Need(t, "sctp")
			}
			serveSCTP(t, l.B1, port)
			serveSCTP(t, l.B2, port)
			svc := Service("sctp", NodePort(30094), overSCTP)
			l.Apply(t, []*corev1.Service{svc}, Slice(svc, []int32{port}, Ready(l.B1), Ready(l.B2)))
			seen := map[string]bool{}
			for range 12 {
				name, err := askSCTP(t, l.C1, netip.MustParseAddrPort(vip+":80"))
				if err != nil {
					t.Fatalf("cluster address: %v", err)
				}
				seen[name] = true
			}
			if !seen["b1"] || !seen["b2"] {
				t.Errorf("12 associations met %v", seen)
			}
			if name, err := askSCTP(t, l.X, netip.AddrPortFrom(l.N1.IP, 30094)); err != nil || (name != "b1" && name != "b2") {
				t.Errorf("nodePort: %q, %v", name, err)
			}
		}},
	}
}

func sctpSocket(t *testing.T, h *Host) int {
	t.Helper()
	fd := -1
	in(t, h.NS, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return err
	})
	return fd
}

// serveSCTP answers on a port of a backend with its name.
func serveSCTP(t *testing.T, h *Host, port int) {
	t.Helper()
	fd := sctpSocket(t, h)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: h.IP.As4(), Port: port}), unix.Listen(fd, 16)); err != nil {
		t.Fatal(err)
	}
	var end atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !end.Load() {
			ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if n, err := unix.Poll(ready, 100); n <= 0 || err != nil {
				continue
			}
			c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			_, _ = unix.Write(c, []byte(h.Name))
			_ = unix.Close(c)
		}
	}()
	t.Cleanup(func() {
		end.Store(true)
		<-done
		_ = unix.Close(fd)
	})
}

// askSCTP makes an association and reads who answers.
func askSCTP(t *testing.T, from *Host, to netip.AddrPort) (string, error) {
	t.Helper()
	fd := sctpSocket(t, from)
	defer func() { _ = unix.Close(fd) }()
	wait := unix.NsecToTimeval((5 * quiet()).Nanoseconds())
	for _, opt := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, opt, &wait); err != nil {
			return "", err
		}
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	buf := make([]byte, 64)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return "", fmt.Errorf("read: %w", err)
	}
	return string(buf[:n]), nil
}
