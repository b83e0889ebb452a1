// SPDX-License-Identifier: Apache-2.0

// Command kplab-cni-routed is kplab's routed CNI plugin as an executable, for any
// runtime that follows the CNI specification. kplab itself serves the same code
// inside its daemon.
package main

import (
	"context"
	"os"

	"github.com/kplab/kplab/cni/routed"
)

func main() {
	os.Exit(routed.Main(context.Background(), os.Stdout, "CNI plugin routed, part of kplab"))
}
