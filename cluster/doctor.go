// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/xtables"
	"github.com/kplab/kplab/proxy/iptables"
	"github.com/kplab/kplab/proxy/ipvs"
	"github.com/kplab/kplab/proxy/nftables"
	"github.com/kplab/kplab/sandbox"
)

// Verdict is the outcome of a check.
type Verdict string

// The two verdicts. There is no third: a check that could not be made has not
// seen the thing work.
const (
	Works   Verdict = "works"
	Missing Verdict = "missing"
)

// Check is one thing that a lab uses of the kernel or of the host's tools. It
// was tried, not looked up.
type Check struct {
	Name string `json:"name"`
	// Required is true when no lab can start without it.
	Required bool    `json:"required"`
	Verdict  Verdict `json:"verdict"`
	// Found says what happened when it was tried.
	Found string `json:"found"`
	// Breaks says what does not work without it, Remedy how to get it.
	Breaks string `json:"breaks"`
	Remedy string `json:"remedy"`
}

// trial is a check before it was made: try returns what was seen.
type trial struct {
	name, breaks, remedy string
	required             bool
	try                  func(ctx context.Context, s scratch) (string, error)
}

// scratch is a network namespace to try things in, with nothing in it.
type scratch struct {
	ns  *netns.NS
	run execx.Runner
}

const kernelRemedy = "use a kernel with this feature (Debian 12's has it), or load its module"

// Doctor tries everything, in namespaces of its own, and leaves nothing behind.
func Doctor(ctx context.Context) []Check {
	var out []Check
	for _, t := range trials() {
		c := Check{Name: t.name, Required: t.required, Verdict: Works, Breaks: t.breaks, Remedy: t.remedy}
		found, err := t.attempt(ctx)
		c.Found = found
		if err != nil {
			c.Verdict, c.Found = Missing, err.Error()
		}
		out = append(out, c)
	}
	return out
}

// attempt runs one trial in a namespace that ends with it.
func (t trial) attempt(ctx context.Context) (string, error) {
	ns, err := netns.New()
	if err != nil {
		return "", err
	}
	said, err := t.try(ctx, scratch{ns: ns, run: execx.In(ns)})
	return said, errors.Join(err, ns.Close())
}

