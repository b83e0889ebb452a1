// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A place is found by the name that a person gives it, whatever names nodes have.
func TestPlacesResolve(t *testing.T) {
	paths := Paths{Runtime: t.TempDir()}
	pin(t, paths, "fabric", "outside", "node-master", "node-node-1", "node-pod-x", "pod-1234")
	for where, want := range map[string]string{
		"master":  "node-master",
		"node-1":  "node-node-1",
		"pod-x":   "node-pod-x",
		"outside": "outside",
		"fabric":  "fabric",
	} {
		got, _, err := Place{Where: where}.resolve(paths)
		if err != nil || got != want {
			t.Errorf("%s is %q, %v; want %q", where, got, err, want)
		}
	}
	for _, where := range []string{"node-master", "pod-1234", "nowhere", ""} {
		if got, _, err := (Place{Where: where}).resolve(paths); err == nil || !strings.Contains(err.Error(), "want one of master, node-1, pod-x") {
			t.Errorf("%q is %q, %v; want the names that there are", where, got, err)
		}
	}
	if _, _, err := (Place{Where: "pod/web", Namespace: "default"}).resolve(paths); err == nil || !strings.Contains(err.Error(), "pod default/web has no namespace here") {
		t.Errorf("a pod that is not there: %v", err)
	}
}

// pin makes the files that namespaces are pinned at.
func pin(t *testing.T, paths Paths, names ...string) {
	t.Helper()
	dir := filepath.Join(paths.Runtime, "netns")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
