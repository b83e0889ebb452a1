// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func open(tb testing.TB, cfg Config) *Pool {
	tb.Helper()
	if cfg.Dir == "" {
		cfg.Dir = tb.TempDir()
	}
	p, err := Open(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
	})
	return p
}

func owner(n int) Owner { return Owner{ID: fmt.Sprintf("pod-%d", n), IfName: "eth0"} }

func mustAllocate(tb testing.TB, p *Pool, o Owner) netip.Addr {
	tb.Helper()
	a, _, err := p.Allocate(o)
	if err != nil {
		tb.Fatal(err)
	}
	return a
}

// TestStart begins in the middle of the range, once, and goes round.
func TestStart(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), Subnet: netip.MustParsePrefix("10.244.36.64/29"), Start: netip.MustParseAddr("10.244.36.69")}
	p := open(t, cfg)
	for i, want := range []string{"10.244.36.69", "10.244.36.70", "10.244.36.66"} {
		if got := mustAllocate(t, p, owner(i)); got.String() != want {
			t.Errorf("address %d is %s, want %s", i, got, want)
		}
	}
	if got := mustAllocate(t, open(t, cfg), owner(3)); got.String() != "10.244.36.67" {
		t.Errorf("after another open: %s", got)
	}
	cfg.Start = netip.MustParseAddr("10.244.36.65")
	if _, err := Open(cfg); err == nil {
		t.Error("a start outside of what is handed out was taken")
	}
}

func TestAllocateGivesTheSameOwnerTheSameAddress(t *testing.T) {
	p := open(t, Config{Subnet: netip.MustParsePrefix("10.244.1.0/24")})
	first := mustAllocate(t, p, owner(1))
	if want := netip.MustParseAddr("10.244.1.2"); first != want {
		t.Errorf("first address is %s, want %s", first, want)
	}
	if again := mustAllocate(t, p, owner(1)); again != first {
		t.Errorf("second ADD gave %s, want %s", again, first)
	}
	if other := mustAllocate(t, p, owner(2)); other == first {
		t.Errorf("two owners got %s", other)
	}
	text, err := os.ReadFile(filepath.Join(p.cfg.Dir, "10.244.1.2"))
	if err != nil || string(text) != "pod-1 eth0\n" {
		t.Errorf("file holds %q, %v", text, err)
	}
}

func TestFreedAddressIsUsedLast(t *testing.T) {
	p := open(t, Config{Subnet: netip.MustParsePrefix("10.0.0.0/28")})
	// .2 to .14 are 13 addresses.
	freed := mustAllocate(t, p, owner(0))
	if err := p.Release(owner(0), ""); err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 12; n++ {
		if a := mustAllocate(t, p, owner(n)); a == freed {
			t.Fatalf("pod %d got %s, which was freed just before, while others are free", n, a)
		}
	}
	if a := mustAllocate(t, p, owner(13)); a != freed {
		t.Errorf("the 13th pod got %s, want the freed %s", a, freed)
	}
}

func TestExhausted(t *testing.T) {
	p := open(t, Config{Subnet: netip.MustParsePrefix("10.0.0.8/29")})
	for n := range 5 {
		mustAllocate(t, p, owner(n))
	}
	_, _, err := p.Allocate(owner(9))
	if !errors.Is(err, ErrExhausted) {
		t.Fatalf("error is %v, want ErrExhausted", err)
	}
	for _, want := range []string{"10.0.0.8/29", "5 addresses taken"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not say %q", err, want)
		}
	}
	if err := p.Release(owner(3), ""); err != nil {
		t.Fatal(err)
	}
	if err := p.Release(owner(3), ""); err != nil {
		t.Errorf("second release: %v", err)
	}
	mustAllocate(t, p, owner(9))
}

func TestAddressIsFreeOnlyWhenItsLinkIsGone(t *testing.T) {
	gone := map[string]bool{}
	p := open(t, Config{Subnet: netip.MustParsePrefix("10.0.0.8/29"), LinkGone: func(l string) bool { return gone[l] }})
	var last netip.Addr
	for n := range 5 {
		last = mustAllocate(t, p, owner(n))
	}
	if err := p.Release(owner(4), "veth4"); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := p.Lookup(owner(4)); ok || err != nil {
		t.Errorf("the owner still holds the address (%v)", err)
	}
	_, _, err := p.Allocate(owner(5))
	if !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "1 that wait") {
		t.Fatalf("with the link still there: %v", err)
	}
	gone["veth4"] = true
	if a := mustAllocate(t, p, owner(5)); a != last {
		t.Errorf("got %s, want %s", a, last)
	}
}

