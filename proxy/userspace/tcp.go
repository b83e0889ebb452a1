// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// acceptPause is the wait after an accept that failed for want of descriptors or memory.
const acceptPause = 50 * time.Millisecond

// acceptTCP accepts connections until the listener closes. When all slots are taken it
// waits, and clients wait in the listener's queue.
func (s *server) acceptTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || s.ctx.Err() != nil {
				return
			}
			s.log.Error("a connection was not accepted", "error", err)
			pause := time.NewTimer(acceptPause)
			select {
			case <-s.ctx.Done():
			case <-pause.C:
			}
			pause.Stop()
			continue
		}
		in, ok := c.(*net.TCPConn)
		if !ok || !s.flows.take(s.ctx) {
			_ = c.Close()
			continue
		}
		s.flows.wg.Go(func() {
			defer s.flows.release()
			s.carry(in)
		})
	}
}

// carry connects an accepted client to a backend and copies both ways until both have
// ended. Without a backend the client finds its connection closed.
func (s *server) carry(in *net.TCPConn) {
	defer func() { _ = in.Close() }()
	client, ok := addrPort(in.RemoteAddr())
	if !ok {
		return
	}
	c, _, err := s.dial("tcp", client.Addr())
	if err != nil {
		s.log.Debug("a client is sent away", "client", client.String(), "error", err)
		return
	}
	out, ok := c.(*net.TCPConn)
	if !ok {
		_ = c.Close()
		return
	}
	defer func() { _ = out.Close() }()
	// The end of the mode ends the copies.
	defer context.AfterFunc(s.flows.ctx, func() {
		_ = in.Close()
		_ = out.Close()
	})()
	var wg sync.WaitGroup
	wg.Go(func() { half(out, in) })
	half(in, out)
	wg.Wait()
}

// half copies one direction. Between two TCP sockets io.Copy moves bytes by splice(2),
// so that they are copied inside the kernel only. The end of what src sends is passed
// on, and the other direction lives; a reset is passed on as a reset.
func half(dst, src *net.TCPConn) {
	_, err := io.Copy(dst, src)
	if err == nil {
		_ = dst.CloseWrite() // fails when dst is gone, and then all is said
		return
	}
	if errors.Is(err, unix.ECONNRESET) {
		_, _ = dst.SetLinger(0), src.SetLinger(0)
	}
	_ = dst.Close()
	_ = src.Close()
}
