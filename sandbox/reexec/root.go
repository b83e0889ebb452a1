// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// rootSize bounds what a container can write into its root, which is memory.
const rootSize = "size=512m,nr_inodes=64k,mode=755"

// tree is a part of the host's files, taken before the host's root is out of
// sight and put into the container's root after. It goes through a descriptor, so
// that neither name is ever looked up in the other's root.
type tree struct {
	fd     int
	target string
	dir    bool
}

// buildRoot makes a root of its own for the current thread, whose mount namespace
// is new: an empty tmpfs with the host's programs and libraries read-only, and
// nothing else of the host.
func buildRoot(scaffold string, cfg *Root, uid, gid uint32) error {
	// What is mounted here from now on is not seen elsewhere, nor the reverse.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	base, links, err := hostTrees(cfg.Programs)
	if err != nil {
		return err
	}
	var volumes []tree
	for _, m := range cfg.Mounts {
		t, err := takeTree(m.Source, m.Target, m.ReadOnly, true)
		if err != nil {
			return fmt.Errorf("mount %s: %w", m.Target, err)
		}
		volumes = append(volumes, t)
	}
	devices, err := hostDevices()
	if err != nil {
		return err
	}
	if err := enterRoot(scaffold); err != nil {
		return err
	}
	if err := makeSkeleton(links, uid, gid); err != nil {
		return err
	}
	// In a user namespace the kernel makes new ones only where old ones can be seen.
	if err := mountKernel(cfg.Unmasked); err != nil {
		return err
	}
	if err := unix.Unmount("/.old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("let go of the host's root: %w", err)
	}
	if err := os.Remove("/.old"); err != nil {
		return err
	}
	for _, t := range base {
		if err := t.put(); err != nil {
			return err
		}
	}
	if err := makeDevices(devices); err != nil {
		return err
	}
	for path, content := range cfg.Files {
		if err := writeInto(path, content); err != nil {
			return err
		}
	}
	for _, t := range volumes {
		if err := t.put(); err != nil {
			return err
		}
	}
	if !cfg.Unmasked {
		if err := mask(); err != nil {
			return err
		}
	}
	// The one place where a device file has effect is closed: a container may make
	// them (CAP_MKNOD), and could reach the machine's disks by one.
	if err := setAttr("/dev", unix.MOUNT_ATTR_RDONLY); err != nil {
		return err
	}
	if cfg.ReadOnly {
		return setAttr("/", unix.MOUNT_ATTR_RDONLY)
	}
	return nil
}

