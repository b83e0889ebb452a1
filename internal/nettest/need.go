// SPDX-License-Identifier: Apache-2.0

package nettest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
)

// requireEnv lists, separated by commas, the features that have to be there:
// their lack is a failure and not a skip.
const requireEnv = "KPLAB_REQUIRE"

// Need skips the test when the machine lacks a feature, with the reason. The
// feature is tried, in a namespace of its own, and not looked up in a list. With
// the feature's name in KPLAB_REQUIRE the test fails instead.
//
// Features: root, users (more than one, as a user namespace may lack), iptables, iptables-legacy, nft, ipvs, dummy, netem, sctp, ipv6,
// bridge, vxlan, nfacct, br-netfilter, ping, busybox.
func Need(tb testing.TB, feature string) {
	tb.Helper()
	probe, ok := probes()[feature]
	if !ok {
		tb.Fatalf("nettest has no probe for %q; it has %s", feature, strings.Join(features(), ", "))
	}
	err := probe(tb.Context())
	if err == nil {
		return
	}
	msg := fmt.Sprintf("needs %s: %v", feature, err)
	if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), feature) {
		tb.Fatalf("%s (%s demands it)", msg, requireEnv)
	}
	tb.Skip(msg)
}

// Lacks is why the machine lacks a feature that Need knows; nil when it does not.
func Lacks(ctx context.Context, feature string) error {
	probe, ok := probes()[feature]
	if !ok {
		return fmt.Errorf("nettest has no probe for %q; it has %s", feature, strings.Join(features(), ", "))
	}
	return probe(ctx)
}

// features lists the names that Need knows.
func features() []string {
	var names []string
	for name := range probes() {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

// probes says for each feature how to try it.
func probes() map[string]func(context.Context) error {
	const rule = "*filter\n:PROBE - [0:0]\nCOMMIT\n"
	return map[string]func(context.Context) error{
		"root":            func(context.Context) error { return probeRoot() },
		"users":           func(context.Context) error { return probeUsers() },
		"iptables":        try(rule, "iptables-restore", "-w"),
		"iptables-legacy": try(rule, "iptables-legacy-restore", "-w"),
		"nft":             try("table ip probe {\n chain c {\n counter\n }\n}\n", "nft", "-f", "-"),
		"nfacct":          try("*filter\n-A INPUT -m nfacct --nfacct-name probe\nCOMMIT\n", "iptables-restore", "-w"),
		"ipvs":            func(context.Context) error { return inNew(probeIPVS) },
		"dummy":           link(func(a netlink.LinkAttrs) netlink.Link { return &netlink.Dummy{LinkAttrs: a} }),
		"bridge":          link(func(a netlink.LinkAttrs) netlink.Link { return &netlink.Bridge{LinkAttrs: a} }),
		"vxlan": link(func(a netlink.LinkAttrs) netlink.Link {
			return &netlink.Vxlan{LinkAttrs: a, VxlanId: 7, Port: 4789}
		}),
		"netem":        func(context.Context) error { return inNew(probeNetem) },
		"sctp":         func(context.Context) error { return inNew(probeSCTP) },
		"ipv6":         func(context.Context) error { return readable("/proc/sys/net/ipv6/conf/all/forwarding") },
		"br-netfilter": func(context.Context) error { return readable("/proc/sys/net/bridge/bridge-nf-call-iptables") },
		"ping":         found("/bin/ping", "iputils-ping"),
		"busybox":      found("/bin/busybox", "busybox-static"),
	}
}

// probeRoot makes a namespace, which is what tests want root for.
func probeRoot() error {
	if os.Geteuid() != 0 {
		return errors.New("not root: run as root, or under unshare -Urnm")
	}
	ns, err := netns.New()
	if err != nil {
		return err
	}
	return ns.Close()
}

// probeUsers reads how many user ids there are.
func probeUsers() error {
	data, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	var inside, outside, count uint64
	if _, err := fmt.Sscan(string(data), &inside, &outside, &count); err != nil {
		return fmt.Errorf("read /proc/self/uid_map: %w", err)
	}
	if count < 65536 {
		return fmt.Errorf("this user namespace has %d user ids", count)
	}
	return nil
}

// try returns a probe that feeds a command in a namespace of its own. nfacct is
// probed by a rule whose object is made first.
func try(stdin, path string, args ...string) func(context.Context) error {
	return func(ctx context.Context) error {
		ns, err := netns.New()
		if err != nil {
			return err
		}
		run := execx.In(ns)
		if strings.Contains(stdin, "nfacct") {
			_, err = run.Run(ctx, execx.Cmd{Path: "nfacct", Args: []string{"add", "probe"}})
		}
		if err == nil {
			_, err = run.Run(ctx, execx.Cmd{
				Path: path, Args: args, Stdin: []byte(stdin),
				Env: []string{"XTABLES_LOCKFILE=/dev/null"}, // legacy would lock for the machine
			})
		}
		return errors.Join(err, ns.Close())
	}
}

// inNew runs fn in a namespace of its own.
func inNew(fn func() error) error {
	ns, err := netns.New()
	if err != nil {
		return err
	}
	return errors.Join(ns.Do(fn), ns.Close())
}

// link returns a probe that adds a link and reads it back.
func link(build func(netlink.LinkAttrs) netlink.Link) func(context.Context) error {
	return func(context.Context) error {
		return inNew(func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "probe"
			l := build(attrs)
			if err := netlink.LinkAdd(l); err != nil {
				return fmt.Errorf("add a link of type %s: %w", l.Type(), err)
			}
			got, err := netlink.LinkByName("probe")
			if err == nil && got.Type() != l.Type() {
				err = fmt.Errorf("asked for a link of type %s, got %s", l.Type(), got.Type())
			}
			return err
		})
	}
}

// probeIPVS asks for the IPVS netlink family, which is there only with ip_vs: on
// a kernel without it libraries report success for every call.
func probeIPVS() error {
	if _, err := netlink.GenlFamilyGet("IPVS"); err != nil {
		return fmt.Errorf("netlink family IPVS (module ip_vs): %w", err)
	}
	return nil
}

// probeNetem puts a netem queue on lo.
func probeNetem() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	q := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: lo.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		netlink.NetemQdiscAttrs{Latency: 1000})
	if err := netlink.QdiscAdd(q); err != nil {
		return fmt.Errorf("add a netem queue: %w", err)
	}
	return nil
}

// probeSCTP opens an SCTP socket.
func probeSCTP() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		return fmt.Errorf("open an SCTP socket: %w", err)
	}
	return unix.Close(fd)
}

// readable reads a file of /proc inside a new namespace.
func readable(path string) error {
	return inNew(func() error {
		_, err := os.ReadFile(path)
		return err
	})
}

// found returns a probe for a program.
func found(path, debianPackage string) func(context.Context) error {
	return func(context.Context) error {
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%w (Debian package %s)", err, debianPackage)
		}
		return nil
	}
}