func trials() []trial {
	all := []trial{
		{"network namespaces", "everything: nodes and pods are network namespaces", "run it as root (sudo kplab doctor)", true, tryNamespace},
		{"sandbox", "everything: namespaces are kept as mounts", "run it as root, in a container with CAP_SYS_ADMIN", true, trySandbox},
		{"veth", "everything: pods hang on veth pairs", kernelRemedy, true, tryLink("veth", &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"})},
		{"bridge", "everything: nodes share a bridge", kernelRemedy, true, tryLink("bridge", &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "a"}})},
		{"state directory", "everything: objects are kept there", "make room, or set KPLAB_STATE to a directory that can be written", true, tryState},
		{"iptables", "proxy mode iptables", "apt-get install iptables", true, tryIptables("nat", "-A POSTROUTING -j ACCEPT")},
	}
	// Each mode knows what it needs; without one of the others a lab can do.
	need := func(mode, name, breaks, options string, required bool, try func(context.Context, *netns.NS) error) {
		remedy := kernelRemedy + " (" + options + ")"
		all = append(all, trial{name, breaks + ", in proxy mode " + mode, remedy, required, func(ctx context.Context, s scratch) (string, error) {
			return "written and read back", try(ctx, s.ns)
		}})
	}
	for _, r := range iptables.Requirements() {
		need("iptables", r.Name, r.Breaks, r.Options, r.Required, func(ctx context.Context, ns *netns.NS) error { return r.Try(ctx, ns, iptables.VariantAuto) })
	}
	for _, r := range nftables.Requirements() {
		need("nftables", r.Name, r.Breaks, r.Options, false, r.Try)
	}
	for _, r := range ipvs.Requirements("") {
		need("ipvs", r.Name, r.Breaks, r.Options, false, func(ctx context.Context, ns *netns.NS) error { return r.Try(ctx, ns, xtables.Auto) })
	}
	return append(all,
		trial{"conntrack", "clearing stale UDP flows when endpoints go", kernelRemedy, false, tryConntrack},
		trial{"iptables-legacy", "the legacy variant of proxy mode iptables", "apt-get install iptables", false, tryTool("iptables-legacy-restore", "--version")},
		trial{"nftables", "looking at the rules with nft", "apt-get install nftables", false, tryNft},
		trial{"cgroup limits", "CPU and memory limits of containers", "a host that has the cpu and memory controllers of cgroups", false, tryLimits},
		trial{"vxlan", "an overlay between nodes", kernelRemedy, false, tryLink("vxlan", &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "a"}, VxlanId: 1, Port: 4789})},
		trial{"busybox", "pods of the busybox image", "apt-get install busybox-static", false, tryTool("busybox", "true")},
		trial{"ip", "looking at links and routes (kplab exec node1 -- ip route)", "apt-get install iproute2", false, tryTool("ip", "-V")},
		trial{"curl", "the tutorials' requests (kplab exec node1 -- curl …)", "apt-get install curl", false, tryTool("curl", "--version")},
		trial{"dig", "the tutorials' name look-ups", "apt-get install bind9-dnsutils", false, tryTool("dig", "-v")},
		trial{"conntrack tool", "looking at NAT's table (kplab exec node1 -- conntrack -L)", "apt-get install conntrack", false, tryTool("conntrack", "--version")},
		trial{"tcpdump", "watching packets (kplab exec node1 -- tcpdump -ni eth0)", "apt-get install tcpdump", false, tryTool("tcpdump", "--version")},
	)
}

// checkTools is the part of Doctor that `up` makes first: the programs without
// which a lab would start and then not carry a packet.
func checkTools(ctx context.Context, cfg *Config) error {
	for i := range cfg.Nodes {
		if want := cfg.ProxyOf(cfg.Nodes[i]); want.Mode == "ipvs" && !want.IPVS.Fallback {
			if _, err := ipvs.Detect(ctx, xtables.Auto, want.IPVS.Scheduler); err != nil {
				return refuseIPVS(err)
			}
		}
	}
	if !slices.ContainsFunc(cfg.Nodes, func(n NodeConfig) bool { return cfg.ProxyOf(n).Mode == "iptables" }) {
		return nil // mode nftables needs no program
	}
	if _, err := execx.Host().Run(context.Background(), execx.Cmd{Path: "iptables-restore", Args: []string{"--version"}}); err != nil {
		return fmt.Errorf("proxy mode iptables needs the iptables tools: install them with `apt-get install iptables`, and see `kplab doctor`: %w", err)
	}
	return nil
}

func tryNamespace(_ context.Context, s scratch) (string, error) {
	var n int
	err := s.ns.Do(func() error {
		links, err := netlink.LinkList()
		n = len(links)
		return err
	})
	return fmt.Sprintf("a new one holds %d link", n), err
}

// trySandbox makes and removes a pod's namespace as a lab does.
func trySandbox(ctx context.Context, _ scratch) (found string, err error) {
	dir, err := os.MkdirTemp(filepath.Dir(PathsOf(DefaultName).Runtime), "doctor-")
	if errors.Is(err, os.ErrNotExist) {
		dir, err = os.MkdirTemp("", "kplab-doctor-")
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, sandbox.Destroy(ctx, dir), os.RemoveAll(dir)) }()
	r, err := sandbox.Open(sandbox.Config{Dir: dir})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if _, err := r.Create(ctx, sandbox.Spec{ID: "doctor", Namespace: "default", Name: "doctor", Hostname: "doctor"}); err != nil {
		return "", err
	}
	return "made one and removed it", r.Remove(ctx, "doctor")
}

