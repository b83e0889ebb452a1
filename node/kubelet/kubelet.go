// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"github.com/kplab/kplab/cni"
	"github.com/kplab/kplab/internal/gate"
	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/settle"
	"github.com/kplab/kplab/sandbox"
)

const (
	// syncWorkers look at pods. More do not help: the kernel makes one network
	// namespace or link at a time.
	syncWorkers = 2
	// statusWorkers wait for the API server's commits.
	statusWorkers = 8
)

// Config describes the kubelet of one node.
type Config struct {
	// NodeName and NodeIP identify the node; NodeNS is its network namespace.
	NodeName string
	NodeIP   netip.Addr
	// SecondaryNodeIP is the node's address of the other IP family, when it has one.
	SecondaryNodeIP netip.Addr
	NodeNS          *netns.NS
	// NodeNSName is what the runtime calls that namespace, for pods that live in it.
	NodeNSName string

	Client    kubernetes.Interface
	Informers informers.SharedInformerFactory
	Recorder  record.EventRecorder

	Runtime *sandbox.Runtime
	Network *cni.Network

	// Intake and Work hold the kubelet up while they are closed: the one what it hears
	// from the API, the other all that it does. nil is never.
	Intake, Work *gate.Gate

	// Witness is told of every event; its owner counts Pending. nil makes one.
	Witness *settle.Witness

	// Dir holds volumes and logs of the node's pods, MemoryDir the volumes that are to
	// be in memory.
	Dir, MemoryDir string

	ClusterDNS    []netip.Addr
	ClusterDomain string

	// PartLog writes what a part of the lab says, for the images that show one; nil
	// for none.
	PartLog func(ctx context.Context, part string, w io.Writer) error

	Log *slog.Logger
}

// nodeIPs are the node's addresses, one a family.
func (c *Config) nodeIPs() []netip.Addr {
	all := []netip.Addr{c.NodeIP}
	if c.SecondaryNodeIP.IsValid() {
		all = append(all, c.SecondaryNodeIP)
	}
	return all
}

// Kubelet runs the pods of one node.
type Kubelet struct {
	cfg Config
	log *slog.Logger

	podInformer cache.SharedIndexInformer
	services    corelisters.ServiceLister
	configMaps  corelisters.ConfigMapLister
	secrets     corelisters.SecretLister
	synced      []cache.InformerSynced
	listens     []listening
	queue       workqueue.TypedDelayingInterface[types.UID]
	statusQueue workqueue.TypedRateLimitingInterface[types.UID]
	witness     *settle.Witness
	inFlight    atomic.Int64

	images imageDirs
	meter  meter

	mu   sync.Mutex
	pods map[types.UID]*pod

	// started is closed once everything that a crash left behind was looked at.
	started chan struct{}
	// work holds everything that runs beside the workers: servers, probes, hooks.
	work    sync.WaitGroup
	workCtx context.Context
	stop    context.CancelFunc
}

// New returns a kubelet. It registers its event handlers, so it has to be called
// before the informers start.
func New(cfg Config) (*Kubelet, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Recorder == nil {
		cfg.Recorder = &record.FakeRecorder{}
	}
	ctx, stop := context.WithCancel(context.Background())
	k := &Kubelet{
		cfg: cfg, log: cfg.Log.With("node", cfg.NodeName), pods: map[types.UID]*pod{},
		queue:       workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[types.UID]{}),
		statusQueue: workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[types.UID](20*time.Millisecond, 10*time.Second)),
		started:     make(chan struct{}), workCtx: ctx, stop: stop,
	}
	k.meter.since = time.Now()
	k.witness = cfg.Witness
	if k.witness == nil {
		k.witness = settle.NewWitness("kubelet/"+cfg.NodeName, k.Pending)
	}
	core := cfg.Informers.Core().V1()
	k.podInformer = core.Pods().Informer()
	k.services, k.configMaps, k.secrets = core.Services().Lister(), core.ConfigMaps().Lister(), core.Secrets().Lister()
	for _, h := range []struct {
		informer cache.SharedIndexInformer
		resource string
		handle   func(obj any, deleted bool)
	}{
		{k.podInformer, "pods", k.onPod},
		{core.ConfigMaps().Informer(), "configmaps", k.onSource("ConfigMap")},
		{core.Secrets().Informer(), "secrets", k.onSource("Secret")},
		{core.Services().Informer(), "services", func(any, bool) {}},
	} {
		if err := k.listen(h.informer, h.resource, h.handle); err != nil {
			stop()
			return nil, err
		}
	}
	return k, nil
}

