// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"strings"

	"github.com/kplab/kplab/proxy"
)

// text writes a table in nft's syntax, in the order in which nft lists it.
func (r *ruleset) text(b *strings.Builder) {
	head := "table " + r.ip() + " " + tableName
	b.WriteString(head + "\ndelete " + head + "\n" + head + " {\n\tcomment \"" + tableComment + "\"\n\n")
	st := newState(r)
	for s, c := range r.sets() {
		if c != nil {
			c.text(b, c.elementTexts(st.contents(set(s))))
		}
	}
	st.affinityText(b)
	st.all(func(c *chain) { c.text(b) })
	b.WriteString("}\n")
}

func (st *state) affinityText(b *strings.Builder) {
	for _, bl := range st.blocks {
		for _, c := range bl.affinity {
			c.text(b, nil)
		}
	}
}

func (c *container) elementTexts(elements []element) []string {
	var out []string
	for _, e := range elements {
		out = append(out, c.elementText(e))
	}
	return out
}

func (c *chain) text(b *strings.Builder) {
	b.WriteString("\tchain " + c.name + " {\n")
	if c.comment != "" {
		b.WriteString("\t\tcomment \"" + c.comment + "\"\n")
	}
	if h := c.hook; h != nil {
		b.WriteString("\t\ttype " + h.kind + " hook " + h.point + " priority " + h.priority + "; policy accept;\n")
	}
	for i := range c.rules {
		b.WriteString("\t\t" + c.rules[i].text)
		if c.rules[i].comment != "" {
			b.WriteString(" comment \"" + c.rules[i].comment + "\"")
		}
		b.WriteByte('\n')
	}
	b.WriteString("\t}\n\n")
}

// serviceText writes what belongs to some Service ports.
func (r *ruleset) serviceText(b *strings.Builder, mine func(*proxy.ServicePort) bool) {
	part := &ruleset{base: r.base}
	for i, o := range r.owners {
		if mine(o) {
			part.blocks = append(part.blocks, r.blocks[i])
		}
	}
	if len(part.blocks) == 0 {
		return
	}
	b.WriteString("table " + r.ip() + " " + tableName + " {\n")
	st := newState(part)
	for s, c := range r.sets() {
		if elements := st.contents(set(s)); c != nil && set(s) != nodePortIPs && len(elements) > 0 {
			c.text(b, c.elementTexts(elements))
		}
	}
	st.affinityText(b)
	st.ofServices(func(c *chain) { c.text(b) })
	b.WriteString("}\n")
}
