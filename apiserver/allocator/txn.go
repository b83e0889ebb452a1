// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"net/netip"
	"slices"
)

// Txn is the part that one request in flight has in a [Book]. It is used by one
// goroutine. Its life: any number of attempts, each made of IP, NextIP, Port,
// NextPort and Keep, and undone by Drop; then once Store or once End.
type Txn struct {
	book   *Book
	owner  Owner
	dryRun bool
	held   Values
	// shown are the ports of a dry run.
	shown []int32
	ended bool
}

// IP reserves a requested address. The errors are [*NotInRangeError] and
// [ErrIPTaken]; an address that the same owner has is granted again.
func (t *Txn) IP(addr netip.Addr) error {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	p, i, ok := b.ip(addr)
	if !ok {
		return &NotInRangeError{Value: addr.String(), Range: b.rangeText(addr)}
	}
	if t.dryRun {
		return nil
	}
	if !p.hold(t.owner, i) {
		return ErrIPTaken
	}
	t.held.IPs = append(t.held.IPs, addr)
	return nil
}

// NextIP reserves a free address of the IPv4 or the IPv6 range. The errors are
// [ErrFull] and [ErrNoFamily].
func (t *Txn) NextIP(is4 bool) (netip.Addr, error) {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	k := slices.IndexFunc(b.cfg.IPs, func(r IPRange) bool { return r.Is4() == is4 })
	if k < 0 {
		return netip.Addr{}, ErrNoFamily
	}
	if t.dryRun {
		return b.cfg.IPs[k].Prefix().Addr(), nil
	}
	i, ok := b.ips[k].holdNext(t.owner)
	if !ok {
		return netip.Addr{}, ErrFull
	}
	addr := b.cfg.IPs[k].at(i)
	t.held.IPs = append(t.held.IPs, addr)
	return addr, nil
}

// Port reserves a requested node port. The errors are [*NotInRangeError] and
// [ErrPortTaken]; a port that the same owner has is granted again, since numbers
// belong to an owner and not to one protocol of it.
func (t *Txn) Port(port int32) error {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	i, ok := b.cfg.Ports.index(port)
	if !ok {
		return &NotInRangeError{Range: b.cfg.Ports.String(), Port: true}
	}
	if t.dryRun {
		t.shown = append(t.shown, port)
		return nil
	}
	if !b.ports.hold(t.owner, i) {
		return ErrPortTaken
	}
	t.held.Ports = append(t.held.Ports, port)
	return nil
}

// NextPort reserves a free node port. The error is [ErrFull].
func (t *Txn) NextPort() (int32, error) {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.dryRun {
		for i := range b.cfg.Ports.size {
			if port := b.cfg.Ports.at(i); !slices.Contains(t.shown, port) {
				t.shown = append(t.shown, port)
				return port, nil
			}
		}
		return 0, ErrFull
	}
	i, ok := b.ports.holdNext(t.owner)
	if !ok {
		return 0, ErrFull
	}
	port := b.cfg.Ports.at(i)
	t.held.Ports = append(t.held.Ports, port)
	return port, nil
}

// Keep holds values that the owner's stored object already has. It never fails:
// a value from outside the range, or one that another owner has, stays as it is,
// because an update that does not touch it is not the place to complain.
func (t *Txn) Keep(v Values) {
	if t.dryRun {
		t.shown = append(t.shown, v.Ports...)
		return
	}
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, addr := range v.IPs {
		if p, i, ok := b.ip(addr); ok && p.hold(t.owner, i) {
			t.held.IPs = append(t.held.IPs, addr)
		}
	}
	for _, port := range v.Ports {
		if i, ok := b.cfg.Ports.index(port); ok && b.ports.hold(t.owner, i) {
			t.held.Ports = append(t.held.Ports, port)
		}
	}
}

// Drop undoes all holds, as after an attempt that was not written. The
// transaction can be used for another attempt.
func (t *Txn) Drop() {
	t.book.mu.Lock()
	defer t.book.mu.Unlock()
	t.drop()
}

func (t *Txn) drop() {
	b := t.book
	for _, addr := range t.held.IPs {
		if p, i, ok := b.ip(addr); ok {
			p.drop(i)
		}
	}
	for _, port := range t.held.Ports {
		if i, ok := b.cfg.Ports.index(port); ok {
			b.ports.drop(i)
		}
	}
	t.held, t.shown = Values{}, nil
}

// Store ends the transaction with the object as it was stored: its values are
// taken from now on, the other ones of this transaction and of the object's
// earlier version are free.
func (t *Txn) Store(revision uint64, v Values) {
	t.end(&Record{Owner: t.owner, Revision: revision, Values: v})
}

// End ends the transaction of a request that stored nothing. Ending twice, or
// after Store, changes nothing.
func (t *Txn) End() { t.end(nil) }

func (t *Txn) end(stored *Record) {
	if t.ended {
		return
	}
	t.ended = true
	if t.dryRun {
		return
	}
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.account(t.owner)
	// The new values become stored before the holds go, so that no value of
	// theirs is free in between.
	if stored != nil {
		b.report(*stored)
	}
	t.drop()
	a.inFlight--
	b.settle(t.owner, a)
}

// rangeText names the ranges of an address's family, or all of them when it has
// none.
func (b *Book) rangeText(addr netip.Addr) string {
	text := ""
	for _, r := range b.cfg.IPs {
		if r.Is4() == addr.Unmap().Is4() {
			return r.Prefix().String()
		}
		if text != "" {
			text += ", "
		}
		text += r.Prefix().String()
	}
	return text
}
