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

// mark is what our packets are known by. Address translation changes neither: the
// first sequence number of a TCP connection, or the first bytes of a UDP payload.
type mark struct {
	udp bool
	// seq is the sequence number of the SYN.
	seq uint32
	// head is how the payload of the datagram begins, at least four bytes, and size
	// its length.
	head []byte
	size int
}

func (m mark) String() string {
	if m.udp {
		return fmt.Sprintf("payload %x", m.head)
	}
	return fmt.Sprintf("seq %d", m.seq)
}

// protocol is the mark's, in lower case.
func (m mark) protocol() string {
	if m.udp {
		return "udp"
	}
	return "tcp"
}

// headLen is how much of a payload the rules compare.
const headLen = 4

// markTable is the table that asks for tracing, in one namespace.
//
// It belongs to its socket (NFT_TABLE_F_OWNER): nobody else may change it, and the
// kernel removes it when the socket is closed, be it because the process was killed.
type markTable struct {
	conn *nfnl.Conn
	name string
}

// tableName is unlike those of other traces that run at the same time.
func tableName() string { return fmt.Sprintf("kplab-trace-%d", os.Getpid()) }

// isTraceTable tells our tables, this process's or another's, from those that
// the packet was really judged by.
func isTraceTable(name string) bool { return len(name) > 12 && name[:12] == "kplab-trace-" }

// Numbers of linux/netfilter/nf_tables.h that x/sys lacks.
const (
	tableOwner     = 0x2
	beforeAllHooks = -450 // before defragmentation and connection tracking
	afterNAT       = 350
)

// install writes the table into a namespace.
func (m mark) install(ns *netns.NS) (*markTable, error) {
	conn, err := nfnl.Dial(ns)
	if err != nil {
		return nil, err
	}
	t := &markTable{conn: conn, name: tableName()}
	b := conn.BeginBatch(nil, nfnl.NFTables)
	b = t.message(b, unix.NFT_MSG_NEWTABLE, func(b []byte) []byte {
		return nfnl.Uint32(nfnl.String(b, unix.NFTA_TABLE_NAME, t.name), unix.NFTA_TABLE_FLAGS, tableOwner)
	})
	hooks := map[string][2]int{"prerouting": {unix.NF_INET_PRE_ROUTING, beforeAllHooks}, "output": {unix.NF_INET_LOCAL_OUT, beforeAllHooks}}
	if m.udp {
		// What is sent back carries no mark: the addresses of each form that the
		// datagram takes are remembered, and their reverse is traced.
		hooks["postrouting"] = [2]int{unix.NF_INET_POST_ROUTING, afterNAT}
		b = t.message(b, unix.NFT_MSG_NEWSET, func(b []byte) []byte {
			b = nfnl.String(nfnl.String(b, unix.NFTA_SET_TABLE, t.name), unix.NFTA_SET_NAME, "flows")
			b = nfnl.Uint32(b, unix.NFTA_SET_FLAGS, unix.NFT_SET_EVAL)
			b = nfnl.Uint32(b, unix.NFTA_SET_KEY_TYPE, concatType)
			b = nfnl.Uint32(b, unix.NFTA_SET_KEY_LEN, 16)
			return nfnl.Uint32(b, unix.NFTA_SET_ID, 1)
		})
	}
	for _, name := range []string{"prerouting", "output", "postrouting"} {
		h, wanted := hooks[name]
		if !wanted {
			continue
		}
		b = t.message(b, unix.NFT_MSG_NEWCHAIN, func(b []byte) []byte {
			b = nfnl.String(nfnl.String(b, unix.NFTA_CHAIN_TABLE, t.name), unix.NFTA_CHAIN_NAME, name)
			b, at := nfnl.Nest(b, unix.NFTA_CHAIN_HOOK)
			b = nfnl.Uint32(b, unix.NFTA_HOOK_HOOKNUM, uint32(h[0]))
			b = nfnl.Uint32(b, unix.NFTA_HOOK_PRIORITY, uint32(int32(h[1])))
			b = nfnl.EndNest(b, at)
			return nfnl.String(b, unix.NFTA_CHAIN_TYPE, "filter")
		})
		for _, r := range m.rules(name == "postrouting") {
			b = t.message(b, unix.NFT_MSG_NEWRULE, func(b []byte) []byte {
				b = nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, t.name), unix.NFTA_RULE_CHAIN, name)
				b, at := nfnl.Nest(b, unix.NFTA_RULE_EXPRESSIONS)
				for _, e := range r {
					b = e(b)
				}
				return nfnl.EndNest(b, at)
			})
		}
	}
	if _, err := conn.Commit(b, nfnl.NFTables); err != nil {
		conn.Close()
		if errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("mark packets for tracing: table %s is there already: %w", t.name, err)
		}
		return nil, fmt.Errorf("mark packets for tracing (needs nf_tables with table owners, Linux 5.12): %w", err)
	}
	return t, nil
}

