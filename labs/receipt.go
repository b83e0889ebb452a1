// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kplab/kplab/cluster"
)

// shortestKey is how many bytes a receipt's key has at least.
const shortestKey = 16

// Receipt says what a learner passed. Who has the learner's key can check it; who
// has root on the learner's machine can still forge it, since the key is there.
type Receipt struct {
	// Version of this form.
	Version int `json:"version"`
	// Kplab is the version of the program that wrote it.
	Kplab    string        `json:"kplab"`
	Lab      string        `json:"lab"`
	Title    string        `json:"title"`
	Digest   string        `json:"digest"`
	Seed     uint64        `json:"seed"`
	Started  time.Time     `json:"started"`
	Finished *time.Time    `json:"finished,omitempty"`
	Issued   time.Time     `json:"issued"`
	Steps    []ReceiptStep `json:"steps"`
	// Passed counts the steps that the learner passed without the engine's solution.
	Passed int `json:"passed"`
	Of     int `json:"of"`
	// MAC is an HMAC-SHA256 over all of the above, in hexadecimal.
	MAC string `json:"mac"`
}

// ReceiptStep is one step of a Receipt.
type ReceiptStep struct {
	ID     string     `json:"id"`
	Passed *time.Time `json:"passed,omitempty"`
	Checks int        `json:"checks"`
	Hints  int        `json:"hints"`
	// Solved is true when the engine applied the solution.
	Solved  bool `json:"solved,omitempty"`
	Skipped bool `json:"skipped,omitempty"`
}

// ReadKey reads a receipt's key; white space around it does not count.
func ReadKey(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the key: %w", err)
	}
	key := bytes.TrimSpace(data)
	if len(key) < shortestKey {
		return nil, fmt.Errorf("key %s: %d bytes, want at least %d: `head -c 32 /dev/urandom | base64 > %s` makes one", path, len(key), shortestKey, path)
	}
	return key, nil
}

// Receipt writes what was passed so far, under a key.
func (s *Session) Receipt(key []byte) (*Receipt, error) {
	p := s.progress
	if p == nil {
		return nil, fmt.Errorf("lab %s: %w", s.lab.Name, ErrNotStarted)
	}
	r := &Receipt{
		Version: 1, Kplab: cluster.Versions().Kplab, Lab: p.Lab, Title: s.lab.Title.EN, Digest: p.Digest, Seed: p.Seed,
		Started: p.Started, Finished: p.Finished, Issued: time.Now().UTC(), Of: len(p.Steps),
	}
	for _, step := range p.Steps {
		r.Steps = append(r.Steps, ReceiptStep(step))
		if step.Passed != nil && !step.Solved {
			r.Passed++
		}
	}
	mac, err := r.mac(key)
	r.MAC = hex.EncodeToString(mac)
	return r, err
}

// mac is over the JSON of the receipt without its MAC.
func (r *Receipt) mac(key []byte) ([]byte, error) {
	plain := *r
	plain.MAC = ""
	data, err := json.Marshal(plain)
	if err != nil {
		return nil, err
	}
	h := hmac.New(sha256.New, key)
	_, _ = h.Write(data)
	return h.Sum(nil), nil
}

// ErrForged says that a receipt is not what was written under the key.
var ErrForged = errors.New("the receipt is not genuine")

// VerifyReceipt reads a receipt and says whether it was written under the key, and,
// where this kplab has the lab, or lab names its folder, whether it is the same lab.
func VerifyReceipt(data, key []byte, lab string) (*Receipt, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	// What the MAC does not cover must not be there.
	d.DisallowUnknownFields()
	r := &Receipt{}
	if err := d.Decode(r); err != nil {
		return nil, fmt.Errorf("read the receipt: %w", err)
	}
	if d.More() {
		return nil, fmt.Errorf("%w: something follows it", ErrForged)
	}
	got, err := hex.DecodeString(r.MAC)
	if err != nil {
		return nil, fmt.Errorf("%w: its mac is no hexadecimal number", ErrForged)
	}
	want, err := r.mac(key)
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(got, want) {
		return nil, fmt.Errorf("%w: it was changed, or written under another key", ErrForged)
	}
	named := lab != ""
	if !named {
		lab = r.Lab
	}
	l, err := Find(lab)
	switch {
	case errors.Is(err, ErrNoLab) && !named:
		return r, nil // a teacher's own, whose folder is not here
	case err != nil:
		return r, err
	case l.Digest != r.Digest:
		return r, fmt.Errorf("lab %s was another one there: its files have the digest %.12s…, here %.12s…", r.Lab, r.Digest, l.Digest)
	}
	return r, nil
}
