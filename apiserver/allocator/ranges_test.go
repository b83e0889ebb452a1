// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"errors"
	"net/netip"
	"testing"
)

func TestBands(t *testing.T) {
	for _, tc := range []struct {
		id, cidr   string
		size, band uint64
		first      string // the first address of the upper band
	}{
		{"A02", "10.96.0.0/12", 1<<20 - 2, 256, "10.96.1.1"},
		{"A03 /24", "10.96.0.0/24", 254, 16, "10.96.0.17"},
		{"A03 /28", "10.96.0.0/28", 14, 0, "10.96.0.1"},
		{"A03 /27", "10.96.0.0/27", 30, 16, "10.96.0.17"},
		{"not masked", "10.96.0.77/24", 254, 16, "10.96.0.17"},
		{"smallest", "10.96.0.0/30", 2, 0, "10.96.0.1"},
		{"IPv6", "fd00:96::/112", 1<<16 - 1, 256, "fd00:96::101"},
		{"IPv6 wide", "fd00:96::/32", maxSpan - 1, 256, "fd00:96::101"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			r, err := NewIPRange(netip.MustParsePrefix(tc.cidr))
			if err != nil {
				t.Fatal(err)
			}
			if r.size != tc.size || r.band != tc.band {
				t.Errorf("size %d, band %d; want %d, %d", r.size, r.band, tc.size, tc.band)
			}
			if got := r.at(r.band); got != netip.MustParseAddr(tc.first) {
				t.Errorf("upper band begins at %s, want %s", got, tc.first)
			}
			for _, i := range []uint64{0, r.band, r.size - 1} {
				if back, ok := r.index(r.at(i)); !ok || back != i {
					t.Errorf("number %d is %s and comes back as %d, %t", i, r.at(i), back, ok)
				}
			}
		})
	}
}

func TestRangesWithoutRoom(t *testing.T) {
	for _, cidr := range []string{"10.96.0.0/32", "10.96.0.0/31", "fd00::/128"} {
		if _, err := NewIPRange(netip.MustParsePrefix(cidr)); err == nil {
			t.Errorf("%s was accepted", cidr)
		}
	}
	if _, err := NewIPRange(netip.Prefix{}); err == nil {
		t.Error("no prefix at all was accepted")
	}
	for _, p := range [][2]int32{{0, 10}, {10, 9}, {60000, 65536}} {
		if _, err := NewPortRange(p[0], p[1]); err == nil {
			t.Errorf("%v was accepted", p)
		}
	}
}

// TestE01 checks the static band of node ports (KEP-3668).
func TestE01(t *testing.T) {
	for _, tc := range []struct {
		first, last int32
		upper       int32
	}{
		{30000, 32767, 30086},
		{30000, 30015, 30000},
		{30000, 30016, 30016},
		{1000, 60000, 1128},
	} {
		r, err := NewPortRange(tc.first, tc.last)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.at(r.band); got != tc.upper {
			t.Errorf("%s: upper band begins at %d, want %d", r, got, tc.upper)
		}
	}
}

func TestNetworkAndBroadcast(t *testing.T) {
	b := newBook(t, "10.96.0.0/24", 32767)
	for _, tc := range []struct{ id, ip string }{
		{"A09 network", "10.96.0.0"}, {"A09 broadcast", "10.96.0.255"}, {"A07 outside", "10.0.0.9"}, {"A07 other family", "fd00::1"},
	} {
		t.Run(tc.id, func(t *testing.T) {
			txn := b.Begin(Owner{UID: tc.id})
			defer txn.End()
			if err := txn.IP(netip.MustParseAddr(tc.ip)); !errors.Is(err, ErrNoRange) {
				t.Errorf("got %v, want ErrNoRange", err)
			}
			dry := b.BeginDryRun(Owner{UID: tc.id})
			defer dry.End()
			err := dry.IP(netip.MustParseAddr(tc.ip))
			var out *NotInRangeError
			if !errors.As(err, &out) || out.Value != tc.ip {
				t.Errorf("dry run: got %v, want a NotInRangeError about %s", err, tc.ip)
			}
		})
	}
}

// newBook makes a book of the addresses in cidr and the ports from 30000 to last.
func newBook(tb testing.TB, cidr string, last int32) *Book {
	tb.Helper()
	ips, err := NewIPRange(netip.MustParsePrefix(cidr))
	if err != nil {
		tb.Fatal(err)
	}
	ports, err := NewPortRange(30000, last)
	if err != nil {
		tb.Fatal(err)
	}
	return NewBook(Config{IPs: []IPRange{ips}, Ports: ports})
}