// A pod's address is let go in one process and asked for in another, which has had
// the directory open all the time.
func TestOtherProcessSeesAnAddressLetGo(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), Subnet: netip.MustParsePrefix("10.244.1.0/24"), LinkGone: func(string) bool { return false }}
	a, b := open(t, cfg), open(t, cfg)
	addr := mustAllocate(t, a, owner(1))
	if got, ok, err := b.Lookup(owner(1)); err != nil || !ok || got != addr {
		t.Fatalf("the other process sees %s, %v, %v; want %s", got, ok, err, addr)
	}
	if err := a.Release(owner(1), "veth1"); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := b.Lookup(owner(1)); err != nil || ok {
		t.Errorf("the other process still sees %s as the owner's: %v", got, err)
	}
	if got := mustAllocate(t, b, owner(1)); got == addr {
		t.Errorf("%s is handed out again while its link stands", got)
	}
}

func TestOpenAfterCrash(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Dir: dir, Subnet: netip.MustParsePrefix("10.244.1.0/24")}
	a := mustAllocate(t, open(t, cfg), owner(1))
	if err := os.WriteFile(filepath.Join(dir, "10.244.1.9"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	p := open(t, cfg)
	if got, ok, err := p.Lookup(owner(1)); got != a || !ok || err != nil {
		t.Errorf("after the crash the owner holds %s %v %v, want %s", got, ok, err, a)
	}
	if b := mustAllocate(t, p, owner(2)); b != a.Next() {
		t.Errorf("next address is %s, want %s", b, a.Next())
	}
	if _, err := os.Stat(filepath.Join(dir, "10.244.1.9")); !os.IsNotExist(err) {
		t.Errorf("the half-written reservation is still there: %v", err)
	}
}

func TestTwoProcessesNeverShareAnAddress(t *testing.T) {
	cfg := Config{Dir: t.TempDir(), Subnet: netip.MustParsePrefix("10.244.1.0/24")}
	pools := []*Pool{open(t, cfg), open(t, cfg)}
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		seen = map[netip.Addr]Owner{}
	)
	for w, p := range pools {
		wg.Go(func() {
			for n := range 60 {
				o := owner(w*1000 + n)
				a, _, err := p.Allocate(o)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if had, dup := seen[a]; dup {
					t.Errorf("%s given to %s and %s", a, had, o)
				}
				seen[a] = o
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	all, err := pools[0].List()
	if err != nil || len(all) != 120 {
		t.Errorf("%d reservations, want 120 (%v)", len(all), err)
	}
}

// A range of IPv6 is handed out as one of IPv4 is, however large it is.
func TestIPv6Range(t *testing.T) {
	dir := t.TempDir()
	p := open(t, Config{Dir: dir, Subnet: netip.MustParsePrefix("fd00:10:244:1::/64")})
	for n, want := range []string{"fd00:10:244:1::2", "fd00:10:244:1::3", "fd00:10:244:1::4"} {
		if got := mustAllocate(t, p, owner(n)); got.String() != want {
			t.Errorf("address %d is %s, want %s", n, got, want)
		}
	}
	if err := p.Release(owner(1), ""); err != nil {
		t.Fatal(err)
	}
	again := open(t, Config{Dir: dir, Subnet: netip.MustParsePrefix("fd00:10:244:1::/64")})
	all, err := again.List()
	if err != nil || len(all) != 2 || all[1].Addr.String() != "fd00:10:244:1::4" || all[1].Owner != owner(2) {
		t.Errorf("a second process sees %v, %v", all, err)
	}
	if got := mustAllocate(t, again, owner(3)); got.String() != "fd00:10:244:1::5" {
		t.Errorf("the next address is %s", got)
	}
	small := open(t, Config{Dir: t.TempDir(), Subnet: netip.MustParsePrefix("fd00::8/125")})
	for n := range 5 {
		mustAllocate(t, small, owner(n))
	}
	if _, _, err := small.Allocate(owner(9)); !errors.Is(err, ErrExhausted) {
		t.Errorf("a sixth address of a /125: %v", err)
	}
}

func TestOpenAndAllocateRefuse(t *testing.T) {
	for _, subnet := range []string{"10.0.0.0/30", "fd00::/126", "::ffff:10.0.0.0/104"} {
		if p, err := Open(Config{Dir: t.TempDir(), Subnet: netip.MustParsePrefix(subnet)}); err == nil {
			t.Errorf("%s was accepted", subnet)
			_ = p.Close()
		}
	}
	p := open(t, Config{Subnet: netip.MustParsePrefix("10.0.0.0/24")})
	for _, o := range []Owner{{}, {ID: "a b", IfName: "eth0"}, {ID: "a"}} {
		if _, _, err := p.Allocate(o); err == nil {
			t.Errorf("owner %q was accepted", o)
		}
	}
}

func BenchmarkAllocateRelease(b *testing.B) {
	p := open(b, Config{Subnet: netip.MustParsePrefix("10.244.1.0/24")})
	for n := range 100 {
		mustAllocate(b, p, owner(n))
	}
	for b.Loop() {
		mustAllocate(b, p, owner(1000))
		if err := p.Release(owner(1000), ""); err != nil {
			b.Fatal(err)
		}
	}
}
