// SPDX-License-Identifier: Apache-2.0

// Command kubectl132 is the stock kubectl of Kubernetes 1.32, built from its
// published module. The transcripts run it beside the embedded kubectl, because
// a client five releases older than the server asks in older ways (LIST and
// WATCH instead of a streamed list, other messages).
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"

	_ "k8s.io/client-go/plugin/pkg/client/auth"
)

func main() {
	// CheckErr prints as kubectl does and exits with kubectl's code.
	util.CheckErr(cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()))
	os.Exit(0)
}
