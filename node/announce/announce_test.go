// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

func TestARPReadsWhatItWrites(t *testing.T) {
	q := arp{
		op: opRequest, senderMAC: []byte{2, 0, 0, 0, 0, 1}, sender: netip.MustParseAddr("10.0.0.200"),
		targetMAC: make([]byte, 6), target: netip.MustParseAddr("10.0.0.240"), ethernetReceiver: broadcast,
	}
	got, ok := parseARP(q.frame())
	if !ok || fmt.Sprint(got) != fmt.Sprint(q) {
		t.Errorf("read back %v %v, want %v", got, ok, q)
	}
	r := q.reply([]byte{2, 0, 0, 0, 0, 9})
	if r.op != opReply || r.sender != q.target || r.target != q.sender || r.ethernetReceiver.String() != q.senderMAC.String() {
		t.Errorf("reply %v", r)
	}
	for _, cut := range [][]byte{nil, q.frame()[:41], append([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0}, q.frame()[14:]...)} {
		if _, ok := parseARP(cut); ok {
			t.Errorf("%d bytes are taken for ARP", len(cut))
		}
	}
}

func TestNDPReadsAndAnswers(t *testing.T) {
	client, target := netip.MustParseAddr("fd00::200"), netip.MustParseAddr("fd00::240")
	frame := advert([]byte{2, 0, 0, 0, 0, 9}, target, client, []byte{2, 0, 0, 0, 0, 1}, true)
	if len(frame) != headerLen+ip6Len+32 || checksum(target, client, frame[headerLen+ip6Len:]) != 0 {
		t.Errorf("an advertisement of %d bytes whose checksum does not add up", len(frame))
	}
	if _, ok := parseSolicit(frame); ok {
		t.Error("an advertisement is taken for a question")
	}
	frame[headerLen+ip6Len] = typeSolicit
	if q, ok := parseSolicit(frame); !ok || q.target != target || q.sender != target || q.senderMAC.String() != "02:00:00:00:00:09" {
		t.Errorf("read %v %v", q, ok)
	}
}

// run runs a tool in a namespace and returns what it said.
func run(ns *netns.NS, argv ...string) (string, error) {
	var out strings.Builder
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := ns.Start(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// Two nodes and a client on one link: the node that is named answers, the other does
// not, and a change of the name reaches a client that has the address in its cache.
func TestOnlyTheNamedNodeAnswers(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	client, one := nettest.NewNS(t), nettest.NewNS(t)
	nettest.Veth(t,
		nettest.End{NS: client, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.200/24"), netip.MustParsePrefix("fd00:1::200/64")}},
		nettest.End{NS: one, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.132/24"), netip.MustParsePrefix("fd00:1::132/64")}},
	)
	service := func(node string, addrs ...string) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "u", Annotations: map[string]string{annotationNode: node}}}
		for _, a := range addrs {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: a})
		}
		return s
	}
	api := fake.NewClientset(service("node1", "10.0.0.240", "fd00:1::240"))
	factory := informers.NewSharedInformerFactory(api, 0)
	a, err := New(Config{NodeName: "node1", NS: one, Link: "eth0", Informers: factory})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	factory.Start(ctx.Done())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		factory.Shutdown()
	})
	resolves := func(ip string) error {
		// Whatever the packet meets: before it leaves, its address is asked for.
		_, _ = run(client, "ip", "neigh", "flush", "to", ip)
		_, _ = run(client, "bash", "-c", "echo > /dev/udp/"+ip+"/9")
		var out string
		nettest.Until(t, 20*time.Second, "the kernel has an answer or gives up", func() bool {
			out, _ = run(client, "ip", "neigh", "show", "to", ip)
			return strings.Contains(out, "lladdr") || strings.Contains(out, "FAILED")
		})
		if !strings.Contains(out, "lladdr") {
			return fmt.Errorf("neighbour of %s: %q", ip, out)
		}
		return nil
	}
	nettest.Eventually(t, 20*time.Second, "the address is answered for", func() error { return resolves("10.0.0.240") })
	nettest.Eventually(t, 20*time.Second, "the IPv6 address is answered for", func() error { return resolves("fd00:1::240") })
	if err := resolves("10.0.0.241"); err == nil {
		t.Error("an address is answered for that no Service has")
	}
	if out, _ := run(one, "ip", "addr"); strings.Contains(out, "10.0.0.240") {
		t.Errorf("an interface has the address:\n%s", out)
	}
	move := func(svc *corev1.Service) {
		t.Helper()
		if _, err := api.CoreV1().Services("default").Update(t.Context(), svc, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	move(service("node2", "10.0.0.240"))
	nettest.Until(t, 20*time.Second, "the address is given up", func() bool { return len(a.Addresses()) == 0 })
	if err := resolves("10.0.0.240"); err == nil {
		t.Error("the node answers for an address that another node has")
	}
	// A client believes its cache until somebody tells it otherwise.
	if out, err := run(client, "ip", "neigh", "replace", "10.0.0.240", "lladdr", "02:00:00:00:00:77", "nud", "reachable", "dev", "eth0"); err != nil {
		t.Fatal(out)
	}
	move(service("node1", "10.0.0.240"))
	nettest.Eventually(t, 20*time.Second, "gratuitous ARP reaches the client's cache", func() error {
		if out, _ := run(client, "ip", "neigh", "show", "to", "10.0.0.240"); strings.Contains(out, "02:00:00:00:00:77") {
			return fmt.Errorf("the cache says %s", out)
		}
		return nil
	})
}