// listen registers a handler that tells the witness after it queued the event.
func (k *Kubelet) listen(informer cache.SharedIndexInformer, resource string, handle func(obj any, deleted bool)) error {
	k.witness.Observe(resource, "0")
	event := func(obj any, deleted bool) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if k.cfg.Intake.Wait(k.workCtx) != nil {
			return // the kubelet has ended
		}
		handle(obj, deleted)
		if m, err := meta.Accessor(obj); err == nil {
			k.witness.Observe(resource, m.GetResourceVersion())
		}
	}
	// A kubelet that begins later than the informers gets what they have; what was
	// deleted before no event will tell.
	from := informer.LastSyncResourceVersion()
	reg, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { event(obj, false) },
		UpdateFunc: func(_, obj any) { event(obj, false) },
		DeleteFunc: func(obj any) { event(obj, true) },
	})
	if err != nil {
		return fmt.Errorf("listen to %s: %w", resource, err)
	}
	k.synced = append(k.synced, reg.HasSynced)
	k.listens = append(k.listens, listening{informer, reg, resource, from})
	return nil
}

// listening is one subscription to an informer, and the revision that it began with.
type listening struct {
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
	resource string
	from     string
}

// unlisten ends the subscriptions: the informers may go on without this kubelet.
func (k *Kubelet) unlisten() {
	for _, l := range k.listens {
		if err := l.informer.RemoveEventHandler(l.handle); err != nil {
			k.log.Warn("the kubelet still listens", "to", l.resource, "error", err)
		}
	}
}

// Witness tells how far the kubelet has come. Probes and back-offs that wait for
// their time are not pending work.
func (k *Kubelet) Witness() *settle.Witness { return k.witness }

// Pending counts what is queued and in hand, statuses that the API does not have
// yet, and pods on their way out.
func (k *Kubelet) Pending() int {
	n := k.queue.Len() + int(k.inFlight.Load())
	for _, p := range k.allPods() {
		if p.unfinished() {
			n++
		}
	}
	return n
}

// onPod takes up a pod of this node.
func (k *Kubelet) onPod(obj any, deleted bool) {
	p, ok := obj.(*corev1.Pod)
	if !ok || p.Spec.NodeName != k.cfg.NodeName {
		return
	}
	k.mu.Lock()
	known := k.pods[p.UID]
	if known == nil {
		if deleted {
			k.mu.Unlock()
			return
		}
		known = newPod(p)
		k.pods[p.UID] = known
	}
	k.mu.Unlock()
	known.setLatest(p, deleted)
	k.queue.Add(p.UID)
}

// onSource wakes the pods that mount or read the object that changed.
func (k *Kubelet) onSource(kind string) func(obj any, deleted bool) {
	return func(obj any, _ bool) {
		m, err := meta.Accessor(obj)
		if err != nil {
			return
		}
		for _, p := range k.allPods() {
			spec := p.object()
			if spec.Namespace == m.GetNamespace() && refersTo(spec, kind, m.GetName()) {
				k.queue.Add(spec.UID)
			}
		}
	}
}

func (k *Kubelet) allPods() []*pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := make([]*pod, 0, len(k.pods))
	for _, p := range k.pods {
		all = append(all, p)
	}
	return all
}

func (k *Kubelet) pod(uid types.UID) *pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.pods[uid]
}

// find returns a pod of this node by name. Of two with one name (one is going) it
// prefers the one that stays.
func (k *Kubelet) find(namespace, name string) *pod {
	var found *pod
	for _, p := range k.allPods() {
		o := p.object()
		if o.Namespace == namespace && o.Name == name && (found == nil || o.DeletionTimestamp == nil) {
			found = p
		}
	}
	return found
}

// Run works until ctx ends. The informers must be running. When it returns, no
// server of a built-in image is open any more; processes, namespaces and addresses
// stay for the next start.
func (k *Kubelet) Run(ctx context.Context) error {
	defer k.work.Wait()
	defer k.unlisten()
	defer k.stop()
	if !cache.WaitForCacheSync(ctx.Done(), k.synced...) {
		return nil
	}
	for _, l := range k.listens {
		k.witness.Observe(l.resource, l.from)
	}
	if err := k.adopt(ctx); err != nil {
		return err
	}
	close(k.started)
	var wg sync.WaitGroup
	for range syncWorkers {
		wg.Go(func() { k.syncLoop(ctx) })
	}
	for range statusWorkers {
		wg.Go(func() { k.statusLoop(ctx) })
	}
	<-ctx.Done()
	k.queue.ShutDown()
	k.statusQueue.ShutDown()
	wg.Wait()
	return nil
}

