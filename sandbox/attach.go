// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// Attach connects to the streams of a running process until it ends, ctx does, or
// the output cannot be written any more. As with Exec, a Read of spec.Stdin that
// hangs is the caller's to end.
func (p *Process) Attach(ctx context.Context, spec AttachSpec) error {
	if !p.running() {
		return fmt.Errorf("attach to container %s: %w", p.container, ErrNotRunning)
	}
	conn, err := p.dial()
	if err != nil {
		return fmt.Errorf("attach to container %s: %w", p.container, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	a := attached{conn: conn}
	if spec.Stdin != nil {
		go a.copyIn(spec.Stdin)
	}
	resizing, stopResizing := context.WithCancel(ctx)
	var resizer sync.WaitGroup
	if spec.Resize != nil {
		resizer.Go(func() { a.resize(resizing, spec.Resize) })
	}
	err = a.copyOut(spec)
	stopResizing()
	resizer.Wait()
	_ = conn.Close() // a second close only fails
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// dial connects to the shim. The socket's path may be longer than a socket address
// holds, so it goes through the directory's descriptor.
func (p *Process) dial() (net.Conn, error) {
	dir, err := os.Open(p.dir)
	if err != nil {
		return nil, err
	}
	path := "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + reexec.AttachSocket
	conn, err := net.Dial("unixpacket", path)
	return conn, errors.Join(err, dir.Close())
}

// attached is one connection to a shim.
type attached struct {
	conn net.Conn
	mu   sync.Mutex // of writes
}

func (a *attached) write(kind byte, data []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, err := a.conn.Write(append([]byte{kind}, data...))
	return err
}

// copyIn sends input, and its end.
func (a *attached) copyIn(r io.Reader) {
	buf := make([]byte, reexec.MaxFrame)
	for {
		n, err := r.Read(buf)
		if n > 0 && a.write(reexec.FrameStdin, buf[:n]) != nil {
			return
		}
		if err != nil {
			_ = a.write(reexec.FrameStdin, nil) // the process may have ended
			return
		}
	}
}

// resize sends sizes until ctx ends.
func (a *attached) resize(ctx context.Context, sizes <-chan Size) {
	for {
		select {
		case <-ctx.Done():
			return
		case s, ok := <-sizes:
			if !ok {
				return
			}
			msg := []byte{byte(s.Width >> 8), byte(s.Width), byte(s.Height >> 8), byte(s.Height)}
			if a.write(reexec.FrameResize, msg) != nil {
				return
			}
		}
	}
}

// copyOut writes output until the shim closes the connection.
func (a *attached) copyOut(spec AttachSpec) error {
	buf := make([]byte, 1+reexec.MaxFrame)
	served := false
	for {
		n, err := a.conn.Read(buf)
		if errors.Is(err, unix.ECONNRESET) {
			// The shim has ended without reading all input; its output comes first.
			n, err = a.conn.Read(buf)
		}
		if n == 0 || err != nil {
			switch over := err == nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed); {
			case !served && (over || errors.Is(err, unix.ECONNRESET)):
				return ErrNotRunning // it ended before the shim took this client in
			case over:
				return nil
			}
			return err
		}
		served = true
		var to io.Writer
		switch kind := buf[0]; {
		case kind == reexec.FrameStdout, kind == reexec.FrameEarlyStdout && spec.Early:
			to = spec.Stdout
		case kind == reexec.FrameStderr, kind == reexec.FrameEarlyStderr && spec.Early:
			to = spec.Stderr
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(buf[1:n]); err != nil {
			return err
		}
	}
}
