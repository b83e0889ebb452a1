// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"

	"github.com/kplab/kplab/internal/execx"
)

// Program is what a node has, or would have, of rules of a proxy mode.
type Program struct {
	Node string `json:"node"`
	Mode string `json:"mode"`
	// Source is "kernel" for what was read back, "rendered" for what a mode would
	// write.
	Source  string         `json:"source"`
	Service string         `json:"service,omitempty"`
	Lines   []*ProgramLine `json:"lines"`
}

// ProgramLine is a rule, or an element of a set.
type ProgramLine struct {
	Family string `json:"family"`
	Table  string `json:"table"`
	// Chain is empty for elements, Set for rules.
	Chain string `json:"chain,omitempty"`
	Set   string `json:"set,omitempty"`
	// Text is the line in the words of the mode's tool.
	Text string `json:"text"`
	// Explanation says it in a sentence; empty when there is nothing to say.
	Explanation string `json:"explanation,omitempty"`
	// Owners are the objects that it is there for. It is empty for what is there
	// whatever Services there are.
	Owners []Owner `json:"owners,omitempty"`

	port string // "NS/NAME:PORT" of the Service port that it belongs to
	to   string // the chain that it leads to
}

// Owner is an object of the API that a rule comes from, as it is now.
type Owner struct {
	Object          string `json:"object"` // KIND/NS/NAME
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

// ErrNoRules says that a node has no rules for what was asked.
var ErrNoRules = errors.New("no rules")

// Program reads the rules of a node back from its kernel; those of one Service,
// "NS/NAME", when service is not empty. Rules of every mode that has left some are
// there: those of the node's own mode, unless something is wrong.
func (l *Lab) Program(ctx context.Context, nodeName, service string) (*Program, error) {
	n := l.node(nodeName)
	if n == nil {
		return nil, &TargetError{fmt.Sprintf("no node is called %q; there are %s", nodeName, strings.Join(l.nodeNames(), ", "))}
	}
	x, err := l.Index(ctx)
	if err != nil {
		return nil, err
	}
	lines, err := l.readBack(ctx, nodeName)
	if err != nil {
		return nil, err
	}
	p := &Program{Node: nodeName, Mode: n.ModeName(), Source: "kernel", Service: service, Lines: lines}
	return p.finish(x, service)
}

// Explained takes a program that a mode rendered apart and puts it into words.
func (l *Lab) Explained(ctx context.Context, nodeName, mode, service, text string) (*Program, error) {
	x, err := l.Index(ctx)
	if err != nil {
		return nil, err
	}
	p := &Program{Node: nodeName, Mode: mode, Source: "rendered", Service: service, Lines: ParseProgram(text)}
	return p.finish(x, service)
}

// readBack reads all rules of the proxy of a node.
func (l *Lab) readBack(ctx context.Context, nodeName string) ([]*ProgramLine, error) {
	place, err := l.Place(nodeName, "")
	if err != nil {
		return nil, err
	}
	run := execx.In(place.ns)
	var out []*ProgramLine
	env := []string{"XTABLES_LOCKFILE=" + l.lockOf(place)}
	for _, tool := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		r, err := run.Run(ctx, execx.Cmd{Path: tool, Env: env})
		if errors.Is(err, exec.ErrNotFound) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("read the rules of %s: %w", nodeName, err)
		}
		lines := ParseProgram(string(r.Stdout))
		if strings.HasPrefix(tool, "ip6") {
			for _, p := range lines {
				p.Family = "ip6"
			}
		}
		out = append(out, lines...)
	}
	for _, family := range []string{"ip", "ip6"} {
		r, err := run.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"list", "table", family, "kube-proxy"}})
		if err == nil {
			out = append(out, ParseProgram(string(r.Stdout))...)
		} else if !errors.Is(err, exec.ErrNotFound) && !strings.Contains(err.Error(), "No such file") {
			return nil, fmt.Errorf("read the rules of %s: %w", nodeName, err)
		}
	}
	// What is not the proxy's is left out: other people's rules have no owner here.
	return slices.DeleteFunc(out, func(p *ProgramLine) bool { return p.Table != "kube-proxy" && !strings.Contains(p.Text, "KUBE-") }), nil
}

