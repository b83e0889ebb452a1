// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// The names are those of the reference plugin.
const (
	tableName    = "cni_hostport"
	hostPorts    = "hostports"
	masquerading = "masquerading"
)

// families are the tables, one a family of IP.
func families() []nftables.TableFamily {
	return []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6}
}

func familyOf(ip netip.Addr) nftables.TableFamily {
	if ip.Is4() {
		return nftables.TableFamilyIPv4
	}
	return nftables.TableFamilyIPv6
}

// connect opens a connection to the node's nftables.
func (p *Plugin) connect() (*nftables.Conn, error) {
	var c *nftables.Conn
	err := p.inNode(func() error {
		var err error
		// A lasting one, whose socket stays in the namespace where it was made.
		c, err = nftables.New(nftables.AsLasting())
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	return c, nil
}

// write replaces the rules of an attachment, in one transaction.
func (p *Plugin) write(id string, ports []port, ips []netip.Addr) (err error) {
	c, err := p.connect()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.CloseLasting()) }()
	for _, ip := range ips {
		table := c.AddTable(&nftables.Table{Name: tableName, Family: familyOf(ip)})
		to := c.AddChain(&nftables.Chain{Name: hostPorts, Table: table})
		for name, hook := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting, "output": nftables.ChainHookOutput} {
			base := c.AddChain(&nftables.Chain{Name: name, Table: table, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: nftables.ChainPriorityNATDest})
			c.FlushChain(base)
			c.AddRule(&nftables.Rule{Table: table, Chain: base, Exprs: []expr.Any{
				&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true},
				&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)},
				&expr.Verdict{Kind: expr.VerdictJump, Chain: hostPorts},
			}})
		}
		masq := c.AddChain(&nftables.Chain{Name: masquerading, Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource})
		// What is there of the attachment goes in the same transaction.
		if err := drop(c, table, func(comment string) bool { return comment == id }); err != nil {
			return err
		}
		comment := userdata.AppendString(nil, userdata.TypeComment, id)
		for _, port := range ports {
			if port.pod.Addr() == ip {
				c.AddRule(&nftables.Rule{Table: table, Chain: to, Exprs: port.lead(), UserData: comment})
			}
		}
		for _, from := range []netip.Addr{ip, netip.AddrFrom4([4]byte{127, 0, 0, 1})} {
			if from.Is4() == ip.Is4() {
				exprs := append(address(source, from), address(destination, ip)...)
				c.AddRule(&nftables.Rule{Table: table, Chain: masq, Exprs: append(exprs, &expr.Masq{}), UserData: comment})
			}
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("write the rules: %w", err)
	}
	return nil
}

// lead is the rule of one port.
func (p port) lead() []expr.Any {
	var e []expr.Any
	if p.hostIP.IsValid() {
		e = address(destination, p.hostIP)
	}
	return append(e,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{p.protocol}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, p.host)},
		&expr.Immediate{Register: 1, Data: p.pod.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, p.pod.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(familyOf(p.pod.Addr())), RegAddrMin: 1, RegProtoMin: 2, Specified: true},
	)
}

// Where addresses are in an IPv4 header; those of IPv6 are elsewhere, and longer.
type direction uint32

const (
	source      direction = 12
	destination direction = 16
)

func address(d direction, ip netip.Addr) []expr.Any {
	offset, length := uint32(d), uint32(4)
	if ip.Is6() {
		offset, length = map[direction]uint32{source: 8, destination: 24}[d], 16
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ip.AsSlice()},
	}
}

// drop adds to the transaction the end of the rules with such comments. A table that is
// not there has none.
func drop(c *nftables.Conn, table *nftables.Table, which func(comment string) bool) error {
	return each(c, table, func(_ string, comment string, r *nftables.Rule) error {
		if !which(comment) {
			return nil
		}
		return c.DelRule(r)
	})
}

// each calls fn for every rule that is of an attachment.
func each(c *nftables.Conn, table *nftables.Table, fn func(chain, comment string, r *nftables.Rule) error) error {
	for _, chain := range []string{hostPorts, masquerading} {
		rules, err := c.GetRules(table, &nftables.Chain{Name: chain, Table: table})
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read the rules of %s: %w", tableName, err)
		}
		for _, r := range rules {
			if comment, ok := userdata.GetString(r.UserData, userdata.TypeComment); ok {
				if err := fn(chain, comment, r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// remove ends the rules with such comments. Where nobody ever asked for a port there is
// nothing to read but that.
func (p *Plugin) remove(which func(comment string) bool) (err error) {
	c, err := p.connect()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.CloseLasting()) }()
	for _, f := range families() {
		table, err := c.ListTableOfFamily(tableName, f)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look for table %s: %w", tableName, err)
		}
		if err := drop(c, table, which); err != nil {
			return err
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("remove the rules of %s: %w", tableName, err)
	}
	return nil
}

// count is how many ports lead to an attachment.
func (p *Plugin) count(id string) (n int, err error) {
	c, err := p.connect()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.CloseLasting()) }()
	for _, f := range families() {
		table, err := c.ListTableOfFamily(tableName, f)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("look for table %s: %w", tableName, err)
		}
		err = each(c, table, func(chain, comment string, _ *nftables.Rule) error {
			if chain == hostPorts && comment == id {
				n++
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}
