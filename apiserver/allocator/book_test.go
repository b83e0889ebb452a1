// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func owner(name string) Owner { return Owner{UID: name, Namespace: "default", Name: name} }

// TestDynamicPicks takes a whole range: the upper band first, in no order, then
// the lower one, then nothing (A02, A04, A10, E01, E08).
func TestDynamicPicks(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 30063)
	txn := b.Begin(owner("all"))
	defer txn.End()

	var ips []netip.Addr
	for range 254 - 16 {
		ip, err := txn.NextIP(true)
		if err != nil {
			t.Fatal(err)
		}
		if ip.Less(addr("10.96.0.17")) {
			t.Fatalf("%s is in the lower band, the upper one has room", ip)
		}
		ips = append(ips, ip)
	}
	if slices.IsSortedFunc(ips, netip.Addr.Compare) {
		t.Error("the addresses come in order")
	}
	for range 16 {
		ip, err := txn.NextIP(true)
		if err != nil {
			t.Fatalf("the lower band is not used: %v", err)
		}
		if !ip.Less(addr("10.96.0.17")) {
			t.Fatalf("%s was given out twice", ip)
		}
	}
	if _, err := txn.NextIP(true); !errors.Is(err, ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if _, err := txn.NextIP(false); !errors.Is(err, ErrNoFamily) {
		t.Errorf("got %v, want ErrNoFamily", err)
	}

	seen := map[int32]bool{}
	for i := range 64 {
		port, err := txn.NextPort()
		if err != nil || seen[port] {
			t.Fatalf("port %d (%v), seen before: %t", port, err, seen[port])
		}
		if i < 64-16 && port < 30016 {
			t.Fatalf("%d is in the lower band, the upper one has room", port)
		}
		seen[port] = true
	}
	if _, err := txn.NextPort(); !errors.Is(err, ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	txn.Drop()
	if left := b.Taken(); len(left) > 0 {
		t.Errorf("%d values are still taken", len(left))
	}
}

func TestOwnership(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 32767)
	b.Load([]Record{{Owner: owner("dns"), Revision: 5, Values: Values{IPs: []netip.Addr{addr("10.96.0.10")}, Ports: []int32{32223}}}})

	other := b.Begin(owner("other"))
	if err := other.IP(addr("10.96.0.10")); !errors.Is(err, ErrIPTaken) {
		t.Errorf("A06: got %v, want ErrIPTaken", err)
	}
	if err := other.Port(32223); !errors.Is(err, ErrPortTaken) {
		t.Errorf("E03: got %v, want ErrPortTaken", err)
	}
	var out *NotInRangeError
	if err := other.Port(25565); !errors.As(err, &out) {
		t.Errorf("E04: got %v, want a NotInRangeError", err)
	}
	if err := other.IP(addr("10.96.0.50")); err != nil {
		t.Errorf("A05: %v", err)
	}
	same := b.Begin(owner("dns"))
	if err := same.Port(32223); err != nil {
		t.Errorf("E05: a second protocol of the same owner: %v", err)
	}
	same.End()

	third := b.Begin(owner("third"))
	if err := third.IP(addr("10.96.0.50")); !errors.Is(err, ErrIPTaken) {
		t.Errorf("an address in flight: got %v, want ErrIPTaken", err)
	}
	other.End()
	if err := third.IP(addr("10.96.0.50")); err != nil {
		t.Errorf("A17: after the failed create: %v", err)
	}
	third.Store(6, Values{IPs: []netip.Addr{addr("10.96.0.50")}})
	b.Deleted(owner("third"))
	again := b.Begin(owner("again"))
	if err := again.IP(addr("10.96.0.50")); err != nil {
		t.Errorf("A16: after the deletion: %v", err)
	}
	again.End()
	again.End()

	want := []string{"10.96.0.10 default/dns", "32223 default/dns"}
	var got []string
	for _, e := range b.Taken() {
		got = append(got, e.String())
	}
	if !slices.Equal(got, want) {
		t.Errorf("taken: %q, want %q", got, want)
	}
}

