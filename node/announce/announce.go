// SPDX-License-Identifier: Apache-2.0

// Package announce makes a node answer for load balancer addresses, as MetalLB's
// speaker does in layer 2 mode: it answers ARP requests for the addresses of those
// Services that name this node as their announcer, on the node network only (for IPv6
// it answers neighbour solicitations), and tells everybody there unasked when it takes
// one over.
//
// The answers come from a packet socket and not from the kernel: no interface gets
// the address. An address on a node would be delivered to the node itself where no
// proxy rule takes it, would be chosen as a source, and would be answered by every
// node that has it. What arrives for the address is the Service proxy's business.
//
// Who announces is decided elsewhere (package controller/loadbalancer) and read from
// the API. When this process ends, the answers end with it.
package announce

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/internal/pace"
	"github.com/kplab/kplab/internal/settle"
)

// annotationNode is where the load balancer's controller writes the elected node.
const annotationNode = "kplab/announced-by"

const (
	// minInterval makes one look of the events of one change.
	minInterval = 5 * time.Millisecond
	// lookEvery finds a link that was replaced by another of the same name.
	lookEvery = 10 * time.Second
	// repeats and repeatEvery are the gratuitous announcements after the first:
	// a switch or a client may miss one.
	repeats     = 3
	repeatEvery = time.Second
)

// Config says for which node an Announcer works.
type Config struct {
	NodeName string
	// NS is the node's namespace and Link the name of its link to the node network.
	NS   *netns.NS
	Link string
	// Informers gives Services; New registers with it.
	Informers informers.SharedInformerFactory
	// Recorder writes the event that tells of a new announcer; nil writes none.
	Recorder record.EventRecorder
	Log      *slog.Logger
}

// Announcer answers for one node.
type Announcer struct {
	cfg      Config
	services corelisters.ServiceLister
	// informer, handle and from are the subscription: what to end, and the revision
	// at which it came in.
	informer cache.SharedIndexInformer
	handle   cache.ResourceEventHandlerRegistration
	from     string
	looks    *pace.Runner
	repeats  *pace.Runner
	witness  *settle.Witness

	mu sync.Mutex
	// addrs are the addresses answered for, with how often each is still to be told.
	addrs map[netip.Addr]int
	link  *link // nil while there is nothing to answer
	// told are the Services, by key and address, that have had their event. Only
	// the loop uses it.
	told map[string]bool
	// readers are the goroutines behind links.
	readers sync.WaitGroup
}

// New returns an announcer that does nothing until Run.
func New(cfg Config) (*Announcer, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	a := &Announcer{cfg: cfg, addrs: map[netip.Addr]int{}, told: map[string]bool{}}
	a.services = cfg.Informers.Core().V1().Services().Lister()
	a.informer = cfg.Informers.Core().V1().Services().Informer()
	a.looks = pace.New(pace.Config{
		Name: "announcements of " + cfg.NodeName, MinInterval: minInterval, MaxInterval: lookEvery,
		OnError: func(err error) {
			cfg.Log.Error("cannot announce load balancer addresses; trying again", "node", cfg.NodeName, "error", err)
		},
	}, a.look)
	a.repeats = pace.New(pace.Config{Name: "gratuitous ARP of " + cfg.NodeName, MinInterval: repeatEvery}, a.repeat)
	a.witness = settle.NewWitness("announcer/"+cfg.NodeName, a.looks.Pending)
	a.witness.Observe("services", "0")
	on := func(old, cur any) {
		rev := ""
		for _, obj := range []any{old, cur} {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if svc, ok := obj.(*corev1.Service); ok && svc != nil {
				if svc.Annotations[annotationNode] == cfg.NodeName {
					a.looks.Kick()
				}
				rev = svc.ResourceVersion
			}
		}
		a.witness.Observe("services", rev)
	}
	a.from = a.informer.LastSyncResourceVersion()
	var err error
	a.handle, err = a.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { on(nil, obj) }, UpdateFunc: on, DeleteFunc: func(obj any) { on(obj, nil) },
	})
	if err != nil {
		return nil, fmt.Errorf("announcer of node %s: watch services: %w", cfg.NodeName, err)
	}
	return a, nil
}

// Witness tells how far the announcer has come.
func (a *Announcer) Witness() *settle.Witness { return a.witness }

// Addresses lists what the node answers for now.
func (a *Announcer) Addresses() []netip.Addr {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Keys(a.addrs), netip.Addr.Compare)
}

