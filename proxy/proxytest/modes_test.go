// SPDX-License-Identifier: Apache-2.0

package proxytest

import (
	"os"
	"testing"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/nettest"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/nftables"
	"github.com/kplab/kplab/proxy/userspace"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// modes is the list of modes under test.
func modes() []Mode {
	return []Mode{
		{Name: "iptables", Variant: "nft", Needs: []string{"iptables"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return iptables.New(iptables.Options{NetNS: ns, Variant: iptables.VariantNFT})
		}},
		{Name: "iptables", Variant: "legacy", Needs: []string{"iptables-legacy"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return iptables.New(iptables.Options{NetNS: ns, Variant: iptables.VariantLegacy, LockFile: tb.TempDir() + "/xtables.lock"})
		}},
		// kube-proxy's default in this mode, and with the other layout every address.
		{Name: "nftables", Variant: "upstream", NodePortAddresses: []string{"primary"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return nftables.New(nftables.Options{NetNS: ns, Layout: nftables.LayoutUpstream})
		}},
		{Name: "nftables", Variant: "compact", New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return nftables.New(nftables.Options{NetNS: ns, Layout: nftables.LayoutCompact})
		}},
		{Name: "userspace", Needs: []string{"iptables"}, New: func(tb testing.TB, ns *netns.NS) proxy.Mode {
			tb.Helper()
			return userspace.New(userspace.Options{NetNS: ns, Variant: xtables.NFT})
		}},
	}
}

// TestModes runs the rows with every mode: all of them in the long run, else those that
// are not long. KPLAB_MODES_OUT names the file that gets the table of results (docs/modes.md
// of the project), KPLAB_MODES_JSON one that keeps them, and KPLAB_MODES_MERGE those of
// other machines, separated by commas, whose results fill what does not apply here.
func TestModes(t *testing.T) {
	nettest.NeedRoot(t)
	nettest.LeakCheck(t)
	m := NewMatrix()
	m.Run(t, os.Getenv("KPLAB_LONG") != "", append(modes(), ipvsMode())...)
	if err := m.Keep(os.Getenv("KPLAB_MODES_JSON"), os.Getenv("KPLAB_MODES_MERGE"), os.Getenv("KPLAB_MODES_OUT")); err != nil {
		t.Error(err)
	}
}
