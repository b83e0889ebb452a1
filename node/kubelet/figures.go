// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/sandbox"
)

// The figures of a node are those of its pods' processes: CPU time that they have had
// and memory that is theirs (sandbox.Measure). A built-in server is no process: it
// runs inside the daemon, as part of it, and what it uses cannot be told apart, so
// that such a container has 0 for both. What people start in it (kubectl exec) is
// counted. A node is the sum of its pods: the machine below is shared by all nodes,
// and the daemon belongs to none.

// summary is the part of upstream's stats/v1alpha1 Summary that there are figures for.
type summary struct {
	Node nodeFigures  `json:"node"`
	Pods []podFigures `json:"pods"`
}

type nodeFigures struct {
	NodeName string    `json:"nodeName"`
	Start    time.Time `json:"startTime"`
	CPU      cpu       `json:"cpu"`
	Memory   memory    `json:"memory"`
}

type podFigures struct {
	Ref struct {
		Name      string    `json:"name"`
		Namespace string    `json:"namespace"`
		UID       types.UID `json:"uid"`
	} `json:"podRef"`
	Start      time.Time          `json:"startTime"`
	Containers []containerFigures `json:"containers"`
	CPU        cpu                `json:"cpu"`
	Memory     memory             `json:"memory"`
}

type containerFigures struct {
	Name   string    `json:"name"`
	Start  time.Time `json:"startTime"`
	CPU    cpu       `json:"cpu"`
	Memory memory    `json:"memory"`
}

// cpu is time on a core in ns since the start; memory is in bytes.
type cpu struct {
	At   time.Time `json:"time"`
	Used int64     `json:"usageCoreNanoSeconds"`
}

type memory struct {
	At         time.Time `json:"time"`
	WorkingSet uint64    `json:"workingSetBytes"`
}

// meter remembers what the containers that have ended had used, so that the node's CPU
// time only grows. One that begins and ends between two looks is not in it.
type meter struct {
	mu    sync.Mutex
	since time.Time
	last  map[string]int64 // by container and start
	past  int64
}

// total takes note of what is now and returns what there ever was.
func (m *meter) total(now map[string]int64) int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, used := range m.last {
		if _, ok := now[key]; !ok {
			m.past += used
		}
	}
	m.last = now
	sum := m.past
	for _, used := range now {
		sum += used
	}
	return sum
}

// figures measures the node's pods.
func (k *Kubelet) figures() (*summary, error) {
	pods := k.allPods()
	var boxes []*sandbox.Sandbox
	for _, p := range pods {
		if box := p.box(); box != nil {
			boxes = append(boxes, box)
		}
	}
	measured, err := sandbox.Measure(boxes...)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", k.cfg.NodeName, err)
	}
	at := time.Now()
	out := &summary{Pods: []podFigures{}}
	out.Node.NodeName, out.Node.Start = k.cfg.NodeName, k.meter.since
	used := map[string]int64{}
	for _, p := range pods {
		f := podFigures{Start: p.started, CPU: cpu{At: at}, Memory: memory{At: at}}
		o := p.object()
		f.Ref.Name, f.Ref.Namespace, f.Ref.UID = o.Name, o.Namespace, o.UID
		f.Containers = p.figures(measured, at)
		for _, c := range f.Containers {
			f.CPU.Used += c.CPU.Used
			f.Memory.WorkingSet += c.Memory.WorkingSet
			used[fmt.Sprint(o.UID, c.Name, c.Start.UnixNano())] = c.CPU.Used
		}
		if len(f.Containers) > 0 {
			out.Pods = append(out.Pods, f)
			out.Node.Memory.WorkingSet += f.Memory.WorkingSet
		}
	}
	slices.SortFunc(out.Pods, func(a, b podFigures) int {
		return strings.Compare(a.Ref.Namespace+"/"+a.Ref.Name, b.Ref.Namespace+"/"+b.Ref.Name)
	})
	out.Node.CPU, out.Node.Memory.At = cpu{at, k.meter.total(used)}, at
	return out, nil
}

