// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"fmt"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
)

// BenchmarkPodsReady brings up pods of a built-in image, all asked for at once, and
// takes them down again; the API is a fake, so this is the kubelet's own share.
func BenchmarkPodsReady(b *testing.B) {
	const pods = 200
	var up, down time.Duration
	for b.Loop() {
		b.StopTimer()
		h := newHarness(b)
		<-h.kubelet.started
		b.StartTimer()
		start := time.Now()
		for i := range pods {
			h.create(newTestPod(fmt.Sprint("p", i), "nginx"))
			if i%25 == 24 { // the fake's watch has room for 100 events
				nettest.Eventually(b, time.Minute, "the watch", func() error {
					if n := len(h.kubelet.allPods()); n <= i {
						return fmt.Errorf("%d pods of %d", n, i+1)
					}
					return nil
				})
			}
		}
		nettest.Eventually(b, time.Minute, "all pods to be ready", func() error {
			n := 0
			for _, p := range h.kubelet.allPods() {
				p.mu.Lock()
				if !p.dirty && p.want != nil && len(p.want.ContainerStatuses) == 1 && p.want.ContainerStatuses[0].Ready {
					n++
				}
				p.mu.Unlock()
			}
			if n < pods {
				return fmt.Errorf("%d of them", n)
			}
			return nil
		})
		up += time.Since(start)
		start = time.Now()
		for i := range pods {
			h.delete(fmt.Sprint("p", i), 0)
		}
		nettest.Eventually(b, time.Minute, "all pods to be gone", func() error {
			if n := len(h.kubelet.allPods()); n > 0 {
				return fmt.Errorf("%d are there", n)
			}
			return nil
		})
		down += time.Since(start)
		b.StopTimer()
		h.stop()
		b.StartTimer()
	}
	b.ReportMetric(float64(pods*b.N)/up.Seconds(), "pods-ready/s")
	b.ReportMetric(float64(pods*b.N)/down.Seconds(), "pods-gone/s")
}
