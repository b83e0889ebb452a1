// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Entries of the pin directory that pin no network namespace begin with a dot.
const (
	pinsName   = "netns"
	utsName    = ".uts"     // host names, by pod
	ipcName    = ".ipc"     // System V and POSIX message queues, by pod
	exeName    = ".exe"     // this program, read-only
	rootName   = ".root"    // where containers build their roots
	toolsName  = ".busybox" // programs of busybox containers
	podPrefix  = "pod-"
	tmpfsLabel = "kplab"
)

// NetNSPath returns the file that pins the network namespace name of the lab whose
// runtime directory is dir. A pod's namespace is called "pod-" and its UID.
func NetNSPath(dir, name string) string { return filepath.Join(dir, pinsName, name) }

// PinnedNames returns the names of the lab's network namespaces, sorted, from the
// runtime directory alone. A lab that is not there has none.
func PinnedNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(dir, pinsName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// CreateNetNS makes the network namespace name, or returns the one that exists. A
// new one has lo down and the kernel's settings, some of which are the host's. The
// handle is the Runtime's: it stays open until Close.
func (r *Runtime) CreateNetNS(name string) (*netns.NS, error) {
	if err := checkName("network namespace", name); err != nil {
		return nil, err
	}
	defer r.busy.lock(name)()
	ns, err := r.lookNetNS(name)
	if err == nil || !errors.Is(err, os.ErrNotExist) {
		return ns, err
	}
	fresh, err := netns.New()
	if err != nil {
		return nil, err
	}
	ns, err = pinNetNS(fresh, NetNSPath(r.dir, name))
	if err != nil {
		return nil, err
	}
	return r.keep(name, ns)
}

// NetNS returns the network namespace name, or an error that wraps os.ErrNotExist.
// The handle is the Runtime's, as with CreateNetNS.
func (r *Runtime) NetNS(name string) (*netns.NS, error) {
	if err := checkName("network namespace", name); err != nil {
		return nil, err
	}
	defer r.busy.lock(name)()
	return r.lookNetNS(name)
}

// RemoveNetNS ends every process in the network namespace name, which is none of a
// pod's, and lets go of it: with the last socket in it the kernel takes it apart. No
// namespace by that name is success.
func (r *Runtime) RemoveNetNS(ctx context.Context, name string) error {
	if err := checkName("network namespace", name); err != nil {
		return err
	}
	defer r.busy.lock(name)()
	guests, err := inhabitants(r.dir, []string{name})
	if err != nil {
		return fmt.Errorf("look who is in network namespace %s: %w", name, err)
	}
	if err := killAll(ctx, guests); err != nil {
		return fmt.Errorf("end who is in network namespace %s: %w", name, err)
	}
	r.mu.Lock()
	ns := r.spaces[name]
	delete(r.spaces, name)
	r.mu.Unlock()
	if ns != nil {
		err = ns.Close()
	}
	return errors.Join(err, unpin(NetNSPath(r.dir, name)))
}

// lookNetNS finds an open handle or opens the pin.
func (r *Runtime) lookNetNS(name string) (*netns.NS, error) {
	r.mu.Lock()
	ns, closed := r.spaces[name], r.closed
	if s := r.boxes[strings.TrimPrefix(name, podPrefix)]; ns == nil && s != nil && strings.HasPrefix(name, podPrefix) {
		ns = s.ns
	}
	r.mu.Unlock()
	switch {
	case closed:
		return nil, ErrClosed
	case ns != nil:
		return ns, nil
	}
	ns, err := openPin(NetNSPath(r.dir, name))
	if err != nil {
		return nil, err
	}
	return r.keep(name, ns)
}

// keep adds an open handle.
func (r *Runtime) keep(name string, ns *netns.NS) (*netns.NS, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errors.Join(ErrClosed, ns.Close())
	}
	r.spaces[name] = ns
	return ns, nil
}

// mountPins makes dir/netns a tmpfs of the lab's own and the things that every lab
// has on it, or finds it as it was left.
func mountPins(dir string) error {
	pins := filepath.Join(dir, pinsName)
	if err := os.MkdirAll(pins, 0o755); err != nil {
		return err
	}
	mounted, err := isMountPoint(pins)
	if err != nil {
		return err
	}
	if !mounted {
		if err := unix.Mount(tmpfsLabel, pins, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
			return fmt.Errorf("mount a tmpfs for namespaces at %s (needs CAP_SYS_ADMIN): %w", pins, err)
		}
	}
	// Copies of a mount in other mount namespaces would hold the pods' namespaces.
	if err := unix.Mount("", pins, "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make %s private: %w", pins, err)
	}
	for _, d := range []string{utsName, ipcName, rootName} {
		if err := os.Mkdir(filepath.Join(pins, d), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return pinProgram(filepath.Join(pins, exeName))
}

// pinProgram puts this program at path, read-only. Containers are started from
// there: a process that gets hold of the file by /proc/PID/exe, as root of the
// machine that it is, still cannot open it for writing.
func pinProgram(path string) error {
	// One that an earlier daemon left may be another version.
	if err := unpin(path); err != nil {
		return err
	}
	source, err := ownProgram(path + ".copy")
	if err != nil {
		return err
	}
	if err := bind(source, path); err != nil {
		return err
	}
	if err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("make %s read-only: %w", path, err)
	}
	return nil
}

// ownProgram returns a path of this program. The link /proc/self/exe itself will
// not do as the source of a mount: it may lead into another mount namespace. Where
// the file has been replaced since the start, its content is copied to spare.
func ownProgram(spare string) (string, error) {
	const self = "/proc/self/exe"
	path, err := os.Readlink(self)
	if err != nil {
		return "", err
	}
	mine, err := os.Stat(self)
	if err != nil {
		return "", err
	}
	if there, err := os.Stat(path); err == nil && os.SameFile(mine, there) {
		return path, nil
	}
	program, err := os.ReadFile(self)
	if err != nil {
		return "", err
	}
	if err := os.Remove(spare); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err // one that an earlier daemon's containers were started from
	}
	return spare, os.WriteFile(spare, program, 0o500)
}

// isMountPoint says whether something is mounted at path.
func isMountPoint(path string) (bool, error) {
	var stx unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &stx); err != nil {
		return false, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return stx.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// bind mounts the file source on a new file at path.
func bind(source, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make the mount point: %w", err)
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("mount %s at %s: %w", source, path, err), os.Remove(path))
	}
	return nil
}

// pinNetNS makes ns outlive this process, and returns it as opened by its pin. It
// takes ns over.
func pinNetNS(ns *netns.NS, path string) (*netns.NS, error) {
	if err := bind(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), path); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	pinned, err := netns.Open(path)
	if err := errors.Join(err, ns.Close()); err != nil {
		return nil, errors.Join(err, unpin(path))
	}
	return pinned, nil
}

// openPin opens a pinned namespace. A pin on which nothing is mounted, of a daemon
// that was killed between the two steps, is removed and counts as absent.
func openPin(path string) (*netns.NS, error) {
	mounted, err := isMountPoint(path)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if !mounted {
		if err := os.Remove(path); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("open network namespace: %w", &os.PathError{Op: "open", Path: path, Err: os.ErrNotExist})
	}
	return netns.Open(path)
}

// unpin unmounts and unlinks. The first frees this mount namespace's copy, the
// second those that other mount namespaces took while the lab ran. What is absent
// is success.
func unpin(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // EINVAL: not mounted
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
