// SPDX-License-Identifier: Apache-2.0

// Command helm is the stock Helm, built from its published module, so that a client
// that nobody here wrote can be run against the API.
package main

import (
	"fmt"
	"os"

	"helm.sh/helm/v4/pkg/cmd"
)

func main() {
	root, err := cmd.NewRootCmd(os.Stdout, os.Args[1:], cmd.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if root.Execute() != nil {
		os.Exit(1) // Helm printed why
	}
}
