// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// disk measures what the disk under a database does by itself.
type disk struct {
	file *os.File
	// grow: each write makes the file longer, as a log's does. Without it one
	// page is written again and again, the least that a disk can be asked for.
	grow bool
	n    int64
	took time.Duration
}

func newDisk(b *testing.B, dir string, grow bool) *disk {
	b.Helper()
	f, err := os.Create(filepath.Join(dir, fmt.Sprintf("fsync-%t", grow)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	return &disk{file: f, grow: grow}
}

// sync writes and syncs a page, times times.
func (d *disk) sync(b *testing.B, times int) {
	b.Helper()
	page := make([]byte, 4096)
	began := time.Now()
	for range times {
		at := int64(0)
		if d.grow {
			at = d.n * int64(len(page))
		}
		if _, err := d.file.WriteAt(page, at); err != nil {
			b.Fatal(err)
		}
		if err := d.file.Sync(); err != nil {
			b.Fatal(err)
		}
		d.n++
	}
	d.took += time.Since(began)
}

func (d *disk) rate() float64 { return float64(d.n) / d.took.Seconds() }

// slice is how many creates are measured between two looks at the disk, so that
// both see the same moments of a machine that others use too.
const slice = 50

// BenchmarkServices creates Services through the API, on disk, with one client and
// with eight. x-fsync is their rate by that of a program that appends a page to
// a file and syncs it; x-rewrite is the same by one that writes over a page.
func BenchmarkServices(b *testing.B) {
	for _, clients := range []int{1, 8} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) {
			s := startServer(b, "", func(c *Config) { c.NoFsync = false })
			makeNamespace(b, s, "default")
			logs, page := newDisk(b, s.dir, true), newDisk(b, s.dir, false)
			var took time.Duration
			used := cpu(b)
			for done := 0; done < b.N; {
				n := min(slice*clients, b.N-done)
				began := time.Now()
				createServices(b, s, clients, done, n)
				took += time.Since(began)
				done += n
				logs.sync(b, slice/2)
				page.sync(b, slice/2)
			}
			rate := float64(b.N) / took.Seconds()
			b.ReportMetric(float64((cpu(b)-used).Microseconds())/1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(rate, "services/s")
			b.ReportMetric(logs.rate(), "fsyncs/s")
			b.ReportMetric(rate/logs.rate(), "x-fsync")
			b.ReportMetric(rate/page.rate(), "x-rewrite")
		})
	}
}

// createServices makes n Services, numbered from first, by so many clients.
func createServices(b *testing.B, s *testServer, clients, first, n int) {
	b.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				svc := &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%06d", first+i)},
					Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, Selector: map[string]string{"app": "x"}},
				}
				if _, err := s.client.CoreV1().Services("default").Create(context.Background(), svc, metav1.CreateOptions{}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// Watching: how many watch how many pods, and how often one changes.
const (
	watchers       = 50
	watchedPods    = 1000
	updateInterval = 10 * time.Millisecond
)

// sentAt is the annotation with the time of an update, in nanoseconds.
const sentAt = "sent-at"

// BenchmarkWatchers has 50 informers with protobuf watch 1,000 pods, of which one
// changes every 10 ms, on disk. The metrics are the time from the answer to the
// writer, which comes when the change is on disk, to the handler of each informer; a
// handler that is quicker than the answer counts as 0.
func BenchmarkWatchers(b *testing.B) {
	s := startServer(b, "", func(c *Config) { c.NoFsync = false })
	makeNamespace(b, s, "default")
	pods := s.client.CoreV1().Pods("default")
	for i := range watchedPods {
		p := testPod(fmt.Sprintf("p%04d", i))
		if _, err := pods.Create(b.Context(), p, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	w := &watchTimes{seen: map[string][]time.Time{}}
	for i := range watchers {
		w.watch(b, s, i)
	}
	answered := map[string]time.Time{}
	tick := time.NewTicker(updateInterval)
	defer tick.Stop()
	b.ResetTimer()
	for i := range b.N {
		<-tick.C
		patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:"%d"}}}`, sentAt, i)
		p, err := pods.Patch(b.Context(), fmt.Sprintf("p%04d", i%watchedPods), types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		if err != nil {
			b.Fatal(err)
		}
		answered[p.ResourceVersion] = time.Now()
	}
	b.StopTimer()
	late := w.delays(b, answered)
	for _, q := range []int{50, 99} {
		b.ReportMetric(float64(late[(len(late)-1)*q/100].Microseconds())/1000, fmt.Sprintf("ms-p%d", q))
	}
	b.ReportMetric(float64(late[len(late)-1].Microseconds())/1000, "ms-max")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "updates/s")
}

// watchTimes collects when each handler saw each revision.
type watchTimes struct {
	mu   sync.Mutex
	seen map[string][]time.Time
}

// watch starts an informer with a connection of its own and waits for its list.
func (w *watchTimes) watch(b *testing.B, s *testServer, i int) {
	b.Helper()
	client, err := kubernetes.NewForConfig(s.ClientConfig("system:watcher-"+strconv.Itoa(i), "system:masters"))
	if err != nil {
		b.Fatal(err)
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Pods().Informer()
	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, obj any) {
		now := time.Now()
		w.mu.Lock()
		defer w.mu.Unlock()
		p, ok := obj.(*corev1.Pod)
		if ok && p.Annotations[sentAt] != "" {
			w.seen[p.ResourceVersion] = append(w.seen[p.ResourceVersion], now)
		}
	}})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	factory.StartWithContext(ctx)
	b.Cleanup(func() {
		cancel()
		factory.Shutdown()
	})
	if err := factory.WaitForCacheSyncWithContext(ctx).AsError(); err != nil {
		b.Fatal(err)
	}
}

// delays waits until every handler has seen every update, and returns how late
// each was, sorted.
func (w *watchTimes) delays(b *testing.B, answered map[string]time.Time) (late []time.Duration) {
	b.Helper()
	deadline := time.After(waitTime)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		late = late[:0]
		w.mu.Lock()
		for rev, at := range answered {
			for _, seen := range w.seen[rev] {
				late = append(late, max(0, seen.Sub(at)))
			}
		}
		w.mu.Unlock()
		if len(late) == watchers*len(answered) {
			slices.Sort(late)
			return late
		}
		select {
		case <-deadline:
			b.Fatalf("%d of %d updates were seen", len(late), watchers*len(answered))
		case <-tick.C:
		}
	}
}

// residentMiB is the memory of this process that is in RAM, the heap given back.
func residentMiB(b *testing.B) float64 {
	b.Helper()
	debug.FreeOSMemory()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if kb, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(kb), " kB"))
			if err != nil {
				b.Fatal(err)
			}
			return float64(n) / 1024
		}
	}
	b.Fatal("/proc/self/status has no VmRSS")
	return 0
}

// BenchmarkMemory: how much the process grows from an empty lab to 10,000
// ConfigMaps of 1 kB, with the client of the benchmark in it.
func BenchmarkMemory(b *testing.B) {
	for b.Loop() {
		s := startServer(b, "")
		makeNamespace(b, s, "default")
		maps := s.client.CoreV1().ConfigMaps("default")
		data := map[string]string{"k": strings.Repeat("x", 1000)}
		before := residentMiB(b)
		for i := range 10_000 {
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c%05d", i)}, Data: data}
			if _, err := maps.Create(b.Context(), c, metav1.CreateOptions{}); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(residentMiB(b)-before, "MB-grown")
		b.ReportMetric(before, "MB-empty")
		s.stop()
	}
}