// TestLateReports brings the answers of writes in an order that the store did not
// have.
func TestLateReports(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 32767)
	first, second := b.Begin(owner("a")), b.Begin(owner("a"))
	if err := errors.Join(first.Port(30001), second.Port(30002)); err != nil {
		t.Fatal(err)
	}
	second.Store(8, Values{Ports: []int32{30002}})
	first.Store(7, Values{Ports: []int32{30001}})
	if got := b.Taken(); len(got) != 1 || got[0].Value != "30002" {
		t.Errorf("the older report won: %v", got)
	}

	update := b.Begin(owner("a"))
	update.Keep(Values{Ports: []int32{30002}})
	b.Deleted(owner("a"))
	update.Store(9, Values{Ports: []int32{30002}})
	b.Deleted(owner("a"))
	if got := b.Taken(); len(got) != 0 {
		t.Errorf("an update that was answered after the deletion brought back %v", got)
	}
	if len(b.owners) != 0 {
		t.Errorf("%d owners are remembered", len(b.owners))
	}
}

func TestDryRun(t *testing.T) {
	b := newBook(t, "10.96.0.0/12", 32767)
	b.Load([]Record{{Owner: owner("dns"), Values: Values{IPs: []netip.Addr{addr("10.96.0.10")}}}})
	txn := b.BeginDryRun(owner("x"))
	if ip, err := txn.NextIP(true); err != nil || ip != addr("10.96.0.0") {
		t.Errorf("A18: got %s, %v; want the base of the range", ip, err)
	}
	if err := txn.IP(addr("10.96.0.10")); err != nil {
		t.Errorf("A18: an address in use is not detected in a dry run, got %v", err)
	}
	if err := txn.IP(addr("10.0.0.9")); err == nil {
		t.Error("A18: an address outside the range was accepted")
	}
	if err := txn.Port(30000); err != nil {
		t.Error(err)
	}
	a, errA := txn.NextPort()
	c, errC := txn.NextPort()
	if errA != nil || errC != nil || a == c || a == 30000 || c == 30000 {
		t.Errorf("stand-ins %d and %d (%v, %v) must differ, also from the requested 30000", a, c, errA, errC)
	}
	txn.Store(4, Values{Ports: []int32{30001}})
	if got := b.Taken(); len(got) != 1 {
		t.Errorf("the dry run left %v", got)
	}
}

func TestKeepNeverFails(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 32767)
	b.Load([]Record{{Owner: owner("a"), Values: Values{Ports: []int32{30001}}}})
	txn := b.Begin(owner("b"))
	txn.Keep(Values{IPs: []netip.Addr{addr("172.30.0.1")}, Ports: []int32{80, 30001}})
	txn.Store(3, Values{IPs: []netip.Addr{addr("172.30.0.1")}, Ports: []int32{80, 30001}})
	b.Deleted(owner("b"))
	if got := b.Taken(); len(got) != 1 || got[0].Owner.Name != "a" {
		t.Errorf("taken: %v, want a's port only", got)
	}
}

func TestTwoFamilies(t *testing.T) {
	v4, err4 := NewIPRange(netip.MustParsePrefix("10.96.0.0/24"))
	v6, err6 := NewIPRange(netip.MustParsePrefix("fd00:96::/112"))
	ports, errP := NewPortRange(30000, 32767)
	if err := errors.Join(err4, err6, errP); err != nil {
		t.Fatal(err)
	}
	b := NewBook(Config{IPs: []IPRange{v4, v6}, Ports: ports})
	txn := b.Begin(owner("a"))
	one, errOne := txn.NextIP(true)
	two, errTwo := txn.NextIP(false)
	if err := errors.Join(errOne, errTwo); err != nil || !one.Is4() || !two.Is6() {
		t.Errorf("got %s and %s: %v", one, two, err)
	}
}

