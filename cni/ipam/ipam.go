// SPDX-License-Identifier: Apache-2.0

// Package ipam hands out pod addresses from a range and keeps what it handed out
// in files, one a taken address, so that a daemon that was killed finds them
// again and a person can read them with ls and cat.
//
// A directory holds, for one range:
//
//	10.244.1.7   taken: the line "ID IFNAME" names the owner
//	10.244.1.6   let go: a second line "gone-with LINK" says that the address is
//	             free for the next pod once the link LINK has left the node
//	last         the address handed out last; the search starts behind it
//	lock         held (flock) while a process works on the directory
//
// Two rules give an address its peace. The search goes round the range, so an
// address that was just given back is the last to be handed out again. And an
// address that was let go while its link still stood (a namespace dies when its
// last socket does, which can be minutes later) stays taken until the link is
// gone: two pods never answer for one address.
//
// An address file is made with O_EXCL under the lock, so neither a crash nor a
// second process can give an address to two owners; an empty one that is seen
// under the lock was left by a process that was killed in between, and is free.
// Nothing is truncated or renamed over, which ext4 answers with a flush.
package ipam

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	lastFile = "last"
	lockFile = "lock"
	// lastWidth is the fixed size of the file "last": the longest address and a line
	// feed.
	lastWidth = len("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff") + 1
	// hostBits is the least number of bits that a range leaves to its addresses.
	hostBits = 3
	// goneWith separates the owner from the link whose end frees the address.
	goneWith = "gone-with"
	// sweepAtMost bounds how many waiting addresses one call looks at, so that
	// its cost does not grow with the pods that died before.
	sweepAtMost = 4
)

// ErrExhausted says that no address of the range is free. The error that wraps it
// names the range, how many are taken and how many wait for their link to go.
var ErrExhausted = errors.New("no free address in the range")

// Owner is who holds an address: one interface of one sandbox. Neither part may
// be empty or hold white space.
type Owner struct {
	// ID is the container ID of the CNI call (kplab: the pod's UID).
	ID string
	// IfName is the interface inside the sandbox.
	IfName string
}

func (o Owner) String() string { return o.ID + " " + o.IfName }

func (o Owner) validate() error {
	for _, part := range []string{o.ID, o.IfName} {
		if part == "" || strings.ContainsAny(part, " \t\r\n") {
			return fmt.Errorf("address owner %q: the ID and the interface name must be non-empty and hold no white space", o.String())
		}
	}
	return nil
}

// Reservation is one taken address.
type Reservation struct {
	Addr  netip.Addr
	Owner Owner
	// GoneWith names the link on the node that still carries the address after
	// its owner let it go; empty while the owner holds it.
	GoneWith string
}

// Config describes a range.
type Config struct {
	// Dir holds the files; it is made when it is missing. One range, one Dir.
	Dir string
	// Subnet is the range, of either family. The network's own address, the first
	// host address (which readers expect to be a gateway) and the last address are
	// never handed out.
	Subnet netip.Prefix
	// Start is the address that a range which has handed out none begins with; the
	// zero address means the first. The rest of the range follows when its end is
	// reached.
	Start netip.Addr
	// LinkGone reports whether a link on the node is gone; it is asked about
	// addresses that were let go while their link stood. nil means that links
	// are always gone.
	LinkGone func(link string) bool
}

// Pool is an open range. It is safe for concurrent use, by several processes too.
type Pool struct {
	cfg         Config
	first, last netip.Addr

	mu    sync.Mutex
	lock  *os.File
	seen  *os.File // the file "last", held open
	index map[netip.Addr]Reservation
	byOwn map[Owner]netip.Addr
	stamp dirStamp
}

// dirStamp tells whether another process has changed the directory.
type dirStamp struct{ sec, nsec int64 }

