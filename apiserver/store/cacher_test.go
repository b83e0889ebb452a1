// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/client/v3/kubernetes"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/feature"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/kplab/kplab/internal/nettest"
)

// The same suite through the stock watch cache, as upstream runs it through
// its own: what the API server does with our store.

// cached is a watch cache on a store.
type cached struct {
	*cacher.CacheDelegator
	store    *Store
	clock    *clocktesting.FakeClock // of the cache
	ahead    atomic.Int64            // nanoseconds by which it is ahead of the real one
	recorder *storagetesting.KubernetesRecorder
}

// cacheOptions are what single tests want different.
type cacheOptions struct {
	clusterScoped, indexed bool
	codec                  runtime.Codec
	transformer            value.Transformer
}

func newCached(t *testing.T, opts cacheOptions) *cached {
	t.Helper()
	if opts.codec == nil {
		opts.codec = exampleCodec()
	}
	if opts.transformer == nil {
		opts.transformer = identity.NewEncryptCheckTransformer()
	}
	c := &cached{
		store:    suiteStore(t, opts.codec, opts.transformer),
		clock:    clocktesting.NewFakeClock(time.Now()),
		recorder: storagetesting.NewKubernetesRecorder(noEtcd{}),
	}
	t.Cleanup(c.runClock())
	c.store.onList = func(ctx context.Context, key string, rev, limit int64) {
		// etcd's keys begin with a prefix that ours do not have.
		_, _ = c.recorder.List(ctx, "/registry"+key, kubernetes.ListOptions{Revision: rev, Limit: limit})
	}
	nettest.Eventually(t, 10*time.Second, "the cache knows that progress can be asked for", func() error {
		if !feature.DefaultFeatureSupportChecker.Supports(storage.RequestWatchProgress) {
			return errors.New("it does not")
		}
		return nil
	})
	cfg := cacher.Config{
		Storage:             c.store,
		Versioner:           storage.APIObjectVersioner{},
		GroupResource:       schema.GroupResource{Resource: "pods"},
		EventsHistoryWindow: cacher.DefaultEventFreshDuration,
		ResourcePrefix:      "/pods/",
		KeyFunc:             func(obj runtime.Object) (string, error) { return storage.NamespaceKeyFunc("/pods/", obj) },
		GetAttrsFunc:        podAttrs,
		NewFunc:             newPod,
		NewListFunc:         newPodList,
		Codec:               opts.codec,
		Clock:               c.clock,
	}
	if opts.clusterScoped {
		cfg.KeyFunc = func(obj runtime.Object) (string, error) { return storage.NoNamespaceKeyFunc("/pods/", obj) }
	}
	if opts.indexed {
		cfg.IndexerFuncs = map[string]storage.IndexerFunc{
			"spec.nodeName": func(obj runtime.Object) string { return obj.(*example.Pod).Spec.NodeName },
		}
		cfg.Indexers = &cache.Indexers{
			"f:spec.nodeName":      func(obj any) ([]string, error) { return []string{obj.(*example.Pod).Spec.NodeName}, nil },
			"f:metadata.namespace": func(obj any) ([]string, error) { return []string{obj.(*example.Pod).Namespace}, nil },
		}
	}
	inner, err := cacher.NewCacherFromConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := inner.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.CacheDelegator = cacher.NewCacheDelegator(inner, c.store)
	t.Cleanup(func() {
		c.Stop()
		inner.Stop()
	})
	return c
}

// noEtcd answers the recorder, which passes everything on to an etcd client.
type noEtcd struct{ kubernetes.Interface }

func (noEtcd) List(context.Context, string, kubernetes.ListOptions) (kubernetes.ListResponse, error) {
	return kubernetes.ListResponse{}, nil
}

func podAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod, ok := obj.(*example.Pod)
	if !ok {
		return nil, nil, fmt.Errorf("%T is not a pod", obj)
	}
	return pod.Labels, fields.Set{
		"metadata.name":      pod.Name,
		"metadata.namespace": pod.Namespace,
		"spec.nodeName":      pod.Spec.NodeName,
		"spec.restartPolicy": string(pod.Spec.RestartPolicy),
		"status.phase":       string(pod.Status.Phase),
	}, nil
}

// compact compacts the store and turns the cache's clock on until it has noticed.
func (c *cached) compact(ctx context.Context, t *testing.T, resourceVersion string) {
	t.Helper()
	compaction(c.store.db)(ctx, t, resourceVersion)
	want := c.store.CompactRevision()
	nettest.Eventually(t, 10*time.Second, "the cache notices the compaction", func() error {
		if got := c.CompactRevision(); got != want {
			c.ahead.Add(int64(time.Second))
			return fmt.Errorf("it is at %d, not %d", got, want)
		}
		return nil
	})
}

// seesOwnWrites makes Create wait until the cache has the object, which some
// tests of watches count on.
type seesOwnWrites struct{ *cached }

func (c seesOwnWrites) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if err := c.cached.Create(ctx, key, obj, out, ttl); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for tick := time.NewTicker(time.Millisecond); ; {
		got := newPod()
		err := c.Get(ctx, key, storage.GetOptions{ResourceVersion: "0"}, got)
		if err == nil && apiequality.Semantic.DeepEqual(got, out) {
			tick.Stop()
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			tick.Stop()
			return fmt.Errorf("%s is not in the cache: %w", key, errors.Join(ctx.Err(), err))
		}
	}
}

// exchangeable is a transformer that can be exchanged while the cache reads.
type exchangeable struct {
	now atomic.Pointer[value.Transformer]
}

func newExchangeable() *exchangeable {
	e := &exchangeable{}
	e.set(storagetesting.NewPrefixTransformer([]byte(valuePrefix), false))
	return e
}

func (e *exchangeable) set(t value.Transformer) { e.now.Store(&t) }

func (e *exchangeable) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	return (*e.now.Load()).TransformFromStorage(ctx, data, dataCtx)
}

func (e *exchangeable) TransformToStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, error) {
	return (*e.now.Load()).TransformToStorage(ctx, data, dataCtx)
}

// exchanging lets the suite change how the store below the cache reads.
type exchanging struct {
	*cached
	transformer *exchangeable
}

func (e exchanging) UpdatePrefixTransformer(modify storagetesting.PrefixTransformerModifier) func() {
	before := *e.transformer.now.Load()
	e.transformer.set(modify(storagetesting.NewPrefixTransformer([]byte(valuePrefix), false)))
	return func() { e.transformer.set(before) }
}

