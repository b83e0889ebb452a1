// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// lab is a node with one pod, and a client outside that knows only the node.
type lab struct {
	*Plugin
	node, pod, client *netns.NS
}

const (
	nodeIP, nodeIP6 = "10.0.0.132", "fd00:10::132"
	podIP, podIP6   = "10.244.1.2", "fd00:10:244:1::2"
)

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{node: nettest.NewNS(t), pod: nettest.NewNS(t), client: nettest.NewNS(t)}
	l.Plugin = New(l.node)
	prefixes := func(all ...string) (out []netip.Prefix) {
		for _, s := range all {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	in := func(ns *netns.NS, fn func() error) {
		t.Helper()
		if err := ns.Do(fn); err != nil {
			t.Fatal(err)
		}
	}
	in(l.node, func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	})
	nettest.Veth(t, nettest.End{NS: l.client, Name: "eth0", Addrs: prefixes("10.0.0.200/24", "fd00:10::200/64")},
		nettest.End{NS: l.node, Name: "eth0", Addrs: prefixes(nodeIP+"/24", nodeIP6+"/64")})
	nettest.Veth(t, nettest.End{NS: l.pod, Name: "eth0", Addrs: prefixes(podIP+"/24", podIP6+"/64")},
		nettest.End{NS: l.node, Name: "vethpod", Addrs: prefixes("10.244.1.1/24", "fd00:10:244:1::1/64")})
	in(l.pod, func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, gw := range []string{"10.244.1.1", "fd00:10:244:1::1"} {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: net.ParseIP(gw)}); err != nil {
				return err
			}
		}
		return nil
	})
	for _, network := range []string{"tcp", "udp"} {
		l.serve(t, network)
	}
	return l
}

// serve answers on port 80 of the pod with the address of who asks.
func (l *lab) serve(t *testing.T, network string) {
	t.Helper()
	done := make(chan struct{})
	if network == "udp" {
		u, err := l.pod.ListenPacket(t.Context(), network, ":80")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(done)
			for {
				_, peer, err := u.ReadFrom(make([]byte, 64))
				if err != nil {
					return
				}
				_, _ = u.WriteTo([]byte(peer.String()), peer)
			}
		}()
		t.Cleanup(func() { _ = u.Close(); <-done })
		return
	}
	ln, err := l.pod.Listen(t.Context(), network, ":80")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(c.RemoteAddr().String()))
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
}

// ask returns which client the pod saw; an error when it does not answer.
func ask(from *netns.NS, network, to string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := from.Dial(ctx, network, to)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if network == "udp" {
		if _, err := c.Write([]byte("x")); err != nil {
			return "", err
		}
	}
	buf := make([]byte, 64)
	n, err := c.Read(buf)
	if err != nil {
		return "", err
	}
	host, _, err := net.SplitHostPort(string(buf[:n]))
	return host, err
}

// call makes one CNI call for container id.
func (l *lab) call(command, id string, ports []map[string]any, extra map[string]any) ([]byte, error) {
	conf := map[string]any{
		"cniVersion": "1.1.0", "name": "pods", "type": Type, "runtimeConfig": map[string]any{"portMappings": ports},
		"prevResult": map[string]any{
			"cniVersion": "1.1.0",
			"interfaces": []map[string]any{{"name": "vethpod"}, {"name": "eth0", "sandbox": "/x"}},
			"ips":        []map[string]any{{"address": podIP + "/32"}, {"address": podIP6 + "/128"}},
		},
	}
	for k, v := range extra {
		conf[k] = v
	}
	stdin, err := json.Marshal(conf)
	if err != nil {
		return nil, err
	}
	return l.Serve(context.Background(), Request{Command: command, ContainerID: id, IfName: "eth0", Stdin: stdin})
}

func open(host int, protocol, hostIP string) map[string]any {
	return map[string]any{"hostPort": host, "containerPort": 80, "protocol": protocol, "hostIP": hostIP}
}