// syncLoop takes pods from the queue. Two workers never hold the same pod.
func (k *Kubelet) syncLoop(ctx context.Context) {
	for {
		uid, quit := k.queue.Get()
		if quit {
			return
		}
		k.inFlight.Add(1)
		if k.cfg.Work.Wait(ctx) == nil && ctx.Err() == nil {
			if p := k.pod(uid); p != nil {
				k.sync(ctx, p)
			}
		}
		k.queue.Done(uid)
		k.inFlight.Add(-1)
	}
}

// again puts a pod back after a while.
func (k *Kubelet) again(p *pod, after time.Duration) {
	k.queue.AddAfter(p.uid, after)
}

// kick puts a pod back at once.
func (k *Kubelet) kick(p *pod) { k.queue.Add(p.uid) }

// background runs fn beside the workers. Run waits for it.
func (k *Kubelet) background(fn func(ctx context.Context)) {
	k.work.Go(func() { fn(k.workCtx) })
}

// Attachment is a pod's place on the network, for the node's healing loop.
type Attachment struct {
	ID string
	// IPs are the pod's addresses, at most one a family.
	IPs                   []netip.Addr
	PodNamespace, PodName string
}

// Attachments returns the pods that are attached and stay.
func (k *Kubelet) Attachments() []Attachment {
	var all []Attachment
	for _, p := range k.allPods() {
		if ips, ok := p.attached(); ok {
			o := p.object()
			all = append(all, Attachment{ID: string(p.uid), IPs: ips, PodNamespace: o.Namespace, PodName: o.Name})
		}
	}
	return all
}

// Rewire repeats the network's ADD for a pod; one that left meanwhile is success.
func (k *Kubelet) Rewire(ctx context.Context, id string) error {
	p := k.pod(types.UID(id))
	if p == nil {
		return nil
	}
	// Against an end that starts meanwhile: DEL waits for this and comes after it.
	p.wiring.Lock()
	defer p.wiring.Unlock()
	if _, ok := p.attached(); !ok {
		return nil
	}
	a := k.attachment(p)
	_, err := k.cfg.Network.Add(ctx, a)
	if _, gone := os.Stat(a.NetNSPath); errors.Is(gone, os.ErrNotExist) {
		return nil // the pod's sandbox was taken down meanwhile: nothing is left to wire
	}
	return err
}

// attachment names a pod for the network.
func (k *Kubelet) attachment(p *pod) cni.Attachment {
	o := p.object()
	a := cni.Attachment{ID: string(p.uid), PodNamespace: o.Namespace, PodName: o.Name, PodUID: string(p.uid)}
	if sb := p.box(); sb != nil {
		a.NetNSPath = sb.NetNS().Path()
	}
	for _, containers := range [][]corev1.Container{o.Spec.InitContainers, o.Spec.Containers} {
		for _, c := range containers {
			for _, port := range c.Ports {
				if port.HostPort == 0 {
					continue
				}
				m := cni.PortMapping{HostPort: port.HostPort, ContainerPort: port.ContainerPort, HostIP: port.HostIP, Protocol: "tcp"}
				if port.Protocol != "" {
					m.Protocol = strings.ToLower(string(port.Protocol))
				}
				a.Ports = append(a.Ports, m)
			}
		}
	}
	return a
}

// podDir is where a pod's volumes, logs and other files are: one directory, because
// making more would cost a pod as much as its network does.
func (k *Kubelet) podDir(uid types.UID) string { return filepath.Join(k.cfg.Dir, "pods", string(uid)) }

// logFileOf is an attempt's log.
func (k *Kubelet) logFileOf(uid types.UID, container string, attempt int) string {
	return filepath.Join(k.podDir(uid), container+"."+strconv.Itoa(attempt)+".log")
}

// event records an event about a pod. Recording is asynchronous.
func (k *Kubelet) event(p *corev1.Pod, kind, reason, format string, args ...any) {
	k.cfg.Recorder.Eventf(p, kind, reason, format, args...)
}

// containerEvent records an event about one container of a pod: the field path says
// which, and kubectl describe begins the message with it.
func (k *Kubelet) containerEvent(p *corev1.Pod, container, kind, reason, format string, args ...any) {
	k.cfg.Recorder.Eventf(containerRef(p, container), kind, reason, format, args...)
}

// containerRef refers to a container the way upstream's events do.
func containerRef(p *corev1.Pod, container string) *corev1.ObjectReference {
	list := "containers"
	for i := range p.Spec.InitContainers {
		if p.Spec.InitContainers[i].Name == container {
			list = "initContainers"
		}
	}
	if ephemeral(p, container) != nil {
		list = "ephemeralContainers"
	}
	return &corev1.ObjectReference{
		Kind: "Pod", APIVersion: "v1", Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
		FieldPath: "spec." + list + "{" + container + "}",
	}
}
