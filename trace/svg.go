// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"context"
	"fmt"
	"html"
	"io"
	"slices"
	"strings"
)

// Picture is the lab with a request's way through it, as boxes and lines with
// measures in pixels. Names are set in a monospaced face, so that the width of
// each is known.
type Picture struct {
	Width, Height float64
	Boxes         []Box
	Lines         []Line
	Labels        []Label
}

// Box is a node, a pod, the node network or the client outside.
type Box struct {
	Rect
	Place string
	Title Label
	// On says that the request passed it; Dead that it ended here.
	On, Dead bool
	// Kind is node, pod, outside or fabric.
	Kind string
}

// Rect is a rectangle.
type Rect struct{ X, Y, W, H float64 }

// Overlaps says whether two rectangles share more than an edge.
func (r Rect) Overlaps(o Rect) bool {
	return r.X < o.X+o.W && o.X < r.X+r.W && r.Y < o.Y+o.H && o.Y < r.Y+r.H
}

// Holds says whether o lies inside.
func (r Rect) Holds(o Rect) bool {
	return o.X >= r.X && o.Y >= r.Y && o.X+o.W <= r.X+r.W && o.Y+o.H <= r.Y+r.H
}

// Line is a part of the way, between two boxes.
type Line struct {
	X1, Y1, X2, Y2 float64
	Number         int
	Badge          Rect
}

// Label is one line of text. X and Y are its upper left corner.
type Label struct {
	Rect
	Text string
	// Class is title, note, list or verdict.
	Class string
}

// Sizes of the picture's parts.
const (
	fontSize  = 13.0
	charWidth = 0.62 * fontSize // of a monospaced face, with a margin: faces differ
	lineH     = 18.0
	gap       = 26.0
	padding   = 10.0
	badge     = 18.0
	podW      = 212.0
	nodeW     = podW + 2*padding
	podH      = lineH + 12
)

func label(x, y float64, text, class string) Label {
	return Label{Rect{x, y, float64(len([]rune(text))) * charWidth, lineH}, text, class}
}

// fit cuts a name to a width, in the middle, since both ends tell pods apart.
func fit(s string, width float64) string {
	r := []rune(s)
	if most := int(width / charWidth); len(r) > most {
		half := (most - 1) / 2
		return string(r[:most-1-half]) + "…" + string(r[len(r)-half:])
	}
	return s
}

// NodePods is what a picture shows besides the path: the lab's nodes with their
// addresses, and the pods on each.
type NodePods struct {
	Node, Address string
	Pods          []string // NS/NAME
}

// Layout lists the lab's nodes and those of its pods that have to do with a trace:
// on its path, or behind the same Service.
func (l *Lab) Layout(x *Index, t *Trace) []NodePods {
	on := map[string]bool{}
	for _, h := range t.Path {
		on[h.Place] = true
	}
	for _, a := range x.candidates(t.Target) {
		if p := x.Pod(a); p != nil {
			on["pod/"+p.Namespace+"/"+p.Name] = true
		}
	}
	var out []NodePods
	for _, n := range l.opts.Nodes {
		np := NodePods{Node: n.Name, Address: n.Address.String()}
		for key, p := range x.pods {
			if p.Spec.NodeName == n.Name && !p.Spec.HostNetwork && on["pod/"+key] {
				np.Pods = append(np.Pods, key)
			}
		}
		slices.Sort(np.Pods)
		out = append(out, np)
	}
	return out
}

// WriteSVG draws the first request of a report in the lab.
func (l *Lab) WriteSVG(ctx context.Context, w io.Writer, r *Report) error {
	x, err := l.Index(ctx)
	if err != nil {
		return err
	}
	t := r.Traces[0]
	return t.Picture(fmt.Sprintf("%s → %s, %s, proxy mode %s", r.From, r.To, r.Protocol, r.modesText()), l.Layout(x, t)).WriteSVG(w)
}

