// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/netns"
)

// Watch calls lost whenever something may have been taken away in ns: an address,
// a route or a neighbour was removed, a route was replaced, a link went down or
// away, or the kernel had more to say than the socket could hold. It returns when
// ctx ends. lost must not block.
//
// What is added is not reported: the owner of a namespace adds things all the time
// and wants to know when others remove them.
func Watch(ctx context.Context, ns *netns.NS, lost func()) error {
	var file *os.File
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		groups := uint32(unix.RTMGRP_LINK | unix.RTMGRP_NEIGH | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV4_ROUTE |
			unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_IPV6_ROUTE)
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		file = os.NewFile(uintptr(fd), "rtnetlink events")
		return nil
	})
	if err != nil {
		return fmt.Errorf("listen to route netlink events: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = file.Close() })
	defer func() {
		if stop() {
			_ = file.Close()
		}
	}()
	// Whatever happened before the socket was bound was not seen.
	lost()
	buf := make([]byte, 32<<10)
	for {
		n, err := file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost()
		case err != nil:
			return fmt.Errorf("read route netlink events: %w", err)
		case anyLoss(buf[:n]):
			lost()
		}
	}
}

// anyLoss reports whether one of the messages takes something away.
func anyLoss(data []byte) bool {
	for len(data) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(data))
		if size < unix.SizeofNlMsghdr || size > len(data) {
			return true // cannot be read: let the owner look
		}
		kind := binary.NativeEndian.Uint16(data[4:])
		flags := binary.NativeEndian.Uint16(data[6:])
		body := data[unix.SizeofNlMsghdr:size]
		switch kind {
		case unix.RTM_DELLINK, unix.RTM_DELADDR, unix.RTM_DELROUTE, unix.RTM_DELNEIGH:
			return true
		case unix.RTM_NEWROUTE:
			if flags&unix.NLM_F_REPLACE != 0 {
				return true
			}
		case unix.RTM_NEWLINK:
			if len(body) >= unix.SizeofIfInfomsg && binary.NativeEndian.Uint32(body[8:])&unix.IFF_UP == 0 {
				return true
			}
		}
		data = data[min(align(size), len(data)):]
	}
	return false
}
