// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nfnl"
)

// event is one message of nftrace: a rule that matched, a return, or a policy.
type event struct {
	family       uint8
	table, chain string
	handle       uint64
	kind         uint32 // unix.NFT_TRACETYPE_…
	verdict      int32
	to           string // the chain of a jump or goto
	policy       uint32
	id           uint32
	iif, oif     uint32
	mark         uint32
	ctID         uint32
	// header is there at the first event of each base chain.
	header *header
}

// Attributes of a trace message that x/sys lacks.
const attrCTID = 18

// groupTrace is NFNLGRP_NFTRACE.
const groupTrace = 9

// Verdicts of netfilter.
const (
	nfDrop   = 0
	nfAccept = 1
)

// listener hears the trace messages of one namespace.
type listener struct {
	fd   int
	buf  []byte
	lost bool
}

// eventBuffer holds some thousands of messages: those of one flow are a hundred.
const eventBuffer = 4 << 20

func listen(ns *netns.NS) (*listener, error) {
	l := &listener{fd: -1, buf: make([]byte, 64<<10)}
	err := ns.Do(func() (err error) {
		l.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		return err
	})
	if err == nil {
		_ = unix.SetsockoptInt(l.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventBuffer) // else the default, and a loss is noticed
		err = errors.Join(unix.Bind(l.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
			unix.SetsockoptInt(l.fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, groupTrace))
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("listen for trace events: %w", err)
	}
	return l, nil
}

func (l *listener) close() {
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
	}
}

// drain hands over what has come. The kernel queues an event while the packet is
// in the rule: what a packet caused is here before its answer is.
func (l *listener) drain(fn func(*event)) error {
	for {
		n, _, err := unix.Recvfrom(l.fd, l.buf, 0)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			l.lost = true
			continue
		case err != nil:
			return os.NewSyscallError("receive", err)
		}
		for b := l.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			length := int(binary.NativeEndian.Uint32(b))
			if length < unix.NLMSG_HDRLEN || length > len(b) {
				break
			}
			if binary.NativeEndian.Uint16(b[4:]) == nfnl.NFTables|unix.NFT_MSG_TRACE {
				if e := decodeEvent(b[unix.NLMSG_HDRLEN:length]); e != nil {
					fn(e)
				}
			}
			b = b[min(len(b), (length+3)&^3):]
		}
	}
}

func decodeEvent(body []byte) *event {
	if len(body) < 4 {
		return nil
	}
	e := &event{family: body[0], verdict: unix.NFT_CONTINUE}
	var net, trans []byte
	nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
		switch typ {
		case unix.NFTA_TRACE_TABLE:
			e.table = nfnl.CString(v)
		case unix.NFTA_TRACE_CHAIN:
			e.chain = nfnl.CString(v)
		case unix.NFTA_TRACE_RULE_HANDLE:
			e.handle = nfnl.U64(v)
		case unix.NFTA_TRACE_TYPE:
			e.kind = nfnl.U32(v)
		case unix.NFTA_TRACE_VERDICT:
			nfnl.Attrs(v, func(typ uint16, v []byte) {
				switch typ {
				case unix.NFTA_VERDICT_CODE:
					e.verdict = int32(nfnl.U32(v))
				case unix.NFTA_VERDICT_CHAIN:
					e.to = nfnl.CString(v)
				}
			})
		case unix.NFTA_TRACE_POLICY:
			e.policy = nfnl.U32(v)
		case unix.NFTA_TRACE_ID:
			e.id = nfnl.U32(v)
		case unix.NFTA_TRACE_IIF:
			e.iif = nfnl.U32(v)
		case unix.NFTA_TRACE_OIF:
			e.oif = nfnl.U32(v)
		case unix.NFTA_TRACE_MARK:
			e.mark = nfnl.U32(v)
		case unix.NFTA_TRACE_NETWORK_HEADER:
			net = v
		case unix.NFTA_TRACE_TRANSPORT_HEADER:
			trans = v
		case attrCTID:
			e.ctID = nfnl.U32(v)
		}
	})
	if net != nil {
		e.header = parseHeader(net, trans)
	}
	return e
}

// drops says that the event is the packet's end.
func (e *event) drops() bool {
	switch e.kind {
	case unix.NFT_TRACETYPE_RULE:
		return e.verdict == nfDrop
	case unix.NFT_TRACETYPE_POLICY:
		return e.policy == nfDrop
	}
	return false
}

// verdictText is the verdict in nft's words.
func (e *event) verdictText() string {
	if e.kind == unix.NFT_TRACETYPE_POLICY {
		if e.policy == nfDrop {
			return "drop"
		}
		return "accept"
	}
	switch e.verdict {
	case nfDrop:
		return "drop"
	case nfAccept:
		return "accept"
	case unix.NFT_JUMP:
		return "jump " + e.to
	case unix.NFT_GOTO:
		return "goto " + e.to
	case unix.NFT_RETURN:
		return "return"
	case unix.NFT_CONTINUE:
		return "continue"
	}
	return fmt.Sprintf("verdict %d", e.verdict)
}