// Picture lays out the lab and a request's way.
func (t *Trace) Picture(title string, nodes []NodePods) *Picture {
	p := &Picture{}
	width := max(2*padding+float64(len(nodes))*(nodeW+gap)-gap, 560)
	p.Labels = append(p.Labels, label(padding, padding, fit(title, width-2*padding), "title"))
	y := padding + lineH + gap
	path := map[string]bool{}
	for _, h := range t.Path {
		path[h.Place] = true
	}
	dead := ""
	if !t.Verdict.OK() && len(t.Path) > 0 {
		dead = t.Path[len(t.Path)-1].Place
	}
	add := func(kind, place, text string, r Rect) {
		p.Boxes = append(p.Boxes, Box{Rect: r, Place: place, Kind: kind, On: path[place], Dead: place == dead,
			Title: label(r.X+padding, r.Y+6, fit(text, r.W-2*padding), "name")})
	}
	// The client outside, and the node network below it, as wide as all nodes.
	if path["outside"] {
		add("outside", "outside", "outside", Rect{padding, y, nodeW, podH})
		y += podH + 2*gap
	}
	add("fabric", "fabric", "node network", Rect{padding, y, width - 2*padding, podH})
	y += podH + 2*gap
	rows := 0
	for _, n := range nodes {
		rows = max(rows, len(n.Pods))
	}
	// Between a node's name and its pods is room for the lines and their numbers.
	nodeH := podH + gap + float64(rows)*(podH+gap)
	for i, n := range nodes {
		x := padding + float64(i)*(nodeW+gap)
		add("node", n.Node, n.Node+"  "+n.Address, Rect{x, y, nodeW, nodeH})
		for j, pod := range n.Pods {
			add("pod", "pod/"+pod, shortName("pod/"+pod), Rect{x + padding, y + podH + gap + float64(j)*(podH+gap), podW, podH})
		}
	}
	y += nodeH + gap
	p.connect(t)
	p.Width = width
	p.legend(t, y)
	return p
}

// connect draws the way: from box to box, each step with its number. Lines of one
// pair of boxes stand beside each other.
func (p *Picture) connect(t *Trace) {
	lanes := map[string]int{}
	for i := 1; i < len(t.Path); i++ {
		a, b := p.box(t.Path[i-1].Place), p.box(t.Path[i].Place)
		if a == nil || b == nil {
			continue
		}
		var l Line
		inside, pod := (*Box)(nil), (*Box)(nil)
		if a.Holds(b.Rect) {
			inside, pod = a, b
		} else if b.Holds(a.Rect) {
			inside, pod = b, a
		}
		lower, upper := b, a
		if a.Y > b.Y {
			lower, upper = a, b
		}
		if inside != nil {
			lower = pod
		}
		lane := lanes[lower.Place]
		lanes[lower.Place]++
		x := lower.X + lower.W/2 + float64(lane)*(badge+8) - badge
		if inside != nil {
			// From below the node's name to the pod; past the pods above it on the right.
			x = pod.X + pod.W - badge - float64(lane)*(badge+8)
			l = Line{X1: x, Y1: inside.Y + lineH + 8, X2: x, Y2: pod.Y}
			if b == inside {
				l.Y1, l.Y2 = l.Y2, l.Y1
			}
			l.Badge = Rect{x - badge/2, pod.Y - gap/2 - badge/2, badge, badge}
		} else {
			l = Line{X1: x, Y1: upper.Y + upper.H, X2: x, Y2: lower.Y}
			if lower == a {
				l.Y1, l.Y2 = l.Y2, l.Y1
			}
			mid := (upper.Y + upper.H + lower.Y) / 2
			l.Badge = Rect{x - badge/2, mid - badge/2, badge, badge}
		}
		l.Number = len(p.Lines) + 1
		p.Lines = append(p.Lines, l)
	}
}

func (p *Picture) box(place string) *Box {
	for i := range p.Boxes {
		if p.Boxes[i].Place == place {
			return &p.Boxes[i]
		}
	}
	return nil
}

