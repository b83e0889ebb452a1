// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kplab/kplab/cni/routed"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// nodeNS is a namespace that looks enough like a node: it forwards and has the IP.
func nodeNS(t *testing.T) *netns.NS {
	t.Helper()
	ns := nettest.NewNS(t)
	err := ns.Do(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr("10.0.0.132/32")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, addr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return ns
}

func load(t *testing.T, cfg Config) *Network {
	t.Helper()
	if cfg.StateDir == "" {
		cfg.StateDir = t.TempDir()
	}
	n, err := Load(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// attachment names a namespace in a way that other processes can open too.
func attachment(id string, ns *netns.NS) Attachment {
	return Attachment{
		ID: id, NetNSPath: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd()),
		PodNamespace: "default", PodName: "web-" + id, PodUID: "uid-" + id,
	}
}

// exchange checks that the node reaches the pod and is seen as its own IP.
func exchange(t *testing.T, node, pod *netns.NS, ip netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	l, err := pod.ListenPacket(ctx, "udp4", netip.AddrPortFrom(ip, 9).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	c, err := node.Dial(ctx, "udp4", netip.AddrPortFrom(ip, 9).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	_ = l.SetReadDeadline(time.Now().Add(3 * time.Second))
	_, from, err := l.ReadFrom(make([]byte, 4))
	if err != nil || !strings.HasPrefix(from.String(), "10.0.0.132:") {
		t.Errorf("packet from %v, %v; want the node IP", from, err)
	}
}

func TestBuiltInPluginThroughLibcni(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	node, pod := nodeNS(t), nettest.NewNS(t)
	dir := t.TempDir()
	c := Conflist{
		Subnet: netip.MustParsePrefix("10.244.1.0/24"), NodeIP: netip.MustParseAddr("10.0.0.132"),
		DataDir: filepath.Join(t.TempDir(), "ipam"), MTU: 1400,
	}
	for range 2 {
		if err := WriteConflist(dir, c); err != nil {
			t.Fatal(err)
		}
	}
	n := load(t, Config{ConfDir: dir, NodeNS: node})
	ctx := context.Background()
	if err := n.Status(ctx); err != nil {
		t.Errorf("status: %v", err)
	}
	a := attachment("a", pod)
	for range 2 {
		res, err := n.Add(ctx, a)
		if err != nil || len(res.IPs) != 1 || res.IPs[0].String() != "10.244.1.2" {
			t.Fatalf("Add gave %v, %v", res, err)
		}
	}
	exchange(t, node, pod, netip.MustParseAddr("10.244.1.2"))
	if err := n.Check(ctx, a); err != nil {
		t.Errorf("check: %v", err)
	}
	if err := node.Do(func() error {
		l, err := netlink.LinkByName(routed.LinkName("a", "eth0"))
		if err != nil {
			return err
		}
		if at := l.Attrs(); at.MTU != 1400 || at.Alias != "a/eth0 default/web-a" {
			t.Errorf("host end has MTU %d and alias %q", at.MTU, at.Alias)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// A second daemon finds the attachment of the first; GC takes what is not valid.
	again := load(t, Config{ConfDir: dir, NodeNS: node})
	if res, err := again.Add(ctx, a); err != nil || res.IPs[0].String() != "10.244.1.2" {
		t.Errorf("Add by a second daemon: %v, %v", res, err)
	}
	if err := again.GC(ctx, []Attachment{a}); err != nil {
		t.Errorf("GC: %v", err)
	}
	exchange(t, node, pod, netip.MustParseAddr("10.244.1.2"))
	if err := again.GC(ctx, nil); err != nil {
		t.Errorf("GC: %v", err)
	}
	for range 2 {
		if err := again.Del(ctx, a); err != nil {
			t.Errorf("Del: %v", err)
		}
	}
	if err := again.Check(ctx, a); err == nil {
		t.Error("Check after Del says that all is well")
	}
}

// The same code as an executable: built, found in a directory and started in the
// node's namespace, as any runtime would.
func TestExecutableThroughLibcni(t *testing.T) {
	nettest.NeedRoot(t)
	bin := t.TempDir()
	out, err := exec.Command("go", "build", "-o", filepath.Join(bin, "kplab-cni-routed"), "github.com/kplab/kplab/cmd/kplab-cni-routed").CombinedOutput()
	if err != nil {
		t.Fatalf("build the plugin: %v\n%s", err, out)
	}
	nettest.LeakCheck(t)
	node, pod := nodeNS(t), nettest.NewNS(t)
	dir := t.TempDir()
	conf := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "pods", "plugins": [
		{"type": "kplab-cni-routed", "subnet": "10.244.1.0/24", "nodeIP": "10.0.0.132", "dataDir": %q}]}`, filepath.Join(t.TempDir(), "ipam"))
	if err := os.WriteFile(filepath.Join(dir, "10-exec.conflist"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	n := load(t, Config{ConfDir: dir, BinDirs: []string{bin}, NodeNS: node})
	ctx := context.Background()
	a := attachment("a", pod)
	if err := n.Status(ctx); err != nil {
		t.Errorf("status: %v", err)
	}
	for range 2 {
		res, err := n.Add(ctx, a)
		if err != nil || len(res.IPs) != 1 || res.IPs[0].String() != "10.244.1.2" {
			t.Fatalf("Add gave %v, %v", res, err)
		}
	}
	exchange(t, node, pod, netip.MustParseAddr("10.244.1.2"))
	if err := n.Check(ctx, a); err != nil {
		t.Errorf("check: %v", err)
	}
	if _, err := n.Add(ctx, Attachment{ID: "b", NetNSPath: "/nowhere"}); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("Add without a namespace: %v", err)
	}
	for range 2 {
		if err := n.Del(ctx, a); err != nil {
			t.Errorf("Del: %v", err)
		}
	}
	if err := n.Check(ctx, a); err == nil {
		t.Error("Check after Del says that all is well")
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, c := range map[string]struct{ file, text, says string }{
		"nothing there": {"README", "", "no network configuration in"},
		"broken":        {"10-x.conflist", "{", "10-x.conflist"},
		"no plugins":    {"10-x.conflist", `{"cniVersion":"1.1.0","name":"x","plugins":[]}`, "plugin"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if _, err := Load(Config{ConfDir: dir}); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error is %v, want %q", err, c.says)
			}
		})
	}
	dir := t.TempDir()
	text := `{"cniVersion":"1.1.0","name":"x","plugins":[{"type":"ptp"}]}`
	if err := os.WriteFile(filepath.Join(dir, "10-x.conflist"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	n := load(t, Config{ConfDir: dir, BinDirs: []string{dir}})
	if err := n.Status(context.Background()); err == nil || !strings.Contains(err.Error(), `"ptp" is neither built in`) {
		t.Errorf("error for a missing plugin: %v", err)
	}
}
