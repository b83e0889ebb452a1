// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// Owner is the object that has a value. Its UID is its identity: a Service that
// was deleted and made again under the same name is another owner.
type Owner struct {
	UID, Namespace, Name string
}

// same tells whether two owners are one.
func (o Owner) same(other Owner) bool { return o.UID == other.UID }

// String is the owner as "namespace/name".
func (o Owner) String() string { return o.Namespace + "/" + o.Name }

// Values are the addresses and ports of one object.
type Values struct {
	IPs   []netip.Addr
	Ports []int32
}

// Record is what one stored object has. Revision is the store's revision of the
// object, which orders reports about the same owner.
type Record struct {
	Owner    Owner
	Revision uint64
	Values   Values
}

// Problem is a stored value that should not be as it is. Its object keeps it:
// changing it would cut off whoever uses the object.
type Problem struct {
	Owner Owner
	// IP or Port is the value; the other one is zero.
	IP   netip.Addr
	Port int32
	// Holder is the other owner that has the value. It is the zero Owner when
	// the value lies outside of every range.
	Holder Owner
}

// Config describes the ranges of a [Book].
type Config struct {
	// IPs are the address ranges, in the order in which they are used up. They
	// may overlap.
	IPs []IPRange
	// Ports is the range of node ports.
	Ports PortRange
	// Random returns a number in [0, n), safely for concurrent use. Nil means
	// the random source of math/rand/v2. Tests set it to make picks known.
	Random func(n uint64) uint64
}

// Book knows which values are taken and by whom. It is safe for concurrent use.
type Book struct {
	random func(n uint64) uint64
	ports  PortRange

	mu        sync.Mutex
	ranges    []*usedRange
	portUsage usage
	takenIPs  *pool[netip.Addr]
	takenPort *pool[int32]
	owners    map[string]*account // by UID
}

// usedRange is an address range with the number of its addresses in use.
type usedRange struct {
	IPRange
	used usage
}

// account is what the book knows of one owner.
type account struct {
	revision uint64
	stored   Values
	// gone is true once the object was deleted. The account is then kept while
	// requests are in flight, so that the late report of a write that preceded
	// the deletion does not bring the values back.
	gone     bool
	inFlight int
}

// NewBook makes a book in which nothing is taken.
func NewBook(cfg Config) *Book {
	b := &Book{random: cfg.Random, ports: cfg.Ports, owners: map[string]*account{}}
	if b.random == nil {
		b.random = rand.Uint64N
	}
	b.takenIPs = newPool(func(ip netip.Addr, taken bool) {
		for _, r := range b.ranges {
			r.count(ip, taken)
		}
	})
	b.takenPort = newPool(func(port int32, taken bool) {
		if i, ok := b.ports.index(port); ok {
			b.portUsage.count(b.ports.span, i, taken)
		}
	})
	b.SetRanges(cfg.IPs)
	return b
}

func (r *usedRange) count(ip netip.Addr, taken bool) {
	if i, ok := r.index(ip); ok {
		r.used.count(r.span, i, taken)
	}
}

// SetRanges replaces the address ranges. Addresses that are taken stay so,
// whether or not a range holds them.
func (b *Book) SetRanges(ranges []IPRange) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranges = nil
	for _, r := range ranges {
		used := &usedRange{IPRange: r}
		for ip := range b.takenIPs.taken {
			used.count(ip, true)
		}
		b.ranges = append(b.ranges, used)
	}
}

// Load reports all stored objects at once, as after a start, and tells what is
// wrong with them: values outside of the ranges (the configuration may have
// changed), and values that two objects have. Of those, the first of the list has
// the value, and the next one gets it when the first is gone; nobody else does.
func (b *Book) Load(records []Record) []Problem {
	b.mu.Lock()
	defer b.mu.Unlock()
	var problems []Problem
	for _, r := range records {
		b.report(r)
		for _, ip := range r.Values.IPs {
			if !b.inRange(ip) {
				problems = append(problems, Problem{Owner: r.Owner, IP: ip})
			} else if c := b.takenIPs.taken[ip]; c != nil && !c.owner.same(r.Owner) {
				problems = append(problems, Problem{Owner: r.Owner, IP: ip, Holder: c.owner})
			}
		}
		for _, port := range r.Values.Ports {
			if _, ok := b.ports.index(port); !ok {
				problems = append(problems, Problem{Owner: r.Owner, Port: port})
			} else if c := b.takenPort.taken[port]; c != nil && !c.owner.same(r.Owner) {
				problems = append(problems, Problem{Owner: r.Owner, Port: port, Holder: c.owner})
			}
		}
	}
	return problems
}