func TestSuiteCached(t *testing.T) {
	plain := map[string]func(context.Context, *testing.T, storage.Interface){
		"CreateWithTTL":                              storagetesting.RunTestCreateWithTTL,
		"CreateWithKeyExist":                         storagetesting.RunTestCreateWithKeyExist,
		"Get":                                        storagetesting.RunTestGet,
		"UnconditionalDelete":                        storagetesting.RunTestUnconditionalDelete,
		"ConditionalDelete":                          storagetesting.RunTestConditionalDelete,
		"DeleteWithSuggestion":                       storagetesting.RunTestDeleteWithSuggestion,
		"DeleteWithSuggestionAndConflict":            storagetesting.RunTestDeleteWithSuggestionAndConflict,
		"DeleteWithConflict":                         storagetesting.RunTestDeleteWithConflict,
		"DeleteWithSuggestionOfDeletedObject":        storagetesting.RunTestDeleteWithSuggestionOfDeletedObject,
		"ValidateDeletionWithSuggestion":             storagetesting.RunTestValidateDeletionWithSuggestion,
		"ValidateDeletionWithOnlySuggestionValid":    storagetesting.RunTestValidateDeletionWithOnlySuggestionValid,
		"PreconditionalDeleteWithSuggestion":         storagetesting.RunTestPreconditionalDeleteWithSuggestion,
		"PreconditionalDeleteWithOnlySuggestionPass": storagetesting.RunTestPreconditionalDeleteWithOnlySuggestionPass,
		"GetListRecursivePrefix":                     storagetesting.RunTestGetListRecursivePrefix,
		"ListPaging":                                 storagetesting.RunTestListPaging,
		"GuaranteedUpdateWithTTL":                    storagetesting.RunTestGuaranteedUpdateWithTTL,
		"GuaranteedUpdateWithConflict":               storagetesting.RunTestGuaranteedUpdateWithConflict,
		"GuaranteedUpdateWithSuggestionAndConflict":  storagetesting.RunTestGuaranteedUpdateWithSuggestionAndConflict,
		"KeySchema":                                  storagetesting.RunTestKeySchema,
		"Watch":                                      storagetesting.RunTestWatch,
		"DeleteTriggerWatch":                         storagetesting.RunTestDeleteTriggerWatch,
		"WatchFromNonZero":                           storagetesting.RunTestWatchFromNonZero,
		"DelayedWatchDelivery":                       storagetesting.RunTestDelayedWatchDelivery,
		"WatcherTimeout":                             storagetesting.RunTestWatcherTimeout,
		"WatchDeleteEventObjectHaveLatestRV":         storagetesting.RunTestWatchDeleteEventObjectHaveLatestRV,
		"WatchInitializationSignal":                  storagetesting.RunTestWatchInitializationSignal,
		"SendInitialEventsBackwardCompatibility":     storagetesting.RunSendInitialEventsBackwardCompatibility,
		"DeleteWithSuggestionAndMissingExpectedTransformOrDecodeError": func(ctx context.Context, t *testing.T, s storage.Interface) {
			storagetesting.RunTestDeleteWithSuggestionAndMissingExpectedTransformOrDecodeError(ctx, t, s)
		},
	}
	for name, run := range plain {
		t.Run(name, func(t *testing.T) { run(t.Context(), t, newCached(t, cacheOptions{})) })
	}
	special := map[string]func(*testing.T, *cached){
		"Create": func(t *testing.T, c *cached) {
			storagetesting.RunTestCreate(t.Context(), t, c, func(context.Context, *testing.T, string) {})
		},
		"CompactRevision": func(t *testing.T, c *cached) {
			storagetesting.RunTestCompactRevision(t.Context(), t, c, increaseRV(c.store.db), c.compact)
		},
		"ListContinuation": func(t *testing.T, c *cached) {
			storagetesting.RunTestListContinuation(t.Context(), t, c, nil)
		},
		"ListPaginationRareObject": func(t *testing.T, c *cached) {
			storagetesting.RunTestListPaginationRareObject(t.Context(), t, c, nil)
		},
		"ListContinuationWithFilter": func(t *testing.T, c *cached) {
			storagetesting.RunTestListContinuationWithFilter(t.Context(), t, c, nil)
		},
		"WatchFromZero": func(t *testing.T, c *cached) {
			storagetesting.RunTestWatchFromZero(t.Context(), t, c, nil)
		},
		"WatchSemantics": func(t *testing.T, c *cached) {
			storagetesting.RunWatchSemantics(t.Context(), t, seesOwnWrites{c})
		},
		"WatchSemanticInitialEventsExtended": func(t *testing.T, c *cached) {
			storagetesting.RunWatchSemanticInitialEventsExtended(t.Context(), t, seesOwnWrites{c})
		},
		"WatchListMatchSingle": func(t *testing.T, c *cached) {
			storagetesting.RunWatchListMatchSingle(t.Context(), t, seesOwnWrites{c})
		},
		"WatchContextCancel": func(t *testing.T, c *cached) {
			storagetesting.RunTestWatchContextCancel(t.Context(), t, c)
		},
		"WatchDispatchBookmarkEvents": func(t *testing.T, c *cached) {
			storagetesting.RunTestWatchDispatchBookmarkEvents(t.Context(), t, c, true)
		},
		"OptionalWatchBookmarksWithCorrectResourceVersion": func(t *testing.T, c *cached) {
			storagetesting.RunTestOptionalWatchBookmarksWithCorrectResourceVersion(t.Context(), t, c)
		},
	}
	for name, run := range special {
		t.Run(name, func(t *testing.T) { run(t, newCached(t, cacheOptions{})) })
	}
	t.Run("ClusterScopedWatch", func(t *testing.T) {
		storagetesting.RunTestClusterScopedWatch(t.Context(), t, newCached(t, cacheOptions{clusterScoped: true, indexed: true}))
	})
	t.Run("NamespaceScopedWatch", func(t *testing.T) {
		storagetesting.RunTestNamespaceScopedWatch(t.Context(), t, newCached(t, cacheOptions{indexed: true}))
	})
	t.Run("NamespaceScopedList", func(t *testing.T) {
		storagetesting.RunTestNamespaceScopedList(t.Context(), t, newCached(t, cacheOptions{indexed: true}))
	})
	for name, run := range map[string]func(context.Context, testing.TB, storage.Interface, func(bool)){
		"DeleteExpectedTransformOrDecodeError": storagetesting.RunTestDeleteExpectedTransformOrDecodeError,
		"DeleteWithConflictAndMissingExpected": storagetesting.RunTestDeleteWithConflictAndMissingExpectedTransformOrDecodeError,
	} {
		t.Run(name, func(t *testing.T) {
			tr := &failingTransformer{Transformer: identity.NewEncryptCheckTransformer()}
			run(t.Context(), t, newCached(t, cacheOptions{transformer: tr}), tr.fail.Store)
		})
	}
	for name, run := range map[string]func(*testing.T, exchanging){
		"GuaranteedUpdate": func(t *testing.T, e exchanging) {
			storagetesting.RunTestGuaranteedUpdate(t.Context(), t, e, keyIsClean(e.store))
		},
		"GuaranteedUpdateChecksStoredData": func(t *testing.T, e exchanging) {
			storagetesting.RunTestGuaranteedUpdateChecksStoredData(t.Context(), t, e)
		},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newExchangeable()
			run(t, exchanging{newCached(t, cacheOptions{transformer: tr}), tr})
		})
	}
	for _, sizes := range []bool{true, false} {
		t.Run(fmt.Sprintf("Stats/sizes=%v", sizes), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.SizeBasedListCostEstimate, sizes)
			c := newCached(t, cacheOptions{})
			storagetesting.RunTestStats(t.Context(), t, c, c.store.codec, c.store.transformer, sizes)
		})
	}
	for _, snapshots := range []bool{true, false} {
		t.Run(fmt.Sprintf("Lists/snapshots=%v", snapshots), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ListFromCacheSnapshot, snapshots)
			t.Run("List", func(t *testing.T) {
				c := newCached(t, cacheOptions{})
				storagetesting.RunTestList(t.Context(), t, c, c.compact, true, c.recorder)
			})
			t.Run("ConsistentList", func(t *testing.T) {
				c := newCached(t, cacheOptions{})
				storagetesting.RunTestConsistentList(t.Context(), t, c, increaseRV(c.store.db), true, true, snapshots)
			})
			t.Run("GetListNonRecursive", func(t *testing.T) {
				c := newCached(t, cacheOptions{})
				storagetesting.RunTestGetListNonRecursive(t.Context(), t, increaseRV(c.store.db), c)
			})
		})
	}
}

// runClock lets the cache's clock run as the real one does, plus ahead, until
// the function that it returns is called.
func (c *cached) runClock() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				c.clock.SetTime(now.Add(time.Duration(c.ahead.Load())))
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
