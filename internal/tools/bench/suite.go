// SPDX-License-Identifier: Apache-2.0

package main

// suite is one run of `go test -bench`.
type suite struct {
	pkg, pattern string
	// times is go test's -benchtime, a count: how long the run takes must not
	// depend on how busy the machine is.
	times string
	env   []string
}

// suites are run in this order.
var suites = []suite{
	{pkg: "./node", pattern: "FabricRatio$", times: "20x"},
	{pkg: "./cni/routed", pattern: "AddRatio$", times: "300x"},
	{pkg: "./sandbox", pattern: "BenchmarkSandbox$", times: "300x"},
	{pkg: "./apiserver/store", pattern: "BenchmarkCreate$/fsync=true/writers=(1|8)$", times: "400x"},
	{pkg: "./apiserver", pattern: "BenchmarkServices$/clients=1$", times: "1000x"},
	{pkg: "./apiserver", pattern: "BenchmarkServices$/clients=8$", times: "4000x"},
	{pkg: "./apiserver", pattern: "BenchmarkWatchers$", times: "500x"},
	{pkg: "./apiserver", pattern: "BenchmarkMemory$", times: "1x"},
	{pkg: "./proxy/iptables", pattern: "FullApply$/^10000$", times: "1x", env: []string{"KPLAB_LONG=1"}},
	{pkg: "./proxy/iptables", pattern: "OneChange$/^10000$", times: "10x", env: []string{"KPLAB_LONG=1"}},
	{pkg: "./proxy/nftables", pattern: "FullApply$/^compact$/^10000$", times: "5x", env: []string{"KPLAB_LONG=1"}},
	{pkg: "./proxy/nftables", pattern: "FullApply$/^upstream$/^10000$", times: "1x", env: []string{"KPLAB_LONG=1"}},
	{pkg: "./proxy/nftables", pattern: "OneChange$/^(upstream|compact)$/^10000$", times: "60x", env: []string{"KPLAB_LONG=1"}},
	{pkg: "./proxy/proxytest", pattern: "Path$/nftables/^10000$", times: "12x"},
	{pkg: "./internal/tools/bench", pattern: "BenchmarkUp$", times: "5x"},
	{pkg: "./internal/tools/bench", pattern: "Benchmark(Idle|FirstPacket|Pods|Down)$", times: "1x"},
}

// figure is one number that a benchmark reports, and how the table shows it.
type figure struct {
	metric string // the unit in go test's output
	label  string // what follows the number in the table
}

// bar is what a figure has to keep to. The zero bar is none.
type bar struct {
	limit   float64
	atLeast bool // the figure must reach the limit; else it must stay below it
}

func below(limit float64) bar   { return bar{limit: limit} }
func atLeast(limit float64) bar { return bar{limit: limit, atLeast: true} }

// row is a line of the table.
type row struct {
	what   string
	bench  string // the benchmark's name in go test's output
	figure figure
	bar    bar
	beside []figure
}

