// SPDX-License-Identifier: Apache-2.0

// Package workload holds the images that need no file from anywhere: small servers
// that behave like the well-known ones where it matters for looking at a network.
//
// A server's sockets are opened in its pod's network namespace and served by the
// daemon's own goroutines, so that a thousand of them cost a thousand accept loops
// and nothing while nobody calls. What a caller sees from outside (ports, refusals,
// greetings, which address answered) is that of a process in the pod.
//
// Each image is one file; [Lookup] goes through the list in images.go.
package workload

import (
	"context"
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/kplab/kplab/internal/netns"
)

// Pod is what a server gets to know about where it runs.
type Pod struct {
	Namespace, Name, UID string
	// IP is the pod's address as its status has it.
	IP string
	// Node is the name of the pod's node.
	Node string
	// Hostname is the pod's host name; empty means Name.
	Hostname string
}

// Port is a port that a container declares.
type Port struct {
	Name string
	// Protocol is TCP, UDP or SCTP; empty means TCP.
	Protocol string
	Number   int
}

// Context is what a server is made from.
type Context struct {
	Pod       Pod
	Container string
	// Image is the image as the pod spec names it.
	Image string
	// Args are the container's arguments, without a command.
	Args []string
	// Env is the container's environment, KEY=value.
	Env []string
	// Ports are those that the container declares; web servers listen there, and
	// where they are used to when there is none.
	Ports []Port
	// NetNS is where sockets are opened; it stays the caller's.
	NetNS *netns.NS
	// Volumes maps a path in the container to the directory on the host that is
	// mounted there.
	Volumes map[string]string
	// PartLog writes what a part of the lab itself says, by the name of its image,
	// until ctx ends. nil where there is no such part.
	PartLog func(ctx context.Context, part string, w io.Writer) error
	// Stdout and Stderr get what a process would write there, whole lines at a
	// time. They have to be safe for concurrent use.
	Stdout, Stderr io.Writer
}

// hostname is what the server calls itself.
func (c *Context) hostname() string {
	if c.Pod.Hostname != "" {
		return c.Pod.Hostname
	}
	return c.Pod.Name
}

// ports returns the declared ports of a protocol, or the default one.
func (c *Context) ports(protocol string, byDefault int) []int {
	var found []int
	for _, p := range c.Ports {
		if (p.Protocol == protocol || p.Protocol == "" && protocol == "TCP") && !slices.Contains(found, p.Number) {
			found = append(found, p.Number)
		}
	}
	if len(found) == 0 {
		found = []int{byDefault}
	}
	return found
}

// Server is a container's program. Run opens its sockets, serves until ctx ends,
// then closes them and every accepted connection at once, the latter by a reset:
// whoever wants requests to be finished waits before it ends ctx. A port that is
// taken, or anything else that would end a real program, is Run's error; an
// *ExitError gives the exit code. nil without the end of ctx is a program that has
// done its work. Run is called once.
type Server interface {
	Run(ctx context.Context) error
}

// ExitError is the end of a program with an exit code.
type ExitError struct{ Code int }

// Error names the code.
func (e *ExitError) Error() string { return fmt.Sprintf("exit code %d", e.Code) }

// Image is one of the images that there are.
type Image struct {
	// Names are those of the repository, without registry, tag and digest.
	Names []string
	// Process says that the image has no server: its container is a real process.
	Process bool
	// Part says that the image stands for a part of the lab, which only its own pods
	// use: messages do not offer it.
	Part bool
	// Self says that the container's program is kplab's own, found in the container's
	// root under this name. Its arguments are the container's.
	Self string
	// DefaultArgs are what such a container runs without arguments.
	DefaultArgs []string
	// Programs are the names by which arguments may call the image's own server. An
	// image that has them runs any other program that its arguments name; one without
	// gives all of its arguments to its server.
	Programs []string
	// Content is the files that the image has and that people change or mount over:
	// absolute path to content. The server serves a volume at one of their
	// directories, so a writable copy mounted there makes "kubectl exec" and the
	// server agree.
	Content func(*Context) map[string][]byte
	// New makes the server. Arguments that the real program would refuse are an
	// error. nil for a Process.
	New func(Context) (Server, error)
}

// Runs reports whether a container with these arguments, and no command, is a real
// process: the arguments name another program than the image's server.
func (i Image) Runs(args []string) bool {
	return len(i.Programs) > 0 && len(args) > 0 && !strings.HasPrefix(args[0], "-") && !strings.HasSuffix(args[0], ".conf") &&
		!slices.Contains(i.Programs, path.Base(args[0]))
}

// Lookup finds the image that a pod spec names: the last element of the repository
// counts, whatever registry, path, tag and digest are around it.
func Lookup(image string) (Image, bool) {
	name := repository(image)
	for _, i := range images() {
		if slices.Contains(i.Names, name) {
			return i, true
		}
	}
	return Image{}, false
}

// Images returns the names of all images but those of parts of the lab, sorted, for a message that says what
// there is.
func Images() []string {
	var names []string
	for _, i := range images() {
		if !i.Part {
			names = append(names, i.Names...)
		}
	}
	slices.Sort(names)
	return names
}

// repository returns the last element of an image's name.
func repository(image string) string {
	name, _, _ := strings.Cut(image, "@")
	name = name[strings.LastIndexByte(name, '/')+1:]
	name, _, _ = strings.Cut(name, ":")
	return name
}

// MissingTag tells whether an image has a tag that no registry would have: a version of
// which a part has more than two digits, as in nginx:1.161. Everything else is taken for
// a release that was pulled before. So a slip of the pen can be seen to fail, as the
// tutorials on rollouts have it.
func MissingTag(image string) bool {
	name, _, _ := strings.Cut(image, "@")
	_, tag, _ := strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ":")
	return missing.MatchString(tag)
}

// missing is a version with a part of three digits or more; a date, with eight, is none.
var missing = regexp.MustCompile(`^v?(\d{1,2}\.)*\d{3,7}(\.\d+)*(-|$)`)

// release is a tag that is a full version.
var release = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)`)

// version returns the version in an image's tag, so that a rolling update can be
// seen from outside, or the default.
func version(image, byDefault string) string {
	name, _, _ := strings.Cut(image, "@")
	name = name[strings.LastIndexByte(name, '/')+1:]
	_, tag, _ := strings.Cut(name, ":")
	if m := release.FindStringSubmatch(tag); m != nil {
		return m[1]
	}
	return byDefault
}
