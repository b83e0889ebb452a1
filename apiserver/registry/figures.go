// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// minWindow is the shortest time over which a CPU figure is worth something: the
	// kernel counts in steps of 10 ms. maxWindow is the longest, so that a figure is
	// about now.
	minWindow = 500 * time.Millisecond
	maxWindow = time.Minute
	// scrapeTimeout is how long a kubelet may take to answer.
	scrapeTimeout = 5 * time.Second
	// maxSummary is the largest answer of a kubelet that is read, in bytes.
	maxSummary = 16 << 20
)

// summary is what is read of a kubelet's /stats/summary.
type summary struct {
	Pods []struct {
		Ref struct {
			UID types.UID `json:"uid"`
		} `json:"podRef"`
		Containers []containerSummary `json:"containers"`
	} `json:"pods"`
}

type containerSummary struct {
	Name  string    `json:"name"`
	Start time.Time `json:"startTime"`
	CPU   struct {
		At   time.Time `json:"time"`
		Used int64     `json:"usageCoreNanoSeconds"`
	} `json:"cpu"`
	Memory struct {
		WorkingSet int64 `json:"workingSetBytes"`
	} `json:"memory"`
}

// look is one answer of a kubelet.
type look struct {
	at         time.Time
	containers map[types.UID][]containerSummary
}

// find returns the same run of a container, nil when it is not there.
func (l *look) find(pod types.UID, c containerSummary) *containerSummary {
	all := l.containers[pod]
	i := slices.IndexFunc(all, func(o containerSummary) bool { return o.Name == c.Name && o.Start.Equal(c.Start) })
	if i < 0 {
		return nil
	}
	return &all[i]
}

// containerUse is what a container used in a window.
type containerUse struct {
	name string
	// cpu is in cores/10⁹, memory in bytes.
	cpu, memory int64
}

func (u containerUse) resources() corev1.ResourceList { return useOf(u.cpu, u.memory) }

func useOf(nanoCores, bytes int64) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewScaledQuantity(nanoCores, resource.Nano),
		corev1.ResourceMemory: *resource.NewQuantity(bytes, resource.BinarySI),
	}
}

// nodeUse is what the containers of a node used.
type nodeUse struct {
	at     time.Time
	window time.Duration
	pods   map[types.UID][]containerUse
}

// figures asks kubelets what their pods use. Memory is as it is; CPU is a difference
// between two looks, so the last ones are kept. Nothing is looked at unless somebody
// asks, as against upstream's metrics-server, which asks every 15 seconds.
type figures struct {
	kubelets kubeletProxy

	mu    sync.Mutex
	looks map[string][]*look // by node, oldest first
}

func newFigures(deps Deps) *figures {
	return &figures{kubelets: kubeletProxy{deps: deps}, looks: map[string][]*look{}}
}

// ofNodes returns the use of nodes. One whose kubelet does not answer is missing.
func (f *figures) ofNodes(ctx context.Context, nodes []string) map[string]*nodeUse {
	out := map[string]*nodeUse{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, node := range nodes {
		all.Go(func() {
			use, err := f.ofNode(ctx, node)
			if err != nil {
				return // it is as if there were no figures yet
			}
			mu.Lock()
			defer mu.Unlock()
			out[node] = use
		})
	}
	all.Wait()
	return out
}

// ofNode compares two looks at a node; without an earlier one that is recent, it waits
// a moment between two of its own.
func (f *figures) ofNode(ctx context.Context, node string) (*nodeUse, error) {
	now, err := f.ask(ctx, node)
	if err != nil {
		return nil, err
	}
	before := f.remember(node, now)
	if before == nil {
		before = now
		wait := time.NewTimer(minWindow)
		defer wait.Stop()
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-wait.C:
		}
		if now, err = f.ask(ctx, node); err != nil {
			return nil, err
		}
	}
	return compare(before, now), nil
}

// remember keeps a look, and returns the newest one that is old enough to compare it
// with; nil when there is none.
func (f *figures) remember(node string, now *look) *look {
	f.mu.Lock()
	defer f.mu.Unlock()
	var before *look
	recent := slices.DeleteFunc(f.looks[node], func(l *look) bool {
		age := now.at.Sub(l.at)
		if age >= minWindow && age <= maxWindow {
			before = l // the newest of them comes last
		}
		return age > maxWindow
	})
	if before != nil {
		// Nothing will be compared with those before it any more.
		recent = recent[slices.Index(recent, before):]
	}
	f.looks[node] = append(recent, now)
	return before
}

// compare works out what was used between two looks. Of a container that is new, it is
// what it has used since its start, when that was nothing.
func compare(before, now *look) *nodeUse {
	out := &nodeUse{at: now.at, window: now.at.Sub(before.at), pods: map[types.UID][]containerUse{}}
	for pod, containers := range now.containers {
		for _, c := range containers {
			since, used := c.Start, int64(0)
			if was := before.find(pod, c); was != nil {
				since, used = was.CPU.At, was.CPU.Used
			}
			window := max(c.CPU.At.Sub(since), time.Millisecond)
			out.pods[pod] = append(out.pods[pod], containerUse{
				name: c.Name,
				// A process that ended without being waited for takes its time with it.
				cpu:    max(0, int64(float64(c.CPU.Used-used)/float64(window)*1e9)),
				memory: c.Memory.WorkingSet,
			})
		}
	}
	return out
}

// ask has a kubelet measure its pods.
func (f *figures) ask(ctx context.Context, node string) (*look, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	u, transport, err := f.kubelets.kubelet(ctx, node)
	if err != nil {
		return nil, err
	}
	u.Path = "/stats/summary"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("the kubelet of node %s does not answer: %v", node, err))
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("the kubelet of node %s has no figures: %s", node, resp.Status))
	}
	var s summary
	if err := json.NewDecoder(http.MaxBytesReader(nil, resp.Body, maxSummary)).Decode(&s); err != nil {
		return nil, fmt.Errorf("read the figures of node %s: %w", node, err)
	}
	out := &look{at: time.Now(), containers: map[types.UID][]containerSummary{}}
	for _, p := range s.Pods {
		out.containers[p.Ref.UID] = p.Containers
	}
	return out, nil
}

// figureColumns are metrics-server's.
func figureColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		{Name: "Name", Type: "string", Format: "name", Description: "Name of the resource"},
		{Name: "cpu", Type: "string", Format: "quantity"},
		{Name: "memory", Type: "string", Format: "quantity"},
		{Name: "Window", Type: "string", Format: "duration"},
	}
}

func figureRow(name string, use corev1.ResourceList, window metav1.Duration) []any {
	return []any{name, use.Cpu().String(), use.Memory().String(), window.Duration.String()}
}

// byName orders by namespace and name.
func byName[T metav1.Object](a, b T) int {
	return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}
