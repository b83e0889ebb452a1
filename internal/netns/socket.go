// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen is net.ListenConfig.Listen inside the namespace. The listener, and the
// connections it accepts, may be used from any goroutine. The host part of a TCP
// address is empty or a literal IP: names are not looked up.
//
// An open listener holds the namespace, as an open connection does.
func (n *NS) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	var l net.Listener
	err := n.Do(func() error {
		var err error
		l, err = (&net.ListenConfig{}).Listen(ctx, network, address)
		return err
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

// ListenPacket is net.ListenConfig.ListenPacket inside the namespace, with the
// same limits as Listen.
func (n *NS) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	var c net.PacketConn
	err := n.Do(func() error {
		var err error
		c, err = (&net.ListenConfig{}).ListenPacket(ctx, network, address)
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Dial connects from inside the namespace; the address is a literal IP and port (or a
// Unix socket). No thread waits in the namespace for the other side's answer.
func (n *NS) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var swapErr error
		if err := c.Control(func(fd uintptr) { swapErr = n.swap(int(fd)) }); err != nil {
			return err
		}
		return swapErr
	}}
	return d.DialContext(ctx, network, address)
}

// swap puts a socket of the same kind, made in the namespace, in the place of one
// that is not used yet. A socket belongs for life to the namespace in which it was
// made, so that only its making has to happen inside.
func (n *NS) swap(fd int) error {
	var kind [3]int
	for i, opt := range []int{unix.SO_DOMAIN, unix.SO_TYPE, unix.SO_PROTOCOL} {
		var err error
		if kind[i], err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, opt); err != nil {
			return fmt.Errorf("look at a socket: %w", err)
		}
	}
	return n.Do(func() error {
		inside, err := unix.Socket(kind[0], kind[1]|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, kind[2])
		if err != nil {
			return fmt.Errorf("make a socket: %w", err)
		}
		return errors.Join(unix.Dup3(inside, fd, unix.O_CLOEXEC), unix.Close(inside))
	})
}

// Start is cmd.Start on a thread inside the namespace, so that the child lives
// there. cmd.Wait may be called from anywhere.
func (n *NS) Start(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// literal refuses host names: the resolver works on goroutines of its own, which
// are not in the namespace, and would ask the host's name server.
func literal(network, address string) error {
	if strings.HasPrefix(network, "unix") {
		return nil
	}
	host := address
	if !strings.HasPrefix(network, "ip") {
		h, _, err := net.SplitHostPort(address)
		if err != nil {
			return fmt.Errorf("address %q: %w", address, err)
		}
		host = h
	}
	if host == "" {
		return nil
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return fmt.Errorf("address %q is no literal IP address; names are not looked up inside a namespace: %w", address, err)
	}
	return nil
}
