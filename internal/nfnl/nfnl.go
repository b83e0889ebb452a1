// SPDX-License-Identifier: Apache-2.0

// Package nfnl speaks netfilter's netlink protocol (linux/netfilter/nfnetlink.h):
// a socket in a node's namespace, messages with nested attributes, dumps, and the
// batches that nf_tables takes as one transaction. It knows the envelope; what is
// in it belongs to the packages that use it.
package nfnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// NFTables is the subsystem of nf_tables, shifted to where a message type has it.
const NFTables = 10 << 8

// Types of the messages around a batch, by nfnetlink.h, and the attribute of the
// first that names the generation which the batch is meant for.
const (
	batchBegin = 0x10
	batchEnd   = 0x11
)

// stockLimit keeps a batch under what a socket buffer of a stock unprivileged
// limit (212,992 bytes, of which netlink takes twice) can hold.
const stockLimit = 380 << 10

// largeBuffer is the send buffer that is asked for where that is allowed: a full
// load of ten thousand Services is some ten megabytes, and should be one
// transaction.
const largeBuffer = 64 << 20

// Conn is a netfilter netlink socket. It is not safe for concurrent use.
type Conn struct {
	fd    int
	seq   uint32
	from  uint32 // what is older than this belongs to an earlier request
	limit int
	buf   []byte
}

// Dial opens a socket in ns; nil means the current namespace.
func Dial(ns *netns.NS) (*Conn, error) {
	c := &Conn{buf: make([]byte, 128<<10)}
	open := func() (err error) {
		c.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		return err
	}
	var err error
	if ns == nil {
		err = open()
	} else {
		err = ns.Do(open)
	}
	if err != nil {
		return nil, fmt.Errorf("open a netfilter netlink socket: %w", err)
	}
	// An answer that never comes must not hang the proxy. Errors need not carry
	// the message that they are about: it is known by its number.
	timeout := unix.NsecToTimeval((120 * time.Second).Nanoseconds())
	if err := errors.Join(
		unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	); err != nil {
		c.Close()
		return nil, fmt.Errorf("set up a netfilter netlink socket: %w", err)
	}
	c.limit = stockLimit
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, largeBuffer) == nil {
		c.limit = largeBuffer
	}
	return c, nil
}

// Close ends the socket.
func (c *Conn) Close() { _ = unix.Close(c.fd) }

// Limit is the size of the largest batch that can be sent.
func (c *Conn) Limit() int { return c.limit }

// SetLimit lowers Limit, to send what an unprivileged socket could.
func (c *Conn) SetLimit(n int) { c.limit = min(n, c.limit) }

// Begin appends the header of a message to b and returns the message's number;
// End completes it.
func (c *Conn) Begin(b []byte, typ, flags uint16, family uint8, resource uint16) (out []byte, start int, seq uint32) {
	c.seq++
	start = len(b)
	b = append(b, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags|unix.NLM_F_REQUEST)
	b = binary.NativeEndian.AppendUint32(b, c.seq)
	b = append(b, 0, 0, 0, 0)
	b = append(b, family, unix.NFNETLINK_V0)
	return binary.BigEndian.AppendUint16(b, resource), start, c.seq
}

