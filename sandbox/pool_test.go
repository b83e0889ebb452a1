// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// A namespace that could not be made once does not leave the pool empty for ever.
func TestPoolRecovers(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	var broken atomic.Bool
	var tries atomic.Int32
	broken.Store(true)
	p := startPool(slog.New(slog.NewTextHandler(t.Output(), nil)), func() (*netns.NS, error) {
		tries.Add(1)
		if broken.Load() {
			return nil, errors.New("no space left")
		}
		return netns.New()
	})
	nettest.Eventually(t, 10*time.Second, "the first try", func() error {
		if tries.Load() == 0 {
			return errors.New("none")
		}
		return nil
	})
	if _, err := p.take(); err == nil {
		t.Error("a namespace was made")
	}
	broken.Store(false)
	ns, err := p.take()
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Close(); err != nil {
		t.Error(err)
	}
	nettest.Eventually(t, 10*time.Second, "a full pool", func() error {
		if n := len(p.ready); n < poolSize {
			return errors.New("not full")
		}
		return nil
	})
	if err := p.stop(); err != nil {
		t.Error(err)
	}
}
