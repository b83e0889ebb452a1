// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
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

// BenchmarkRender renders everything anew, as after a start.
func BenchmarkRender(b *testing.B) {
	for _, n := range sizes(10, 100, 1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts())
			b.ReportAllocs()
			for b.Loop() {
				if _, err := New(Options{}).Render(s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkChangeRender decides and renders after one endpoint changed.
func BenchmarkChangeRender(b *testing.B) {
	for _, n := range sizes(1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d := proxytest.SyntheticDecider(n, 5)
			_, eps := proxytest.Synthetic(1, 5)
			m := New(Options{})
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				slice := eps[0].DeepCopy()
				slice.Endpoints = slice.Endpoints[:4+i%2]
				d.SetSlice(slice)
				if _, err := m.Render(d.Decide(proxytest.SyntheticFacts())); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFullApply loads everything into an empty namespace and reads it back,
// beside what the plain tool needs for the same text in one piece (up to a
// thousand Services; beyond, the text in chunks of a hundred, which is the
// fastest load of text known, without reading back).
func BenchmarkFullApply(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	for _, n := range sizes(1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts())
			var ours, plain time.Duration
			for b.Loop() {
				ns := nettest.NewNS(b)
				m := New(Options{NetNS: ns})
				start := time.Now()
				p := apply(b, m, s)
				ours += time.Since(start)

				other := nettest.NewNS(b)
				run := execx.In(other)
				var texts []string
				if n <= 1000 {
					texts = []string{p.String()}
				} else {
					texts = chunked(p.rulesets[0])
				}
				start = time.Now()
				for _, text := range texts {
					if _, err := run.Run(b.Context(), execx.Cmd{Path: "iptables-nft-restore", Args: []string{"--noflush"}, Stdin: []byte(text)}); err != nil {
						b.Fatal(err)
					}
				}
				plain += time.Since(start)
			}
			b.ReportMetric(ours.Seconds()/float64(b.N), "s/apply")
			b.ReportMetric(plain.Seconds()/float64(b.N), "s/plain")
			b.ReportMetric(float64(ours)/float64(plain), "ratio")
		})
	}
}

// chunked is the text in the order that loads fastest: base, Services by the
// hundred, shared chains and jumps.
func chunked(r *ruleset) []string {
	empty := xtables.Parse("")
	m := New(Options{})
	var out []string
	var b strings.Builder
	for _, t := range tables {
		m.base(&b, r, t, empty)
	}
	out = append(out, b.String())
	for start := 0; start < len(r.blocks); start += chunk {
		b.Reset()
		b.WriteString("*nat\n")
		part := r.blocks[start:min(start+chunk, len(r.blocks))]
		for _, bl := range part {
			for i := range bl.chains {
				xtables.Declare(&b, bl.chains[i].name)
			}
		}
		for _, bl := range part {
			for i := range bl.chains {
				b.WriteString(bl.chains[i].text)
			}
		}
		b.WriteString("COMMIT\n")
		out = append(out, b.String())
	}
	b.Reset()
	for _, t := range tables {
		m.shared(&b, r, t, empty)
	}
	return append(out, b.String())
}

// BenchmarkOneChange changes one endpoint with everything loaded: from the event
// to the rule read back, beside the plain tool loading the same few lines.
func BenchmarkOneChange(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	for _, n := range sizes(1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d := proxytest.SyntheticDecider(n, 5)
			ns := nettest.NewNS(b)
			m := New(Options{NetNS: ns})
			apply(b, m, d.Decide(proxytest.SyntheticFacts()))
			svcs, eps := proxytest.Synthetic(n, 5)
			_ = svcs
			slice := eps[n/2]
			run := execx.In(ns)
			var ours, plain time.Duration
			for i := 0; b.Loop(); i++ {
				next := slice.DeepCopy()
				next.Endpoints = next.Endpoints[:4+i%2]
				d.SetSlice(next)
				seen := &recorder{Runner: run}
				m.tool.Exec = seen
				start := time.Now()
				apply(b, m, d.Decide(proxytest.SyntheticFacts()))
				ours += time.Since(start)
				if len(seen.cmds) == 0 {
					continue
				}
				// The same lines once more change nothing and cost the kernel and
				// the tool the same.
				start = time.Now()
				if _, err := run.Run(b.Context(), seen.cmds[0]); err != nil {
					b.Fatal(err)
				}
				plain += time.Since(start)
			}
			b.ReportMetric(ours.Seconds()*1000/float64(b.N), "ms/change")
			b.ReportMetric(plain.Seconds()*1000/float64(b.N), "ms/plain")
			b.ReportMetric(float64(ours)/float64(plain), "ratio")
		})
	}
}

// BenchmarkIntact looks whether everything is still there, as the proxy does every
// 30 seconds: when nobody has changed a rule since the last look, and when somebody
// has.
func BenchmarkIntact(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	for _, n := range sizes(1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			m := New(Options{NetNS: nettest.NewNS(b)})
			apply(b, m, proxytest.SyntheticDecider(n, 5).Decide(proxytest.SyntheticFacts()))
			for name, prepare := range map[string]func(){"still": func() {}, "changed": func() { clear(m.checked) }} {
				b.Run(name, func(b *testing.B) {
					for b.Loop() {
						prepare()
						if intact, err := m.Intact(b.Context()); err != nil || !intact {
							b.Fatalf("intact %v, %v", intact, err)
						}
					}
				})
			}
		})
	}
}

// BenchmarkDetect is what a node's start pays for knowing its kernel.
func BenchmarkDetect(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	for b.Loop() {
		if _, err := Detect(b.Context(), VariantAuto); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFirstApply is what a node's start pays for its first rules: the
// cluster's own Services.
func BenchmarkFirstApply(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	f, err := Detect(b.Context(), VariantAuto)
	if err != nil {
		b.Fatal(err)
	}
	s := proxytest.SyntheticDecider(3, 5).Decide(proxytest.SyntheticFacts())
	var spent time.Duration
	for b.Loop() {
		ns := nettest.NewNS(b)
		start := time.Now()
		apply(b, New(Options{NetNS: ns, Features: &f}), s)
		spent += time.Since(start)
	}
	b.ReportMetric(spent.Seconds()*1000/float64(b.N), "ms/apply")
}

// BenchmarkOneService adds a Service and takes it away again with everything
// loaded: the shared chains change, too.
func BenchmarkOneService(b *testing.B) {
	nettest.NeedRoot(b)
	nettest.Need(b, "iptables")
	for _, n := range sizes(1000) {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			d := proxytest.SyntheticDecider(n, 5)
			m := New(Options{NetNS: nettest.NewNS(b)})
			svcs, eps := proxytest.Synthetic(n+1, 5)
			d.SetSlice(eps[n])
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
}
