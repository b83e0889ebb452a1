// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
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

// Dial connects from inside the namespace; the address is a literal IP and port
// (or a Unix socket). It holds a thread until the connection stands or ctx ends,
// so give ctx a deadline.
func (n *NS) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if err := literal(network, address); err != nil {
		return nil, err
	}
	var c net.Conn
	err := n.Do(func() error {
		var err error
		c, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
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