// figures are those of the pod's running containers, by name.
func (p *pod) figures(measured map[*sandbox.Process]sandbox.Usage, at time.Time) []containerFigures {
	sums := map[string]sandbox.Usage{}
	if box := p.box(); box != nil {
		for _, proc := range box.Processes() {
			name := strings.TrimPrefix(proc.Container(), viewPrefix)
			u := measured[proc]
			sums[name] = sandbox.Usage{CPU: sums[name].CPU + u.CPU, Memory: sums[name].Memory + u.Memory}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []containerFigures
	for name, c := range p.containers {
		if !c.running() {
			continue
		}
		out = append(out, containerFigures{
			Name: name, Start: c.startedAt,
			CPU:    cpu{at, int64(sums[name].CPU)},
			Memory: memory{at, sums[name].Memory},
		})
	}
	slices.SortFunc(out, func(a, b containerFigures) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// serveSummary answers /stats/summary.
func (k *Kubelet) serveSummary(w http.ResponseWriter, _ *http.Request) {
	s, err := k.figures()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	// A client that breaks off is no news.
	_ = json.NewEncoder(w).Encode(s)
}

// serveResourceMetrics answers /metrics/resource: the figures by upstream's names, in
// the text format of Prometheus.
func (k *Kubelet) serveResourceMetrics(w http.ResponseWriter, _ *http.Request) {
	s, err := k.figures()
	failed := 0
	if err != nil {
		k.log.Warn("the pods could not be measured", "err", err)
		failed, s = 1, nil
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = io.WriteString(w, resourceMetrics(s, failed))
}

// resourceMetrics is the text; s is nil when there are no figures.
func resourceMetrics(s *summary, failed int) string {
	var b strings.Builder
	metric := func(name, kind, help string, lines func(line func(labels string, value float64, at time.Time))) {
		fmt.Fprintf(&b, "# HELP %s [STABLE] %s\n# TYPE %s %s\n", name, help, name, kind)
		lines(func(labels string, value float64, at time.Time) {
			if labels != "" {
				labels = "{" + labels + "}"
			}
			stamp := ""
			if !at.IsZero() {
				stamp = fmt.Sprintf(" %d", at.UnixMilli())
			}
			fmt.Fprintf(&b, "%s%s %v%s\n", name, labels, value, stamp)
		})
	}
	type emit = func(labels string, value float64, at time.Time)
	containers := func(value func(c containerFigures, line emit, labels string)) func(emit) {
		return func(line emit) {
			for _, p := range s.Pods {
				for _, c := range p.Containers {
					value(c, line, fmt.Sprintf("container=%q,namespace=%q,pod=%q", c.Name, p.Ref.Namespace, p.Ref.Name))
				}
			}
		}
	}
	pods := func(value func(p podFigures) (float64, time.Time)) func(emit) {
		return func(line emit) {
			for _, p := range s.Pods {
				v, at := value(p)
				line(fmt.Sprintf("namespace=%q,pod=%q", p.Ref.Namespace, p.Ref.Name), v, at)
			}
		}
	}
	seconds := func(c cpu) float64 { return float64(c.Used) / 1e9 }
	if s != nil {
		metric("container_cpu_usage_seconds_total", "counter", "CPU time of the container's processes since its start, in seconds of one core",
			containers(func(c containerFigures, line emit, labels string) { line(labels, seconds(c.CPU), c.CPU.At) }))
		metric("container_memory_working_set_bytes", "gauge", "Memory of the container's processes in bytes",
			containers(func(c containerFigures, line emit, labels string) {
				line(labels, float64(c.Memory.WorkingSet), c.Memory.At)
			}))
		metric("container_start_time_seconds", "gauge", "When the container started, in seconds since 1970",
			containers(func(c containerFigures, line emit, labels string) {
				line(labels, float64(c.Start.UnixMilli())/1000, time.Time{})
			}))
		metric("node_cpu_usage_seconds_total", "counter", "CPU time of the processes of the node's pods, in seconds of one core",
			func(line emit) { line("", seconds(s.Node.CPU), s.Node.CPU.At) })
		metric("node_memory_working_set_bytes", "gauge", "Memory of the processes of the node's pods in bytes",
			func(line emit) { line("", float64(s.Node.Memory.WorkingSet), s.Node.Memory.At) })
		metric("pod_cpu_usage_seconds_total", "counter", "CPU time of the pod's processes, in seconds of one core",
			pods(func(p podFigures) (float64, time.Time) { return seconds(p.CPU), p.CPU.At }))
		metric("pod_memory_working_set_bytes", "gauge", "Memory of the pod's processes in bytes",
			pods(func(p podFigures) (float64, time.Time) { return float64(p.Memory.WorkingSet), p.Memory.At }))
	}
	metric("resource_scrape_error", "gauge", "1 if the figures could not be had, 0 otherwise", func(line emit) { line("", float64(failed), time.Time{}) })
	return b.String()
}
