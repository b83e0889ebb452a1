// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"io"
	"strings"
)

// WriteText writes the diagnosis for a person: the cause, the fix, what was read, and
// what a request met.
func (d *Diagnosis) WriteText(out io.Writer) error {
	var b strings.Builder
	if d.Healthy {
		fmt.Fprintf(&b, "Service %s works, as seen from %s: nothing found in %d checks\n", d.Service, d.From, len(d.Checked))
	} else {
		c := d.Causes[0]
		fmt.Fprintf(&b, "cause: %s (%s)\n", c.Text, c.Reason)
		if c.Fix != "" {
			fmt.Fprintf(&b, "fix:   %s\n", c.Fix)
		}
		for _, e := range c.Evidence {
			fmt.Fprintf(&b, "  read: %s\n", e)
		}
		for i, c := range d.Causes[1:] {
			if i == 0 {
				b.WriteString("\nalso seen, and perhaps only because of the first:\n")
			}
			fmt.Fprintf(&b, "  %s (%s)\n", c.Text, c.Reason)
			if c.Fix != "" {
				fmt.Fprintf(&b, "    fix: %s\n", c.Fix)
			}
		}
	}
	if d.Probe != nil {
		fmt.Fprintf(&b, "\nproof: a request from %s: %s: %s\n", d.From, d.Probe.Outcome, d.Probe.Text)
	}
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "note:  %s\n", n)
	}
	_, err := io.WriteString(out, b.String())
	return err
}