// rows are the table. A new mode or part adds its line here.
var rows = []row{
	{
		"wiring of a lab: fabric, 3 nodes, outside", "FabricRatio", figure{"x-raw", "× raw netlink"}, below(3),
		[]figure{{"raw-µs/op", "µs raw"}},
	},
	{
		"pod: CNI ADD", "AddRatio", figure{"cpu-x-raw", "× raw netlink, CPU"}, bar{},
		[]figure{{"x-raw", "× by the clock"}, {"raw-µs/op", "µs raw"}},
	},
	{
		"pod: sandbox", "Sandbox", figure{"create/raw", "× unshare"}, bar{},
		[]figure{{"pods/s", "pods/s"}, {"raw-us", "µs raw"}},
	},
	{
		"pod Ready through the API, 500 on 3 nodes", "Pods", figure{"pods/s", "pods/s"}, atLeast(150),
		[]figure{
			{"x-raw", "of raw netlink's rate"}, {"raw-pods/s", "pods/s raw"}, {"cpu-ms/pod", "ms CPU/pod"},
			{"raw-cpu-ms/pod", "ms CPU/pod raw"}, {"writes/pod", "writes/pod"},
		},
	},
	{
		"up -d → first ClusterIP reply, wall", "Up", figure{"s-wall", "s"}, below(1),
		[]figure{
			{"s-up", "s until up returns"}, {"ms-network", "ms network"}, {"ms-api", "ms api"},
			{"ms-proxy", "ms proxy"}, {"ms-settle", "ms settle"},
		},
	},
	{
		"up -d → first ClusterIP reply, CPU", "Up", figure{"s-cpu", "s"}, below(1),
		[]figure{{"s-cpu-up", "s until up returns"}},
	},
	{"idle: memory", "Idle", figure{"MB-pss", "MB PSS"}, below(150), []figure{{"MB-rss", "MB RSS"}, {"MB-anon", "MB not of files"}, {"processes", "processes"}}},
	{"idle: CPU", "Idle", figure{"%-cpu", "% of a core"}, below(1), []figure{{"s-window", "s looked at"}}},
	{"first packet to a pod after Ready, p50", "FirstPacket", figure{"ms-p50", "ms"}, below(5), []figure{{"ms-max", "ms at most"}}},
	{"down with 100 pods", "Down", figure{"s-down", "s"}, below(1), []figure{{"s-cpu", "s CPU"}}},
	{
		"store: creates, 1 writer", "Create/fsync=true/writers=1", figure{"x-fsync", "× the disk's fsyncs"}, bar{},
		[]figure{{"creates/s", "creates/s"}, {"fsyncs/s", "fsyncs/s"}},
	},
	{
		"store: creates, 8 writers", "Create/fsync=true/writers=8", figure{"x-fsync", "× the disk's fsyncs"}, bar{},
		[]figure{{"creates/s", "creates/s"}, {"fsyncs/s", "fsyncs/s"}, {"creates/commit", "creates/commit"}},
	},
	{
		"API: Services by 1 client", "Services/clients=1", figure{"x-fsync", "× the disk's fsyncs"}, atLeast(0.8),
		[]figure{{"services/s", "Services/s"}, {"fsyncs/s", "fsyncs/s"}, {"x-rewrite", "× fsyncs of one page"}, {"cpu-ms/op", "ms CPU each"}},
	},
	{
		"API: Services by 8 clients", "Services/clients=8", figure{"services/s", "Services/s"}, atLeast(1000),
		[]figure{{"x-fsync", "× the disk's fsyncs"}, {"cpu-ms/op", "ms CPU each"}},
	},
	{
		"API: 50 watchers on 1,000 pods, 100 updates/s", "Watchers", figure{"ms-p99", "ms to the handler, p99"}, below(50),
		[]figure{{"ms-p50", "ms p50"}, {"ms-max", "ms at most"}, {"updates/s", "updates/s"}},
	},
	{
		"API: 10,000 ConfigMaps of 1 kB", "Memory", figure{"MB-grown", "MB more"}, below(60),
		[]figure{{"MB-empty", "MB before"}},
	},
	{
		"iptables, 10,000 Services × 5: full sync", "FullApply/10000", figure{"ratio", "× iptables-restore"}, below(1.3),
		[]figure{{"s/apply", "s"}, {"s/plain", "s plain"}},
	},
	{
		"iptables, 10,000 Services × 5: one endpoint", "OneChange/10000", figure{"ratio", "× --noflush"}, below(1.5),
		[]figure{{"ms/change", "ms"}, {"ms/plain", "ms plain"}},
	},
	{
		"nftables compact, 10,000 Services × 5: full sync", "FullApply/compact/10000", figure{"s/apply", "s"}, below(0.5),
		[]figure{{"cpu-s/apply", "s CPU"}, {"ratio", "× nft -f"}},
	},
	{
		"nftables upstream, 10,000 Services × 5: full sync", "FullApply/upstream/10000", figure{"s/apply", "s"}, bar{},
		[]figure{{"cpu-s/apply", "s CPU"}},
	},
	{
		"nftables compact, 10,000 Services × 5: one endpoint, p50", "OneChange/compact/10000", figure{"ms/p50", "ms"}, below(5),
		[]figure{{"ms/p90", "ms p90"}, {"cpu-ms", "ms CPU"}},
	},
	{
		"nftables upstream, 10,000 Services × 5: one endpoint, p50", "OneChange/upstream/10000", figure{"ms/p50", "ms"}, bar{},
		[]figure{{"ms/p90", "ms p90"}, {"cpu-ms", "ms CPU"}},
	},
	{
		"nftables compact, 10,000 Services: connection through a Service", "Path/nftables-compact/10000", figure{"ratio", "× to the pod"}, below(1.2),
		[]figure{{"us/service", "µs"}, {"us/direct", "µs to the pod"}},
	},
	{
		"nftables upstream, 10,000 Services: connection through a Service", "Path/nftables-upstream/10000", figure{"ratio", "× to the pod"}, below(1.2),
		[]figure{{"us/service", "µs"}, {"us/direct", "µs to the pod"}},
	},
}
