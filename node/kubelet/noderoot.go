// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kplab/kplab/sandbox"
)

// nodeRoot is the directory that hostPath volumes are below: each node has files of
// its own, and none of the machine's.
func (k *Kubelet) nodeRoot() string { return filepath.Join(k.cfg.Dir, "rootfs") }

// nodePrograms are the mounts that put the machine's programs, read-only as every
// container has them, into the node's root where a container has mounted that whole:
// people look around on a node with `chroot /host`.
func (k *Kubelet) nodePrograms(at string) ([]sandbox.Mount, error) {
	root := k.nodeRoot()
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(root, "etc/hostname"), []byte(k.cfg.NodeName+"\n"), 0o644); err != nil {
		return nil, fmt.Errorf("write into the root of node %s: %w", k.cfg.NodeName, err)
	}
	var mounts []sandbox.Mount
	for _, p := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		there := filepath.Join(root, p)
		info, err := os.Lstat(p)
		switch {
		case errors.Is(err, os.ErrNotExist):
			continue
		case err != nil:
			return nil, err
		case info.Mode()&os.ModeSymlink != 0:
			// On a merged-/usr system /bin is one.
			to, err := os.Readlink(p)
			if err != nil {
				return nil, err
			}
			if err := os.Symlink(to, there); err != nil && !errors.Is(err, os.ErrExist) {
				return nil, err
			}
		default:
			if err := os.MkdirAll(there, 0o755); err != nil {
				return nil, err
			}
			mounts = append(mounts, sandbox.Mount{Source: p, Target: filepath.Join(at, p), ReadOnly: true})
		}
	}
	return mounts, nil
}
