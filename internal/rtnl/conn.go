// SPDX-License-Identifier: Apache-2.0

// Package rtnl writes links, addresses, routes and neighbours to the kernel in
// batches: many messages in one system call, one acknowledgement for all.
//
// A pod's wiring is a dozen small writes in two namespaces. One system call and
// one answer for each, as general libraries do it, costs as much again as the
// kernel's own work. A [Batch] collects the writes, [Conn.Do] sends them; each
// message that fails is reported with what it was about and with the kernel's
// own explanation.
//
// A connection belongs to the network namespace in which it was made and may be
// used from any goroutine. Reading whole tables is not this package's job.
package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Conn is a route netlink socket. It is safe for concurrent use.
type Conn struct {
	mu   sync.Mutex
	file *os.File
	fd   int
	seq  uint32
	buf  []byte
}

// Dial opens a connection in the namespace of the calling thread.
func Dial() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a route netlink socket: %w", err)
	}
	// Without these two the kernel still answers, only with less: the first adds
	// its explanation of an error, the second leaves out a copy of the message.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	// The kernel answers before sendmsg returns. The limit turns an answer that
	// was lost (no memory for it) into an error and not a hang.
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		return nil, errors.Join(fmt.Errorf("limit the wait for netlink answers: %w", err), unix.Close(fd))
	}
	return &Conn{fd: fd, file: os.NewFile(uintptr(fd), "rtnetlink"), buf: make([]byte, 8<<10)}, nil
}

// DialIn opens a connection in ns, which stays the caller's to close.
func DialIn(ns *netns.NS) (*Conn, error) {
	var c *Conn
	err := ns.Do(func() error {
		var err error
		c, err = Dial()
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Close closes the socket.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fd = -1
	return c.file.Close()
}

// Do sends all messages of the batch in one system call. The kernel works on them
// in order and goes on after one that fails; the error joins the failures, each
// an [*Error], without those that the message tolerates. What the batch asked for
// is filled in when Do returns. A batch is used once.
func (c *Conn) Do(b *Batch) error {
	if len(b.ops) == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return fmt.Errorf("route netlink socket: %w", os.ErrClosed)
	}
	first := c.seq + 1
	for i := range b.ops {
		c.seq++
		hdr := b.buf[b.ops[i].start:]
		binary.NativeEndian.PutUint32(hdr[8:], c.seq)
		if i == len(b.ops)-1 {
			flags := binary.NativeEndian.Uint16(hdr[6:]) | unix.NLM_F_ACK
			binary.NativeEndian.PutUint16(hdr[6:], flags)
		}
	}
	if err := unix.Sendto(c.fd, b.buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send %d netlink messages (%d bytes): %w", len(b.ops), len(b.buf), err)
	}
	return c.collect(b, first)
}

// collect reads answers until the last message is acknowledged.
func (c *Conn) collect(b *Batch, first uint32) error {
	var failed []error
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return errors.Join(append(failed, fmt.Errorf("read the netlink answer: %w", err))...)
		}
		for data := c.buf[:n]; len(data) >= unix.SizeofNlMsghdr; {
			size := int(binary.NativeEndian.Uint32(data))
			if size < unix.SizeofNlMsghdr || size > len(data) {
				return fmt.Errorf("netlink answer of %d bytes in a packet of %d", size, len(data))
			}
			kind := binary.NativeEndian.Uint16(data[4:])
			flags := binary.NativeEndian.Uint16(data[6:])
			at := binary.NativeEndian.Uint32(data[8:]) - first
			body := data[unix.SizeofNlMsghdr:size]
			data = data[min(align(size), len(data)):]
			if at >= uint32(len(b.ops)) {
				continue // the answer to a batch whose wait was given up
			}
			op := &b.ops[at]
			switch {
			case kind != unix.NLMSG_ERROR:
				if op.answer != nil {
					op.answer(body)
				}
			case len(body) >= 4:
				if err := op.failure(body, flags); err != nil {
					failed = append(failed, err)
				}
				if int(at) == len(b.ops)-1 {
					return errors.Join(failed...)
				}
			}
		}
	}
}

// Error is one message that the kernel refused.
type Error struct {
	// Op says what the message was to do, for example "add route".
	Op string
	// On names what it was to be done on.
	On string
	// Errno is the kernel's answer.
	Errno unix.Errno
	// Detail is the kernel's explanation where it gave one.
	Detail string
}

// Error says what failed on what, and why.
func (e *Error) Error() string {
	s := e.Op
	if e.On != "" {
		s += " " + e.On
	}
	s += ": " + e.Errno.Error()
	if e.Detail != "" {
		s += " (" + e.Detail + ")"
	}
	return s
}

// Unwrap returns the errno, so that errors.Is(err, unix.EEXIST) works.
func (e *Error) Unwrap() error { return e.Errno }

// failure makes the error of an NLMSG_ERROR body; nil for an acknowledgement and
// for an errno that the message tolerates.
func (o *op) failure(body []byte, flags uint16) error {
	errno := unix.Errno(-int32(binary.NativeEndian.Uint32(body)))
	if errno == 0 {
		return nil
	}
	for _, t := range o.tolerate {
		if errno == t {
			return nil
		}
	}
	e := &Error{Op: o.what, On: o.on(), Errno: errno}
	if flags&unix.NLM_F_ACK_TLVS != 0 {
		rest := body[4:]
		skip := unix.SizeofNlMsghdr
		if flags&unix.NLM_F_CAPPED == 0 && len(rest) >= 4 {
			skip = align(int(binary.NativeEndian.Uint32(rest)))
		}
		if skip <= len(rest) {
			eachAttr(rest[skip:], func(kind uint16, v []byte) {
				if kind == unix.NLMSGERR_ATTR_MSG {
					e.Detail = cstring(v)
				}
			})
		}
	}
	return e
}

func align(n int) int { return (n + 3) &^ 3 }

// eachAttr calls fn for each attribute in data.
func eachAttr(data []byte, fn func(kind uint16, value []byte)) {
	for len(data) >= 4 {
		size := int(binary.NativeEndian.Uint16(data))
		if size < 4 || size > len(data) {
			return
		}
		fn(binary.NativeEndian.Uint16(data[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), data[4:size])
		data = data[min(align(size), len(data)):]
	}
}

func cstring(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
