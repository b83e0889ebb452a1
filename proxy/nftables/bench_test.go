// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/proxy/proxytest"
)

// sizes are the numbers of Services of the benchmarks, of five endpoints each;
// KPLAB_LONG adds ten thousand.
func sizes(base ...int) []int {
	if os.Getenv("KPLAB_LONG") != "" {
		base = append(base, 10000)
	}
	return base
}

// each runs a benchmark for every layout and size.
func each(b *testing.B, fn func(b *testing.B, l Layout, n int)) {
	b.Helper()
	for _, l := range Layouts() {
		for _, n := range sizes(1000) {
			b.Run(fmt.Sprintf("%s/%d", l, n), func(b *testing.B) { fn(b, l, n) })
		}
	}
}

// cpu is the processor time of this process so far, the kernel's on its behalf
// included: it says more than the clock where other work runs beside.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRender renders everything anew, as after a start.
func BenchmarkRender(b *testing.B) {
	each(b, func(b *testing.B, l Layout, n int) {
		b.Helper()
		s := proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts())
		b.ReportAllocs()
		for b.Loop() {
			if _, err := New(Options{Layout: l}).Render(s); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkFullApply loads everything into an empty namespace and reads it back,
// beside what nft needs for the same text (with KPLAB_PLAIN set beyond a thousand
// Services in upstream's layout, where that takes minutes).
func BenchmarkFullApply(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "nft")
	each(b, func(b *testing.B, l Layout, n int) {
		b.Helper()
		s := proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts())
		var ours, plain, worked time.Duration
		compare := n <= 1000 || l == LayoutCompact || os.Getenv("KPLAB_PLAIN") != ""
		for b.Loop() {
			m := New(Options{NetNS: nettest.NewNS(b), Layout: l})
			start := time.Now()
			before := cpu(b)
			p := apply(b, m, s)
			ours += time.Since(start)
			worked += cpu(b) - before
			m.Close()
			if !compare {
				continue
			}
			other, text := execx.In(nettest.NewNS(b)), p.String()
			start = time.Now()
			if _, err := other.Run(b.Context(), execx.Cmd{Path: "nft", Args: []string{"-f", "-"}, Stdin: []byte(text)}); err != nil {
				b.Fatal(err)
			}
			plain += time.Since(start)
		}
		b.ReportMetric(ours.Seconds()/float64(b.N), "s/apply")
		b.ReportMetric(worked.Seconds()/float64(b.N), "cpu-s/apply")
		if compare {
			b.ReportMetric(plain.Seconds()/float64(b.N), "s/plain")
			b.ReportMetric(float64(ours)/float64(plain), "ratio")
		}
	})
}

// BenchmarkOneChange changes one endpoint with everything loaded: from the event
// to the element or rule read back.
func BenchmarkOneChange(b *testing.B) {
	nettest.NeedRoot(b)
	each(b, func(b *testing.B, l Layout, n int) {
		b.Helper()
		d := proxytest.SyntheticDecider(n, 5)
		m := New(Options{NetNS: nettest.NewNS(b), Layout: l})
		apply(b, m, d.Decide(proxytest.SyntheticFacts()))
		_, eps := proxytest.Synthetic(n, 5)
		slice := eps[n/2]
		var spent []time.Duration
		before := cpu(b)
		b.Cleanup(m.Close)
		for i := 0; b.Loop(); i++ {
			next := slice.DeepCopy()
			next.Endpoints = next.Endpoints[:4+i%2]
			d.SetSlice(next)
			start := time.Now()
			apply(b, m, d.Decide(proxytest.SyntheticFacts()))
			spent = append(spent, time.Since(start))
		}
		b.ReportMetric(float64((cpu(b)-before).Microseconds())/1000/float64(len(spent)), "cpu-ms")
		slices.Sort(spent)
		b.ReportMetric(float64(spent[len(spent)/2].Microseconds())/1000, "ms/p50")
		b.ReportMetric(float64(spent[len(spent)*9/10].Microseconds())/1000, "ms/p90")
	})
}

// BenchmarkOneService adds a Service and takes it away again with everything
// loaded.
func BenchmarkOneService(b *testing.B) {
	nettest.NeedRoot(b)
	each(b, func(b *testing.B, l Layout, n int) {
		b.Helper()
		d := proxytest.SyntheticDecider(n, 5)
		m := New(Options{NetNS: nettest.NewNS(b), Layout: l})
		svcs, eps := proxytest.Synthetic(n+1, 5)
		d.SetSlice(eps[n])
		b.Cleanup(m.Close)
		apply(b, m, d.Decide(proxytest.SyntheticFacts()))
		var add, del time.Duration
		for b.Loop() {
			d.SetService(svcs[n])
			start := time.Now()
			apply(b, m, d.Decide(proxytest.SyntheticFacts()))
			add += time.Since(start)
			d.DeleteService(svcs[n].Namespace, svcs[n].Name)
			start = time.Now()
			apply(b, m, d.Decide(proxytest.SyntheticFacts()))
			del += time.Since(start)
		}
		b.ReportMetric(add.Seconds()*1000/float64(b.N), "ms/add")
		b.ReportMetric(del.Seconds()*1000/float64(b.N), "ms/delete")
	})
}

// BenchmarkIntact looks whether everything is still there, as the proxy does every
// 30 seconds: when nobody has changed a rule since the last look, and when somebody
// has. restart is what a new process pays that finds all as it should be.
func BenchmarkIntact(b *testing.B) {
	nettest.NeedRoot(b)
	each(b, func(b *testing.B, l Layout, n int) {
		b.Helper()
		ns := nettest.NewNS(b)
		m := New(Options{NetNS: ns, Layout: l})
		b.Cleanup(m.Close)
		s := proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts())
		apply(b, m, s)
		for _, c := range []struct {
			name    string
			prepare func()
		}{{"still", func() {}}, {"changed", func() { m.applied[familyOf("IPv4")].checked = 0 }}} {
			b.Run(c.name, func(b *testing.B) {
				for b.Loop() {
					c.prepare()
					if intact, err := m.Intact(b.Context()); err != nil || !intact {
						b.Fatalf("intact %v, %v", intact, err)
					}
				}
			})
		}
		b.Run("restart", func(b *testing.B) {
			for b.Loop() {
				fresh := New(Options{NetNS: ns, Layout: l})
				apply(b, fresh, s)
				fresh.Close()
			}
		})
	})
}

// BenchmarkDetect is what a lab's start pays for knowing its kernel.
func BenchmarkDetect(b *testing.B) {
	nettest.NeedRoot(b)
	for b.Loop() {
		if err := Detect(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
