// SPDX-License-Identifier: Apache-2.0

package gate_test

import (
	"context"
	"errors"
	"testing"

	"github.com/kplab/kplab/internal/gate"
)

func TestGate(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var none *gate.Gate
	if err := none.Wait(ctx); err != nil || none.Closed() {
		t.Errorf("a nil gate: %v, closed %t; want open", err, none.Closed())
	}
	var g gate.Gate
	if err := g.Wait(ctx); err != nil {
		t.Errorf("a new gate does not let pass: %v", err)
	}
	g.Close()
	g.Close()
	if !g.Closed() {
		t.Error("closed, and says that it is open")
	}
	passed := make(chan error, 2)
	for range 2 {
		go func() { passed <- g.Wait(ctx) }()
	}
	select {
	case err := <-passed:
		t.Fatalf("passed a closed gate: %v", err)
	default:
	}
	g.Open()
	g.Open()
	for range 2 {
		if err := <-passed; err != nil {
			t.Errorf("an opened gate: %v", err)
		}
	}
	g.Close()
	go func() { passed <- g.Wait(ctx) }()
	cancel()
	if err := <-passed; !errors.Is(err, context.Canceled) {
		t.Errorf("who waits in vain gets %v, want the end of the context", err)
	}
}