// Run announces until ctx ends, and stops answering before it returns. It runs once.
func (a *Announcer) Run(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), a.handle.HasSynced) {
		// A node that begins later than the informers heard of no deletion before.
		a.witness.Observe("services", a.from)
		a.looks.Kick()
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = a.repeats.Run(ctx) }) // it returns nil
	err := a.looks.Run(ctx)
	wg.Wait()
	a.drop(nil)
	a.readers.Wait()
	return errors.Join(err, a.informer.RemoveEventHandler(a.handle))
}

// look makes the set of addresses true, and the socket that answers for them.
func (a *Announcer) look(context.Context) error {
	services, err := a.services.List(labels.Everything())
	if err != nil {
		return err
	}
	want := map[netip.Addr]int{}
	told := map[string]bool{}
	var news []*corev1.Service
	for _, svc := range services {
		if svc.Annotations[annotationNode] != a.cfg.NodeName {
			continue
		}
		for _, in := range svc.Status.LoadBalancer.Ingress {
			ip, err := netip.ParseAddr(in.IP)
			if err != nil || ptr.Deref(in.IPMode, corev1.LoadBalancerIPModeVIP) != corev1.LoadBalancerIPModeVIP {
				continue
			}
			want[ip] = repeats
			name := string(svc.UID) + " " + in.IP
			told[name] = true
			if !a.told[name] {
				news = append(news, svc)
			}
		}
	}
	if len(want) == 0 {
		a.drop(nil)
		a.mu.Lock()
		a.addrs = want
		a.mu.Unlock()
		a.told = told
		return nil
	}
	if err := a.open(); err != nil {
		return err
	}
	a.mu.Lock()
	l := a.link
	var fresh []netip.Addr
	for ip := range want {
		if left, had := a.addrs[ip]; had {
			want[ip] = left
		} else {
			fresh = append(fresh, ip)
		}
	}
	a.addrs = want
	a.mu.Unlock()
	if l == nil {
		return errors.New("the link went away")
	}
	for _, ip := range fresh {
		if err := l.gratuitous(ip); err != nil {
			return fmt.Errorf("announce %s on %s: %w", ip, a.cfg.Link, err)
		}
	}
	if len(fresh) > 0 {
		a.repeats.Kick()
	}
	a.told = told
	for _, svc := range news {
		if a.cfg.Recorder != nil {
			a.cfg.Recorder.Eventf(svc, corev1.EventTypeNormal, "nodeAssigned", "announcing from node %q with protocol \"layer2\"", a.cfg.NodeName)
		}
	}
	return nil
}

// open opens a socket on the link, unless there is one on the link that is there now.
func (a *Announcer) open() error {
	a.mu.Lock()
	have := a.link
	a.mu.Unlock()
	if have != nil {
		if same, err := have.current(a.cfg.NS); err != nil || same {
			return err
		}
		a.drop(have)
	}
	l, err := openLink(a.cfg.NS, a.cfg.Link)
	if err != nil {
		return fmt.Errorf("answer ARP on %s of node %s: %w", a.cfg.Link, a.cfg.NodeName, err)
	}
	a.mu.Lock()
	a.link = l
	// A new link: everybody has to hear of all of it.
	a.addrs = map[netip.Addr]int{}
	a.mu.Unlock()
	for _, answer := range []func(func(netip.Addr) bool) error{l.answerARP, l.answerNDP} {
		a.readers.Go(func() {
			err := answer(a.answers)
			if a.drop(l) {
				// Not closed by us: the link failed.
				a.cfg.Log.Warn("the link on which load balancer addresses are announced failed; opening it again", "node", a.cfg.NodeName, "error", err)
				a.looks.Kick()
			}
		})
	}
	return nil
}

// drop closes the link in use if it is l, or any with nil, and reports whether it did.
func (a *Announcer) drop(l *link) bool {
	a.mu.Lock()
	have := a.link
	mine := have != nil && (l == nil || l == have)
	if mine {
		a.link = nil
	}
	a.mu.Unlock()
	if mine {
		have.close()
	}
	return mine
}

// answers says whether the node answers for an address.
func (a *Announcer) answers(ip netip.Addr) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, yes := a.addrs[ip]
	return yes
}

// repeat tells again of the addresses that are new.
func (a *Announcer) repeat(context.Context) error {
	a.mu.Lock()
	l := a.link
	var due []netip.Addr
	more := false
	for ip, left := range a.addrs {
		if left > 0 {
			due = append(due, ip)
			a.addrs[ip] = left - 1
			more = more || left > 1
		}
	}
	a.mu.Unlock()
	if l == nil {
		return nil
	}
	for _, ip := range due {
		if err := l.gratuitous(ip); err != nil {
			a.cfg.Log.Warn("cannot repeat an announcement", "node", a.cfg.NodeName, "address", ip, "error", err)
		}
	}
	if more {
		a.repeats.Kick()
	}
	return nil
}
