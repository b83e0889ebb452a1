// SPDX-License-Identifier: Apache-2.0

package store

import (
	"os"
	"testing"

	"github.com/kplab/kplab/internal/nettest"
)

// TestMain: the tests of a full disk mount one of their own.
func TestMain(m *testing.M) {
	if path := os.Getenv(crashChildEnv); path != "" {
		crashChild(path)
	}
	nettest.Main(m)
}
