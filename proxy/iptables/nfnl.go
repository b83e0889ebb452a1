// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Message types and attributes of nfnetlink that this file needs, by the names
// of linux/netfilter/nf_tables.h and nfnetlink_acct.h.
const (
	subsysNFTables = 10 << 8
	subsysAcct     = 7 << 8

	batchBegin = 0x10
	batchEnd   = 0x11

	msgGetChain = subsysNFTables | 4
	msgDelChain = subsysNFTables | 5
	msgGetRule  = subsysNFTables | 7
	msgDelRule  = subsysNFTables | 8
	msgGetGen   = subsysNFTables | 16

	attrChainTable = 1
	attrChainName  = 3
	attrChainUse   = 6
	attrRuleTable  = 1
	attrRuleChain  = 2
	attrGenID      = 1

	msgAcctNew = subsysAcct // NFNL_MSG_ACCT_NEW is 0
	msgAcctDel = subsysAcct | 3
	attrAcct   = 1
)

// maxBatch keeps a batch under what a socket buffer of a stock unprivileged
// limit (212,992 bytes, of which netlink takes twice) can hold.
const maxBatch = 380 << 10

// nfnl is a netfilter netlink socket in a node's namespace. It exists because
// the iptables tools read a whole table to answer a question about one chain,
// and because their -X walks every chain: at ten thousand Services the one takes
// seconds and the other minutes. It only counts and deletes; rules are written
// by the tool.
type nfnl struct {
	fd  int
	seq uint32
	buf []byte
}

// dialNFNL opens a socket in ns; nil means the current namespace.
func dialNFNL(ns *netns.NS) (*nfnl, error) {
	c := &nfnl{buf: make([]byte, 128<<10)}
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
	// An answer that never comes must not hang the proxy.
	timeout := unix.NsecToTimeval((30 * time.Second).Nanoseconds())
	if err := errors.Join(
		unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
	); err != nil {
		c.close()
		return nil, fmt.Errorf("set up a netfilter netlink socket: %w", err)
	}
	// More room for batches where we may; the default will do where we may not.
	_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4<<20)
	return c, nil
}

func (c *nfnl) close() { _ = unix.Close(c.fd) }

// message appends one message to b and returns it with the message's sequence
// number.
func (c *nfnl) message(b []byte, typ, flags uint16, family uint8, resource uint16, attrs ...attr) ([]byte, uint32) {
	c.seq++
	start := len(b)
	b = append(b, make([]byte, unix.NLMSG_HDRLEN)...)
	b = append(b, family, unix.NFNETLINK_V0)
	b = binary.BigEndian.AppendUint16(b, resource)
	for _, a := range attrs {
		b = binary.NativeEndian.AppendUint16(b, uint16(4+len(a.value)+1))
		b = binary.NativeEndian.AppendUint16(b, a.typ)
		b = append(b, a.value...)
		b = append(b, 0)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
	}
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	binary.NativeEndian.PutUint16(b[start+4:], typ)
	binary.NativeEndian.PutUint16(b[start+6:], flags|unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(b[start+8:], c.seq)
	return b, c.seq
}

// attr is a string attribute.
type attr struct {
	typ   uint16
	value string
}

func (c *nfnl) send(b []byte) error {
	return os.NewSyscallError("send", unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
}

// errInterrupted says that the table changed while it was listed.
var errInterrupted = errors.New("the ruleset changed while it was read")

// receive hands each message of the answer to request seq to fn, until the end
// of a dump or the acknowledgement. An error code becomes a unix.Errno.
func (c *nfnl) receive(seq uint32, fn func(typ uint16, body []byte)) error {
	interrupted := false
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("receive", err)
		}
		for b := c.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				return fmt.Errorf("netlink message of %d bytes in %d", length, len(b))
			}
			typ, flags := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])
			msgSeq, body := binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:length]
			b = b[min(len(b), (length+3)&^3):]
			if msgSeq > seq {
				continue
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch typ {
			case unix.NLMSG_ERROR:
				if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
					return unix.Errno(-code)
				}
				if msgSeq == seq {
					return nil
				}
			case unix.NLMSG_DONE:
				if interrupted {
					return errInterrupted
				}
				return nil
			default:
				if fn != nil {
					fn(typ, body)
				}
			}
		}
	}
}

