// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// TestErrors checks what a person is told.
func TestErrors(t *testing.T) {
	t.Run("no tools", func(t *testing.T) {
		missing := execx.NewFake(
			execx.Step{Line: "iptables-nft-restore --version", Err: errors.New("executable file not found")},
			execx.Step{Line: "iptables-restore --version", Stdout: "iptables-restore v1.8.9 (legacy)\n"},
		)
		_, err := Find(t.Context(), missing, NFT, "")
		if !errors.Is(err, ErrNoTools) || !strings.Contains(err.Error(), "install the package iptables") {
			t.Errorf("error is %v", err)
		}
	})
	t.Run("offending line", func(t *testing.T) {
		nettest.NeedRoot(t)
		nettest.Need(t, "iptables")
		nettest.LeakCheck(t)
		tool, err := Find(t.Context(), execx.In(nettest.NewNS(t)), Auto, "")
		if err != nil {
			t.Fatal(err)
		}
		err = tool.Restore(t.Context(), corev1.IPv4Protocol, "*nat\n:A - [0:0]\n-A A -j RETURN\n-A A -p tcp -m tcp --dport 99999999 -j RETURN\nCOMMIT\n")
		if err == nil || !strings.Contains(err.Error(), `--dport 99999999 -j RETURN"`) {
			t.Errorf("error is %v", err)
		}
	})
}

// TestParse reads a table as the tool prints it, with a match that prints two spaces.
func TestParse(t *testing.T) {
	s := Parse("*nat\n:OUTPUT ACCEPT [1:2]\n:MINE - [0:0]\n-A OUTPUT -m nfacct --nfacct-name  x -j MINE\nCOMMIT\n")
	if !s.Has("MINE") || s.Builtin["MINE"] || !s.Builtin["OUTPUT"] || s.Has("OTHER") {
		t.Errorf("chains %v", s.Builtin)
	}
	got := s.Rules["OUTPUT"]
	if len(got) != 1 || got[0] != "-A OUTPUT -m nfacct --nfacct-name x -j MINE" || Target(got[0]) != "MINE" || Target("-A OUTPUT") != "" {
		t.Errorf("rules %q", got)
	}
}
