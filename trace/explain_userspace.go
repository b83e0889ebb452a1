// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"strings"
)

// userspaceExplainer knows the chains of mode userspace, which lead to a port of the
// proxy's own program.
type userspaceExplainer struct{}

// Mode implements Explainer.
func (userspaceExplainer) Mode() string { return "userspace" }

// Owns implements Explainer.
func (userspaceExplainer) Owns(_, _, chain string) bool {
	return strings.HasPrefix(chain, "KUBE-PORTALS-") || strings.HasPrefix(chain, "KUBE-NODEPORT-")
}

// Explain implements Explainer.
func (m userspaceExplainer) Explain(e *RuleEvent, _ *Index) (Sentence, bool) {
	if e.Rule == nil || e.Rule.Text == "" {
		if m.Owns(e.Family, e.Table, e.Chain) && e.Rule == nil {
			return Sentence{Text: fmt.Sprintf("no rule of %s matches: back to where it was called", e.Chain)}, true
		}
		return Sentence{}, false
	}
	r := parseIPTables(e.Rule.Text)
	if !m.Owns(e.Family, e.Table, e.Chain) {
		text := map[string]string{
			"KUBE-PORTALS-CONTAINER":  "every new connection that arrives is compared with the list of Services",
			"KUBE-PORTALS-HOST":       "every new connection of the node itself is compared with the list of Services",
			"KUBE-NODEPORT-CONTAINER": "the address is the node's own: the port may be a nodePort",
			"KUBE-NODEPORT-HOST":      "the address is the node's own: the port may be a nodePort",
			"KUBE-NODEPORT-NON-LOCAL": "ports of the proxy that serve nodePorts are open to everybody",
		}[r.target]
		return Sentence{Text: text}, text != ""
	}
	s := Sentence{Port: r.comment, Objects: serviceObject(r.comment)}
	what := "port " + r.option("--dport") + "/" + r.option("-p")
	if dst := strings.TrimSuffix(r.option("-d"), "/32"); dst != "" {
		what = dst + ":" + r.option("--dport") + "/" + r.option("-p")
	}
	switch r.target {
	case "REDIRECT":
		s.Text = fmt.Sprintf("%s belongs to %s: taken by the proxy's own program on this node, which listens on port %s for it", what, serviceText(s.Port), r.option("--to-ports"))
	case "DNAT":
		s.Text = fmt.Sprintf("%s belongs to %s: taken by the proxy's own program on this node, which listens on %s for it", what, serviceText(s.Port), r.option("--to-destination"))
	case "ACCEPT":
		s.Text = fmt.Sprintf("%s is the proxy's port for a nodePort of %s: let in", what, serviceText(s.Port))
	default:
		return s, false
	}
	return s, true
}
