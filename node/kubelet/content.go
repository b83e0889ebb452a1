// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/workload"
)

// contentMounts writes the files that a built-in image has into a directory of the
// attempt, so that its server and `kubectl exec` see the same ones and a change by
// the one is seen by the other. A new attempt begins with the image's own files
// again, as a new container does. Directories that a volume covers are the
// volume's.
func (k *Kubelet) contentMounts(o *corev1.Pod, spec *corev1.Container, image workload.Image, c *workload.Context, attempt int) ([]sandbox.Mount, error) {
	if image.Content == nil {
		return nil, nil
	}
	byDir := map[string]map[string][]byte{}
	for file, data := range image.Content(c) {
		dir := path.Dir(file)
		if covered(spec, dir) {
			continue
		}
		if byDir[dir] == nil {
			byDir[dir] = map[string][]byte{}
		}
		byDir[dir][path.Base(file)] = data
	}
	var mounts []sandbox.Mount
	for dir, files := range byDir {
		host := filepath.Join(k.podDir(o.UID), "content", spec.Name, strconv.Itoa(attempt), strings.ReplaceAll(strings.Trim(dir, "/"), "/", "~"))
		mounts = append(mounts, sandbox.Mount{Source: host, Target: dir})
		if _, err := os.Stat(host); err == nil {
			continue // of this attempt, before the daemon was started again
		}
		if err := os.MkdirAll(host, 0o755); err != nil {
			return nil, fmt.Errorf("make the image's files: %w", err)
		}
		for name, data := range files {
			if err := os.WriteFile(filepath.Join(host, name), data, 0o644); err != nil {
				return nil, fmt.Errorf("make the image's files: %w", err)
			}
		}
	}
	sort.Slice(mounts, func(i, j int) bool { return mounts[i].Target < mounts[j].Target })
	return mounts, nil
}

// covered reports whether a volume is mounted at dir or above it.
func covered(spec *corev1.Container, dir string) bool {
	for _, m := range spec.VolumeMounts {
		at := path.Clean(m.MountPath)
		if dir == at || strings.HasPrefix(dir, at+"/") {
			return true
		}
	}
	return false
}
