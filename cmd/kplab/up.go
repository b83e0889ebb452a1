// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
)

type upOptions struct {
	config     string
	nodes      int
	ipFamilies string
	overlay    string
	cniConf    string
	cniBin     string
	proxyMode  string
	dnsZone    string
	lbPool     string
	nftLayout  string
	ipvs       cluster.IPVSConfig
	detach     bool
	fresh      bool
	disposable bool
	audit      cluster.AuditConfig
	reportFD   int
}

func newUpCommand(g *globals) *cobra.Command {
	o := &upOptions{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "start a lab, or resume the one that was stopped",
		Long: `Start a lab, or resume the one that was stopped.

In the foreground the lab lives until Ctrl-C; with -d it lives on and the command
returns when every node is ready and every proxy has written its rules. Either
way the state is kept: the next up brings every object and pod back.

--config takes a settings file or a name: ` + "`kplab up --config tutorial-1`" + ` makes the
cluster of the first tutorial (nodes master and slave), tutorial-2 that of the second
(k8s-master1, k8s-node1, k8s-node2), with their addresses and the pods of kube-system.
A file of that name wins.`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error { return runUp(cmd, g, o) },
	}
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "settings file (apiVersion kplab/v1alpha1, kind Lab), or the name of settings that come with kplab: "+strings.Join(cluster.PresetNames(), ", "))
	f.IntVar(&o.nodes, "nodes", 0, "number of nodes, the control plane included (default 3)")
	f.StringVar(&o.ipFamilies, "ip-families", "", "IP families, the primary one first: ipv4, ipv6, dual or a list such as ipv6,ipv4 (default ipv4)")
	f.StringVar(&o.overlay, "overlay", "", "how packets between pods of two nodes travel: routes or vxlan (default routes)")
	f.StringVar(&o.cniConf, "cni-conf", "", "file with the CNI network configuration list of the nodes (default: the built-in plugin)")
	f.StringVar(&o.cniBin, "cni-bin", "", "directory with the list's plugins, or several separated by commas")
	f.StringVar(&o.proxyMode, "proxy-mode", "", "Service proxy mode, one of "+strings.Join(cluster.ProxyModes(), ", ")+" (default iptables)")
	f.StringVar(&o.nftLayout, "nft-layout", "", "layout of proxy mode nftables: upstream or compact (default upstream)")
	ipvsFlags(f, &o.ipvs)
	f.StringVar(&o.dnsZone, "dns-zone", "", "file of DNS records (RFC 1035) for names outside of the cluster")
	f.StringVar(&o.lbPool, "lb-pool", "", "addresses of the node network for Services of type LoadBalancer, such as 10.0.0.240/28 (default: no load balancer)")
	f.BoolVarP(&o.detach, "detach", "d", false, "return when the lab is ready and leave it running")
	f.BoolVar(&o.fresh, "fresh", false, "delete the kept state first")
	f.BoolVar(&o.disposable, "no-fsync", false, "do not wait for the disk on each write; for labs that are thrown away")
	f.StringVar(&o.audit.Log, "audit-log", "", "file to record requests to the API in, one JSON object a line")
	f.StringVar(&o.audit.Policy, "audit-policy", "", "file (kind Policy of audit.k8s.io/v1) that says which requests; default: the metadata of all but events, leases and health checks")
	f.IntVar(&o.reportFD, "report-fd", -1, "descriptor on which a detached lab reports its start")
	_ = f.MarkHidden("report-fd")
	return cmd
}

func runUp(cmd *cobra.Command, g *globals, o *upOptions) error {
	cfg, err := o.settings(cmd, g)
	if err != nil {
		return err
	}
	opts := cluster.UpOptions{Config: cfg, Asked: o.asked(cmd), Fresh: o.fresh}
	if o.reportFD >= 0 {
		return cluster.RunDetached(cmd.Context(), opts, os.NewFile(uintptr(o.reportFD), "report"))
	}
	progress := newProgress(cmd.ErrOrStderr())
	if o.detach {
		err = cluster.StartDetached(cmd.Context(), opts, o.daemonArgs(), progress)
	} else {
		err = cluster.RunForeground(cmd.Context(), opts, progress, func() {
			printNext(cmd, cfg.Name)
			fmt.Fprintln(cmd.ErrOrStderr(), "\nCtrl-C stops the lab and keeps its state")
		})
	}
	switch {
	case errors.Is(err, cluster.ErrRunning):
		fmt.Fprintf(cmd.ErrOrStderr(), "lab %q runs already with these settings\n", cfg.Name)
		return nil
	case err != nil:
		return err
	case o.detach:
		printNext(cmd, cfg.Name)
	}
	return nil
}

