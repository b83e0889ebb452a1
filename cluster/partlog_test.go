// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"testing"
)

// TestPartLog follows a log that has lost its beginning, and one that grows.
func TestPartLog(t *testing.T) {
	var logs partLogs
	log := logs.tee(slog.New(slog.DiscardHandler).With("part", "proxy"), "kube-proxy/n1").With("node", "n1")
	for range partLogLines + 3 {
		log.Info("early")
	}
	log.Warn("Using iptables Proxier", "mode", "iptables")

	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- logs.of("kube-proxy/n1").follow(ctx, w) }()
	lines := make([]byte, 0, 1<<17)
	read := func(want string) {
		t.Helper()
		buf := make([]byte, 1<<16)
		for !strings.Contains(string(lines), want) {
			n, err := r.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			lines = append(lines, buf[:n]...)
		}
	}
	read("Proxier")
	if got := strings.Count(string(lines), "\n"); got != partLogLines {
		t.Errorf("%d lines, want the last %d", got, partLogLines)
	}
	want := regexp.MustCompile(`(?m)^W\d{4} \d\d:\d\d:\d\d\.\d{6} +1 partlog_test\.go:\d+\] "Using iptables Proxier" node="n1" mode="iptables"$`)
	if !want.Match(lines) {
		t.Errorf("no line matches %s in\n%s", want, lines[max(0, len(lines)-300):])
	}
	log.Error("later")
	read("later")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestPresets reads the settings that come with the program.
func TestPresets(t *testing.T) {
	if got := strings.Join(PresetNames(), " "); got != "tutorial-1 tutorial-2" {
		t.Errorf("names: %s", got)
	}
	for _, name := range PresetNames() {
		c, ok, err := Preset(name)
		if err != nil || !ok {
			t.Fatalf("%s: %v, %v", name, ok, err)
		}
		if c.Name = name; c.APINode().Name == "" {
			t.Errorf("%s: no control plane", name)
		}
		c.SetDefaults(0)
		if err := c.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"tutorial-3", "../config", ""} {
		if _, ok, err := Preset(name); ok || err != nil {
			t.Errorf("%q: %v, %v", name, ok, err)
		}
	}
}
