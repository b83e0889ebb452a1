// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// Paths are the places of one lab on the host.
//
// State survives a stop and a reboot: the bbolt file, the certificates, the
// settings. Runtime is what exists while a lab runs, or after its daemon was
// killed: pinned namespaces, the journal of what the lab owns, the control
// socket, the kubeconfig.
type Paths struct {
	State, Runtime string
	// Lock is held by the daemon for its whole life.
	Lock string
}

// PathsOf returns the places of the lab called name: below $KPLAB_STATE and
// $KPLAB_RUN where these are set, else in /var/lib/kplab and /run/kplab. They are
// absolute: the daemon works in another directory than who starts it.
func PathsOf(name string) Paths {
	state, runtime := fromEnv(envState, "/var/lib/kplab"), fromEnv(envRun, "/run/kplab")
	return Paths{
		State:   filepath.Join(state, name),
		Runtime: filepath.Join(runtime, name),
		Lock:    filepath.Join(runtime, name+".lock"),
	}
}

// Database is the bbolt file with every object of the lab.
func (p Paths) Database() string { return filepath.Join(p.State, "state.db") }

// Settings is the file with the settings that the lab was made with.
func (p Paths) Settings() string { return filepath.Join(p.State, "lab.json") }

// Kubeconfig is the file for `kubectl --kubeconfig`.
func (p Paths) Kubeconfig() string { return filepath.Join(p.Runtime, "kubeconfig") }

// Namespace is the current namespace of the lab's kubeconfig; "default" when there is
// none, or no lab runs.
func (p Paths) Namespace() string {
	cfg, err := clientcmd.LoadFromFile(p.Kubeconfig())
	if err == nil {
		if c := cfg.Contexts[cfg.CurrentContext]; c != nil && c.Namespace != "" {
			return c.Namespace
		}
	}
	return metav1.NamespaceDefault
}

// NodeKubeconfig is the same for tools in a node's network, NodeKubectl a kubectl for
// them, and NodeBin the directory that holds it.
func (p Paths) NodeKubeconfig() string { return filepath.Join(p.Runtime, "kubeconfig-node") }

// NodeKubectl is described at NodeKubeconfig.
func (p Paths) NodeKubectl() string { return filepath.Join(p.NodeBin(), "kubectl") }

// NodeBin is described at NodeKubeconfig.
func (p Paths) NodeBin() string { return filepath.Join(p.Runtime, "bin") }

// Socket is the daemon's control socket.
func (p Paths) Socket() string { return filepath.Join(p.Runtime, "control.sock") }

// Log is what the daemon says of itself. It is among the state, so that it can be
// read after the lab ended.
func (p Paths) Log() string { return filepath.Join(p.State, "daemon.log") }

// Daemon is the record of the process that runs the lab.
func (p Paths) Daemon() string { return filepath.Join(p.Runtime, "daemon.json") }

// HostBefore is the snapshot of the host that `kplab down --prove` compares with.
func (p Paths) HostBefore() string { return filepath.Join(p.Runtime, "host-before.json") }

// XtablesLock is the lock file of the legacy iptables tools in one network
// namespace of the lab, given by the name that it is pinned under. One for each,
// so that nodes do not wait for one another and the host's own /run/xtables.lock
// is never made. Its directory is there once a lab has started.
func (p Paths) XtablesLock(ns string) string {
	return filepath.Join(p.Runtime, "xtables", ns+".lock")
}

// The variables that say where labs are.
const (
	envState = "KPLAB_STATE"
	envRun   = "KPLAB_RUN"
)

// absoluteEnv returns these variables, as far as they are set, for a process that
// works in another directory.
func absoluteEnv() (env []string) {
	for _, name := range []string{envState, envRun} {
		if dir := fromEnv(name, ""); dir != "" {
			env = append(env, name+"="+dir)
		}
	}
	return env
}

// fromEnv returns the directory that a variable names, or the default.
func fromEnv(variable, unset string) string {
	dir := os.Getenv(variable)
	if dir == "" {
		return unset
	}
	// It fails only when the working directory is gone; then a relative name
	// means nothing, and whoever opens it says so.
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}