// remove takes the table away. It would go with the socket, but then the kernel may
// take its time.
func (t *markTable) remove() error {
	b := t.conn.BeginBatch(nil, nfnl.NFTables)
	b = t.message(b, unix.NFT_MSG_DELTABLE, func(b []byte) []byte { return nfnl.String(b, unix.NFTA_TABLE_NAME, t.name) })
	_, err := t.conn.Commit(b, nfnl.NFTables)
	t.conn.Close()
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove table %s: %w", t.name, err)
	}
	return nil
}

func (t *markTable) message(b []byte, typ uint16, build func([]byte) []byte) []byte {
	flags := uint16(unix.NLM_F_CREATE | unix.NLM_F_APPEND)
	if typ == unix.NFT_MSG_DELTABLE {
		flags = 0
	}
	b, start, _ := t.conn.Begin(b, nfnl.NFTables|typ, flags, unix.NFPROTO_INET, 0)
	return nfnl.End(build(b), start)
}

// concatType is what nft keeps as the type of ipv4_addr . inet_service . ipv4_addr .
// inet_service, six bits each, so that a listing prints the set as it is.
const concatType = ((7<<6|13)<<6|7)<<6 | 13

// expr appends one expression of a rule.
type expr func([]byte) []byte

// Registers: four bytes each from 8 on, the first of sixteen bytes is 1.
const (
	reg1  = unix.NFT_REG_1
	reg32 = unix.NFT_REG32_00
)

const (
	network   = unix.NFT_PAYLOAD_NETWORK_HEADER
	transport = unix.NFT_PAYLOAD_TRANSPORT_HEADER
)

func expression(name string, data func([]byte) []byte) expr {
	return func(b []byte) []byte {
		b, elem := nfnl.Nest(b, unix.NFTA_LIST_ELEM)
		b = nfnl.String(b, unix.NFTA_EXPR_NAME, name)
		b, at := nfnl.Nest(b, unix.NFTA_EXPR_DATA)
		return nfnl.EndNest(nfnl.EndNest(data(b), at), elem)
	}
}

func value(b []byte, attr uint16, v []byte) []byte {
	b, at := nfnl.Nest(b, attr)
	return nfnl.EndNest(nfnl.Bytes(b, unix.NFTA_DATA_VALUE, v), at)
}

func loadMeta(key uint32) expr {
	return expression("meta", func(b []byte) []byte {
		return nfnl.Uint32(nfnl.Uint32(b, unix.NFTA_META_DREG, reg1), unix.NFTA_META_KEY, key)
	})
}

func loadPayload(reg, base, offset, length uint32) expr {
	return expression("payload", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_DREG, reg)
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_BASE, base)
		b = nfnl.Uint32(b, unix.NFTA_PAYLOAD_OFFSET, offset)
		return nfnl.Uint32(b, unix.NFTA_PAYLOAD_LEN, length)
	})
}