// enterRoot puts an empty tmpfs in the place of the root; the old one is at /.old.
func enterRoot(scaffold string) error {
	if err := unix.Mount("kplab", scaffold, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, rootSize); err != nil {
		return fmt.Errorf("mount the root: %w", err)
	}
	old := filepath.Join(scaffold, ".old")
	if err := os.Mkdir(old, 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(scaffold, old); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	return unix.Chdir("/")
}

// hostTrees takes what containers see of the host, and reads the symbolic links
// that stand in its place: on a merged-/usr system /bin is one.
func hostTrees(programs string) (trees []tree, links map[string]string, err error) {
	links = make(map[string]string)
	take := func(source, target string) error {
		switch fi, err := os.Lstat(source); {
		case errors.Is(err, os.ErrNotExist):
			return nil
		case err != nil:
			return err
		case fi.Mode()&os.ModeSymlink != 0:
			links[target], err = os.Readlink(source)
			return err
		}
		t, err := takeTree(source, target, true, false)
		trees = append(trees, t)
		return err
	}
	libraries := []string{"/lib", "/lib32", "/lib64", "/libx32"}
	sources := make([][2]string, 0, 32)
	if programs == "" {
		for _, p := range append([]string{"/usr", "/bin", "/sbin"}, libraries...) {
			sources = append(sources, [2]string{p, p})
		}
	} else {
		for _, p := range []string{"/bin", "/sbin", "/usr/bin", "/usr/sbin"} {
			sources = append(sources, [2]string{programs, p})
		}
		// Static programs load the C library's name service modules all the same.
		for _, p := range append([]string{"/usr/lib", "/usr/lib32", "/usr/lib64"}, libraries...) {
			sources = append(sources, [2]string{p, p})
		}
	}
	for _, p := range sharedEtc() {
		sources = append(sources, [2]string{p, p})
	}
	for _, s := range sources {
		if err := take(s[0], s[1]); err != nil {
			return nil, nil, err
		}
	}
	return trees, links, nil
}

// sharedEtc names what containers see of the host's /etc: what programs and
// libraries are configured with, and nothing about the machine, its users or its
// secrets. Private keys lie in /etc/ssl/private, so /etc/ssl is not shared whole.
func sharedEtc() []string {
	return []string{
		"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
		"/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/ca-trust", "/etc/pki/tls/certs",
		"/etc/services", "/etc/protocols", "/etc/ethertypes", "/etc/gai.conf",
		"/etc/localtime", "/etc/os-release", "/etc/debian_version", "/etc/inputrc", "/etc/mime.types",
	}
}

// takeTree makes a detached copy of the mount at source. A volume brings what is
// mounted below it, and may be written unless readOnly.
func takeTree(source, target string, readOnly, volume bool) (tree, error) {
	var flags uint = unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC
	if volume {
		flags |= unix.AT_RECURSIVE
	}
	fail := func(err error) (tree, error) {
		return tree{}, &os.PathError{Op: "take", Path: source, Err: err}
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, source, flags)
	if err != nil {
		return fail(err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	how := uint(unix.AT_EMPTY_PATH)
	if volume {
		how |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(fd, "", how, &attr); err != nil {
		return fail(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail(err)
	}
	return tree{fd: fd, target: target, dir: st.Mode&unix.S_IFMT == unix.S_IFDIR}, nil
}

// put mounts the tree at its target in the current root and closes it.
func (t tree) put() error {
	if err := makeTarget(t.target, t.dir); err != nil {
		return fmt.Errorf("make the mount point %s: %w", t.target, err)
	}
	if err := unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.target, unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_SYMLINKS); err != nil {
		return fmt.Errorf("mount %s: %w", t.target, err)
	}
	return unix.Close(t.fd)
}

// makeTarget makes an empty directory or file to mount on. Where the directory
// that it should be in is the host's, and so read-only, that directory is opened
// up first.
func makeTarget(path string, dir bool) error {
	err := tryTarget(path, dir)
	if !errors.Is(err, unix.EROFS) {
		return err
	}
	parent := filepath.Dir(filepath.Clean(path))
	for {
		if fi, err := os.Stat(parent); err == nil && fi.IsDir() {
			break
		}
		parent = filepath.Dir(parent)
	}
	if err := openUp(parent); err != nil {
		return fmt.Errorf("make room in %s: %w", parent, err)
	}
	return tryTarget(path, dir)
}

func tryTarget(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

// openUp puts a tmpfs on a read-only directory and everything that was in the
// directory back into it, entry by entry.
func openUp(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var trees []tree
	links := make(map[string]string)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.Type()&os.ModeSymlink != 0 {
			if links[path], err = os.Readlink(path); err != nil {
				return err
			}
			continue
		}
		t, err := takeTree(path, path, true, true)
		if err != nil {
			return err
		}
		trees = append(trees, t)
	}
	if err := unix.Mount("kplab", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, rootSize); err != nil {
		return err
	}
	for path, to := range links {
		if err := os.Symlink(to, path); err != nil {
			return err
		}
	}
	for _, t := range trees {
		if err := t.put(); err != nil {
			return err
		}
	}
	return nil
}

// makeSkeleton makes the directories and files that every root has.
func makeSkeleton(links map[string]string, uid, gid uint32) error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{"/usr", 0o755}, {"/etc", 0o755}, {"/etc/ssl", 0o755}, {"/home", 0o755}, {"/root", 0o700}, {"/run", 0o755},
		{"/run/lock", 0o777 | os.ModeSticky}, {"/tmp", 0o777 | os.ModeSticky}, {"/var", 0o755}, {"/var/cache", 0o755},
		{"/var/lib", 0o755}, {"/var/log", 0o755}, {"/var/spool", 0o755}, {"/var/tmp", 0o777 | os.ModeSticky},
		{"/mnt", 0o755}, {"/opt", 0o755}, {"/srv", 0o755}, {"/dev", 0o755}, {"/proc", 0o555}, {"/sys", 0o555},
	} {
		if err := os.MkdirAll(d.path, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(d.path, d.mode); err != nil {
			return err
		}
	}
	// In order of length, so that a directory comes before what is in it.
	names := make([]string, 0, len(links))
	for name := range links {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := os.Symlink(links[name], name); err != nil {
			return err
		}
	}
	if err := os.Symlink("/proc/self/mounts", "/etc/mtab"); err != nil {
		return err
	}
	if err := os.Symlink("/run", "/var/run"); err != nil {
		return err
	}
	for path, content := range map[string]string{
		"/etc/passwd":        passwd(uid, gid),
		"/etc/group":         group(gid),
		"/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
		"/etc/shells":        "/bin/sh\n",
	} {
		if err := writeInto(path, []byte(content)); err != nil {
			return err
		}
	}
	return nil
}

// passwd is the container's own list of users. A numeric user gets a line, since
// some programs will not start for a user without a name.
func passwd(uid, gid uint32) string {
	s := "root:x:0:0:root:/root:/bin/sh\n" +
		"daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n" +
		"www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin\n" +
		"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
	if uid != 0 && uid != 1 && uid != 33 && uid != 65534 {
		s += fmt.Sprintf("user:x:%d:%d:user:/:/bin/sh\n", uid, gid)
	}
	return s
}

// group is the container's own list of groups.
func group(gid uint32) string {
	s := "root:x:0:\ndaemon:x:1:\ntty:x:5:\nwww-data:x:33:\nnogroup:x:65534:\n"
	if gid != 0 && gid != 1 && gid != 5 && gid != 33 && gid != 65534 {
		s += fmt.Sprintf("user:x:%d:\n", gid)
	}
	return s
}

// writeInto writes a file of the container's root.
func writeInto(path string, content []byte) error {
	if !strings.HasPrefix(path, "/") {
		return fmt.Errorf("file %q: the path is not absolute", path)
	}
	if err := makeTarget(path, false); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	return os.WriteFile(path, content, 0o644)
}

// setAttr adds attributes to the mount at path.
func setAttr(path string, attrs uint64) error {
	if err := unix.MountSetattr(unix.AT_FDCWD, path, 0, &unix.MountAttr{Attr_set: attrs}); err != nil {
		return fmt.Errorf("protect %s: %w", path, err)
	}
	return nil
}
