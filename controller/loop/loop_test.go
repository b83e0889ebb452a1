// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/internal/nettest"
)

const patience = 10 * time.Second

func run(t *testing.T, l *Loop[Key]) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func TestPendingCountsQueuedInHandAndRetries(t *testing.T) {
	gate, entered := make(chan error), make(chan struct{})
	l := New(Options[Key]{Name: "x", Workers: 2, Sync: func(ctx context.Context, _ Key) error {
		entered <- struct{}{}
		select {
		case err := <-gate:
			return err
		case <-ctx.Done():
			return nil
		}
	}})
	run(t, l)
	a, b, c := Key{"ns", "a"}, Key{"ns", "b"}, Key{"ns", "c"}
	l.Add(a)
	l.Add(b)
	<-entered
	<-entered
	l.Add(c)
	l.Add(c)
	l.Add(a) // again, while it is in hand
	if n := l.Pending(); n != 3 {
		t.Fatalf("pending: %d", n)
	}
	gate <- nil                   // one of them
	gate <- errors.New("not yet") // and the other, which is tried again
	// What follows: c, a again, the failed one again; it may be a itself.
	var wg sync.WaitGroup
	idle := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-entered:
				gate <- nil
			case <-idle:
				return
			}
		}
	})
	nettest.Until(t, patience, "nothing is pending", func() bool { return l.Pending() == 0 })
	close(idle)
	wg.Wait()
	l.After(a, time.Hour)
	if n := l.Pending(); n != 0 {
		t.Fatalf("a look in an hour is pending: %d", n)
	}
}

func TestWatchTellsTheWitness(t *testing.T) {
	old := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "old", ResourceVersion: "5"}}
	client := fake.NewClientset(old)
	factory := informers.NewSharedInformerFactory(client, 0)
	var synced atomic.Int64
	l := New(Options[Key]{Name: "x", Sync: func(context.Context, Key) error { synced.Add(1); return nil }})
	informer := factory.Core().V1().Pods().Informer()
	var gone atomic.Value
	Watch(l, "pods", informer, func(old, cur *corev1.Pod) {
		if cur == nil {
			gone.Store(old.Name)
			return
		}
		l.Add(KeyOf(cur))
	})
	if rev, known := l.Witness().Snapshot().Revs["pods"]; !known || rev != 0 {
		t.Fatal("a subscription is not in the account")
	}
	ctx, cancel := context.WithCancel(t.Context())
	factory.Start(ctx.Done())
	t.Cleanup(factory.Shutdown)
	t.Cleanup(cancel)
	run(t, l)
	nettest.Until(t, patience, "the first list is handled", func() bool { return synced.Load() == 1 && l.Pending() == 0 })
	newer := old.DeepCopy()
	newer.ResourceVersion = "12"
	if _, err := client.CoreV1().Pods("ns").Update(ctx, newer, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Until(t, patience, "revision 12 is seen", func() bool { return l.Witness().Snapshot().Revs["pods"] >= 12 })
	if err := client.CoreV1().Pods("ns").Delete(ctx, "old", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Until(t, patience, "the deletion is seen", func() bool { return gone.Load() == "old" })
}

// What the API refuses is tried again and not owed; it is tried at once when somebody
// says that the reason may be gone.
func TestRefusedIsNotPending(t *testing.T) {
	var tries atomic.Int32
	var open atomic.Bool
	l := New(Options[Key]{Name: "x", Sync: func(context.Context, Key) error {
		tries.Add(1)
		if open.Load() {
			return nil
		}
		return fmt.Errorf("make a pod: %w", apierrors.NewForbidden(corev1.Resource("pods"), "p", errors.New("exceeded quota")))
	}})
	run(t, l)
	l.Add(Key{Name: "a"})
	nettest.Until(t, patience, "it is refused, and nothing is owed", func() bool { return tries.Load() > 0 && l.Pending() == 0 })
	// The retries come ever later; this does not wait for one of them.
	nettest.Until(t, patience, "it is tried again", func() bool { return tries.Load() > 8 })
	open.Store(true)
	before := tries.Load()
	l.RetryRefused()
	nettest.Until(t, time.Second, "it is tried now", func() bool { return tries.Load() > before && l.Pending() == 0 })
	l.RetryRefused()
	if l.Pending() != 0 {
		t.Error("what succeeded is tried again")
	}
}

func TestWatchUnwrapsTombstones(t *testing.T) {
	l := New(Options[Key]{Name: "x"})
	capture := &capturing{SharedIndexInformer: informers.NewSharedInformerFactory(fake.NewClientset(), 0).Core().V1().Pods().Informer()}
	var gone string
	Watch(l, "pods", capture, func(old, cur *corev1.Pod) {
		if cur == nil {
			gone = old.Name
		}
	})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", ResourceVersion: "7"}}
	capture.handler.OnDelete(cache.DeletedFinalStateUnknown{Key: "p", Obj: pod})
	if gone != "p" || l.Witness().Snapshot().Revs["pods"] != 7 {
		t.Fatalf("%q, %+v", gone, l.Witness().Snapshot())
	}
	capture.handler.OnDelete(cache.DeletedFinalStateUnknown{Key: "q", Obj: nil}) // nothing known: no panic
}

// capturing keeps the handler that was registered.
type capturing struct {
	cache.SharedIndexInformer
	handler cache.ResourceEventHandler
}

func (c *capturing) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	c.handler = h
	return c.SharedIndexInformer.AddEventHandler(h)
}
