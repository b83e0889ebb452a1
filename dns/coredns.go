// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"path/filepath"

	"github.com/coredns/coredns/coremain"
	// The plugins that a Corefile may name: those of a cluster's own, and those by which
	// people extend it.
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/file"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/loadbalance"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/loop"
	_ "github.com/coredns/coredns/plugin/metrics"
	_ "github.com/coredns/coredns/plugin/ready"
	_ "github.com/coredns/coredns/plugin/reload"
	_ "github.com/coredns/coredns/plugin/rewrite"
	_ "github.com/coredns/coredns/plugin/template"
)

// Program is the name under which this program is CoreDNS.
const Program = "coredns"

// IsProgram tells whether the program was called as CoreDNS: args is os.Args.
func IsProgram(args []string) bool { return len(args) > 0 && filepath.Base(args[0]) == Program }

// Main is CoreDNS's own main: it takes its flags (-conf and others) from os.Args, and
// returns only when it was told to stop.
func Main() { coremain.Run() }