// TestLoadProblems starts on a file in which two objects have the same values,
// and in which values lie outside of the ranges.
func TestLoadProblems(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 32767)
	both := Values{IPs: []netip.Addr{addr("10.96.0.50")}, Ports: []int32{30050}}
	got := b.Load([]Record{
		{Owner: owner("old"), Values: both},
		{Owner: owner("twin"), Values: both},
		{Owner: owner("third"), Values: both},
		{Owner: owner("stray"), Values: Values{IPs: []netip.Addr{addr("172.30.0.1")}, Ports: []int32{80}}},
	})
	want := []Problem{
		{Owner: owner("twin"), IP: addr("10.96.0.50"), Holder: owner("old")},
		{Owner: owner("twin"), Port: 30050, Holder: owner("old")},
		{Owner: owner("third"), IP: addr("10.96.0.50"), Holder: owner("old")},
		{Owner: owner("third"), Port: 30050, Holder: owner("old")},
		{Owner: owner("stray"), IP: addr("172.30.0.1")},
		{Owner: owner("stray"), Port: 80},
	}
	if !slices.Equal(got, want) {
		t.Errorf("problems %v\nwant %v", got, want)
	}
	refused := func(when string) {
		t.Helper()
		txn := b.Begin(owner("new"))
		defer txn.End()
		if err := txn.IP(addr("10.96.0.50")); !errors.Is(err, ErrIPTaken) {
			t.Errorf("%s: address: got %v, want ErrIPTaken", when, err)
		}
		if err := txn.Port(30050); !errors.Is(err, ErrPortTaken) {
			t.Errorf("%s: port: got %v, want ErrPortTaken", when, err)
		}
	}
	refused("three have it")
	b.Deleted(owner("third"))
	refused("one that waited is gone")
	b.Deleted(owner("old"))
	refused("the first is gone, the twin has it")
	update := b.Begin(owner("twin"))
	update.Keep(both)
	update.Store(9, both)
	refused("the twin was written again")
	b.Deleted(owner("twin"))
	b.Deleted(owner("stray"))
	txn := b.Begin(owner("new"))
	defer txn.End()
	if err := errors.Join(txn.IP(addr("10.96.0.50")), txn.Port(30050)); err != nil {
		t.Errorf("nobody has them: %v", err)
	}
	txn.End()
	if left := b.Taken(); len(left) != 0 {
		t.Errorf("still taken: %v", left)
	}
}

// TestSetRanges adds a range when the first is full, and takes it away while its
// addresses are in use (A13, A14).
func TestSetRanges(t *testing.T) {
	small, errS := NewIPRange(netip.MustParsePrefix("10.96.0.0/30"))
	more, errM := NewIPRange(netip.MustParsePrefix("10.97.0.0/29"))
	if err := errors.Join(errS, errM); err != nil {
		t.Fatal(err)
	}
	b := newBook(t, "10.96.0.0/30", 32767)
	txn := b.Begin(owner("a"))
	defer txn.End()
	next := func() (netip.Addr, error) { return txn.NextIP(true) }
	for range 2 {
		if _, err := next(); err != nil {
			t.Fatal(err)
		}
	}
	if ip, err := next(); !errors.Is(err, ErrFull) {
		t.Fatalf("got %s, %v; want ErrFull", ip, err)
	}
	// The second range overlaps with itself: an address is counted in both.
	b.SetRanges([]IPRange{small, more, more})
	var got []netip.Addr
	for range 6 {
		ip, err := next()
		if err != nil || !more.prefix.Contains(ip) || slices.Contains(got, ip) {
			t.Fatalf("got %s, %v; before %v", ip, err, got)
		}
		got = append(got, ip)
	}
	if _, err := next(); !errors.Is(err, ErrFull) {
		t.Fatalf("got %v, want ErrFull", err)
	}
	b.SetRanges([]IPRange{small})
	other := b.Begin(owner("b"))
	defer other.End()
	if err := other.IP(got[0]); !errors.Is(err, ErrNoRange) {
		t.Errorf("got %v, want ErrNoRange", err)
	}
	b.SetRanges([]IPRange{small, more})
	if err := other.IP(got[0]); !errors.Is(err, ErrIPTaken) {
		t.Errorf("got %v, want ErrIPTaken: it was never given back", err)
	}
}

