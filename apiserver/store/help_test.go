// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/kplab/kplab/internal/nettest"
)

// patience is the time in which anything that has to happen happens.
const patience = 30 * time.Second

// long is how many times more a test does when there is time (KPLAB_LONG=1).
func long(times int) int {
	if os.Getenv("KPLAB_LONG") != "" {
		return times
	}
	return 1
}

func contextWithPatience() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), patience)
}

// pods is a store of pods in db, as the API server makes one.
func pods(db *DB) *Store {
	return storeOf(db, exampleCodec(), identity.NewEncryptCheckTransformer())
}

func podKey(name string) string { return "/pods/ns/" + name }

func podNamed(name string) *example.Pod {
	return &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
}

func mustCreate(tb testing.TB, s *Store, name string) *example.Pod {
	tb.Helper()
	out := &example.Pod{}
	if err := s.Create(context.Background(), podKey(name), podNamed(name), out, 0); err != nil {
		tb.Fatal(err)
	}
	return out
}

// relabel makes a new version of a pod.
func relabel(ctx context.Context, s *Store, name, label string) (*example.Pod, error) {
	out := &example.Pod{}
	err := s.GuaranteedUpdate(ctx, podKey(name), out, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		obj.(*example.Pod).Labels = map[string]string{"label": label}
		return obj, nil
	}), nil)
	return out, err
}

func mustRelabel(tb testing.TB, s *Store, name, label string) *example.Pod {
	tb.Helper()
	out, err := relabel(context.Background(), s, name, label)
	if err != nil {
		tb.Fatal(err)
	}
	return out
}

func remove(ctx context.Context, s *Store, name string) error {
	return s.Delete(ctx, podKey(name), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
}

func mustDelete(tb testing.TB, s *Store, name string) {
	tb.Helper()
	if err := remove(context.Background(), s, name); err != nil {
		tb.Fatal(err)
	}
}

// list names the pods at a revision ("" = now).
func list(s *Store, rv string) ([]string, error) {
	opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: rv}
	if rv != "" {
		opts.ResourceVersionMatch = metav1.ResourceVersionMatchExact
	}
	var l example.PodList
	err := s.GetList(context.Background(), "/pods/", opts, &l)
	names := make([]string, 0, len(l.Items))
	for _, p := range l.Items {
		names = append(names, p.Name)
	}
	return names, err
}

func mustWatch(tb testing.TB, s *Store, opts storage.ListOptions) watch.Interface {
	tb.Helper()
	opts.Recursive = true
	opts.Predicate.AllowWatchBookmarks = true
	w, err := s.Watch(context.Background(), "/pods/", opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(w.Stop)
	return w
}

// want reads one event and describes it as "TYPE name@rev".
func want(tb testing.TB, w watch.Interface, desc string) {
	tb.Helper()
	if got := next(tb, w); got != desc {
		tb.Errorf("event %q, want %q", got, desc)
	}
}

func next(tb testing.TB, w watch.Interface) string {
	tb.Helper()
	select {
	case e, ok := <-w.ResultChan():
		return describe(e, ok)
	case <-time.After(patience):
		tb.Fatal("no event")
		return ""
	}
}

func describe(e watch.Event, ok bool) string {
	if !ok {
		return "closed"
	}
	if st, ok := e.Object.(*metav1.Status); ok {
		return fmt.Sprintf("%s %s", e.Type, st.Reason)
	}
	p := e.Object.(*example.Pod)
	return fmt.Sprintf("%s %s@%s", e.Type, p.Name, p.ResourceVersion)
}

// gate holds the writer back at the end of each commit until it is opened.
type gate struct {
	reached chan struct{}
	open    chan struct{}
}

// shut makes the next commit of db stop until release is called. It must be set
// before anything is written.
func shut(db *DB) (reached <-chan struct{}, release func()) {
	g := gate{reached: make(chan struct{}), open: make(chan struct{})}
	first := true
	db.afterSync = func(err error) error { // only the writer calls it
		if first {
			first = false
			close(g.reached)
			<-g.open
		}
		return err
	}
	return g.reached, func() { close(g.open) }
}

// waitQueued waits until n ops wait for the writer.
func waitQueued(tb testing.TB, db *DB, n int) {
	tb.Helper()
	nettest.Eventually(tb, patience, fmt.Sprintf("%d writes wait", n), func() error {
		db.queue.mu.Lock()
		defer db.queue.mu.Unlock()
		if got := len(db.queue.ops); got != n {
			return fmt.Errorf("%d do", got)
		}
		return nil
	})
}

// checkWhole checks a closed file, if there is one.
func checkWhole(tb testing.TB, path string) {
	tb.Helper()
	r, err := Inspect(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil {
		tb.Errorf("%s: %v", path, err)
		return
	}
	for _, p := range r.Problems {
		tb.Errorf("%s: %s", path, p)
	}
}
