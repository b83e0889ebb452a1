// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// outcome is what the client saw.
type outcome struct {
	local     netip.AddrPort
	connected bool
	answer    []byte
	err       error // of the socket; nil after a timeout
	timedOut  bool
	took      time.Duration
}

// newMark chooses how the flow is to be known, and for UDP what is sent.
func newMark(proto string, to netip.AddrPort) (mark, []byte, error) {
	if proto != "udp" {
		// Neither 0, which means that the kernel chooses, nor close to the wrap.
		return mark{seq: 1<<24 + rand.Uint32N(1<<31)}, nil, nil
	}
	payload := fmt.Appendf(nil, "%08x kplab trace\n", rand.Uint32())
	if to.Port() == 53 {
		q := new(dns.Msg)
		q.SetQuestion("kubernetes.default.svc.cluster.local.", dns.TypeA)
		q.Id = dns.Id()
		var err error
		if payload, err = q.Pack(); err != nil {
			return mark{}, nil, fmt.Errorf("make a DNS question: %w", err)
		}
	}
	return mark{udp: true, head: payload[:headLen], size: len(payload)}, payload, nil
}

// client is the socket of a request.
type client struct {
	fd      int
	mark    mark
	payload []byte
	to      netip.AddrPort
}

// dial makes the socket in the client's place. Its address is known once it is
// connected.
func dial(p *Place, m mark, payload []byte, to netip.AddrPort) (*client, error) {
	c := &client{fd: -1, mark: m, payload: payload, to: to}
	err := p.ns.Do(func() (err error) {
		typ := unix.SOCK_STREAM
		if m.udp {
			typ = unix.SOCK_DGRAM
		}
		c.fd, err = unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err == nil && !m.udp {
		// The first sequence number of a connection may be set on a socket that is not
		// connected yet; the kernel then draws none.
		err = errors.Join(
			unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1),
			unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, 2), // the queue for sending
			unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ, int(m.seq)),
			unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 0))
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("open a socket in %s: %w", p.Name, err)
	}
	return c, nil
}

func (c *client) close() {
	if c.fd >= 0 {
		_ = unix.Close(c.fd)
		c.fd = -1
	}
}

// grace is what an answer to a packet that was dropped has left to come: a REJECT
// sends its error before it drops.
const grace = 150 * time.Millisecond

// answerTime is how long an application may think about its first bytes once the
// connection stands.
const answerTime = 2 * time.Second

// run sends the request and waits for its end. While it waits it watches the files
// in others; onEvent is called when one of them has something, and says whether
// the packet's end is known.
func (c *client) run(ctx context.Context, timeout time.Duration, others []int, onEvent func() bool) outcome {
	began := time.Now()
	out := outcome{}
	deadline := began.Add(timeout)
	fail := func(err error) outcome {
		out.err, out.took = err, time.Since(began)
		return out
	}
	sa := &unix.SockaddrInet4{Port: int(c.to.Port()), Addr: c.to.Addr().As4()}
	err := unix.Connect(c.fd, sa)
	out.local = c.address()
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return fail(err)
	}
	if c.mark.udp {
		if err := unix.Sendto(c.fd, c.payload, 0, sa); err != nil {
			return fail(err)
		}
	}
	known := false
	wait := func(events int16) (ready bool, err error) {
		for {
			if err := ctx.Err(); err != nil {
				return false, err
			}
			left := time.Until(deadline)
			if left <= 0 {
				return false, nil
			}
			fds := []unix.PollFd{{Fd: int32(c.fd), Events: events}}
			if !known {
				for _, fd := range others {
					fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
				}
			}
			// At most a tenth of a second, so that the context is looked at.
			n, err := unix.Poll(fds, int(min(left, 100*time.Millisecond).Milliseconds())+1)
			if errors.Is(err, unix.EINTR) || (err == nil && n == 0) {
				continue
			} else if err != nil {
				return false, os.NewSyscallError("poll", err)
			}
			if fds[0].Revents != 0 {
				return true, nil
			}
			if onEvent() && !known {
				known = true
				if d := time.Now().Add(grace); d.Before(deadline) {
					deadline = d
				}
			}
		}
	}
	ended := func(ready bool, err error) bool {
		out.timedOut = !ready && err == nil
		return !ready || err != nil
	}
	if !c.mark.udp {
		ready, err := wait(unix.POLLOUT)
		if ended(ready, err) {
			return fail(err)
		}
		if code, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			return fail(errors.Join(err, unix.Errno(code)))
		}
		out.connected, out.local = true, c.address()
		out.took = time.Since(began)
		request := fmt.Sprintf("GET / HTTP/1.1\r\nHost: %s\r\nUser-Agent: kplab-trace\r\nConnection: close\r\n\r\n", c.to)
		if _, err := unix.Write(c.fd, []byte(request)); err != nil {
			return fail(err)
		}
		deadline = time.Now().Add(answerTime)
	}
	buf := make([]byte, 4096)
	for {
		ready, err := wait(unix.POLLIN)
		if ended(ready, err) {
			return fail(err)
		}
		n, err := unix.Read(c.fd, buf)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fail(err)
		}
		out.answer = append(out.answer, buf[:max(n, 0)]...)
		out.took = time.Since(began)
		// One datagram is the answer; of a stream its head is enough.
		if c.mark.udp || n <= 0 || !strings.HasPrefix(string(out.answer), "HTTP/") || strings.Contains(string(out.answer), "\r\n\r\n") {
			return out
		}
	}
}

// address is the socket's own.
func (c *client) address() netip.AddrPort {
	sa, err := unix.Getsockname(c.fd)
	if err != nil {
		return netip.AddrPort{}
	}
	if in, ok := sa.(*unix.SockaddrInet4); ok {
		return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port))
	}
	return netip.AddrPort{}
}
