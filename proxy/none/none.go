// SPDX-License-Identifier: Apache-2.0

// Package none is the proxy mode that writes nothing: the node's kernel knows no
// Services. It shows what a proxy is for, and clears the way for a proxy that a
// person brings along.
package none

import (
	"context"

	"github.com/kplab/kplab/proxy"
)

// Mode is the mode of one node.
type Mode struct{}

// New returns the mode.
func New() Mode { return Mode{} }

// Name implements proxy.Mode.
func (Mode) Name() string { return "none" }

// Render implements proxy.Mode.
func (Mode) Render(*proxy.Snapshot) (proxy.Program, error) { return program{}, nil }

// Cleanup implements proxy.Mode.
func (Mode) Cleanup(context.Context) error { return nil }

// Probe implements proxy.Mode: every kernel can do nothing.
func (Mode) Probe(context.Context) error { return nil }

type program struct{}

func (program) String() string              { return "" }
func (program) Apply(context.Context) error { return nil }