func equal(v []byte) expr {
	return expression("cmp", func(b []byte) []byte {
		b = nfnl.Uint32(b, unix.NFTA_CMP_SREG, reg1)
		b = nfnl.Uint32(b, unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		return value(b, unix.NFTA_CMP_DATA, v)
	})
}

// setTrace is "meta nftrace set 1".
func setTrace() []expr {
	return []expr{
		expression("immediate", func(b []byte) []byte {
			return value(nfnl.Uint32(b, unix.NFTA_IMMEDIATE_DREG, reg1), unix.NFTA_IMMEDIATE_DATA, []byte{1})
		}),
		expression("meta", func(b []byte) []byte {
			return nfnl.Uint32(nfnl.Uint32(b, unix.NFTA_META_SREG, reg1), unix.NFTA_META_KEY, unix.NFT_META_NFTRACE)
		}),
	}
}

// addresses loads the key of the set of flows; reversed for what comes back.
func addresses(reversed bool) []expr {
	src, sport, dst, dport := uint32(12), uint32(0), uint32(16), uint32(2)
	if reversed {
		src, sport, dst, dport = dst, dport, src, sport
	}
	return []expr{
		loadPayload(reg32, network, src, 4), loadPayload(reg32+1, transport, sport, 2),
		loadPayload(reg32+2, network, dst, 4), loadPayload(reg32+3, transport, dport, 2),
	}
}

func l4proto(p byte) []expr { return []expr{loadMeta(unix.NFT_META_L4PROTO), equal([]byte{p})} }

func join(parts ...[]expr) (out []expr) {
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

// rules are those of one chain. remember is for the chain behind NAT, which traces
// nothing.
func (m mark) rules(remember bool) [][]expr {
	if !m.udp {
		seq := binary.BigEndian.AppendUint32(nil, m.seq)
		next := binary.BigEndian.AppendUint32(nil, m.seq+1)
		match := func(proto byte, offset uint32, v []byte) []expr {
			return join(l4proto(proto), []expr{loadPayload(reg1, transport, offset, 4), equal(v)}, setTrace())
		}
		return [][]expr{
			match(unix.IPPROTO_TCP, 4, seq),    // the SYN
			match(unix.IPPROTO_TCP, 8, next),   // what acknowledges it, or resets
			match(unix.IPPROTO_ICMP, 32, seq),  // an error that quotes it
			match(unix.IPPROTO_ICMP, 32, next), // or the first data
		}
	}
	ours := join(l4proto(unix.IPPROTO_UDP),
		[]expr{loadPayload(reg1, transport, 4, 2), equal(binary.BigEndian.AppendUint16(nil, uint16(m.size+8)))},
		[]expr{loadPayload(reg1, transport, 8, headLen), equal(m.head[:headLen])})
	learn := join(ours, addresses(false), []expr{expression("dynset", func(b []byte) []byte {
		b = nfnl.Uint32(nfnl.String(b, unix.NFTA_DYNSET_SET_NAME, "flows"), unix.NFTA_DYNSET_SET_ID, 1)
		b = nfnl.Uint32(b, unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_ADD)
		return nfnl.Uint32(b, unix.NFTA_DYNSET_SREG_KEY, reg32)
	})})
	if remember {
		return [][]expr{learn}
	}
	reply := join(l4proto(unix.IPPROTO_UDP), addresses(true), []expr{expression("lookup", func(b []byte) []byte {
		b = nfnl.Uint32(nfnl.String(b, unix.NFTA_LOOKUP_SET, "flows"), unix.NFTA_LOOKUP_SET_ID, 1)
		return nfnl.Uint32(b, unix.NFTA_LOOKUP_SREG, reg32)
	})}, setTrace())
	quoted := join(l4proto(unix.IPPROTO_ICMP), []expr{loadPayload(reg1, transport, 36, headLen), equal(m.head[:headLen])}, setTrace())
	return [][]expr{reply, join(ours, setTrace()), learn, quoted}
}
