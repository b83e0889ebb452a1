// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func sprint(v any) string { return fmt.Sprint(v) }

// TestReceipt writes a receipt, and then tries to make more of it.
func TestReceipt(t *testing.T) {
	l, err := Find("03-clusterip")
	if err != nil {
		t.Fatal(err)
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	s := &Session{raw: l, lab: l, progress: &Progress{Lab: l.Name, Digest: l.Digest, Seed: 7, Started: now, Steps: []StepProgress{
		{ID: "service", Passed: &now, Checks: 2}, {ID: "nowhere", Passed: &now, Solved: true}, {ID: "order"},
	}}}
	key, other := []byte("0123456789abcdef"), []byte("0123456789abcdeg")
	r, err := s.Receipt(key)
	if err != nil {
		t.Fatal(err)
	}
	if r.Passed != 1 || r.Of != 3 {
		t.Errorf("%d of %d passed, want 1 of 3: what the engine solved does not count", r.Passed, r.Of)
	}
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := VerifyReceipt(data, key, ""); err != nil {
		t.Errorf("the genuine one: %v", err)
	}
	if _, err := VerifyReceipt(data, other, ""); !errors.Is(err, ErrForged) {
		t.Errorf("under another key: %v", err)
	}
	for _, x := range [][2]string{
		{`"seed": 7`, `"seed": 8`}, {`"passed": 1`, `"passed": 3`}, {`"solved": true`, `"solved": false`}, {`"version": 1`, `"version": 2`},
		{`"checks": 2`, `"checks": 1`}, {`"lab": "03-clusterip"`, `"lab": "04-ports"`}, {r.MAC, strings.Repeat("0", 64)}, {r.MAC, "zz"}, {r.MAC, ""},
		{`"2026-01-02T03:04:05.000000006Z"`, `"2026-01-02T03:04:05.000000007Z"`},
	} {
		if !strings.Contains(string(data), x[0]) {
			t.Fatalf("%s is not in the receipt:\n%s", x[0], data)
		}
		if _, err := VerifyReceipt([]byte(strings.Replace(string(data), x[0], x[1], 1)), key, ""); !errors.Is(err, ErrForged) {
			t.Errorf("%s instead of %s: %v", x[1], x[0], err)
		}
	}
	if _, err := VerifyReceipt([]byte(strings.Replace(string(data), "{", `{"grade": "A",`, 1)), key, ""); err == nil {
		t.Error("a field that the MAC does not cover is taken")
	}
	if _, err := VerifyReceipt(append(data, data...), key, ""); !errors.Is(err, ErrForged) {
		t.Errorf("two receipts in one file: %v", err)
	}

	// The same key, and a lab that was made easier.
	s.progress.Digest = strings.Repeat("0", 64)
	if r, err = s.Receipt(key); err != nil {
		t.Fatal(err)
	}
	if data, err = json.Marshal(r); err != nil {
		t.Fatal(err)
	}
	if _, err := VerifyReceipt(data, key, ""); err == nil || !strings.Contains(err.Error(), "another one") {
		t.Errorf("another lab of this name: %v", err)
	}
}

func TestKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	if _, err := ReadKey(file); err == nil {
		t.Error("a key that is not there is taken")
	}
	if err := os.WriteFile(file, []byte("short\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadKey(file); err == nil || !strings.Contains(err.Error(), "want at least 16") {
		t.Errorf("a short key: %v", err)
	}
	if err := os.WriteFile(file, []byte("  0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if key, err := ReadKey(file); err != nil || string(key) != "0123456789abcdef" {
		t.Errorf("%q, %v", key, err)
	}
}

// TestProgress comes back as it was written, and says what is wrong with a damaged file.
func TestProgress(t *testing.T) {
	dir := t.TempDir()
	if p, err := readProgress(dir, "x"); p != nil || err != nil {
		t.Fatalf("%v, %v", p, err)
	}
	now := time.Now().UTC()
	p := &Progress{Lab: "x", Seed: 3, Steps: []StepProgress{{ID: "a", Passed: &now}, {ID: "b", Skipped: true}, {ID: "c"}}}
	if p.Current() != 2 {
		t.Errorf("current %d, want 2: one passed and one skipped", p.Current())
	}
	if err := writeProgress(dir, p); err != nil {
		t.Fatal(err)
	}
	got, err := readProgress(dir, "x")
	if err != nil || got.Seed != 3 || got.Current() != 2 || !got.Steps[0].Passed.Equal(now) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := os.WriteFile(progressFile(dir, "x"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readProgress(dir, "x"); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("damaged: %v", err)
	}
}

// TestLanguage follows the flag, and else the environment in the order of programs.
func TestLanguage(t *testing.T) {
	for _, x := range []struct {
		flag, all, lang string
		want            Lang
	}{{"", "", "zh_CN.UTF-8", ZH}, {"", "C", "zh_CN.UTF-8", EN}, {"en", "", "zh_CN.UTF-8", EN}, {"zh", "", "", ZH}, {"", "", "", EN}} {
		t.Setenv("LC_ALL", x.all)
		t.Setenv("LC_MESSAGES", "")
		t.Setenv("LANG", x.lang)
		if got, err := ParseLang(x.flag); got != x.want || err != nil {
			t.Errorf("%+v: %s, %v", x, got, err)
		}
	}
	if _, err := ParseLang("de"); err == nil {
		t.Error("de is taken")
	}
}
