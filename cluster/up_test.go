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

// TestSettingsOfAnOlderProgram: a lab made before a setting was known goes on with its
// default.
func TestSettingsOfAnOlderProgram(t *testing.T) {
	paths := Paths{State: t.TempDir()}
	old := `{"config":{"apiVersion":"kplab/v1alpha1","kind":"Lab","name":"kplab","nodes":[{"name":"master","role":"control-plane","address":"10.0.0.131","podCIDR":"10.244.0.0/24"}],` +
		`"networking":{"nodeSubnet":"10.0.0.0/24","podSubnet":"10.244.0.0/16","serviceSubnet":"10.96.0.0/12","outside":"10.0.0.200","dnsDomain":"cluster.local","mtu":1500},"proxy":{"mode":"iptables"}},"apiPort":6443}`
	if err := os.WriteFile(paths.Settings(), []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := readSettings(paths)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Config.addressesOf(s.Config.Nodes[0]); len(got) != 1 || got[0].String() != "10.0.0.131" || s.Config.Networking.Overlay == "" {
		t.Errorf("addresses %v, overlay %q", got, s.Config.Networking.Overlay)
	}
}
