// SPDX-License-Identifier: Apache-2.0

package cni

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

// plugins returns the directory of the reference plugins, which `make bin/cni` builds;
// it skips the test where nobody has.
func plugins(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("KPLAB_BIN")
	if dir == "" {
		dir = filepath.Join("..", "bin")
	}
	dir, err := filepath.Abs(filepath.Join(dir, "cni"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "ptp")); err != nil {
		t.Skipf("the reference plugins are not built (make bin/cni): %v", err)
	}
	return dir
}

// The reference plugins wire pods of a node as its list says, in the node's namespace.
func TestReferencePlugins(t *testing.T) {
	nettest.NeedRoot(t)
	bin := plugins(t)
	const hostLocal = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "{{.PodCIDR}}"}]], "routes": [{"dst": "{{index .Routes 0}}"}]}`
	for name, list := range map[string]string{
		"ptp":    `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ptp", ` + hostLocal + `}, {"type": "portmap", "capabilities": {"portMappings": true}}]}`,
		"bridge": `{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, ` + hostLocal + `}, {"type": "portmap", "capabilities": {"portMappings": true}}]}`,
		"routed": `{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "routed"}, {"type": "bandwidth", "egressRate": 100000000, "egressBurst": 100000000}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			nettest.LeakCheck(t)
			node, dir := nodeNS(t), t.TempDir()
			file := filepath.Join(dir, "list.conflist")
			if err := os.WriteFile(file, []byte(list), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := CheckTemplate(file, []string{bin}); err != nil {
				t.Fatal(err)
			}
			confDir, data := filepath.Join(dir, "net.d"), filepath.Join(dir, "data")
			if err := WriteConflist(confDir, Conflist{
				Subnet: netip.MustParsePrefix("10.244.1.0/29"), NodeIP: netip.MustParseAddr("10.0.0.132"), MTU: 1450, DataDir: data, Template: file,
			}); err != nil {
				t.Fatal(err)
			}
			cfg := Config{ConfDir: confDir, StateDir: filepath.Join(dir, "cache"), BinDirs: []string{bin}, NodeNS: node}
			n := load(t, cfg)
			ctx := context.Background()
			var pods []*netns.NS
			var first netip.Addr
			for i, id := range []string{"a", "b"} {
				pods = append(pods, nettest.NewNS(t))
				a := attachment(id, pods[i])
				if name != "routed" && id == "a" {
					a.Ports = []PortMapping{{HostPort: 8080, ContainerPort: 9, Protocol: "udp"}}
				}
				res, err := n.Add(ctx, a)
				if err != nil || len(res.IPs) != 1 {
					t.Fatalf("Add gave %v, %v", res, err)
				}
				// Once more, as a daemon does that was killed: the answer is the same.
				again, err := load(t, cfg).Add(ctx, a)
				if err != nil || again.IPs[0] != res.IPs[0] {
					t.Errorf("another Add gave %v, %v, want %v", again, err, res)
				}
				if id == "a" {
					first = res.IPs[0]
				}
			}
			answersUDP(t, node, pods[0], first, netip.AddrPortFrom(first, 9))
			answersUDP(t, pods[1], pods[0], first, netip.AddrPortFrom(first, 9))
			if name != "routed" { // by the node's port, which leads to the pod
				answersUDP(t, node, pods[0], first, netip.MustParseAddrPort("10.0.0.132:8080"))
			}
			if err := pods[0].Do(func() error {
				l, err := netlink.LinkByName("eth0")
				if err == nil && l.Attrs().MTU != 1450 {
					t.Errorf("the pod's MTU is %d, want 1450", l.Attrs().MTU)
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if err := n.Check(ctx, attachment("b", pods[1])); err != nil {
				t.Errorf("check: %v", err)
			}
			// An ADD that fails takes its address back: the range has room for few.
			for range 8 {
				if _, err := n.Add(ctx, Attachment{ID: "x", NetNSPath: "/nowhere"}); err == nil {
					t.Fatal("a pod without a namespace was attached")
				}
			}
			if _, err := n.Add(ctx, attachment("c", nettest.NewNS(t))); err != nil {
				t.Errorf("after attempts that failed: %v", err)
			}
			// What is not valid any more goes, with its address; DEL of it is success.
			if err := n.GC(ctx, []Attachment{attachment("b", pods[1])}); err != nil {
				t.Errorf("GC: %v", err)
			}
			for _, id := range []string{"a", "b", "c"} {
				for range 2 {
					if err := n.Del(ctx, Attachment{ID: id, NetNSPath: "/gone"}); err != nil {
						t.Errorf("Del of %s: %v", id, err)
					}
				}
			}
			left, err := filepath.Glob(filepath.Join(data, "pods", "10.*"))
			if err != nil || name != "routed" && len(left) > 0 {
				t.Errorf("addresses that are still taken: %v, %v", left, err)
			}
		})
	}
}

// answersUDP checks that what is sent to an address from one namespace arrives at the
// pod's port 9.
func answersUDP(t *testing.T, from, pod *netns.NS, ip netip.Addr, to netip.AddrPort) {
	t.Helper()
	l, err := pod.ListenPacket(t.Context(), "udp4", netip.AddrPortFrom(ip, 9).String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	c, err := from.Dial(t.Context(), "udp4", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	nettest.Eventually(t, patience, "a packet to "+to.String(), func() error {
		if _, err := c.Write([]byte("x")); err != nil {
			return err
		}
		_ = l.SetReadDeadline(deadline())
		_, _, err := l.ReadFrom(make([]byte, 4))
		return err
	})
}

func TestTemplateFaults(t *testing.T) {
	dir := t.TempDir()
	for want, text := range map[string]string{
		`no list of "plugins"`:                `{"cniVersion": "1.0.0", "name": "x", "type": "ptp"}`,
		"unexpected end of JSON":              `{"name"`,
		`map has no entry for key "Nonsense"`: `{"name": "{{.Nonsense}}"}`,
		"neither built in nor":                `{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "quantum"}]}`,
		`plugin "dhcp"`:                       `{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "routed", "ipam": {"type": "dhcp"}}]}`,
	} {
		file := filepath.Join(dir, "list.conflist")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := CheckTemplate(file, nil); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	file := filepath.Join(dir, "good.conflist")
	if err := os.WriteFile(file, []byte(`{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "routed"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckTemplate(file, []string{dir + "/none"}); err == nil || !strings.Contains(err.Error(), "directory of network plugins") {
		t.Errorf("a directory that is not there: %v", err)
	}
}

const patience = 20 * time.Second

// deadline is how long one packet may take.
func deadline() time.Time { return time.Now().Add(300 * time.Millisecond) }
