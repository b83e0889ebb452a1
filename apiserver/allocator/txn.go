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

// IP reserves a requested address. The errors are [ErrNoRange] and [ErrIPTaken],
// for a dry run [*NotInRangeError]; an address that the same owner has is granted
// again.
func (t *Txn) IP(addr netip.Addr) error {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case t.dryRun && !b.inRange(addr):
		return &NotInRangeError{Value: addr.String(), Range: b.rangeText(addr)}
	case t.dryRun:
		return nil
	case !b.inRange(addr):
		return ErrNoRange
	case !b.takenIPs.hold(t.owner, addr):
		return ErrIPTaken
	}
	t.held.IPs = append(t.held.IPs, addr)
	return nil
}

// NextIP reserves a free address of an IPv4 or an IPv6 range, of the first one
// that has room. The errors are [ErrFull] and [ErrNoFamily].
func (t *Txn) NextIP(is4 bool) (netip.Addr, error) {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	err := ErrNoFamily
	for _, r := range b.ranges {
		if r.Is4() != is4 {
			continue
		}
		if t.dryRun {
			return r.Prefix().Addr(), nil
		}
		err = ErrFull
		if i, ok := r.used.pick(r.span, b.random, func(i uint64) bool { return b.takenIPs.has(r.at(i)) }); ok {
			addr := r.at(i)
			b.takenIPs.hold(t.owner, addr)
			t.held.IPs = append(t.held.IPs, addr)
			return addr, nil
		}
	}
	return netip.Addr{}, err
}

// Port reserves a requested node port. The errors are [*NotInRangeError] and
// [ErrPortTaken]; a port that the same owner has is granted again, since numbers
// belong to an owner and not to one protocol of it.
func (t *Txn) Port(port int32) error {
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.ports.index(port); !ok {
		return &NotInRangeError{Range: b.ports.String(), Port: true}
	}
	if t.dryRun {
		t.shown = append(t.shown, port)
		return nil
	}
	if !b.takenPort.hold(t.owner, port) {
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
		for i := range b.ports.size {
			if port := b.ports.at(i); !slices.Contains(t.shown, port) {
				t.shown = append(t.shown, port)
				return port, nil
			}
		}
		return 0, ErrFull
	}
	i, ok := b.portUsage.pick(b.ports.span, b.random, func(i uint64) bool { return b.takenPort.has(b.ports.at(i)) })
	if !ok {
		return 0, ErrFull
	}
	port := b.ports.at(i)
	b.takenPort.hold(t.owner, port)
	t.held.Ports = append(t.held.Ports, port)
	return port, nil
}

// Keep holds values that the owner's stored object already has. It never fails:
// a value that another owner has stays as it is, because an update that does not
// touch it is not the place to complain.
func (t *Txn) Keep(v Values) {
	if t.dryRun {
		t.shown = append(t.shown, v.Ports...)
		return
	}
	b := t.book
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, addr := range v.IPs {
		if b.takenIPs.hold(t.owner, addr) {
			t.held.IPs = append(t.held.IPs, addr)
		}
	}
	for _, port := range v.Ports {
		if b.takenPort.hold(t.owner, port) {
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
		b.takenIPs.drop(addr)
	}
	for _, port := range t.held.Ports {
		b.takenPort.drop(port)
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
	for _, r := range b.ranges {
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
