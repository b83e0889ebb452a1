// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/internal/nettest"
)

// waitTime bounds every wait; it is only reached by a failure.
const waitTime = 10 * time.Second

func refused(err error) error {
	if apierrors.IsUnauthorized(err) {
		return nil
	}
	return fmt.Errorf("got %w", errors.Join(errors.New("not refused"), err))
}

// next returns the next event of a watch.
func next(tb testing.TB, w watch.Interface) watch.Event {
	tb.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			tb.Fatal("the watch has ended")
		}
		return e
	case <-time.After(waitTime):
		tb.Fatal("no event")
	}
	return watch.Event{}
}

func makeConfigMaps(tb testing.TB, s *testServer, n int) {
	tb.Helper()
	for i := range n {
		c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c%02d", i), Labels: map[string]string{"n": "x"}}}
		if _, err := s.client.CoreV1().ConfigMaps("default").Create(tb.Context(), c, metav1.CreateOptions{}); err != nil {
			tb.Fatal(err)
		}
	}
}

// bothWays runs test against a server with the watch cache and against one
// without: a client must not be able to tell.
func bothWays(t *testing.T, test func(t *testing.T, s *testServer)) {
	t.Helper()
	for name, without := range map[string]bool{"watch cache": false, "store": true} {
		t.Run(name, func(t *testing.T) {
			test(t, startServer(t, "", func(c *Config) { c.noWatchCache = without }))
		})
	}
}

// TestWatchList: initial events, then the bookmark that ends them.
func TestWatchList(t *testing.T) { bothWays(t, testWatchList) }

func testWatchList(t *testing.T, s *testServer) {
	makeNamespace(t, s, "default")
	makeConfigMaps(t, s, 3)
	w, err := s.client.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{
		SendInitialEvents: ptr.To(true), ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan, AllowWatchBookmarks: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for range 3 {
		if e := next(t, w); e.Type != watch.Added {
			t.Fatalf("event %s %v", e.Type, e.Object)
		}
	}
	e := next(t, w)
	c, ok := e.Object.(*corev1.ConfigMap)
	if e.Type != watch.Bookmark || !ok || c.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Fatalf("the end of the initial events: %s %v", e.Type, e.Object)
	}
	if c.Name != "" || c.ResourceVersion == "" {
		t.Errorf("the bookmark: %+v", c.ObjectMeta)
	}
}

// TestStopEndsWatches: a server stops at once although clients watch it, and
// their watches end rather than hang.
func TestStopEndsWatches(t *testing.T) { bothWays(t, testStopEndsWatches) }

func testStopEndsWatches(t *testing.T, s *testServer) {
	makeNamespace(t, s, "default")
	w, err := s.client.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	begin := time.Now()
	s.stop()
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("stopping took %v", took)
	}
	select {
	case e, open := <-w.ResultChan():
		if open && e.Type != watch.Error {
			t.Errorf("event %s %v", e.Type, e.Object)
		}
	case <-time.After(waitTime):
		t.Error("the watch hangs")
	}
}

// TestWatchFromZeroAndSelectors: revision 0 sends what is there; an object that
// stops matching is deleted for the watcher.
func TestWatchFromZeroAndSelectors(t *testing.T) { bothWays(t, testWatchFromZeroAndSelectors) }

