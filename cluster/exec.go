// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kplab/kplab/node"
	"github.com/kplab/kplab/sandbox"
)

// Place is where a command of the host runs: the network of a node, of the
// outside client or of a pod.
type Place struct {
	// Where is a node's name, "outside", or "pod/[NAMESPACE/]NAME".
	Where string
	// Namespace of a pod that is named without one.
	Namespace string
}

// Exec replaces this process by argv in a place of the lab; it returns only
// when that failed. It needs the lab's namespaces, not its daemon, so that one
// can look around after the daemon was killed.
func Exec(lab string, place Place, argv, env []string) error {
	if err := ValidateName(lab); err != nil {
		return err
	}
	if err := needRoot("exec"); err != nil {
		return err
	}
	paths := PathsOf(lab)
	ns, resolvConf, err := place.resolve(paths)
	if err != nil {
		return fmt.Errorf("lab %q: %w", lab, err)
	}
	onNode := strings.HasPrefix(ns, node.NSName(""))
	if _, err := exec.LookPath(argv[0]); err != nil {
		if argv[0] != "kubectl" || !onNode {
			return fmt.Errorf("run %s in %s: %w", argv[0], place.Where, err)
		}
		argv = append([]string{paths.NodeKubectl()}, argv[1:]...)
	}
	lockFile := paths.XtablesLock(ns)
	if err := os.MkdirAll(filepath.Dir(lockFile), 0o755); err != nil {
		return fmt.Errorf("make the directory of the iptables lock: %w", err)
	}
	env = append(env, "XTABLES_LOCKFILE="+lockFile)
	if onNode {
		env = paths.nodeEnv(lab, env)
	}
	if err := sandbox.BecomeTool(sandbox.NetNSPath(paths.Runtime, ns), resolvConf, argv, env); err != nil {
		return fmt.Errorf("run %s in %s: %w", argv[0], place.Where, err)
	}
	return nil
}

// nodeEnv makes kubectl work on a node, where the host's loopback and with it the
// API's port is not: the API's address there, unless the person has a kubeconfig of
// their own, and at the end of PATH a kubectl for a host without.
func (p Paths) nodeEnv(lab string, env []string) []string {
	set := func(name string, value func(old string) string) {
		old := ""
		env = slices.DeleteFunc(slices.Clone(env), func(e string) bool {
			v, found := strings.CutPrefix(e, name+"=")
			if found {
				old = v
			}
			return found
		})
		env = append(env, name+"="+value(old))
	}
	set("KPLAB_LAB", func(string) string { return lab })
	set("PATH", func(old string) string { return old + ":" + p.NodeBin() })
	set("KUBECONFIG", func(old string) string {
		if old == "" || old == p.Kubeconfig() {
			return p.NodeKubeconfig()
		}
		return old
	})
	return env
}

// noResolver is the resolv.conf of places that are no pods. With a file that names
// no server the C library asks 127.0.0.1, where the answer is an immediate no.
const noResolver = "# no name server of its own; the cluster's is for pods\n"

// resolve returns the name of the place's namespace, and what its resolv.conf is.
func (p Place) resolve(paths Paths) (ns, resolvConf string, err error) {
	names, err := sandbox.PinnedNames(paths.Runtime)
	if err != nil {
		return "", "", err
	}
	if len(names) == 0 {
		return "", "", fmt.Errorf("%w; start it with `kplab up%s`", ErrNotRunning, nameFlag(filepath.Base(paths.Runtime)))
	}
	pod, isPod := strings.CutPrefix(p.Where, "pod/")
	if !isPod {
		if n := node.NSName(p.Where); slices.Contains(names, n) {
			return n, noResolver, nil
		}
		// No node may have one of these two names.
		if p.Where == node.OutsideNS || p.Where == node.FabricNS {
			return p.Where, noResolver, nil
		}
		if faults, _ := readFaults(paths.FaultJournal()); slices.ContainsFunc(faults, func(f Fault) bool {
			return f.Node == p.Where && (f.Kind == NodeStopped || f.Kind == NodeKilled)
		}) {
			return "", "", fmt.Errorf("node %s is off; `kplab node start %s%s` starts it", p.Where, p.Where, nameFlag(filepath.Base(paths.Runtime)))
		}
		return "", "", fmt.Errorf("no node is called %q; want one of %s, outside, or pod/[NAMESPACE/]NAME",
			p.Where, strings.Join(nodesOf(names), ", "))
	}
	qualified := Qualify(p.Namespace, pod)
	namespace, name, _ := strings.Cut(qualified, "/")
	specs, err := sandbox.Specs(paths.Runtime)
	if err != nil {
		return "", "", err
	}
	for _, s := range specs {
		if s.Namespace == namespace && s.Name == name {
			return "pod-" + s.ID, s.ResolvConf, nil
		}
	}
	return "", "", fmt.Errorf("pod %s has no namespace here; see `kplab kubectl get pods -n %s`", qualified, namespace)
}

func nodesOf(names []string) (nodes []string) {
	for _, n := range names {
		if name, ok := strings.CutPrefix(n, node.NSName("")); ok {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// Qualify puts the namespace before a name that has none.
func Qualify(namespace, name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	return namespace + "/" + name
}
