// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
)

// Mode encodes snapshots for one facility of the kernel, on one node. A Mode
// remembers what it applied; its methods are not called concurrently, Render
// excepted.
type Mode interface {
	// Name is the mode's name as in kube-proxy's --proxy-mode.
	Name() string
	// Render translates a snapshot. It is pure and needs no privilege, so that
	// the rules of any node can be shown on any machine. It may run at the same
	// time as any other method.
	Render(*Snapshot) (Program, error)
	// Cleanup removes everything that this mode ever wrote in the node's
	// namespace, in this process or an earlier one, and nothing else. Removing
	// what is not there is success.
	Cleanup(context.Context) error
	// Probe says what the kernel or the machine lacks for this mode, by doing
	// what the mode does in a scratch namespace and reading it back. The error
	// says how to get what is missing. Optional features that Probe finds are
	// used by later calls of Render.
	Probe(context.Context) error
}

// Program is a rendered snapshot.
type Program interface {
	// String is the whole program in the syntax of the mode's own tool: text
	// that a person could load by hand with the same result.
	String() string
	// Apply makes the kernel's state equal to the program, changing only what
	// differs from what was applied before, and reads back what it wrote: nil
	// means that the kernel has it. After an error the next Apply starts from
	// what the kernel really has.
	Apply(context.Context) error
}

// Checker is implemented by modes that can tell that somebody else changed or
// removed their rules.
type Checker interface {
	// Intact looks, cheaply, whether the applied program is still in place. When
	// it reports false, the next Apply writes everything that is missing.
	Intact(context.Context) (bool, error)
}

// Resetter is implemented by modes that remember what they applied.
type Resetter interface {
	// Reset forgets what was applied: the next Apply compares with the kernel
	// and corrects every difference.
	Reset()
}

// Closer is implemented by modes that keep something open between two calls.
// Rules stay as they are.
type Closer interface {
	Close()
}

// Drainer is implemented by modes whose process carries connections itself. When
// another mode takes over, what is under way is carried on to its end.
type Drainer interface {
	Closer
	// Retire stops taking new connections.
	Retire()
	// Carrying counts the connections under way. When there is none any more, or when
	// the proxy ends, the mode is closed.
	Carrying() int
}

// Receiver is implemented by modes that lead packets to ports of their own on the node
// instead of to endpoints.
type Receiver interface {
	// Receives says whether an address of the node with this port is one of them. A
	// tracked flow that leads there is healthy.
	Receives(corev1.Protocol, netip.AddrPort) bool
}