func testWatchFromZeroAndSelectors(t *testing.T, s *testServer) {
	ctx := t.Context()
	makeNamespace(t, s, "default")
	makeConfigMaps(t, s, 1)
	maps := s.client.CoreV1().ConfigMaps("default")
	w, err := maps.Watch(ctx, metav1.ListOptions{ResourceVersion: "0", LabelSelector: "n=x"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	e := next(t, w)
	c, ok := e.Object.(*corev1.ConfigMap)
	if e.Type != watch.Added || !ok {
		t.Fatalf("first event: %s %v", e.Type, e.Object)
	}
	c.Labels["n"] = "y"
	changed, err := maps.Update(ctx, c, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	e = next(t, w)
	gone, ok := e.Object.(*corev1.ConfigMap)
	if e.Type != watch.Deleted || !ok || gone.Labels["n"] != "x" || gone.ResourceVersion != changed.ResourceVersion {
		t.Errorf("an object that matches no more: %s %v", e.Type, e.Object)
	}
	changed.Labels["n"] = "x"
	if _, err := maps.Update(ctx, changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if e = next(t, w); e.Type != watch.Added {
		t.Errorf("an object that matches again: %s", e.Type)
	}
}

// TestListRevisions: an empty list is a list, and a revision that does not exist
// yet is a time-out that a client may repeat.
func TestListRevisions(t *testing.T) { bothWays(t, testListRevisions) }

func testListRevisions(t *testing.T, s *testServer) {
	ctx := t.Context()
	makeNamespace(t, s, "default")
	get := s.client.CoreV1().RESTClient().Get
	body, err := get().AbsPath("/api/v1/configmaps").SetHeader("Accept", "application/json").DoRaw(ctx)
	if err != nil || !strings.Contains(string(body), `"items":[]`) {
		t.Errorf("an empty list: %v %s", err, body)
	}
	err = get().AbsPath("/api/v1/configmaps").Param("resourceVersion", "999999").Param("resourceVersionMatch", "NotOlderThan").MaxRetries(0).Do(ctx).Error()
	wantError(t, "a revision from the future", err, apierrors.IsTimeout, "Too large resource version")
	err = get().AbsPath("/api/v1/configmaps").Param("resourceVersionMatch", "Exact").Do(ctx).Error()
	wantError(t, "match without a revision", err, apierrors.IsInvalid, "resourceVersionMatch is forbidden unless resourceVersion is provided")
}

func TestPages(t *testing.T) { bothWays(t, testPages) }

func testPages(t *testing.T, s *testServer) {
	ctx := t.Context()
	makeNamespace(t, s, "default")
	makeConfigMaps(t, s, 25)
	maps := s.client.CoreV1().ConfigMaps("default")
	var names []string
	opts := metav1.ListOptions{Limit: 10}
	revision := ""
	for page := 0; ; page++ {
		list, err := maps.List(ctx, opts)
		if err != nil {
			t.Fatal(err)
		}
		if revision == "" {
			revision = list.ResourceVersion
			if list.RemainingItemCount == nil || *list.RemainingItemCount != 15 {
				t.Errorf("remaining: %v", list.RemainingItemCount)
			}
			// What is written meanwhile is not in the later pages.
			c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "zzz"}}
			if _, err := maps.Create(ctx, c, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if list.ResourceVersion != revision {
			t.Errorf("page %d is of revision %s, the first of %s", page, list.ResourceVersion, revision)
		}
		for _, c := range list.Items {
			names = append(names, c.Name)
		}
		if list.Continue == "" {
			break
		}
		opts.Continue = list.Continue
	}
	if len(names) != 25 || names[0] != "c00" || names[24] != "c24" {
		t.Errorf("pages: %v", names)
	}
}

// TestInformer runs a shared informer over protobuf and the watch list.
func TestInformer(t *testing.T) { bothWays(t, testInformer) }

func testInformer(t *testing.T, s *testServer) {
	makeNamespace(t, s, "default")
	makeConfigMaps(t, s, 5)
	ctx, cancel := context.WithCancel(t.Context())
	factory := informers.NewSharedInformerFactory(s.client, 0)
	lister := factory.Core().V1().ConfigMaps().Lister()
	informer := factory.Core().V1().ConfigMaps().Informer()
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		t.Fatal("the informer does not sync")
	}
	if _, err := lister.ConfigMaps("default").Get("c03"); err != nil {
		t.Error(err)
	}
	if err := s.client.CoreV1().ConfigMaps("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "n=x"}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, waitTime, "the informer to see the deletions", func() error {
		if n := len(informer.GetStore().ListKeys()); n != 0 {
			return fmt.Errorf("%d left", n)
		}
		return nil
	})
}
