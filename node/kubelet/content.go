// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/workload"
)

// imageDirs are the files of built-in images on disk, one directory for all pods of
// the node.
type imageDirs struct {
	mu   sync.Mutex
	made map[string]bool
}

// contentOf returns, by directory of the container, the directory on the host with
// the files that a built-in image has there. It is a link: to the node's one copy
// at first, and to a copy of the attempt's own once somebody may write (ownContent). So
// a server and `kubectl exec` see the same files, a change by the one is seen by
// the other, a new attempt begins with the image's files again, and a pod into
// which nobody looks costs one link. Directories that a volume covers are the
// volume's.
func (k *Kubelet) contentOf(o *corev1.Pod, spec *corev1.Container, image workload.Image, attempt int) (map[string]string, error) {
	if image.Content == nil {
		return nil, nil
	}
	dirs := map[string]string{}
	for dir, files := range byDirectory(spec, image) {
		shared, err := k.sharedContent(dir, files)
		if err != nil {
			return nil, fmt.Errorf("make the image's files: %w", err)
		}
		link := filepath.Join(k.podDir(o.UID), "content."+spec.Name+"."+strconv.Itoa(attempt)+"."+strings.ReplaceAll(strings.Trim(dir, "/"), "/", "~"))
		if err := os.Symlink(shared, link); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("make the image's files: %w", err)
		}
		dirs[dir] = link
	}
	return dirs, nil
}

// byDirectory groups an image's files.
func byDirectory(spec *corev1.Container, image workload.Image) map[string]map[string][]byte {
	all := map[string]map[string][]byte{}
	if image.Content == nil {
		return all
	}
	for file, data := range image.Content(&workload.Context{}) {
		dir := path.Dir(file)
		if covered(spec, dir) {
			continue
		}
		if all[dir] == nil {
			all[dir] = map[string][]byte{}
		}
		all[dir][path.Base(file)] = data
	}
	return all
}

// sharedContent makes the node's copy of a directory, once.
func (k *Kubelet) sharedContent(dir string, files map[string][]byte) (string, error) {
	sum := sha256.New()
	_, _ = io.WriteString(sum, dir) // a hash takes everything
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		_, _ = fmt.Fprintf(sum, "\x00%s\x00%s", name, files[name])
	}
	host := filepath.Join(k.cfg.Dir, "images", hex.EncodeToString(sum.Sum(nil)[:8]))
	k.images.mu.Lock()
	defer k.images.mu.Unlock()
	if k.images.made[host] {
		return host, nil
	}
	if err := writeFiles(host, files); err != nil {
		return "", err
	}
	if k.images.made == nil {
		k.images.made = map[string]bool{}
	}
	k.images.made[host] = true
	return host, nil
}

func writeFiles(dir string, files map[string][]byte) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// ownContent gives an attempt copies of its own and returns the mounts for a
// process that joins it.
func (k *Kubelet) ownContent(o *corev1.Pod, spec *corev1.Container, image workload.Image, attempt int) ([]sandbox.Mount, error) {
	links, err := k.contentOf(o, spec, image, attempt)
	if err != nil {
		return nil, err
	}
	k.images.mu.Lock()
	defer k.images.mu.Unlock()
	var mounts []sandbox.Mount
	for dir, files := range byDirectory(spec, image) {
		link := links[dir]
		own := link + ".own"
		mounts = append(mounts, sandbox.Mount{Source: own, Target: dir})
		if now, err := os.Readlink(link); err == nil && now == own {
			continue
		}
		if err := writeFiles(own, files); err != nil {
			return nil, fmt.Errorf("copy the image's files: %w", err)
		}
		if err := replaceLink(own, link); err != nil {
			return nil, fmt.Errorf("copy the image's files: %w", err)
		}
	}
	slices.SortFunc(mounts, func(a, b sandbox.Mount) int { return strings.Compare(a.Target, b.Target) })
	return mounts, nil
}

// replaceLink points a link to another place in one step.
func replaceLink(target, link string) error {
	tmp := link + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, link)
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