// inRange tells whether a range of the book holds ip.
func (b *Book) inRange(ip netip.Addr) bool {
	return slices.ContainsFunc(b.ranges, func(r *usedRange) bool {
		_, ok := r.index(ip)
		return ok
	})
}

// Ports is the range of node ports.
func (b *Book) Ports() PortRange { return b.ports }

// Deleted reports that an object is no longer stored. Reporting it twice, or an
// object that the book never saw, changes nothing.
func (b *Book) Deleted(owner Owner) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a := b.owners[owner.UID]
	if a == nil {
		return
	}
	b.replace(owner, a, Values{})
	a.gone = true
	b.settle(owner, a)
}

// Begin opens a transaction for the request that writes owner. Its holds last
// until End, Store or Drop.
func (b *Book) Begin(owner Owner) *Txn {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.account(owner).inFlight++
	return &Txn{book: b, owner: owner}
}

// BeginDryRun opens a transaction that holds nothing and never looks at what is
// taken, as upstream's dry run does: requested values are checked against the
// range only, and picks are stand-ins (the base of the address range; ports
// counted up from the start of theirs).
func (b *Book) BeginDryRun(owner Owner) *Txn {
	return &Txn{book: b, owner: owner, dryRun: true}
}

// Entry is one taken value, for people who look for what has it.
type Entry struct {
	// Value is an address or a port.
	Value string
	Owner Owner
	// Stored is true when the stored object has it.
	Stored bool
	// InFlight counts the requests that hold it now.
	InFlight int
}

// Taken lists all that is taken, addresses first, each kind in order.
func (b *Book) Taken() []Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := entries(b.takenIPs, netip.Addr.Compare)
	return append(all, entries(b.takenPort, cmp.Compare[int32])...)
}

func entries[V comparable](p *pool[V], compare func(a, b V) int) []Entry {
	var all []Entry
	for _, v := range slices.SortedFunc(maps.Keys(p.taken), compare) {
		c := p.taken[v]
		all = append(all, Entry{Value: fmt.Sprint(v), Owner: c.owner, Stored: c.stored, InFlight: c.holds})
	}
	return all
}

// String is the entry as one line.
func (e Entry) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %s", e.Value, e.Owner)
	if !e.Stored {
		s.WriteString(" (in flight)")
	}
	return s.String()
}

// report takes over what is stored, unless something newer was reported.
func (b *Book) report(r Record) {
	a := b.account(r.Owner)
	if a.gone || r.Revision < a.revision {
		return
	}
	a.revision = r.Revision
	b.replace(r.Owner, a, r.Values)
	b.settle(r.Owner, a)
}

// replace makes now the stored values of owner.
func (b *Book) replace(owner Owner, a *account, now Values) {
	for _, ip := range a.stored.IPs {
		if !slices.Contains(now.IPs, ip) {
			b.takenIPs.unstore(owner, ip)
		}
	}
	for _, port := range a.stored.Ports {
		if !slices.Contains(now.Ports, port) {
			b.takenPort.unstore(owner, port)
		}
	}
	for _, ip := range now.IPs {
		b.takenIPs.store(owner, ip)
	}
	for _, port := range now.Ports {
		b.takenPort.store(owner, port)
	}
	a.stored = now
}

func (b *Book) account(owner Owner) *account {
	a := b.owners[owner.UID]
	if a == nil {
		a = &account{}
		b.owners[owner.UID] = a
	}
	return a
}

// settle forgets an owner of whom nothing is stored and nothing is in flight.
func (b *Book) settle(owner Owner, a *account) {
	if a.inFlight == 0 && len(a.stored.IPs) == 0 && len(a.stored.Ports) == 0 {
		delete(b.owners, owner.UID)
	}
}

// ErrNoFamily says that the book has no range of the wanted family.
var ErrNoFamily = errors.New("no address range of this IP family is configured")