// End fills in the length of the message that begins at start.
func End(b []byte, start int) []byte {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// BeginBatch appends the message that opens a transaction of a subsystem.
func (c *Conn) BeginBatch(b []byte, subsystem uint16) []byte {
	b, start, seq := c.Begin(b, batchBegin, 0, unix.AF_UNSPEC, subsystem>>8)
	c.from = seq
	return End(b, start)
}

// Commit appends the message that ends a transaction, sends all of b, and waits
// until the kernel has committed. The number that comes with an error is that of
// the message which the kernel refused; 0 when it was none in particular.
func (c *Conn) Commit(b []byte, subsystem uint16) (refused uint32, err error) {
	b, start, seq := c.Begin(b, batchEnd, unix.NLM_F_ACK, unix.AF_UNSPEC, subsystem>>8)
	if err := c.Send(End(b, start)); err != nil {
		return 0, err
	}
	return c.receive(seq, nil)
}

// Send sends what was built.
func (c *Conn) Send(b []byte) error {
	return os.NewSyscallError("send", unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
}

// ErrInterrupted says that the table changed while it was listed.
var ErrInterrupted = errors.New("the ruleset changed while it was read")

// Receive hands each message of the answer to request seq to fn, until the end of
// a dump or the acknowledgement. An error code becomes a unix.Errno.
func (c *Conn) Receive(seq uint32, fn func(typ uint16, body []byte)) error {
	_, err := c.receive(seq, fn)
	return err
}

// Await reads the answer to messages that were sent together, of which seq is the last
// and asks for an acknowledgement. The number that comes with an error is that of the
// message which the kernel refused, 0 when it was none in particular; the others have
// been carried out, so call it again until seq itself is answered.
func (c *Conn) Await(seq uint32) (refused uint32, err error) { return c.receive(seq, nil) }

func (c *Conn) receive(seq uint32, fn func(typ uint16, body []byte)) (uint32, error) {
	interrupted := false
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, os.NewSyscallError("receive", err)
		}
		for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				return 0, fmt.Errorf("netlink message of %d bytes in %d", length, len(b))
			}
			typ, flags := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])
			msgSeq, body := binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:length]
			b = b[min(len(b), (length+3)&^3):]
			if msgSeq > seq || msgSeq < c.from {
				continue
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch typ {
			case unix.NLMSG_ERROR:
				if len(body) < 4 {
					return msgSeq, fmt.Errorf("netlink error message of %d bytes", len(body))
				}
				if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
					return msgSeq, unix.Errno(-code)
				}
				if msgSeq == seq {
					return 0, nil
				}
			case unix.NLMSG_DONE:
				if interrupted {
					return 0, ErrInterrupted
				}
				return 0, nil
			default:
				if fn != nil {
					fn(typ, body)
				}
			}
		}
	}
}

// Request sends one message that asks for an acknowledgement and hands the
// answers to fn. The attributes are what build appends.
func (c *Conn) Request(typ, flags uint16, family uint8, build func(b []byte) []byte, fn func(body []byte)) error {
	return c.ask(typ, flags|unix.NLM_F_ACK, family, build, fn)
}

func (c *Conn) ask(typ, flags uint16, family uint8, build func(b []byte) []byte, fn func(body []byte)) error {
	b, start, seq := c.Begin(nil, typ, flags, family, 0)
	c.from = seq
	if build != nil {
		b = build(b)
	}
	if err := c.Send(End(b, start)); err != nil {
		return err
	}
	return c.Receive(seq, func(_ uint16, body []byte) {
		if fn != nil {
			fn(body)
		}
	})
}

// Dump sends a dump request and repeats it while the ruleset moves under it;
// reset runs before each try.
func (c *Conn) Dump(typ uint16, family uint8, build func(b []byte) []byte, reset func(), fn func(body []byte)) error {
	for try := 0; ; try++ {
		if reset != nil {
			reset()
		}
		err := c.ask(typ, unix.NLM_F_DUMP, family, build, fn)
		if !errors.Is(err, ErrInterrupted) || try == 10 {
			return err
		}
	}
}

// Generation is the number of the ruleset in force, which every transaction of
// the namespace raises.
func (c *Conn) Generation() (uint32, error) {
	var id uint32
	err := c.Request(NFTables|unix.NFT_MSG_GETGEN, 0, unix.AF_UNSPEC, nil, func(body []byte) {
		Attrs(Body(body), func(typ uint16, value []byte) {
			if typ == unix.NFTA_GEN_ID {
				id = U32(value)
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of the ruleset: %w", err)
	}
	return id, nil
}