// TestParallelCreates lets 64 writers take and give back at the same time. No
// value may have two owners, and in the end what is taken is what is stored.
func TestParallelCreates(t *testing.T) {
	b := newBook(t, "10.96.0.0/22", 31023)
	var (
		mu     sync.Mutex
		byIP   = map[netip.Addr]string{}
		byPort = map[int32]string{}
		wg     sync.WaitGroup
		stored []Record
	)
	for w := range 64 {
		wg.Go(func() {
			for i := range 40 {
				o := owner(fmt.Sprintf("s-%d-%d", w, i))
				txn := b.Begin(o)
				ip, errIP := txn.NextIP(true)
				port, errPort := txn.NextPort()
				if err := errors.Join(errIP, errPort); err != nil {
					if !errors.Is(err, ErrFull) {
						t.Error(err)
					}
					txn.End()
					continue
				}
				mu.Lock()
				if was := byIP[ip]; was != "" {
					t.Errorf("%s has %s and %s", ip, was, o.Name)
				}
				if was := byPort[port]; was != "" {
					t.Errorf("%d has %s and %s", port, was, o.Name)
				}
				byIP[ip], byPort[port] = o.Name, o.Name
				mu.Unlock()
				release := func() {
					mu.Lock()
					defer mu.Unlock()
					delete(byIP, ip)
					delete(byPort, port)
				}
				v := Values{IPs: []netip.Addr{ip}, Ports: []int32{port}}
				switch i % 4 {
				case 0: // the write failed
					release()
					txn.End()
				case 1: // written, then deleted
					txn.Store(uint64(i+1), v)
					release()
					b.Deleted(o)
				default:
					txn.Store(uint64(i+1), v)
					mu.Lock()
					stored = append(stored, Record{Owner: o, Revision: uint64(i + 1), Values: v})
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()

	restarted := newBook(t, "10.96.0.0/22", 31023)
	restarted.Load(stored)
	if !slices.Equal(b.Taken(), restarted.Taken()) {
		t.Errorf("after a restart %d values are taken, before %d", len(restarted.Taken()), len(b.Taken()))
	}
}

// FuzzBook drives a book with random requests next to a plain model of the same
// rules.
func FuzzBook(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed, uint16(400))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps uint16) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		b := newBook(t, "10.96.0.0/26", 30030)
		type live struct {
			txn  *Txn
			name string
			held []int32
		}
		var (
			inFlight []live
			stored   = map[string]int32{}
			next     int
			revision uint64
		)
		takenBy := func(port int32) string {
			for _, l := range inFlight {
				if slices.Contains(l.held, port) {
					return l.name
				}
			}
			for name, p := range stored {
				if p == port {
					return name
				}
			}
			return ""
		}
		for range steps {
			switch op := rnd.IntN(5); {
			case op == 0 || len(inFlight) == 0:
				next++
				name := fmt.Sprint("s", next)
				inFlight = append(inFlight, live{txn: b.Begin(owner(name)), name: name})
			case op == 1:
				l := &inFlight[rnd.IntN(len(inFlight))]
				port := 30000 + rnd.Int32N(31)
				want := takenBy(port)
				err := l.txn.Port(port)
				if (err == nil) != (want == "" || want == l.name) {
					t.Fatalf("port %d for %s: %v, the model says %q has it", port, l.name, err, want)
				}
				if err == nil {
					l.held = append(l.held, port)
				}
			case op == 2:
				l := &inFlight[rnd.IntN(len(inFlight))]
				port, err := l.txn.NextPort()
				if err == nil {
					if who := takenBy(port); who != "" {
						t.Fatalf("port %d was picked for %s, %s has it", port, l.name, who)
					}
					l.held = append(l.held, port)
				} else if n := len(b.Taken()); n != 31 {
					t.Fatalf("%v with %d of 31 ports taken", err, n)
				}
			case op == 3:
				i := rnd.IntN(len(inFlight))
				l := inFlight[i]
				inFlight = slices.Delete(inFlight, i, i+1)
				revision++
				if len(l.held) == 0 || rnd.IntN(2) == 0 {
					l.txn.End()
					continue
				}
				l.txn.Store(revision, Values{Ports: l.held[:1]})
				stored[l.name] = l.held[0]
			default:
				for name := range stored {
					b.Deleted(owner(name))
					delete(stored, name)
					break
				}
			}
		}
		for _, l := range inFlight {
			l.txn.End()
		}
		var records []Record
		for name, port := range stored {
			records = append(records, Record{Owner: owner(name), Values: Values{Ports: []int32{port}}})
		}
		restarted := newBook(t, "10.96.0.0/26", 30030)
		restarted.Load(records)
		if !slices.Equal(b.Taken(), restarted.Taken()) {
			t.Fatalf("after a restart: %v, before: %v", restarted.Taken(), b.Taken())
		}
	})
}

func BenchmarkNextIP(b *testing.B) {
	book := newBook(b, "10.96.0.0/12", 32767)
	records := make([]Record, 0, 10000)
	for i := range 10000 {
		ip := book.ranges[0].at(uint64(300 + i))
		records = append(records, Record{Owner: owner(fmt.Sprint(i)), Values: Values{IPs: []netip.Addr{ip}}})
	}
	book.Load(records)
	for b.Loop() {
		txn := book.Begin(Owner{UID: "x"})
		if _, err := txn.NextIP(true); err != nil {
			b.Fatal(err)
		}
		txn.End()
	}
}