// attrs walks the attributes behind a message's nfgenmsg.
func attrs(body []byte, fn func(typ uint16, value []byte)) {
	for b := body[min(4, len(body)):]; len(b) >= 4; {
		length := int(binary.NativeEndian.Uint16(b))
		if length < 4 || length > len(b) {
			return
		}
		fn(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:length])
		b = b[min(len(b), (length+3)&^3):]
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

// dump sends a dump request and repeats it while the ruleset moves under it.
func (c *nfnl) dump(typ uint16, family uint8, attributes []attr, reset func(), fn func(body []byte)) error {
	for try := 0; ; try++ {
		reset()
		b, seq := c.message(nil, typ, unix.NLM_F_DUMP, family, 0, attributes...)
		if err := c.send(b); err != nil {
			return err
		}
		err := c.receive(seq, func(_ uint16, body []byte) { fn(body) })
		if !errors.Is(err, errInterrupted) || try == 10 {
			return err
		}
	}
}

// chainUses lists the chains of the mode's tables, each with the number of its
// rules plus the number of rules that jump to it, as the kernel keeps it.
func (c *nfnl) chainUses(family uint8) (map[string]map[string]int, error) {
	out := map[string]map[string]int{}
	reset := func() {
		for _, t := range tables {
			out[t] = map[string]int{}
		}
	}
	// One list for all tables: the kernel lists no table alone.
	err := c.dump(msgGetChain, family, nil, reset, func(body []byte) {
		var in map[string]int
		var name string
		use := 0
		attrs(body, func(typ uint16, value []byte) {
			switch {
			case typ == attrChainTable:
				in = out[cstring(value)]
			case typ == attrChainName:
				name = cstring(value)
			case typ == attrChainUse && len(value) == 4:
				use = int(binary.BigEndian.Uint32(value))
			}
		})
		if in != nil {
			in[name] = use
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list the chains: %w", err)
	}
	return out, nil
}

// generation is the number of the ruleset in force, which every transaction of
// the namespace raises.
func (c *nfnl) generation() (uint32, error) {
	b, seq := c.message(nil, msgGetGen, unix.NLM_F_ACK, unix.AF_UNSPEC, 0)
	if err := c.send(b); err != nil {
		return 0, err
	}
	var id uint32
	err := c.receive(seq, func(_ uint16, body []byte) {
		attrs(body, func(typ uint16, value []byte) {
			if typ == attrGenID && len(value) == 4 {
				id = binary.BigEndian.Uint32(value)
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("read the generation of the ruleset: %w", err)
	}
	return id, nil
}

// countRules counts the rules of one chain; one that is not there has none. It
// is for few chains: to list all rules takes the kernel a time that grows with
// their square, since it walks from the start for each part of the answer.
func (c *nfnl) countRules(family uint8, table, chain string) (int, error) {
	n := 0
	err := c.dump(msgGetRule, family, []attr{{attrRuleTable, table}, {attrRuleChain, chain}}, func() { n = 0 }, func([]byte) { n++ })
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return 0, fmt.Errorf("count the rules of chain %s of table %s: %w", chain, table, err)
	}
	return n, nil
}

// removeChains empties and deletes chains. First all are emptied, so that none
// is used by another any more, then all are deleted; up to maxBatch of messages
// are one transaction, so a handful of chains goes in one.
func (c *nfnl) removeChains(family uint8, table string, chains []string) error {
	var batch []byte
	begin := func() { batch, _ = c.message(batch[:0], batchBegin, 0, 0, subsysNFTables>>8) }
	commit := func() error {
		// The kernel acknowledges after the commit, errors of any message before.
		var seq uint32
		batch, seq = c.message(batch, batchEnd, unix.NLM_F_ACK, 0, subsysNFTables>>8)
		if err := c.send(batch); err != nil {
			return err
		}
		return c.receive(seq, nil)
	}
	begin()
	for pass := range 2 {
		for _, name := range chains {
			if pass == 0 {
				batch, _ = c.message(batch, msgDelRule, 0, family, 0, attr{attrRuleTable, table}, attr{attrRuleChain, name})
			} else {
				batch, _ = c.message(batch, msgDelChain, 0, family, 0, attr{attrChainTable, table}, attr{attrChainName, name})
			}
			if len(batch) > maxBatch-4096 {
				if err := commit(); err != nil {
					return fmt.Errorf("remove chains of table %s: %w", table, err)
				}
				begin()
			}
		}
	}
	if err := commit(); err != nil {
		return fmt.Errorf("remove chains of table %s: %w", table, err)
	}
	return nil
}

// createAcct makes a packet counter object; one that exists is kept.
func (c *nfnl) createAcct(name string) error {
	b, seq := c.message(nil, msgAcctNew, unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.AF_UNSPEC, 0, attr{attrAcct, name})
	if err := c.send(b); err != nil {
		return err
	}
	if err := c.receive(seq, nil); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("create the nfacct object %s: %w", name, err)
	}
	return nil
}

// deleteAcct removes a packet counter object; one that is not there, that is used
// by a rule of somebody else, or on a
// kernel without them, is success.
func (c *nfnl) deleteAcct(name string) error {
	b, seq := c.message(nil, msgAcctDel, unix.NLM_F_ACK, unix.AF_UNSPEC, 0, attr{attrAcct, name})
	if err := c.send(b); err != nil {
		return err
	}
	err := c.receive(seq, nil)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) &&
		!errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("delete the nfacct object %s: %w", name, err)
	}
	return nil
}
