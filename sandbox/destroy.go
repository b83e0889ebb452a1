// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// Destroy ends every process and removes every namespace, mount and record of the
// lab whose runtime directory is dir. It needs no daemon, and none may be running.
// Files of others in dir stay. What is gone already is success.
func Destroy(ctx context.Context, dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("sandbox: runtime directory %q is no absolute path", dir)
	}
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	// Records of an earlier boot name processes that are not ours.
	now, err := bootID()
	if err != nil {
		return err
	}
	then, err := os.ReadFile(filepath.Join(dir, bootFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if string(then) == now {
		if err := killRecorded(ctx, dir); err != nil {
			return fmt.Errorf("sandbox: end the lab's processes: %w", err)
		}
	}
	if err := unmountPins(filepath.Join(dir, pinsName)); err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	return errors.Join(
		os.RemoveAll(filepath.Join(dir, "sandboxes")),
		os.RemoveAll(filepath.Join(dir, bootFile)),
		removeIfEmpty(dir),
	)
}

// Recorded returns the shims and first processes of every container that is
// recorded below a lab's runtime directory, running or not.
func Recorded(dir string) (ids []reexec.ID, err error) {
	entries, err := os.ReadDir(filepath.Join(dir, "sandboxes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read the records of containers: %w", err)
	}
	for _, e := range entries {
		ids = append(ids, processIDs(filepath.Join(dir, "sandboxes", e.Name()))...)
	}
	return ids, nil
}

// killRecorded kills the recorded processes, and then whatever else lives in the
// lab's network namespaces: a shell that somebody opened there would keep its
// namespace, and with it the pod's address, for as long as it is open.
func killRecorded(ctx context.Context, dir string) error {
	ids, err := Recorded(dir)
	if err != nil {
		return err
	}
	if err := killAll(ctx, ids); err != nil {
		return err
	}
	entries, err := os.ReadDir(filepath.Join(dir, "sandboxes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if err := removeAllCgroups(filepath.Join(dir, "sandboxes", e.Name())); err != nil {
			return err
		}
	}
	names, err := PinnedNames(dir)
	if err != nil {
		return err
	}
	guests, err := inhabitants(dir, names)
	if err != nil {
		return err
	}
	return killAll(ctx, guests)
}

// inhabitants returns the processes whose network namespace is one of those of the lab
// that have these names. This process is never one of them.
func inhabitants(dir string, names []string) ([]reexec.ID, error) {
	if len(names) == 0 {
		return nil, nil
	}
	type place struct{ dev, ino uint64 }
	ours := make(map[place]bool, len(names))
	var st unix.Stat_t
	for _, name := range names {
		path := NetNSPath(dir, name)
		if mounted, err := isMountPoint(path); err != nil || !mounted {
			continue
		}
		if err := unix.Stat(path, &st); err == nil {
			ours[place{st.Dev, st.Ino}] = true
		}
	}
	// Whatever is pinned, the namespace of this process and the machine's first
	// one are not the lab's to empty.
	for _, keep := range []string{"/proc/self/ns/net", "/proc/1/ns/net"} {
		if err := unix.Stat(keep, &st); err == nil {
			delete(ours, place{st.Dev, st.Ino})
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var ids []reexec.ID
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// Identified before its namespace is looked at: a pid that changes hands in
		// between is then nobody's.
		id, err := reexec.Identify(pid)
		if err != nil {
			continue
		}
		if unix.Stat("/proc/"+e.Name()+"/ns/net", &st) == nil && ours[place{st.Dev, st.Ino}] {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// unmountPins takes the pin directory away with all that is mounted in it: in one
// step, since each single unmount waits for all CPUs. The files are unlinked after
// that, through a descriptor, which frees the copies that other mount namespaces
// took while the lab ran.
func unmountPins(pins string) error {
	for {
		mounted, err := isMountPoint(pins)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !mounted {
			break
		}
		root, err := os.Open(pins)
		if err != nil {
			return err
		}
		if err := unix.Unmount(pins, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return errors.Join(fmt.Errorf("unmount %s: %w", pins, err), root.Close())
		}
		err = emptyDir(root)
		if err := errors.Join(err, root.Close()); err != nil {
			return fmt.Errorf("empty %s: %w", pins, err)
		}
	}
	// What is on the directory below the mount, of a daemon that could not mount.
	return os.RemoveAll(pins)
}

// emptyDir removes everything in an open directory.
func emptyDir(dir *os.File) error {
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		flags := 0
		if e.IsDir() {
			fd, err := unix.Openat(int(dir.Fd()), e.Name(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			sub := os.NewFile(uintptr(fd), e.Name())
			errs = append(errs, emptyDir(sub), sub.Close())
			flags = unix.AT_REMOVEDIR
		}
		if err := unix.Unlinkat(int(dir.Fd()), e.Name(), flags); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, &os.PathError{Op: "unlink", Path: e.Name(), Err: err})
		}
	}
	return errors.Join(errs...)
}

// removeIfEmpty removes a directory unless somebody else has files in it.
func removeIfEmpty(dir string) error {
	err := os.Remove(dir)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
