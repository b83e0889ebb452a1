// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"io"
	"time"
)

// Spec says which pod a sandbox is for.
type Spec struct {
	// ID is the pod's UID. It names the sandbox on disk: letters, digits, '-', '_'
	// and '.' only.
	ID string `json:"id"`
	// Node is the name of the node that the pod runs on.
	Node string `json:"node"`
	// Namespace and Name are the pod's.
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Hostname is what the pod's containers have as host name; empty means Name.
	Hostname string `json:"hostname"`
	// Network names another network namespace of the lab, a node's, in which the
	// pod's processes live (a pod with hostNetwork). Empty means the pod's own.
	Network string `json:"network,omitempty"`
	// ResolvConf is the pod's /etc/resolv.conf, kept for tools of the host that run in
	// the pod's network ([BecomeTool]).
	ResolvConf string `json:"resolvConf,omitempty"`
}

// User is who a process runs as. The zero value is root.
type User struct {
	UID, GID uint32
	Groups   []uint32
}

// Capabilities changes the default set of a container (see [DefaultCapabilities]).
// Names are as in capabilities(7), with or without "CAP_" and in any case; "ALL"
// stands for every one that the lab has.
type Capabilities struct {
	Add, Drop []string
}

// Mount binds a file or directory of the lab into a container.
type Mount struct {
	// Source is a path on the host. It has to be the lab's own; what is mounted
	// below it comes along.
	Source string
	// Target is an absolute path in the container, made when it is absent.
	Target string
	// ReadOnly refuses writes through this mount.
	ReadOnly bool
}

// ProcessSpec is a process of a container, the first of its process namespace.
type ProcessSpec struct {
	// Container is the container's name, and Attempt counts its restarts from 0.
	// Together they name the process in its pod; the pair is used once.
	Container string
	Attempt   int
	// Args are the program and its arguments. A program without a slash is looked
	// up in the container's PATH.
	Args []string
	// Env is the whole environment, as KEY=value. PATH, HOME and HOSTNAME are added
	// when absent, TERM for a terminal.
	Env []string
	// WorkingDir is made when absent; empty means /.
	WorkingDir string
	// User is who the process is.
	User User
	// Files are written into the container's own root: absolute path → content.
	Files map[string][]byte
	// Mounts are bound into the root, in this order.
	Mounts []Mount
	// Busybox gives a root whose programs are busybox's and no others.
	Busybox bool
	// ReadOnlyRoot makes everything but /dev, /proc, /tmp's own mounts and Mounts
	// read-only.
	ReadOnlyRoot bool
	// Capabilities changes the default set; Privileged gives all of them and a
	// writable /proc/sys and /sys.
	Capabilities Capabilities
	Privileged   bool
	// AllowPrivilegeEscalation lets a program gain rights by its set-user-ID bit or
	// file capabilities. It is off unless asked for.
	AllowPrivilegeEscalation bool
	// LogPath is the file that gets the output in the format of the container
	// runtime interface: "<RFC3339Nano> stdout F line". Empty drops the output.
	LogPath string
	// TTY gives a terminal; standard output and error are then one stream.
	TTY bool
	// Stdin keeps standard input open for Attach. StdinOnce closes it when the
	// first attached client is gone.
	Stdin, StdinOnce bool
	// Limits are the most that the container may use. Where the host cannot keep it to
	// them, the process runs without, and LimitError says why.
	Limits Limits
	// ShareWith names another container of the pod, whose process runs: the two
	// see each other's processes, and end when that one does. Empty means a process
	// namespace of its own.
	ShareWith string
}

// ExecSpec is a further process in a pod.
type ExecSpec struct {
	// Container is the container to join. When it has a running process, the new
	// one shares its root and namespaces and the root options below (Files, Mounts,
	// Busybox, ReadOnlyRoot) are not used; when it never had one (a built-in
	// server), the process gets a root of its own made from them.
	Container string
	// Args, Env, WorkingDir and User are as in ProcessSpec.
	Args       []string
	Env        []string
	WorkingDir string
	User       User

	// Stdin is read until its end; nil means an empty input. Exec does not wait for
	// a Read that hangs after the process has ended: close the source then.
	Stdin io.Reader
	// Stdout and Stderr get the output; nil drops it. When they are the same value
	// it gets one stream, in order. With TTY all goes to Stdout.
	Stdout, Stderr io.Writer
	// TTY gives a terminal, whose size follows Resize.
	TTY    bool
	Resize <-chan Size

	// The root options of a container without a process, and the rights of the new
	// process in either case, as in ProcessSpec.
	Files                    map[string][]byte
	Mounts                   []Mount
	Busybox                  bool
	ReadOnlyRoot             bool
	Capabilities             Capabilities
	Privileged               bool
	AllowPrivilegeEscalation bool
}

// AttachSpec connects to the streams of a running process.
type AttachSpec struct {
	// Stdin is passed on when the process was started with Stdin; nil sends nothing.
	Stdin io.Reader
	// Stdout and Stderr get what the process writes from now on; nil drops it.
	Stdout, Stderr io.Writer
	// Early asks for the output from before the first Attach, too, the last 64 KiB
	// of it. Only the first Attach to a process with Stdin or a terminal gets it.
	Early bool
	// Resize changes the size of the process's terminal.
	Resize <-chan Size
}

// Size is a terminal's size in characters.
type Size struct{ Width, Height uint16 }

// Exit is how a process ended.
type Exit struct {
	// Code is the exit code; 128 + Signal when a signal ended the process.
	Code int `json:"code"`
	// Signal is the number of that signal, else 0.
	Signal int `json:"signal"`
	// At is when it ended.
	At time.Time `json:"at"`
	// OutOfMemory says that the kernel killed a process of the container because it used
	// all the memory that its limit allows.
	OutOfMemory bool `json:"-"`
}
