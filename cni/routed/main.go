// SPDX-License-Identifier: Apache-2.0

package routed

import (
	"context"
	"errors"
	"io"

	"github.com/containernetworking/cni/pkg/skel"
)

// Main serves one call as a CNI executable does: parameters from the environment,
// the configuration from stdin, the answer to stdout. It returns the process's
// exit code; about is shown when somebody starts it by hand.
func Main(ctx context.Context, stdout io.Writer, about string) int {
	p := New(nil)
	call := func(command string) func(*skel.CmdArgs) error {
		return func(a *skel.CmdArgs) error {
			out, err := p.Serve(ctx, Request{
				Command: command, ContainerID: a.ContainerID, Netns: a.Netns, IfName: a.IfName, Args: a.Args, Stdin: a.StdinData,
			})
			if err != nil {
				return err
			}
			_, err = stdout.Write(out)
			return err
		}
	}
	failed := skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add: call("ADD"), Del: call("DEL"), Check: call("CHECK"), GC: call("GC"), Status: call("STATUS"),
	}, supported(), about)
	var err error
	if failed != nil {
		// The specification wants the error on stdout, as JSON.
		err = failed.Print()
	}
	if err = errors.Join(err, p.Close()); err != nil || failed != nil {
		return 1
	}
	return 0
}
