// SPDX-License-Identifier: Apache-2.0

package tutorial

import (
	"fmt"
	"strings"
)

// verdict says how a step came out, for the page.
func (r *Result) verdict() string {
	switch {
	case r.Step.Undone != "":
		return "not done: " + r.Step.Undone
	case r.Err != nil:
		return "**differs**"
	}
	switch r.Step.Mark {
	case Literal:
		return "as in the tutorial"
	case Shape:
		return "same shape"
	case Changed:
		return "as a current cluster"
	}
	return "done as here"
}

// Page is the comparison of a run as a section in Markdown.
func Page(t *Tutorial, results []Result) string {
	counts := map[string]int{}
	var order []string
	var rows strings.Builder
	for i := range results {
		r := &results[i]
		v := r.verdict()
		if counts[v] == 0 {
			order = append(order, v)
		}
		counts[v]++
		command := code(r.Step.typed())
		if r.Step.typed() != r.Step.Run && r.Step.Run != "" {
			command += "<br>run: " + code(r.Step.Run)
		}
		if r.Step.On != "" {
			command += "<br>on " + r.Step.On
		}
		seen := r.seen()
		if r.Step.Note != "" {
			seen = strings.TrimPrefix(seen+"<br>*"+escape(r.Step.Note)+"*", "<br>")
		}
		fmt.Fprintf(&rows, "| %s | %s | %s | %s |\n", r.Step.ID, command, v, seen)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "## %s\n\n`kplab up --config %s`, commands on %s. %d commands:", t.Title, t.Config, t.Node, len(results))
	for i, v := range order {
		sep := ","
		if i == 0 {
			sep = ""
		}
		fmt.Fprintf(&b, "%s %d %s", sep, counts[v], v)
	}
	b.WriteString(".\n\n| id | command | verdict | seen |\n|---|---|---|---|\n")
	b.WriteString(rows.String())
	return b.String()
}

// seen is the beginning of what a step printed.
func (r *Result) seen() string {
	const lines, width = 3, 160
	text := strings.TrimSpace(r.Stderr)
	if strings.Contains(text, "% Total") {
		text = "" // curl's progress
	}
	all := strings.Split(strings.TrimSpace(strings.TrimSpace(r.Output)+"\n"+text), "\n")
	var out []string
	for i, l := range all {
		if l = strings.TrimSpace(l); l == "" {
			continue
		}
		if len(out) == lines {
			out = append(out, fmt.Sprintf("… %d lines more", len(all)-i))
			break
		}
		if runes := []rune(l); len(runes) > width {
			l = string(runes[:width]) + "…"
		}
		out = append(out, code(strings.Join(strings.Fields(l), " ")))
	}
	return strings.Join(out, "<br>")
}

// code is text as it was, in a cell of a table.
func code(text string) string { return "`" + strings.ReplaceAll(text, "|", `\|`) + "`" }

func escape(text string) string { return strings.ReplaceAll(text, "|", `\|`) }