// Open makes Dir when it is missing and reads what is taken. Half-written files
// of a killed process are removed.
func Open(cfg Config) (*Pool, error) {
	if !cfg.Subnet.IsValid() || cfg.Subnet.Addr().Is4In6() {
		return nil, fmt.Errorf("address range %q: want an IPv4 or IPv6 prefix", cfg.Subnet)
	}
	if most := cfg.Subnet.Addr().BitLen() - hostBits; cfg.Subnet.Bits() > most {
		return nil, fmt.Errorf("address range %s: too small for pods, give a /%d or larger", cfg.Subnet, most)
	}
	if cfg.LinkGone == nil {
		cfg.LinkGone = func(string) bool { return true }
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make the address directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(cfg.Dir, lockFile), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the address directory: %w", err)
	}
	seen, err := os.OpenFile(filepath.Join(cfg.Dir, lastFile), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the note of the address handed out last: %w", err), lock.Close())
	}
	p := &Pool{cfg: cfg, lock: lock, seen: seen}
	p.first = cfg.Subnet.Masked().Addr().Next().Next()
	p.last = lastAddr(cfg.Subnet).Prev()
	if cfg.Start.IsValid() && (cfg.Start.Less(p.first) || p.last.Less(cfg.Start)) {
		return nil, errors.Join(fmt.Errorf("address range %s: it hands out %s to %s, and cannot start with %s", cfg.Subnet, p.first, p.last, cfg.Start), p.Close())
	}
	if err := p.locked(p.reload); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Close lets go of the directory. What is taken stays taken.
func (p *Pool) Close() error { return errors.Join(p.seen.Close(), p.lock.Close()) }

// Subnet returns the range.
func (p *Pool) Subnet() netip.Prefix { return p.cfg.Subnet }

// Allocate takes an address for owner. An owner that holds one gets the same
// again, and fresh is false. When nothing is free the error wraps [ErrExhausted].
func (p *Pool) Allocate(owner Owner) (got netip.Addr, fresh bool, err error) {
	if err := owner.validate(); err != nil {
		return netip.Addr{}, false, err
	}
	err = p.locked(func() error {
		if err := p.refresh(); err != nil {
			return err
		}
		if addr, ok := p.byOwn[owner]; ok {
			got = addr
			return nil
		}
		p.sweep()
		addr, err := p.take(owner)
		got, fresh = addr, err == nil
		return err
	})
	return got, fresh, err
}

// Lookup returns the address that owner holds.
func (p *Pool) Lookup(owner Owner) (netip.Addr, bool, error) {
	var (
		addr netip.Addr
		ok   bool
	)
	err := p.locked(func() error {
		err := p.refresh()
		addr, ok = p.byOwn[owner]
		return err
	})
	return addr, ok, err
}

// Release gives owner's address back. With a link, the address is handed out
// again only once LinkGone says that the link has gone; with "" it is free at
// once. An owner without an address is success.
func (p *Pool) Release(owner Owner, link string) error {
	return p.locked(func() error {
		if err := p.refresh(); err != nil {
			return err
		}
		addr, ok := p.byOwn[owner]
		if !ok {
			return nil
		}
		if link == "" || p.cfg.LinkGone(link) {
			return p.free(addr)
		}
		r := p.index[addr]
		r.GoneWith = link
		if err := p.note(r); err != nil {
			return err
		}
		p.index[addr] = r
		delete(p.byOwn, owner)
		return p.restamp()
	})
}

// List returns every reservation, those that wait for their link included, in
// the order of their addresses.
func (p *Pool) List() ([]Reservation, error) {
	var all []Reservation
	err := p.locked(func() error {
		if err := p.reload(); err != nil {
			return err
		}
		for _, a := range slices.SortedFunc(maps.Keys(p.index), netip.Addr.Compare) {
			all = append(all, p.index[a])
		}
		return nil
	})
	return all, err
}

// locked runs fn with the directory locked against other goroutines and other
// processes.
func (p *Pool) locked(fn func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := flock(p.lock, syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock the address directory %s: %w", p.cfg.Dir, err)
	}
	defer func() { _ = flock(p.lock, syscall.LOCK_UN) }()
	return fn()
}

func flock(f *os.File, how int) error {
	for {
		err := syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// take finds and claims the next free address behind the one handed out last.
func (p *Pool) take(owner Owner) (netip.Addr, error) {
	start := p.readLast()
	rescanned := false
	for addr := p.after(start); ; addr = p.after(addr) {
		held, taken := p.index[addr]
		if taken && held.GoneWith != "" && p.cfg.LinkGone(held.GoneWith) {
			if err := p.free(addr); err != nil {
				return netip.Addr{}, err
			}
			taken = false
		}
		if !taken {
			r := Reservation{Addr: addr, Owner: owner}
			switch err := p.create(r); {
			case err == nil:
				p.index[addr], p.byOwn[owner] = r, addr
				if err := p.writeLast(addr); err != nil {
					return netip.Addr{}, errors.Join(err, p.free(addr))
				}
				return addr, p.restamp()
			case errors.Is(err, fs.ErrExist):
				// Taken by another process within the directory's time stamp.
				rescanned = false
			default:
				return netip.Addr{}, err
			}
		}
		if addr == start {
			// All the way round. The index may be old by one tick of the file
			// system's clock, so look at the files themselves once.
			if rescanned {
				return netip.Addr{}, p.exhausted()
			}
			if err := p.reload(); err != nil {
				return netip.Addr{}, err
			}
			rescanned = true
		}
	}
}

func (p *Pool) exhausted() error {
	waiting := 0
	for _, r := range p.index {
		if r.GoneWith != "" {
			waiting++
		}
	}
	return fmt.Errorf("%w: %s has %d addresses taken and %d that wait for the link of a removed pod to go; remove pods from this node or give it a larger range",
		ErrExhausted, p.cfg.Subnet, len(p.index)-waiting, waiting)
}

// sweep frees a few addresses whose link has gone, so that the directory shows
// what is so without anyone asking for each address.
func (p *Pool) sweep() {
	looked := 0
	for addr, r := range p.index {
		if r.GoneWith == "" {
			continue
		}
		if looked++; looked > sweepAtMost {
			return
		}
		if p.cfg.LinkGone(r.GoneWith) {
			// A file that stays is looked at again when the search comes to it.
			_ = p.free(addr)
		}
	}
}

// after returns the address behind a, round the range.
func (p *Pool) after(a netip.Addr) netip.Addr {
	next := a.Next()
	if next.Less(p.first) || p.last.Less(next) {
		return p.first
	}
	return next
}

// free removes the file of addr and forgets it.
func (p *Pool) free(addr netip.Addr) error {
	if err := os.Remove(p.path(addr)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("free address %s: %w", addr, err)
	}
	if r, ok := p.index[addr]; ok {
		delete(p.index, addr)
		if r.GoneWith == "" {
			delete(p.byOwn, r.Owner)
		}
	}
	return p.restamp()
}

// create makes the file of a taken address; the error is fs.ErrExist when the
// address is taken already.
func (p *Pool) create(r Reservation) error {
	f, err := os.OpenFile(p.path(r.Addr), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("reserve %s: %w", r.Addr, err)
	}
	_, err = f.WriteString(r.Owner.String() + "\n")
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(fmt.Errorf("write the owner of %s: %w", r.Addr, err), os.Remove(p.path(r.Addr)))
	}
	return nil
}

// note adds to the file of an address that it waits for its link to go. The
// directory's time says to other processes that something changed, and adding to a
// file does not move it.
func (p *Pool) note(r Reservation) error {
	f, err := os.OpenFile(p.path(r.Addr), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("let go of %s: %w", r.Addr, err)
	}
	_, err = f.WriteString(goneWith + " " + r.GoneWith + "\n")
	now := time.Now()
	if err = errors.Join(err, f.Close(), os.Chtimes(p.cfg.Dir, now, now)); err != nil {
		return fmt.Errorf("let go of %s: %w", r.Addr, err)
	}
	return nil
}

func (p *Pool) path(addr netip.Addr) string { return filepath.Join(p.cfg.Dir, addr.String()) }

// readLast returns the address handed out last; without one, or with one that is
// not of the range, the search starts at Config.Start or the range's first.
func (p *Pool) readLast() netip.Addr {
	var buf [lastWidth]byte
	n, _ := p.seen.ReadAt(buf[:], 0)
	addr, err := netip.ParseAddr(string(bytes.TrimSpace(buf[:n])))
	if err == nil && !addr.Less(p.first) && !p.last.Less(addr) {
		return addr
	}
	if p.cfg.Start.IsValid() && p.cfg.Start != p.first {
		return p.cfg.Start.Prev()
	}
	return p.last
}

// writeLast overwrites in place. It needs no care for crashes: whatever the file
// holds, only the order in which addresses are tried depends on it.
func (p *Pool) writeLast(addr netip.Addr) error {
	if _, err := p.seen.WriteAt(fmt.Appendf(nil, "%-*s\n", lastWidth-1, addr), 0); err != nil {
		return fmt.Errorf("note the address handed out last: %w", err)
	}
	return nil
}

// refresh reads the directory again when another process has changed it.
func (p *Pool) refresh() error {
	now, err := p.readStamp()
	if err != nil {
		return err
	}
	if now == p.stamp {
		return nil
	}
	return p.reload()
}

// reload builds the index from the files and removes what a killed process left
// half-made.
func (p *Pool) reload() error {
	entries, err := os.ReadDir(p.cfg.Dir)
	if err != nil {
		return fmt.Errorf("read the address directory: %w", err)
	}
	p.index, p.byOwn = map[netip.Addr]Reservation{}, map[Owner]netip.Addr{}
	for _, e := range entries {
		name := e.Name()
		addr, err := netip.ParseAddr(name)
		if err != nil || !p.cfg.Subnet.Contains(addr) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(p.cfg.Dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read the reservation of %s: %w", addr, err)
		}
		r := Reservation{Addr: addr}
		fields := strings.Fields(string(text))
		if len(fields) >= 2 {
			r.Owner = Owner{ID: fields[0], IfName: fields[1]}
		}
		if len(fields) >= 4 && fields[2] == goneWith {
			r.GoneWith = fields[3]
		}
		if len(fields) < 2 {
			if err := os.Remove(p.path(addr)); err != nil {
				return fmt.Errorf("remove a half-written reservation: %w", err)
			}
			continue
		}
		p.index[addr] = r
		if r.GoneWith == "" {
			p.byOwn[r.Owner] = addr
		}
	}
	return p.restamp()
}

func (p *Pool) restamp() error {
	s, err := p.readStamp()
	p.stamp = s
	return err
}

func (p *Pool) readStamp() (dirStamp, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(p.cfg.Dir, &st); err != nil {
		return dirStamp{}, fmt.Errorf("look at the address directory %s: %w", p.cfg.Dir, err)
	}
	return dirStamp{st.Mtim.Sec, st.Mtim.Nsec}, nil
}

// lastAddr returns the highest address of a prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}