// ParseProgram takes the text of iptables-save or of nft apart.
func ParseProgram(text string) []*ProgramLine {
	var out []*ProgramLine
	table, family, chain, set := "", "ip", "", ""
	elements := ""
	for l := range strings.Lines(text) {
		l = strings.TrimSpace(l)
		f := strings.Fields(l)
		switch {
		case l == "" || strings.HasPrefix(l, "#") || strings.HasPrefix(l, ":"):
			if strings.Contains(l, "ip6tables-restore") {
				family = "ip6"
			}
		case strings.HasPrefix(l, "*"):
			table = l[1:]
		case strings.HasPrefix(l, "-A "):
			line := strings.Join(f, " ")
			t := table
			if t == "" {
				t = tableOf(line)
			}
			out = append(out, &ProgramLine{Family: family, Table: t, Chain: f[1], Text: line})
		case f[0] == "table" && len(f) >= 3:
			family, table = f[1], f[2]
		case len(f) >= 3 && f[0] == "chain":
			chain, set = f[1], ""
		case len(f) >= 3 && (f[0] == "set" || f[0] == "map"):
			chain, set = "", f[1]
		case set != "" && (elements != "" || strings.HasPrefix(l, "elements = {")):
			elements += " " + strings.TrimPrefix(l, "elements = {")
			if body, done := strings.CutSuffix(strings.TrimSpace(elements), "}"); done {
				for _, e := range strings.Split(body, ",") {
					if e = strings.TrimSpace(e); e != "" {
						out = append(out, &ProgramLine{Family: family, Table: table, Set: set, Text: e})
					}
				}
				elements = ""
			}
		case l == "}":
			chain, set = "", ""
		case chain != "" && !strings.HasPrefix(l, "type ") && !strings.HasPrefix(l, "comment "):
			out = append(out, &ProgramLine{Family: family, Table: table, Chain: chain, Text: l})
		}
	}
	return out
}

// tableOf guesses the table of a rule of mode iptables that was written without one:
// what refuses is in filter, since nat may not.
func tableOf(rule string) string {
	r := parseIPTables(rule)
	if r.target == "REJECT" || r.target == "DROP" || r.target == "ACCEPT" {
		return "filter"
	}
	return "nat"
}

// finish explains every line and keeps those of the Service.
func (p *Program) finish(x *Index, service string) (*Program, error) {
	byChain := map[string][]Rule{}
	for _, l := range p.Lines {
		if l.Chain != "" {
			key := l.Family + " " + l.Table + " " + l.Chain
			byChain[key] = append(byChain[key], Rule{Number: len(byChain[key]) + 1, Text: l.Text})
		}
	}
	number := map[string]int{}
	for _, l := range p.Lines {
		e := &RuleEvent{Node: p.Node, Family: l.Family, Table: l.Table, Chain: l.Chain}
		if l.Chain == "" {
			e.Chain = "@" + l.Set
			e.Rule = &Rule{Text: l.Text}
		} else {
			key := l.Family + " " + l.Table + " " + l.Chain
			e.All = byChain[key]
			for i := range e.All {
				e.All[i].Of = len(e.All)
			}
			e.Rule = &e.All[number[key]]
			number[key]++
		}
		e.To = target(l.Text)
		l.to = e.To
		for _, m := range explainers() {
			s, ok := m.Explain(e, x)
			if !ok {
				continue
			}
			l.Explanation, l.port = s.Text, s.Port
			l.Owners = x.owners(s)
			break
		}
	}
	if service == "" {
		return p, nil
	}
	mine := func(l *ProgramLine) bool {
		name, _, _ := strings.Cut(l.port, ":")
		return name == service
	}
	// Chains that Services share belong to it as far as its own lines lead there.
	lead := map[string]bool{}
	for _, l := range p.Lines {
		if mine(l) && l.to != "" && strings.HasPrefix(l.Table, "kube-proxy") {
			lead[l.to] = true
		}
	}
	p.Lines = slices.DeleteFunc(p.Lines, func(l *ProgramLine) bool { return !mine(l) && (l.Chain == "" || !lead[l.Chain]) })
	if len(p.Lines) == 0 {
		return nil, fmt.Errorf("%w for Service %s on %s: see `kubectl get svc -n %s`", ErrNoRules, service, p.Node, beforeSlash(service))
	}
	return p, nil
}

