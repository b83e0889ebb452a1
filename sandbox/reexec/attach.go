// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// The attach socket of a shim is a SOCK_SEQPACKET socket. Each message is a kind
// and its data.
type frameKind byte

// Kinds of messages: the first two to the shim, the others from it.
const (
	frameStdin  frameKind = 'i' // input; without data its end
	frameResize frameKind = 'r' // columns and rows, two bytes each, high byte first
	frameHello  frameKind = 'h' // the client is served
	frameStdout frameKind = 'o'
	frameStderr frameKind = 'e'
	// The same from before the first client, who gets them first of all.
	frameEarlyStdout frameKind = 'O'
	frameEarlyStderr frameKind = 'E'
)

// Kinds of messages for the daemon's side.
const (
	FrameStdin  = byte(frameStdin)
	FrameResize = byte(frameResize)
	FrameHello  = byte(frameHello)
	FrameStdout = byte(frameStdout)
	FrameStderr = byte(frameStderr)

	FrameEarlyStdout = byte(frameEarlyStdout)
	FrameEarlyStderr = byte(frameEarlyStderr)
)

// MaxFrame is the most data that one message carries, in bytes.
const MaxFrame = maxFrame

const maxFrame = 32 << 10

// clientPatience bounds how long a client that does not read may hold up the
// container's output; then it is dropped.
const clientPatience = 5 // seconds

// earlyOutput bounds what is kept for the first client, in bytes.
const earlyOutput = 64 << 10

// clients are those attached to a container.
type clients struct {
	listener int

	mu    sync.Mutex
	conns map[int]struct{}
	// early is the output before the first client, message by message: whoever
	// starts a container to talk to it wants its first word too, and cannot be
	// there in time. nil when nobody is expected, or somebody has come.
	early [][]byte
	kept  int // its bytes
}

// listenClients makes the socket in the current directory. With expected the
// output is kept for the first client.
func listenClients(name string, expected bool) (*clients, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make the attach socket: %w", err)
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return nil, fmt.Errorf("bind the attach socket: %w", err)
	}
	if err := os.Chmod(name, 0o600); err != nil {
		return nil, err
	}
	if err := unix.Listen(fd, 16); err != nil {
		return nil, fmt.Errorf("listen on the attach socket: %w", err)
	}
	c := &clients{listener: fd, conns: make(map[int]struct{})}
	if expected {
		c.early = [][]byte{}
	}
	return c, nil
}

// accept serves clients until the shim exits, which ends its goroutines too:
// input goes to stdin (nil drops it), sizes to terminal (nil drops them). With
// once the input ends when the first client that sent any has gone.
func (c *clients) accept(stdin, terminal *os.File, once bool) {
	go func() {
		for {
			conn, _, err := unix.Accept4(c.listener, unix.SOCK_CLOEXEC)
			switch {
			case err == nil:
				_ = unix.SetsockoptTimeval(conn, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: clientPatience})
				c.welcome(conn)
				go c.serve(conn, stdin, terminal, once)
			case !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNABORTED):
				return
			}
		}
	}()
}

// welcome takes a client in. It is told so: one whose connection ends without a
// word came when the shim was about to go, and has missed everything.
func (c *clients) welcome(conn int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[conn] = struct{}{}
	for _, msg := range append([][]byte{{byte(frameHello)}}, c.early...) {
		if unix.Send(conn, msg, unix.MSG_NOSIGNAL) != nil {
			break // its reader sees the end and closes it
		}
	}
	c.early = nil
}

// serve reads what one client sends.
func (c *clients) serve(conn int, stdin, terminal *os.File, once bool) {
	buf := make([]byte, 1+maxFrame)
	fed := false
	for {
		n, err := unix.Read(conn, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		switch data := buf[1:n]; frameKind(buf[0]) {
		case frameStdin:
			fed = true
			if stdin == nil {
				continue
			}
			if len(data) == 0 {
				if terminal == nil && once {
					_ = stdin.Close() // a second close only fails
				}
				continue
			}
			_, _ = stdin.Write(data) // the process may have closed its end
		case frameResize:
			if terminal != nil && len(data) == 4 {
				setSize(terminal, uint16(data[0])<<8|uint16(data[1]), uint16(data[2])<<8|uint16(data[3]))
			}
		}
	}
	if fed && once && terminal == nil && stdin != nil {
		_ = stdin.Close()
	}
	c.drop(conn)
}

// drop forgets a client.
func (c *clients) drop(conn int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.conns[conn]; ok {
		delete(c.conns, conn)
		_ = unix.Close(conn)
	}
}

// send gives output to every client.
func (c *clients) send(kind frameKind, data []byte) {
	msg := append([]byte{byte(kind)}, data...)
	c.mu.Lock()
	var list []int
	for conn := range c.conns {
		list = append(list, conn)
	}
	if c.early != nil {
		msg[0] = byte(frameEarlyStdout)
		if kind == frameStderr {
			msg[0] = byte(frameEarlyStderr)
		}
		c.early, c.kept = append(c.early, msg), c.kept+len(msg)
		for c.kept > earlyOutput {
			c.kept -= len(c.early[0])
			c.early = c.early[1:]
		}
	}
	c.mu.Unlock()
	for _, conn := range list {
		if err := unix.Send(conn, msg, unix.MSG_NOSIGNAL); err != nil {
			// Its reader sees the end and closes it.
			_ = unix.Shutdown(conn, unix.SHUT_RDWR)
		}
	}
}

// setSize sets a terminal's size; a size that it refuses changes nothing.
func setSize(terminal *os.File, columns, rows uint16) {
	raw, err := terminal.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns})
	})
}