func TestPortsLeadToThePod(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	l := newLab(t)
	ports := []map[string]any{open(8080, "tcp", ""), open(8080, "udp", ""), open(8081, "tcp", nodeIP), open(8082, "tcp", "::"), open(8083, "tcp", "127.0.0.1")}
	// IPv6 neighbours are asked for here, and not in what is tested.
	nettest.Eventually(t, 20*time.Second, "the neighbours to be known", func() error {
		_, err := ask(l.node, "tcp", "["+podIP6+"]:80")
		if err == nil {
			if _, err = ask(l.client, "udp", "["+nodeIP6+"]:9"); err != nil && strings.Contains(err.Error(), "refused") {
				err = nil
			}
		}
		return err
	})
	for range 2 { // the second changes nothing
		if _, err := l.call("ADD", "a", ports, nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.call("CHECK", "a", ports, nil); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	for _, x := range []struct {
		name        string
		from        *netns.NS
		network, to string
		sees        string // "" is no answer
	}{
		{"outside", l.client, "tcp", nodeIP + ":8080", "10.0.0.200"},
		{"outside by UDP", l.client, "udp", nodeIP + ":8080", "10.0.0.200"},
		{"outside by IPv6", l.client, "tcp", "[" + nodeIP6 + "]:8080", "fd00:10::200"},
		{"the node", l.node, "tcp", nodeIP + ":8080", nodeIP},
		{"the node at localhost", l.node, "tcp", "127.0.0.1:8080", "10.244.1.1"},
		{"the pod itself", l.pod, "tcp", nodeIP + ":8080", "10.244.1.1"},
		{"one host address", l.client, "tcp", nodeIP + ":8081", "10.0.0.200"},
		{"not the other family", l.client, "tcp", "[" + nodeIP6 + "]:8081", ""},
		{"any address of IPv6", l.client, "tcp", "[" + nodeIP6 + "]:8082", "fd00:10::200"},
		{"none of IPv4", l.client, "tcp", nodeIP + ":8082", ""},
		{"localhost only, from there", l.node, "tcp", "127.0.0.1:8083", "10.244.1.1"},
		{"localhost only, from elsewhere", l.client, "tcp", nodeIP + ":8083", ""},
		{"another port", l.client, "tcp", nodeIP + ":8084", ""},
	} {
		got, err := ask(x.from, x.network, x.to)
		if got != x.sees {
			t.Errorf("%s: the pod saw %q (%v), want %q", x.name, got, err, x.sees)
		}
	}
	// Another attachment's end is none of this one's.
	if _, err := l.call("DEL", "b", nil, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(l.client, "tcp", nodeIP+":8080"); err != nil {
		t.Errorf("after the DEL of another: %v", err)
	}
	for range 2 {
		if _, err := l.call("DEL", "a", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := ask(l.client, "tcp", nodeIP+":8080"); err == nil {
		t.Errorf("after DEL %s is answered", got)
	}
	if _, err := l.call("CHECK", "a", ports, nil); err == nil {
		t.Error("CHECK after DEL says that all is well")
	}
}

// What a process that was killed left is found by its comment.
func TestGC(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	l := newLab(t)
	if _, err := l.call("GC", "", nil, nil); err != nil {
		t.Errorf("GC where nobody asked for a port: %v", err)
	}
	for i, id := range []string{"a", "b"} {
		if _, err := l.call("ADD", id, []map[string]any{open(9000+i, "tcp", "")}, nil); err != nil {
			t.Fatal(err)
		}
	}
	valid := []types.GCAttachment{{ContainerID: "b", IfName: "eth0"}}
	if _, err := l.call("GC", "", nil, map[string]any{"cni.dev/valid-attachments": valid}); err != nil {
		t.Fatal(err)
	}
	if _, err := ask(l.client, "tcp", nodeIP+":9000"); err == nil {
		t.Error("the port of a forgotten attachment is answered")
	}
	if _, err := ask(l.client, "tcp", nodeIP+":9001"); err != nil {
		t.Errorf("the port of a valid attachment: %v", err)
	}
}

func TestBadInput(t *testing.T) {
	l := &lab{Plugin: New(nil)}
	for name, c := range map[string]struct {
		ports []map[string]any
		extra map[string]any
	}{
		"protocol":   {ports: []map[string]any{open(80, "icmp", "")}},
		"port":       {ports: []map[string]any{open(70000, "tcp", "")}},
		"address":    {ports: []map[string]any{open(80, "tcp", "10.0.0")}},
		"prevResult": {extra: map[string]any{"prevResult": nil}},
	} {
		_, err := l.call("ADD", "a", c.ports, c.extra)
		var e *types.Error
		if !errors.As(err, &e) || e.Code != types.ErrInvalidNetworkConfig || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if out, err := l.call("ADD", "a", nil, nil); err != nil || !strings.Contains(string(out), podIP) {
		t.Errorf("without ports the result is %s, %v", out, err)
	}
	if out, err := l.call("VERSION", "", nil, nil); err != nil || !strings.Contains(string(out), "1.1.0") {
		t.Errorf("VERSION says %s, %v", out, err)
	}
}
