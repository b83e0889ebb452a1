// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

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
	ns, err := place.resolve(paths)
	if err != nil {
		return fmt.Errorf("lab %q: %w", lab, err)
	}
	if _, err := exec.LookPath(argv[0]); err != nil {
		return fmt.Errorf("run %s in %s: %w", argv[0], place.Where, err)
	}
	node := place.Where
	if !strings.HasPrefix(node, "pod/") {
		env = append(env, "XTABLES_LOCKFILE="+paths.XtablesLock(node))
	}
	if err := sandbox.BecomeTool(sandbox.NetNSPath(paths.Runtime, ns), argv, env); err != nil {
		return fmt.Errorf("run %s in %s: %w", argv[0], place.Where, err)
	}
	return nil
}

// resolve returns the name of the place's namespace.
func (p Place) resolve(paths Paths) (string, error) {
	names, err := sandbox.PinnedNames(paths.Runtime)
	if err != nil {
		return "", err
	}
	if len(names) == 0 {
		return "", fmt.Errorf("%w; start it with `kplab up`", ErrNotRunning)
	}
	pod, isPod := strings.CutPrefix(p.Where, "pod/")
	if !isPod {
		for _, candidate := range []string{"node-" + p.Where, p.Where} {
			for _, n := range names {
				if n == candidate && !strings.HasPrefix(p.Where, "pod-") && !strings.HasPrefix(p.Where, "node-") {
					return n, nil
				}
			}
		}
		return "", fmt.Errorf("no node is called %q; want one of %s, outside, or pod/[NAMESPACE/]NAME",
			p.Where, strings.Join(nodesOf(names), ", "))
	}
	qualified := Qualify(p.Namespace, pod)
	namespace, name, _ := strings.Cut(qualified, "/")
	specs, err := sandbox.Specs(paths.Runtime)
	if err != nil {
		return "", err
	}
	for _, s := range specs {
		if s.Namespace == namespace && s.Name == name {
			return "pod-" + s.ID, nil
		}
	}
	return "", fmt.Errorf("pod %s has no namespace here; see `kplab kubectl get pods -n %s`", qualified, namespace)
}

func nodesOf(names []string) (nodes []string) {
	for _, n := range names {
		if node, ok := strings.CutPrefix(n, "node-"); ok {
			nodes = append(nodes, node)
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

// needRoot says what a person without root can do.
func needRoot(command string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("making and entering network namespaces needs root: run `sudo kplab %s`", command)
}

// cutService takes "NAMESPACE/NAME" apart.
func cutService(qualified string) (namespace, name string, ok bool) {
	namespace, name, ok = strings.Cut(qualified, "/")
	return namespace, name, ok && namespace != "" && name != ""
}
