// SPDX-License-Identifier: Apache-2.0

// Command kube-proxy is upstream's own proxy, built from its published module, so that
// it can be run as a stranger against the API and inside a node of a lab.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	"k8s.io/kubernetes/cmd/kube-proxy/app"
)

func main() {
	os.Exit(cli.Run(app.NewProxyCommand()))
}
