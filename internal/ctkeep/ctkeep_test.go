// SPDX-License-Identifier: Apache-2.0

package ctkeep

import (
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// TestKeep translates a connection, takes the rules away that did it, and goes on using
// it; without the table the same connection ends. Making the table twice is once.
func TestKeep(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	nettest.LeakCheck(t)
	for _, kept := range []bool{true, false} {
		ns := nettest.NewNS(t)
		run := func(args ...string) string {
			t.Helper()
			out, err := execx.In(ns).Run(t.Context(), execx.Cmd{Path: "nft", Args: args})
			if err != nil {
				t.Fatal(err)
			}
			return string(out.Stdout)
		}
		if kept {
			for range 2 {
				if err := Keep(ns); err != nil {
					t.Fatal(err)
				}
			}
			if got := run("list", "ruleset"); strings.Count(got, "ct state established accept") != 1 || strings.Count(got, "type nat hook") != 4 {
				t.Errorf("the table is:\n%s", got)
			}
		}
		run("add table ip nat; add chain ip nat output { type nat hook output priority -100 ; }; add rule ip nat output ip daddr 127.0.0.9 tcp dport 80 dnat to 127.0.0.1:8080")
		l, err := ns.Listen(t.Context(), "tcp", "127.0.0.1:8080")
		if err != nil {
			t.Fatal(err)
		}
		c, err := ns.Dial(t.Context(), "tcp", "127.0.0.9:80")
		if err != nil {
			t.Fatal(err)
		}
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		run("delete table ip nat")
		wait := 5 * time.Second
		if !kept {
			wait = 300 * time.Millisecond
		}
		_ = far.SetDeadline(time.Now().Add(wait))
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		_, err = far.Read(make([]byte, 1))
		if got := err == nil; got != kept {
			t.Errorf("with the table %v: the connection lives %v (%v)", kept, got, err)
		}
		_, _, _ = c.Close(), far.Close(), l.Close()
	}
}
