// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/nfnl"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
)

// TestChurn changes Services at random through an API, and the mode of the proxy that
// follows it, and looks now and then: the kernel holds what a process that remembers
// nothing would write, and nothing of another mode. Afterwards nothing is left. Seconds
// in the short run; KPLAB_LONG is minutes, and KPLAB_CHURN=1h so long.
func TestChurn(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.Need(t, "nft")
	nettest.LeakCheck(t)
	lasts := 3 * time.Second
	if os.Getenv("KPLAB_LONG") != "" {
		lasts = 5 * time.Minute
	}
	if s := os.Getenv("KPLAB_CHURN"); s != "" {
		var err error
		if lasts, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	all := available(t, slices.DeleteFunc(modes(), func(m Mode) bool { return m.Variant == "legacy" || m.Name == "ipvs" }))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r, churn := rand.New(rand.NewPCG(seed, 2)), NewChurner(seed)

	l := &Lab{Topology: NewTopology(t), Mode: all[0].Name}
	before := l.N1.tool(t, "nft", "list", "tables") + l.N1.tool(t, "ss", "-Hltnu")
	mode := all[0].New(t, l.N1.NS)
	current, changes := all[0], 0
	p := l.runWith(t, fake.NewClientset(), mode, func(c *proxy.Config) {
		f := SyntheticFacts()
		c.NodeIPs, c.ClusterCIDRs, c.ServiceCIDRs, c.NodePortAddresses = f.NodeIPs, f.ClusterCIDRs, f.ServiceCIDRs, nil
	})
	for end := time.Now().Add(lasts); changes < 4 || time.Now().Before(end); changes++ {
		for range 1 + r.IntN(12) {
			churn.Step()
			churn.store(t, p.client)
		}
		if r.IntN(2) == 0 {
			current = all[r.IntN(len(all))]
			mode = current.New(t, l.N1.NS)
			if err := p.Switch(t.Context(), mode, nil); err != nil {
				t.Fatalf("change %d, to %s: %v", changes, current, err)
			}
		}
		nettest.Until(t, 60*time.Second, "all changes are seen", func() bool { return reflect.DeepEqual(churn.Fresh(), p.Wanted()) })
		p.settled(t, "the changes")
		if err := l.holds(t, current, churn.Fresh()); err != nil {
			t.Fatalf("change %d, mode %s: %v", changes, current, err)
		}
		if got := leftovers(t, l.N1, current.Name); got != "" {
			t.Fatalf("change %d, mode %s: %s", changes, current, got)
		}
	}
	t.Logf("%d changes", changes)
	if err := p.Switch(t.Context(), noMode.New(t, l.N1.NS), nil); err != nil {
		t.Fatal(err)
	}
	p.stop()
	if got := leftovers(t, l.N1, ""); got != "" {
		t.Error(got)
	}
	// iptables keeps its own empty tables.
	after := l.N1.tool(t, "nft", "list", "tables") + l.N1.tool(t, "ss", "-Hltnu")
	for l := range strings.Lines(after) {
		if !strings.Contains(before, l) && !slices.Contains([]string{"nat", "filter", "mangle"}, strings.TrimSpace(l[strings.LastIndex(strings.TrimSpace(l), " ")+1:])) {
			t.Errorf("left behind: %s", l)
		}
	}
}

// store makes an API hold what the churner does.
func (c *Churner) store(t *testing.T, client *fake.Clientset) {
	t.Helper()
	ctx, services, slices := t.Context(), client.CoreV1().Services("bench"), client.DiscoveryV1().EndpointSlices("bench")
	var errs []error
	note := func(err error) {
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	haveServices, err := services.List(ctx, metav1.ListOptions{})
	note(err)
	for i := range haveServices.Items {
		if name := haveServices.Items[i].Name; c.services[name] == nil {
			note(services.Delete(ctx, name, metav1.DeleteOptions{}))
		}
	}
	haveSlices, err := slices.List(ctx, metav1.ListOptions{})
	note(err)
	for i := range haveSlices.Items {
		if c.slices[haveSlices.Items[i].Labels[discoveryv1.LabelServiceName]] == nil {
			note(slices.Delete(ctx, haveSlices.Items[i].Name, metav1.DeleteOptions{}))
		}
	}
	for _, s := range c.services {
		if _, err := services.Update(ctx, s, metav1.UpdateOptions{}); apierrors.IsNotFound(err) {
			_, err = services.Create(ctx, s, metav1.CreateOptions{})
			note(err)
		} else {
			note(err)
		}
	}
	for _, s := range c.slices {
		if _, err := slices.Update(ctx, s, metav1.UpdateOptions{}); apierrors.IsNotFound(err) {
			_, err = slices.Create(ctx, s, metav1.CreateOptions{})
			note(err)
		} else {
			note(err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// holds is nil when the kernel of n1 has exactly what a mode that remembers nothing would
// write for a snapshot: then it writes nothing. The userspace mode's ports are in use, so
// there the rules are compared.
func (l *Lab) holds(t *testing.T, m Mode, s *proxy.Snapshot) error {
	t.Helper()
	fresh := m.New(t, l.N1.NS)
	// As a process does first: what it finds of the kernel decides about some rules.
	if err := fresh.Probe(t.Context()); err != nil {
		return err
	}
	program, err := fresh.Render(s)
	if err != nil {
		return err
	}
	if m.Name == "userspace" {
		rules := func(text string) []string {
			var out []string
			for line := range strings.Lines(text) {
				if strings.HasPrefix(line, "-A KUBE-") {
					out = append(out, xtables.Squeeze(strings.TrimSpace(line)))
				}
			}
			slices.Sort(out)
			return out
		}
		if d := cmp.Diff(rules(program.String()), rules(l.N1.tool(t, "iptables-nft-save"))); d != "" {
			return fmt.Errorf("the kernel differs from a fresh rendering (-fresh +kernel):\n%s", d)
		}
		return nil
	}
	c, err := nfnl.Dial(l.N1.NS)
	if err != nil {
		return err
	}
	defer c.Close()
	had := l.rules(t)
	before, err := c.Generation()
	if err != nil {
		return err
	}
	if err := program.Apply(t.Context()); err != nil {
		return err
	}
	if closer, ok := fresh.(proxy.Closer); ok {
		closer.Close()
	}
	after, err := c.Generation()
	if err != nil || after == before {
		return err
	}
	// Something was written; what counts is whether it was another thing than was there.
	if d := cmp.Diff(had, l.rules(t)); d != "" {
		return fmt.Errorf("a process that remembers nothing made %d changes:\n%s", after-before, d)
	}
	return nil
}

// rules are all rules of n1 without what counts packets. In chains whose rules exclude
// each other their order means nothing: a running mode adds at the end, a fresh one writes
// Service by Service.
func (l *Lab) rules(t *testing.T) string {
	t.Helper()
	lines := strings.Split(counted.ReplaceAllString(l.N1.tool(t, "nft", "list", "ruleset"), "counter"), "\n")
	for i, line := range lines {
		if !unordered.MatchString(line) {
			continue
		}
		end := i + 1
		for end < len(lines) && strings.TrimSpace(lines[end]) != "}" {
			end++
		}
		slices.Sort(lines[i+1 : end])
	}
	return strings.Join(lines, "\n")
}

var unordered = regexp.MustCompile(`chain KUBE-(SERVICES|EXTERNAL-SERVICES|NODEPORTS|PROXY-FIREWALL) \{`)

// counted is a counter with what it has counted.
var counted = regexp.MustCompile(`counter packets \d+ bytes \d+`)
