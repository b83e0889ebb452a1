// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"time"

	"github.com/kplab/kplab/cluster"
)

// newProgress prints each finished step of a start with its time, and the
// total at the end. Lines only, no cursor tricks: the whole start takes less
// time than a spinner needs to turn.
func newProgress(w io.Writer) cluster.Progress {
	return func(e cluster.Event) {
		mark := "✓"
		if e.Error != "" {
			mark = "✗"
		}
		fmt.Fprintf(w, " %s %-12s %-48s %6s\n", mark, e.Step, e.Detail, e.Took.Round(time.Millisecond))
	}
}
