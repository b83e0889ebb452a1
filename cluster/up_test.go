// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"os"
	"strings"
	"testing"
)

// What a second `up` is told, by what is there and what it asks for.
func TestCompareWithWhatIsThere(t *testing.T) {
	for name, c := range map[string]struct {
		running, damaged, none, fresh, asked, other bool
		want                                        string // of the error, "" for none
	}{
		"nothing there":                   {none: true, asked: true, other: true},
		"stopped, nothing asked":          {other: true},
		"stopped, the same asked":         {asked: true},
		"stopped, others asked":           {asked: true, other: true, want: "exists with other settings (nodes: 3 entries, not 1)"},
		"stopped, others asked, fresh":    {asked: true, other: true, fresh: true},
		"running, nothing asked":          {running: true, other: true, want: ErrRunning.Error()},
		"running, others asked":           {running: true, asked: true, other: true, want: "runs with other settings (nodes: 3 entries, not 1)"},
		"running, fresh":                  {running: true, fresh: true, want: "end it with `kplab down --name x`"},
		"damaged settings":                {damaged: true, want: "`kplab up --fresh` deletes"},
		"damaged settings, fresh":         {damaged: true, fresh: true},
		"damaged settings, running, same": {damaged: true, running: true, want: "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			paths := Paths{State: dir, Runtime: dir}
			kept := settings{Config: defaults()}
			kept.Config.Name = "x"
			opts := UpOptions{Config: kept.Config, Asked: c.asked, Fresh: c.fresh}
			if c.other {
				opts.Config.Nodes = opts.Config.Nodes[:1]
			}
			if !c.none {
				if err := writeJSON(paths.Settings(), kept, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if c.damaged {
				if err := os.WriteFile(paths.Settings(), []byte("{"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if c.running {
				if err := writeDaemon(paths.Daemon()); err != nil {
					t.Fatal(err)
				}
			}
			switch err := compare(&opts, paths); {
			case c.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want %q", err, c.want)
			case c.running && !c.asked && !c.fresh && !c.damaged && !errors.Is(err, ErrRunning):
				t.Errorf("got %v, want ErrRunning", err)
			}
			if !c.none && !c.damaged && !c.asked && !c.fresh && len(opts.Config.Nodes) != 3 {
				t.Errorf("resumed with %d nodes, want the 3 that are there", len(opts.Config.Nodes))
			}
		})
	}
}
