// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/sandbox"
)

// pod is what the kubelet knows about one pod beyond its API object. Only the
// worker that has the pod's UID from the queue changes it, but for what containers
// and probes report; mu guards all of it for readers.
type pod struct {
	uid types.UID

	// wiring is held while the network is called for the pod from outside the
	// queue, and when it is detached.
	wiring sync.Mutex
	// holding is held while a holder is looked for and started.
	holding sync.Mutex

	mu     sync.Mutex
	latest *corev1.Pod // newest object from the API, never changed
	gone   bool        // the API has no such pod any more

	sandbox *sandbox.Sandbox
	ips     []netip.Addr // set once the network has attached the pod
	started time.Time    // when the kubelet took the pod up

	containers map[string]*container
	// blocked says why containers cannot start yet (sandbox, network, volumes);
	// tries counts attempts of the step that fails.
	blocked string
	tries   int

	// end is set once the pod is on its way out.
	end *ending

	// phase, reason and message override what the containers say, for a pod that
	// the kubelet itself gave up.
	phase           corev1.PodPhase
	reason, message string

	want    *corev1.PodStatus // what the API ought to have
	written string            // resource version of the last write
	dirty   bool              // want is not written yet
	// released is set when a pod that ended by itself has given back its network and
	// its namespaces, removed when nothing of the pod is left on the node.
	released, removed bool

	// down ends when the pod's namespaces go, and with them what clients have open
	// to its ports; takeDown ends it, once or more often.
	down     context.Context
	takeDown context.CancelFunc
}

func newPod(o *corev1.Pod) *pod {
	down, takeDown := context.WithCancel(context.Background())
	return &pod{
		uid: o.UID, latest: o, started: time.Now(), containers: map[string]*container{},
		down: down, takeDown: takeDown,
	}
}

func (p *pod) setLatest(o *corev1.Pod, deleted bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latest = o
	p.gone = p.gone || deleted
}

// object returns the newest API object; it must not be changed.
func (p *pod) object() *corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.latest
}

func (p *pod) box() *sandbox.Sandbox {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sandbox
}

// attached returns the pod's addresses while the network has to keep it.
func (p *pod) attached() ([]netip.Addr, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ips) == 0 || p.latest.Spec.HostNetwork || p.end != nil || p.released || p.removed {
		return nil, false
	}
	return p.ips, true
}

// addresses returns the pod's addresses.
func (p *pod) addresses() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ips
}

// unfinished reports whether the pod still has something to be waited for.
func (p *pod) unfinished() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dirty || p.end != nil || (p.latest.DeletionTimestamp != nil || p.gone) && !p.removed
}

// container returns the state of a container, made on first use.
func (p *pod) container(name string) *container {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.containers[name]
	if c == nil {
		c = &container{name: name}
		p.containers[name] = c
	}
	return c
}

// block notes why containers cannot start and how long to wait before the next
// try; unblock forgets it.
func (p *pod) block(why string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked = why
	p.tries++
	return backoffAfter(p.tries, 250*time.Millisecond, 30*time.Second)
}

func (p *pod) unblock() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.blocked, p.tries = "", 0
}

// backoffAfter doubles first for each try, up to most.
func backoffAfter(tries int, first, most time.Duration) time.Duration {
	d := first
	for i := 1; i < tries && d < most; i++ {
		d *= 2
	}
	return min(d, most)
}

// runner is what runs a container: a server in this process, or a real process.
type runner interface {
	// done is closed when it has ended; result is valid then.
	done() <-chan struct{}
	result() sandbox.Exit
	// terminate asks it to end, kill makes it. Neither waits.
	terminate()
	kill()
}

// container is the state of one container of a pod. Its fields are guarded by the
// pod's mu.
type container struct {
	name string
	// attempt counts restarts; it is the API's restartCount.
	attempt int
	id      string

	run       runner
	startedAt time.Time
	// read is what ran when somebody last read the log.
	read runner
	// exit is set when the attempt has ended, last is how the attempt before did.
	exit *corev1.ContainerStateTerminated
	last *corev1.ContainerStateTerminated

	// waiting says why there is no attempt under way.
	waitReason, waitMessage string
	// startDue is when the next attempt may begin; backoff is the wait after the
	// next failure.
	startDue time.Time
	backoff  time.Duration
	// pulls counts failed looks for the image.
	pulls int

	// probes of the running attempt. Without a startup or readiness probe the two
	// are true as soon as it runs.
	startupDone, ready bool
	stopProbes         func()
	// killing is set once the attempt was told to end; why goes into its state.
	killing bool
	why     string
	// postStart has run, or there is none.
	hooked bool
}

// running reports whether an attempt is under way.
func (c *container) running() bool { return c.run != nil && c.exit == nil }