// tryLink makes a link and reads it back.
func tryLink(kind string, l netlink.Link) func(context.Context, scratch) (string, error) {
	return func(_ context.Context, s scratch) (string, error) {
		return kind + " made and read back", s.ns.Do(func() error {
			if err := netlink.LinkAdd(l); err != nil {
				return fmt.Errorf("make a %s link: %w", kind, err)
			}
			got, err := netlink.LinkByName("a")
			if err == nil && got.Type() != kind {
				err = fmt.Errorf("asked for a %s link, the kernel made %s", kind, got.Type())
			}
			return err
		})
	}
}

// tryIptables loads one rule and finds it in what iptables-save prints.
func tryIptables(table, rule string) func(context.Context, scratch) (string, error) {
	return func(ctx context.Context, s scratch) (string, error) {
		// The kernel's legacy tables are locked by a file; the host's is not ours.
		lockFile := filepath.Join(os.TempDir(), fmt.Sprintf("kplab-doctor-%d.lock", os.Getpid()))
		defer func() { _ = os.Remove(lockFile) }() // nft's iptables makes none
		env := []string{"XTABLES_LOCKFILE=" + lockFile}
		text := "*" + table + "\n" + rule + "\nCOMMIT\n"
		if _, err := s.run.Run(ctx, execx.Cmd{Path: "iptables-restore", Args: []string{"-w", "5"}, Env: env, Stdin: []byte(text)}); err != nil {
			return "", err
		}
		saved, err := s.run.Run(ctx, execx.Cmd{Path: "iptables-save", Args: []string{"-t", table}, Env: env})
		if err != nil {
			return "", err
		}
		chain := strings.Fields(rule)[1]
		if !strings.Contains(string(saved.Stdout), "-A "+chain+" ") {
			return "", fmt.Errorf("the rule %q was accepted and is not there", rule)
		}
		return "rule loaded and read back", nil
	}
}

func tryNft(ctx context.Context, s scratch) (string, error) {
	text := "add table ip t\nadd map ip t m { type ipv4_addr . inet_proto . inet_service : verdict ; }\n"
	if _, err := s.run.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"-f", "-"}, Stdin: []byte(text)}); err != nil {
		return "", err
	}
	got, err := s.run.Run(ctx, execx.Cmd{Path: "nft", Args: []string{"list", "map", "ip", "t", "m"}})
	if err == nil && !strings.Contains(string(got.Stdout), "verdict") {
		err = errors.New("the map was accepted and is not there")
	}
	return "verdict map made and read back", err
}

func tryConntrack(_ context.Context, s scratch) (string, error) {
	return "table read", s.ns.Do(func() error {
		_, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		return err
	})
}

// tryLimits makes cgroups as a container with limits would have them.
func tryLimits(context.Context, scratch) (string, error) {
	return "", sandbox.ProbeLimits("/run/kplab")
}

func tryTool(path string, args ...string) func(context.Context, scratch) (string, error) {
	return func(ctx context.Context, s scratch) (string, error) {
		r, err := s.run.Run(ctx, execx.Cmd{Path: path, Args: args})
		said, _, _ := strings.Cut(strings.TrimSpace(string(r.Stdout)+string(r.Stderr)), "\n")
		if said == "" {
			said = "runs"
		}
		return said, err
	}
}

func tryState(context.Context, scratch) (found string, err error) {
	dir := filepath.Dir(PathsOf(DefaultName).State)
	made := false
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
		made = true
	}
	f, err := os.CreateTemp(dir, "doctor-")
	if err != nil {
		return "", err
	}
	defer func() {
		err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		if made {
			err = errors.Join(err, os.Remove(dir))
		}
	}()
	// As much as an empty lab's file takes.
	if _, err := f.Write(make([]byte, 1<<20)); err != nil {
		return "", err
	}
	return dir + " takes writes", f.Sync()
}