// legend tells below the drawing what decided, and how it ended.
func (p *Picture) legend(t *Trace, y float64) {
	most := p.Width - 2*padding
	put := func(text, class string) {
		for _, part := range wrap(text, int(most/charWidth)) {
			p.Labels = append(p.Labels, label(padding, y, part, class))
			y += lineH
		}
	}
	for _, s := range t.Steps {
		if s.Leg == Forward && (s.Kind == KindNAT || (s.Kind == KindRule && len(s.Objects) > 0)) {
			put("• "+s.Place+": "+s.Text, "list")
		}
	}
	put(fmt.Sprintf("%s (%s): %s", t.Verdict.Outcome, t.Verdict.Reason, t.Verdict.Text), cmp.Or(map[bool]string{false: "dead"}[t.Verdict.OK()], "verdict"))
	p.Height = y + padding
}

// wrap cuts a text into lines of at most width characters, at spaces where it can.
func wrap(s string, width int) []string {
	var out []string
	line := ""
	for _, w := range strings.Fields(s) {
		for len([]rune(w)) > width {
			r := []rune(w)
			if line != "" {
				out, line = append(out, line), ""
			}
			out, w = append(out, string(r[:width])), string(r[width:])
		}
		switch {
		case line == "":
			line = w
		case len([]rune(line))+1+len([]rune(w)) <= width:
			line += " " + w
		default:
			out, line = append(out, line), w
		}
	}
	if line != "" {
		out = append(out, line)
	}
	return out
}

// svgStyle has the colours of a light page, and of a dark one where the reader's is.
const svgStyle = `
  svg { background: #ffffff; color: #1b1f24 }
  text { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1b1f24 }
  .title { font-weight: bold }
  rect.box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1 }
  rect.pod, rect.outside { fill: #ffffff }
  rect.on { stroke: #0969da; stroke-width: 2.5 }
  rect.ended { stroke: #cf222e; stroke-width: 3 }
  line { stroke: #0969da; stroke-width: 2.5 }
  marker path { fill: #0969da }
  circle { fill: #0969da }
  text.number { fill: #ffffff; font-size: 11px; font-weight: bold; text-anchor: middle }
  text.dead { fill: #cf222e; font-weight: bold }
  text.verdict { fill: #1a7f37; font-weight: bold }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; color: #e6edf3 }
    text { fill: #e6edf3 }
    rect.box { fill: #161b22; stroke: #6e7681 }
    rect.pod, rect.outside { fill: #0d1117 }
    rect.on { stroke: #58a6ff }
    rect.ended { stroke: #ff7b72 }
    line { stroke: #58a6ff }
    marker path, circle { fill: #58a6ff }
    text.number { fill: #0d1117 }
    text.dead { fill: #ff7b72 }
    text.verdict { fill: #56d364 }
  }
`

// WriteSVG writes the picture as an SVG document that needs nothing else.
func (p *Picture) WriteSVG(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f">`+"\n", p.Width, p.Height, p.Width, p.Height)
	fmt.Fprintf(&b, "<style>%s</style>\n", svgStyle)
	b.WriteString(`<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>` + "\n")
	text := func(l Label) {
		fmt.Fprintf(&b, `<text class="%s" x="%.1f" y="%.1f" xml:space="preserve">%s</text>`+"\n", l.Class, l.X, l.Y+fontSize, html.EscapeString(l.Text))
	}
	for i := range p.Boxes {
		x := &p.Boxes[i]
		class := "box " + x.Kind
		if x.Dead {
			class += " ended"
		} else if x.On {
			class += " on"
		}
		fmt.Fprintf(&b, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f" rx="6"/>`+"\n", class, x.X, x.Y, x.W, x.H)
	}
	for _, l := range p.Lines {
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" marker-end="url(#head)"/>`+"\n", l.X1, l.Y1, l.X2, l.Y2)
	}
	for _, l := range p.Lines {
		fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="%.1f"/><text class="number" x="%.1f" y="%.1f">%d</text>`+"\n",
			l.Badge.X+badge/2, l.Badge.Y+badge/2, badge/2, l.Badge.X+badge/2, l.Badge.Y+badge/2+4, l.Number)
	}
	for i := range p.Boxes {
		text(p.Boxes[i].Title)
	}
	for _, l := range p.Labels {
		text(l)
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}
