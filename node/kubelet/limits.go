// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// usagePeriod is how often volumes with a size limit are measured, as upstream does it.
const usagePeriod = 10 * time.Second

// overLimits ends a pod that was active for longer than its spec allows, or whose
// emptyDir volumes hold more than they may, and reports whether it did. What is within
// its limits is looked at again in time.
func (k *Kubelet) overLimits(p *pod, o *corev1.Pod) bool {
	if seconds := o.Spec.ActiveDeadlineSeconds; seconds != nil {
		p.mu.Lock()
		started := p.started
		p.mu.Unlock()
		if !started.IsZero() {
			left := time.Until(started.Add(time.Duration(*seconds) * time.Second))
			if left <= 0 {
				const why = "Pod was active on the node longer than the specified deadline"
				k.event(o, corev1.EventTypeNormal, "DeadlineExceeded", why)
				k.giveUp(p, corev1.PodFailed, "DeadlineExceeded", why)
				return true
			}
			k.again(p, left)
		}
	}
	limited := false
	for i := range o.Spec.Volumes {
		v := &o.Spec.Volumes[i]
		if v.EmptyDir == nil || v.EmptyDir.SizeLimit == nil || v.EmptyDir.SizeLimit.Sign() <= 0 {
			continue
		}
		limited = true
		used, err := diskUsage(k.volumeDir(o, v))
		if err != nil {
			k.log.Warn("a volume cannot be measured", "pod", o.Namespace+"/"+o.Name, "volume", v.Name, "error", err)
			continue
		}
		if used > v.EmptyDir.SizeLimit.Value() {
			why := fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", v.Name, v.EmptyDir.SizeLimit)
			k.event(o, corev1.EventTypeWarning, "Evicted", "%s", why)
			k.giveUp(p, corev1.PodFailed, "Evicted", why)
			return true
		}
	}
	if limited {
		k.again(p, usagePeriod)
	}
	return false
}

// diskUsage is how many bytes the files below dir occupy. What goes away meanwhile
// counts nothing.
func diskUsage(dir string) (int64, error) {
	var total int64
	seen := map[uint64]bool{} // a file with several names is one file
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !seen[st.Ino] {
			seen[st.Ino] = true
			total += st.Blocks * 512
		}
		return nil
	})
	return total, err
}

// giveToGroup makes everything in a volume belong to the pod's fsGroup, with the modes
// that upstream gives: the group may read, write where the volume is the pod's own, and
// what is made in a directory later belongs to the group too. A volume whose root (or
// whose present files, where they are replaced as a whole) has the group is left alone.
func giveToGroup(dir string, gid int, writable bool) error {
	witness := dir
	if !writable {
		witness = filepath.Join(dir, "..data/.")
	}
	var st unix.Stat_t
	if err := unix.Stat(witness, &st); err != nil {
		return fmt.Errorf("read who owns %s: %w", dir, err)
	}
	if int(st.Gid) == gid {
		return nil
	}
	mask := fs.FileMode(0o440)
	if writable {
		mask = 0o660
	}
	// The root last: it is the witness that all is done.
	var roots []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == dir || path == filepath.Clean(witness) {
			roots = append(roots, path)
			return nil
		}
		return giveOne(path, gid, mask)
	})
	if err != nil {
		return err
	}
	if !writable {
		target, err := filepath.EvalSymlinks(filepath.Join(dir, "..data"))
		if err != nil {
			return err
		}
		roots = append(roots, target)
	}
	for _, path := range roots {
		if err := giveOne(path, gid, mask); err != nil {
			return err
		}
	}
	return nil
}

func giveOne(path string, gid int, mask fs.FileMode) error {
	if err := os.Lchown(path, -1, gid); err != nil {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil || info.Mode()&fs.ModeSymlink != 0 {
		return err
	}
	if info.IsDir() {
		mask |= 0o110 | fs.ModeSetgid
	}
	return os.Chmod(path, info.Mode()|mask)
}
