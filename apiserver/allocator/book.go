// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"errors"
	"fmt"
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

// Config describes the ranges of a [Book].
type Config struct {
	// IPs are the address ranges, at most one a family.
	IPs []IPRange
	// Ports is the range of node ports.
	Ports PortRange
	// Random returns a number in [0, n), safely for concurrent use. Nil means
	// the random source of math/rand/v2. Tests set it to make picks known.
	Random func(n uint64) uint64
}

// Book knows which values are taken and by whom. It is safe for concurrent use.
type Book struct {
	cfg Config

	mu     sync.Mutex
	ips    []*pool // parallel to cfg.IPs
	ports  *pool
	owners map[string]*account // by UID
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

// NewBook makes a book in which nothing is taken. It fails when two ranges are
// of the same family.
func NewBook(cfg Config) (*Book, error) {
	if cfg.Random == nil {
		cfg.Random = rand.Uint64N
	}
	b := &Book{cfg: cfg, ports: newPool(cfg.Ports.span, cfg.Random), owners: map[string]*account{}}
	for i, r := range cfg.IPs {
		if slices.ContainsFunc(cfg.IPs[:i], func(o IPRange) bool { return o.Is4() == r.Is4() }) {
			return nil, fmt.Errorf("service address range %s: there already is a range of its family", r.Prefix())
		}
		b.ips = append(b.ips, newPool(r.span, cfg.Random))
	}
	return b, nil
}

// Load reports all stored objects at once, as after a start. Values outside the
// ranges (the configuration may have changed) are passed over: they are never
// given out, so nothing can collide with them.
func (b *Book) Load(records []Record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range records {
		b.report(r)
	}
}

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
	var all []Entry
	for k, p := range b.ips {
		all = p.appendEntries(all, func(i uint64) string { return b.cfg.IPs[k].at(i).String() })
	}
	return b.ports.appendEntries(all, func(i uint64) string { return fmt.Sprint(b.cfg.Ports.at(i)) })
}

func (p *pool) appendEntries(all []Entry, value func(uint64) string) []Entry {
	numbers := make([]uint64, 0, len(p.taken))
	for i := range p.taken {
		numbers = append(numbers, i)
	}
	slices.Sort(numbers)
	for _, i := range numbers {
		c := p.taken[i]
		all = append(all, Entry{Value: value(i), Owner: c.owner, Stored: c.stored, InFlight: c.holds})
	}
	return all
}

// String is the entry as one line.
func (e Entry) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s %s/%s", e.Value, e.Owner.Namespace, e.Owner.Name)
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
		if p, i, ok := b.ip(ip); ok && !slices.Contains(now.IPs, ip) {
			p.unstore(owner, i)
		}
	}
	for _, port := range a.stored.Ports {
		if i, ok := b.cfg.Ports.index(port); ok && !slices.Contains(now.Ports, port) {
			b.ports.unstore(owner, i)
		}
	}
	for _, ip := range now.IPs {
		if p, i, ok := b.ip(ip); ok {
			p.store(owner, i)
		}
	}
	for _, port := range now.Ports {
		if i, ok := b.cfg.Ports.index(port); ok {
			b.ports.store(owner, i)
		}
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

// ip finds the pool and the number of an address.
func (b *Book) ip(addr netip.Addr) (*pool, uint64, bool) {
	for k, r := range b.cfg.IPs {
		if i, ok := r.index(addr); ok {
			return b.ips[k], i, true
		}
	}
	return nil, 0, false
}

// ErrNoFamily says that the book has no range of the wanted family.
var ErrNoFamily = errors.New("no address range of this IP family is configured")