func beforeSlash(s string) string {
	before, _, _ := strings.Cut(s, "/")
	return before
}

// target is the chain that a rule or an element leads to; empty when none.
func target(text string) string {
	f := strings.Fields(text)
	for i, w := range f {
		if (w == "-j" || w == "-g" || w == "goto" || w == "jump") && i+1 < len(f) {
			return f[i+1]
		}
	}
	return ""
}

// owners are the objects that a sentence is about, with their revisions: an
// endpoint's slice before its Service.
func (x *Index) owners(s Sentence) []Owner {
	var out []Owner
	add := func(object, version string) {
		o := Owner{object, version}
		if !slices.Contains(out, o) {
			out = append(out, o)
		}
	}
	name, _, _ := strings.Cut(s.Port, ":")
	for _, sl := range x.slices[name] {
		object := "endpointslice/" + sl.Namespace + "/" + sl.Name
		if slices.Contains(s.Objects, object) {
			add(object, sl.ResourceVersion)
		}
	}
	if svc := x.services[name]; svc != nil {
		add("service/"+name, svc.ResourceVersion)
	} else if name != "" {
		add("service/"+name, "")
	}
	return out
}

// WriteText prints a program in the words of its tool, with explain each line with
// its sentence and its owners.
func (p *Program) WriteText(w io.Writer, explain bool) error {
	var b strings.Builder
	where, block := "", ""
	closeBlock := func() {
		if block != "" {
			b.WriteString("\t}\n")
			block = ""
		}
	}
	for _, l := range p.Lines {
		iptables := l.Table != "kube-proxy"
		at := l.Family + " " + l.Table
		if at != where {
			closeBlock()
			if where != "" && strings.HasSuffix(where, " kube-proxy") {
				b.WriteString("}\n")
			}
			where = at
			switch {
			case !iptables:
				fmt.Fprintf(&b, "table %s {\n", at)
			case l.Family == "ip6":
				fmt.Fprintf(&b, "# ip6tables, table %s\n", l.Table)
			default:
				fmt.Fprintf(&b, "# iptables, table %s\n", l.Table)
			}
		}
		indent := ""
		if !iptables {
			indent = "\t\t"
			in := "chain " + l.Chain
			if l.Set != "" {
				in = "elements of " + l.Set
			}
			if in != block {
				closeBlock()
				block = in
				fmt.Fprintf(&b, "\t%s {\n", in)
			}
		}
		b.WriteString(indent + l.Text + "\n")
		if !explain {
			continue
		}
		if l.Explanation != "" {
			fmt.Fprintf(&b, "%s    # %s\n", indent, l.Explanation)
		}
		var owners []string
		for _, o := range l.Owners {
			if o.ResourceVersion == "" {
				owners = append(owners, o.Object+" (not in the API now)")
				continue
			}
			owners = append(owners, fmt.Sprintf("%s at revision %s", o.Object, o.ResourceVersion))
		}
		if len(owners) == 0 {
			owners = []string{"the proxy itself"}
		}
		fmt.Fprintf(&b, "%s    # from %s\n", indent, strings.Join(owners, ", "))
	}
	closeBlock()
	if strings.HasSuffix(where, " kube-proxy") {
		b.WriteString("}\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
