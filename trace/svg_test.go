// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// TestPictureGeometry measures what is drawn: every name stays in its box, and no
// two names, boxes of pods or numbers lie on each other.
func TestPictureGeometry(t *testing.T) {
	long := "default/web-with-a-name-that-is-much-too-long-for-a-box-797596b896-92sxb"
	pods := func(n int) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf("%s%d", long, i))
		}
		return out
	}
	hops := func(places ...string) (out []Hop) {
		for _, p := range places {
			out = append(out, Hop{Place: p})
		}
		return out
	}
	for name, c := range map[string]struct {
		nodes []NodePods
		path  []Hop
		dead  bool
	}{
		"one node":   {[]NodePods{{"master", "10.0.0.131", pods(1)}}, hops("master", "pod/"+long+"0"), false},
		"hairpin":    {[]NodePods{{"master", "10.0.0.131", nil}, {"node1", "10.0.0.132", pods(3)}}, hops("pod/"+long+"2", "node1", "pod/"+long+"2"), false},
		"far":        {[]NodePods{{"master", "10.0.0.131", nil}, {"node1", "10.0.0.132", pods(2)}, {"node2", "10.0.0.133", []string{"default/client"}}}, hops("pod/default/client", "node2", "fabric", "node1", "pod/"+long+"1"), false},
		"outside":    {[]NodePods{{"master", "10.0.0.131", pods(4)}, {"node1", "10.0.0.132", []string{"kube-system/x"}}}, hops("outside", "fabric", "master", "fabric", "node1", "pod/kube-system/x"), false},
		"ended":      {[]NodePods{{"master", "10.0.0.131", nil}, {"node1", "10.0.0.132", nil}}, hops("outside", "fabric", "master"), true},
		"long names": {[]NodePods{{strings.Repeat("node", 15), "10.0.0.131", pods(6)}}, hops(strings.Repeat("node", 15), "pod/"+long+"5"), false},
	} {
		t.Run(name, func(t *testing.T) {
			tr := &Trace{Path: c.path, Verdict: Verdict{Outcome: "answered", Reason: "ok", Text: strings.Repeat("some words ", 40)}}
			if c.dead {
				tr.Verdict.Reason = "no-endpoints"
			}
			tr.Steps = []*Step{{Leg: Forward, Kind: KindNAT, Place: "node1", Text: "DNAT: " + strings.Repeat("x", 300)}}
			p := tr.Picture("title "+strings.Repeat("long ", 60), c.nodes)
			if len(p.Lines) != len(c.path)-1 {
				t.Errorf("%d lines for %d hops", len(p.Lines), len(c.path))
			}
			whole := Rect{0, 0, p.Width, p.Height}
			var texts, badges []Rect
			for _, b := range p.Boxes {
				if !b.Holds(b.Title.Rect) || !whole.Holds(b.Rect) {
					t.Errorf("%q leaves its box, or the box %v the picture %v", b.Title.Text, b.Rect, whole)
				}
				texts = append(texts, b.Title.Rect)
				for _, o := range p.Boxes {
					if b.Place != o.Place && b.Overlaps(o.Rect) && !b.Holds(o.Rect) && !o.Holds(b.Rect) {
						t.Errorf("boxes %s and %s overlap", b.Place, o.Place)
					}
				}
			}
			for _, l := range p.Labels {
				if !whole.Holds(l.Rect) {
					t.Errorf("label %q at %v leaves the picture %v", l.Text, l.Rect, whole)
				}
				texts = append(texts, l.Rect)
			}
			for _, l := range p.Lines {
				badges = append(badges, l.Badge)
			}
			apart(t, "names", texts, texts)
			apart(t, "numbers", badges, badges)
			for i, b := range badges {
				for j, n := range texts {
					if b.Overlaps(n) {
						t.Errorf("number %d lies on name %d", i+1, j)
					}
				}
			}
			var b bytes.Buffer
			if err := p.WriteSVG(&b); err != nil {
				t.Fatal(err)
			}
			for dec := xml.NewDecoder(&b); ; {
				if _, err := dec.Token(); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatalf("no XML: %v", err)
				}
			}
		})
	}
}

func apart(t *testing.T, what string, a, b []Rect) {
	t.Helper()
	for i := range a {
		for j := range b {
			if i < j && a[i].Overlaps(b[j]) {
				t.Errorf("%s %d and %d overlap: %v %v", what, i, j, a[i], b[j])
			}
		}
	}
}

func TestCutPort(t *testing.T) {
	for in, want := range map[string]string{"svc/web:80": "svc/web 80 true", "web": "web  false", "10.0.0.1:53": "10.0.0.1 53 true", "[fd00::1]:80": "[fd00::1] 80 true", "fd00::1": "fd00::1  false"} {
		name, port, ok := cutPort(in)
		if got := fmt.Sprintf("%s %s %t", name, port, ok); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

func TestParseProgram(t *testing.T) {
	nft := `table ip kube-proxy {
	comment "rules for kube-proxy"
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.1 . tcp . 443 : goto service-A-default/kubernetes/tcp/https,
			     10.96.0.2 . udp . 53 comment "a/b" : jump balance-1 }
	}
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
	}
}
`
	var got []string
	for _, l := range append(ParseProgram(nft), ParseProgram("*nat\n:X - [0:0]\n-A X -m comment  --comment \"a b\" -j Y\nCOMMIT\n")...) {
		got = append(got, fmt.Sprintf("%s %s %s%s: %s", l.Family, l.Table, l.Chain, l.Set, l.Text))
	}
	want := []string{
		"ip kube-proxy service-ips: 10.96.0.1 . tcp . 443 : goto service-A-default/kubernetes/tcp/https",
		"ip kube-proxy service-ips: 10.96.0.2 . udp . 53 comment \"a/b\" : jump balance-1",
		"ip kube-proxy services: ip daddr . meta l4proto . th dport vmap @service-ips",
		"ip nat X: -A X -m comment --comment \"a b\" -j Y",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
