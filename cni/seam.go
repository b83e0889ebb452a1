// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/kplab/kplab/cni/portmap"
	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
)

// These stand for the paths of the plugins that need no executable.
const (
	builtinPrefix  = "builtin:"
	builtin        = builtinPrefix + routed.Type
	builtinPortmap = builtinPrefix + portmap.Type
)

// seam is what libcni calls instead of starting executables.
type seam struct {
	version.PluginDecoder
	routed  *routed.Plugin
	portmap *portmap.Plugin
	run     execx.Runner
	log     *slog.Logger
}

func newSeam(p *routed.Plugin, ports *portmap.Plugin, nodeNS *netns.NS, log *slog.Logger) *seam {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	run := execx.Host()
	if nodeNS != nil {
		run = execx.In(nodeNS)
	}
	return &seam{routed: p, portmap: ports, run: run, log: log}
}

// FindInPath returns the path of a plugin. The built-in "routed" wins over an
// executable of the same name; "portmap" is built in for want of one.
func (s *seam) FindInPath(plugin string, dirs []string) (string, error) {
	if plugin == routed.Type {
		return builtin, nil
	}
	if plugin == "" || strings.ContainsRune(plugin, os.PathSeparator) {
		return "", fmt.Errorf("%q is no plugin name", plugin)
	}
	for _, dir := range dirs {
		file := filepath.Join(dir, plugin)
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	if plugin == portmap.Type {
		return builtinPortmap, nil
	}
	return "", fmt.Errorf("plugin %q is neither built in nor an executable in %s; put it there or change the network configuration",
		plugin, strings.Join(dirs, ", "))
}

// ExecPlugin serves one call, in this process or by an executable in the node's
// namespace.
func (s *seam) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	env := cniVars(environ)
	if path == builtin {
		return s.routed.Serve(ctx, routed.Request{
			Command: env["CNI_COMMAND"], ContainerID: env["CNI_CONTAINERID"], Netns: env["CNI_NETNS"],
			IfName: env["CNI_IFNAME"], Args: env["CNI_ARGS"], Stdin: stdin,
		})
	}
	if path == builtinPortmap {
		return s.portmap.Serve(ctx, portmap.Request{
			Command: env["CNI_COMMAND"], ContainerID: env["CNI_CONTAINERID"], IfName: env["CNI_IFNAME"], Stdin: stdin,
		})
	}
	c := execx.Cmd{Path: path, Stdin: stdin}
	for k, v := range env {
		c.Env = append(c.Env, k+"="+v)
	}
	res, err := s.run.Run(ctx, c)
	if err == nil {
		if len(res.Stderr) > 0 {
			s.log.Debug("plugin wrote to stderr", "plugin", path, "stderr", string(res.Stderr))
		}
		return res.Stdout, nil
	}
	// A plugin that fails says why on stdout.
	var said types.Error
	if jsonErr := json.Unmarshal(res.Stdout, &said); jsonErr == nil && said.Msg != "" {
		return nil, &said
	}
	var failed *execx.Error
	if errors.As(err, &failed) && failed.Stderr != "" {
		return nil, fmt.Errorf("plugin %s: %s: %w", filepath.Base(path), strings.TrimSpace(failed.Stderr), failed.Err)
	}
	return nil, fmt.Errorf("plugin %s: %w", filepath.Base(path), err)
}

// cniVars picks the call's own variables; the rest of the daemon's environment is
// none of a plugin's business.
func cniVars(environ []string) map[string]string {
	vars := map[string]string{}
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(k, "CNI_") {
			vars[k] = v
		}
	}
	return vars
}