// settings joins the settings file, the flags and the lab's name.
func (o *upOptions) settings(cmd *cobra.Command, g *globals) (cluster.Config, error) {
	var cfg cluster.Config
	if o.config != "" {
		var err error
		if cfg, err = o.load(); err != nil {
			return cfg, err
		}
	}
	if cfg.Name == "" || cmd.Flags().Changed("name") || os.Getenv("KPLAB_LAB") != "" {
		cfg.Name = g.name
	}
	if asked := cmd.Flags().Changed("nodes"); asked && (o.nodes <= 0 || len(cfg.Nodes) > 0) {
		return cfg, usageError{fmt.Errorf("--nodes %d: want a positive number, and not together with nodes in the settings file", o.nodes)}
	}
	if o.ipFamilies != "" {
		families, err := cluster.ParseIPFamilies(o.ipFamilies)
		if err != nil {
			return cfg, usageError{fmt.Errorf("--ip-families: %w", err)}
		}
		cfg.Networking.IPFamilies, cfg.Networking.IPFamily = families, ""
	}
	if o.overlay != "" {
		cfg.Networking.Overlay = o.overlay
	}
	if o.proxyMode != "" {
		cfg.Proxy = cluster.ProxyConfig{Mode: o.proxyMode}
	}
	if o.nftLayout != "" {
		cfg.Proxy.NFTLayout = o.nftLayout
	}
	if o.lbPool != "" {
		cfg.LoadBalancer.Pool = o.lbPool
	}
	if o.ipvs != (cluster.IPVSConfig{}) {
		cfg.Proxy.IPVS = o.ipvs
	}
	cfg.Disposable = cfg.Disposable || o.disposable
	for _, path := range []struct{ flag, setting *string }{{&o.dnsZone, &cfg.DNS.Zone}, {&o.audit.Log, &cfg.Audit.Log}, {&o.audit.Policy, &cfg.Audit.Policy}} {
		if *path.flag != "" {
			*path.setting = *path.flag
		}
		if *path.setting == "" {
			continue
		}
		var err error
		if *path.setting, err = filepath.Abs(*path.setting); err != nil {
			return cfg, fmt.Errorf("find the files of the settings: %w", err)
		}
		*path.flag = *path.setting
	}
	if err := o.setCNI(&cfg); err != nil {
		return cfg, err
	}
	cfg.SetDefaults(o.nodes)
	if err := cfg.Validate(); err != nil {
		return cfg, usageError{fmt.Errorf("settings of lab %q: %w", cfg.Name, err)}
	}
	return cfg, nil
}

// load reads the settings that --config names: a file, or else what comes with the
// program under that name.
func (o *upOptions) load() (cluster.Config, error) {
	path, err := filepath.Abs(o.config)
	if err != nil {
		return cluster.Config{}, fmt.Errorf("find the settings file: %w", err)
	}
	if _, missing := os.Stat(path); errors.Is(missing, fs.ErrNotExist) {
		cfg, ok, err := cluster.Preset(o.config)
		if !ok {
			err = fmt.Errorf("read the lab's settings: %w; the names that come with kplab are %s", missing, strings.Join(cluster.PresetNames(), ", "))
		}
		return cfg, err
	}
	o.config = path
	return cluster.LoadConfig(path)
}

// setCNI puts the flags about network plugins into the settings, as absolute paths.
func (o *upOptions) setCNI(cfg *cluster.Config) (err error) {
	if o.cniConf != "" {
		if o.cniConf, err = filepath.Abs(o.cniConf); err != nil {
			return fmt.Errorf("find the network configuration: %w", err)
		}
		cfg.CNI.Conf = o.cniConf
	}
	if o.cniBin == "" {
		return nil
	}
	cfg.CNI.Bin = strings.Split(o.cniBin, ",")
	for i := range cfg.CNI.Bin {
		if cfg.CNI.Bin[i], err = filepath.Abs(cfg.CNI.Bin[i]); err != nil {
			return fmt.Errorf("find the network plugins: %w", err)
		}
	}
	o.cniBin = strings.Join(cfg.CNI.Bin, ",")
	return nil
}

// daemonArgs are the arguments of this command for a process that works in another
// directory.
func (o *upOptions) daemonArgs() []string {
	args := slices.Clone(os.Args[1:])
	if filepath.IsAbs(o.config) {
		args = append(args, "--config="+o.config) // of several, the last one counts
	}
	if o.dnsZone != "" {
		args = append(args, "--dns-zone="+o.dnsZone)
	}
	if o.cniConf != "" {
		args = append(args, "--cni-conf="+o.cniConf)
	}
	if o.cniBin != "" {
		args = append(args, "--cni-bin="+o.cniBin)
	}
	if o.audit.Log != "" {
		args = append(args, "--audit-log="+o.audit.Log)
	}
	if o.audit.Policy != "" {
		args = append(args, "--audit-policy="+o.audit.Policy)
	}
	return args
}

// asked says whether the person chose any setting, as against resuming whatever
// there is.
func (o *upOptions) asked(cmd *cobra.Command) bool {
	for _, flag := range []string{"config", "nodes", "ip-families", "overlay", "cni-conf", "cni-bin", "proxy-mode", "nft-layout", "ipvs-scheduler", "ipvs-strict-arp", "ipvs-fallback", "dns-zone", "lb-pool", "no-fsync", "audit-log", "audit-policy"} {
		if cmd.Flags().Changed(flag) {
			return true
		}
	}
	return false
}

// printNext says what to type now, calling the program as it was called.
func printNext(cmd *cobra.Command, name string) {
	kplab := os.Args[0]
	if name != cluster.DefaultName {
		kplab += " --name " + name
	}
	where, look := "outside", "ip route"
	if cfg, err := cluster.KeptConfig(name); err == nil {
		where = cfg.APINode().Name
		switch cfg.ProxyOf(cfg.APINode()).Mode {
		case "iptables":
			look = "iptables-save -t nat"
		case "nftables":
			look = "nft list ruleset"
		case "ipvs":
			look = "ip address show kube-ipvs0"
			if cfg.ProxyOf(cfg.APINode()).IPVS.Fallback {
				look = "iptables-save -t nat" // there in both modes
			}
		}
	}
	sudo := ""
	if os.Getenv("SUDO_UID") != "" {
		sudo = "sudo "
	}
	fmt.Fprintf(cmd.ErrOrStderr(), `
lab %[1]q is up. next:
  %[2]s kubectl get nodes -o wide
  export KUBECONFIG=$(%[2]s kubeconfig)        # for your own kubectl
  %[3]s%[2]s exec %[4]s -- %[5]s
  %[3]s%[2]s down
`, name, kplab, sudo, where, look)
}
