// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/apitesting"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
)

// The suite that upstream runs against its etcd store, run against ours. What
// is called here and in cacher_test.go, and what is not, is checked to be
// complete in complete_test.go.

// valuePrefix is what the test transformer puts in front of each value.
const valuePrefix = "test!"

// exampleCodecs knows the kinds that upstream's suite stores.
func exampleCodecs() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	utilruntime.Must(example.AddToScheme(scheme))
	utilruntime.Must(examplev1.AddToScheme(scheme))
	return serializer.NewCodecFactory(scheme)
}

func exampleCodec() runtime.Codec {
	return apitesting.TestCodec(exampleCodecs(), examplev1.SchemeGroupVersion)
}

func newPod() runtime.Object     { return &example.Pod{} }
func newPodList() runtime.Object { return &example.PodList{} }

// openDB opens a DB in a directory of its own.
func openDB(tb testing.TB, opts Options) *DB {
	tb.Helper()
	return openAt(tb, filepath.Join(tb.TempDir(), "store.db"), opts)
}

// openAt opens a DB that is closed, and checked, when the test ends.
func openAt(tb testing.TB, path string, opts Options) *DB {
	tb.Helper()
	db, err := Open(path, opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := db.Close(); err != nil {
			tb.Error(err)
		}
		checkWhole(tb, path)
	})
	return db
}

// suiteStore is a store of pods as upstream's suite wants it.
func suiteStore(tb testing.TB, codec runtime.Codec, transformer value.Transformer) *Store {
	tb.Helper()
	return storeOf(openDB(tb, Options{NoFsync: true, ProgressInterval: 200 * time.Millisecond}), codec, transformer)
}

func storeOf(db *DB, codec runtime.Codec, transformer value.Transformer) *Store {
	s := db.newStore(Config{
		Codec: codec, NewFunc: newPod, NewListFunc: newPodList, Prefix: "/pods",
		GroupResource: schema.GroupResource{Resource: "pods"}, Transformer: transformer,
	})
	// The suite brings errors that are marked already, and some that must not be.
	s.transformer, s.codec = transformer, codec
	return s
}

func podStore(tb testing.TB) *Store {
	tb.Helper()
	return suiteStore(tb, exampleCodec(), storagetesting.NewPrefixTransformer([]byte(valuePrefix), false))
}

// bump makes a revision in which nothing of interest happens.
func bump(tb testing.TB, db *DB) int64 {
	tb.Helper()
	for {
		rec, _, err := db.get("/nothing")
		if err != nil {
			tb.Fatal(err)
		}
		o := &op{kind: opPut, key: "/nothing", value: []byte("x")}
		if rec != nil {
			o.expect = rec.rev
		}
		if err := db.submit(context.Background(), o); err != nil {
			tb.Fatal(err)
		}
		if !o.conflict {
			return int64(o.rev)
		}
	}
}

func increaseRV(db *DB) storagetesting.IncreaseRVFunc {
	return func(_ context.Context, t *testing.T) int64 { t.Helper(); return bump(t, db) }
}

func compaction(db *DB) storagetesting.Compaction {
	return func(ctx context.Context, t *testing.T, resourceVersion string) {
		t.Helper()
		rv, err := storage.APIObjectVersioner{}.ParseResourceVersion(resourceVersion)
		if err != nil {
			t.Fatal(err)
		}
		if err := db.Compact(ctx, rv); err != nil {
			t.Fatal(err)
		}
		bump(t, db) // etcd's compaction writes down how far it came; the suite counts on it
	}
}

// withPrefixTransformer and withTransformer let the suite change how values
// are read.
type withPrefixTransformer struct{ *Store }

func (s withPrefixTransformer) UpdatePrefixTransformer(modify storagetesting.PrefixTransformerModifier) func() {
	before := s.transformer.(*storagetesting.PrefixTransformer)
	copied := *before
	s.transformer = modify(&copied)
	return func() { s.transformer = before }
}

type withTransformer struct{ *Store }

func (s withTransformer) UpdateTransformer(modify storagetesting.TransformerModifier) func() {
	before := s.transformer
	s.transformer = modify(before)
	return func() { s.transformer = before }
}

// failingTransformer and failingCodec fail on demand.
type failingTransformer struct {
	value.Transformer
	fail atomic.Bool
}

func (f *failingTransformer) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	if f.fail.Load() {
		return nil, false, errors.New("made to fail")
	}
	return f.Transformer.TransformFromStorage(ctx, data, dataCtx)
}

type failingCodec struct {
	runtime.Codec
	fail atomic.Bool
}

func (f *failingCodec) Decode(data []byte, gvk *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if f.fail.Load() {
		return nil, nil, errors.New("made to fail")
	}
	return f.Codec.Decode(data, gvk, into)
}

// keyIsClean checks what the suite says about stored bytes: no resource version.
func keyIsClean(s *Store) storagetesting.KeyValidation {
	return func(_ context.Context, t *testing.T, key string) {
		t.Helper()
		rec, _, err := s.db.get(key)
		if err != nil || rec == nil {
			t.Fatalf("%s: %v, %v", key, rec, err)
		}
		obj, err := runtime.Decode(s.codec, rec.value[len(valuePrefix):])
		if err != nil {
			t.Fatal(err)
		}
		if pod := obj.(*example.Pod); pod.ResourceVersion != "" || pod.SelfLink != "" {
			t.Errorf("stored with resource version %q and self link %q", pod.ResourceVersion, pod.SelfLink)
		}
	}
}

// reads checks that a list decodes what it has to and no more, and that the
// pages it reads grow.
func reads(s *Store) storagetesting.CallsValidation {
	var pages atomic.Uint64
	s.onList = func(context.Context, string, int64, int64) { pages.Add(1) }
	return func(t *testing.T, pageSize, objects uint64) {
		t.Helper()
		if got := s.transformer.(*storagetesting.PrefixTransformer).GetReadsAndReset(); got != objects {
			t.Errorf("%d objects decoded, want %d", got, objects)
		}
		want := uint64(1)
		for sum, size := uint64(1), pageSize; pageSize != 0 && sum < objects; want++ {
			size = min(2*size, maxPage)
			sum += size
		}
		if got := pages.Swap(0); got != want {
			t.Errorf("%d pages read, want %d", got, want)
		}
	}
}

func TestSuite(t *testing.T) {
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
		"NamespaceScopedList":                        storagetesting.RunTestNamespaceScopedList,
		"GuaranteedUpdateWithTTL":                    storagetesting.RunTestGuaranteedUpdateWithTTL,
		"GuaranteedUpdateWithConflict":               storagetesting.RunTestGuaranteedUpdateWithConflict,
		"GuaranteedUpdateWithSuggestionAndConflict":  storagetesting.RunTestGuaranteedUpdateWithSuggestionAndConflict,
		"KeySchema":                                  storagetesting.RunTestKeySchema,
		"Watch":                                      storagetesting.RunTestWatch,
		"DeleteTriggerWatch":                         storagetesting.RunTestDeleteTriggerWatch,
		"WatchFromNonZero":                           storagetesting.RunTestWatchFromNonZero,
		"DelayedWatchDelivery":                       storagetesting.RunTestDelayedWatchDelivery,
		"WatchContextCancel":                         storagetesting.RunTestWatchContextCancel,
		"WatcherTimeout":                             storagetesting.RunTestWatcherTimeout,
		"WatchDeleteEventObjectHaveLatestRV":         storagetesting.RunTestWatchDeleteEventObjectHaveLatestRV,
		"WatchInitializationSignal":                  storagetesting.RunTestWatchInitializationSignal,
		"ClusterScopedWatch":                         storagetesting.RunTestClusterScopedWatch,
		"NamespaceScopedWatch":                       storagetesting.RunTestNamespaceScopedWatch,
		"SendInitialEventsBackwardCompatibility":     storagetesting.RunSendInitialEventsBackwardCompatibility,
		"WatchSemantics":                             storagetesting.RunWatchSemantics,
		"WatchSemanticInitialEventsExtended":         storagetesting.RunWatchSemanticInitialEventsExtended,
		"WatchListMatchSingle":                       storagetesting.RunWatchListMatchSingle,
	}
	for name, run := range plain {
		t.Run(name, func(t *testing.T) { run(t.Context(), t, podStore(t)) })
	}
	special := map[string]func(*testing.T, *Store){
		"Create": func(t *testing.T, s *Store) { storagetesting.RunTestCreate(t.Context(), t, s, keyIsClean(s)) },
		"List": func(t *testing.T, s *Store) {
			storagetesting.RunTestList(t.Context(), t, s, compaction(s.db), false, nil)
		},
		"ConsistentList": func(t *testing.T, s *Store) {
			storagetesting.RunTestConsistentList(t.Context(), t, s, increaseRV(s.db), false, true, false)
		},
		"GetListNonRecursive": func(t *testing.T, s *Store) {
			storagetesting.RunTestGetListNonRecursive(t.Context(), t, increaseRV(s.db), s)
		},
		"CompactRevision": func(t *testing.T, s *Store) {
			storagetesting.RunTestCompactRevision(t.Context(), t, s, increaseRV(s.db), compaction(s.db))
		},
		"ListContinuation": func(t *testing.T, s *Store) {
			storagetesting.RunTestListContinuation(t.Context(), t, s, reads(s))
		},
		"ListPaginationRareObject": func(t *testing.T, s *Store) {
			storagetesting.RunTestListPaginationRareObject(t.Context(), t, s, reads(s))
		},
		"ListContinuationWithFilter": func(t *testing.T, s *Store) {
			storagetesting.RunTestListContinuationWithFilter(t.Context(), t, s, reads(s))
		},
		"ListInconsistentContinuation": func(t *testing.T, s *Store) {
			storagetesting.RunTestListInconsistentContinuation(t.Context(), t, s, compaction(s.db))
		},
		"ListResourceVersionMatch": func(t *testing.T, s *Store) {
			storagetesting.RunTestListResourceVersionMatch(t.Context(), t, withPrefixTransformer{s})
		},
		"GuaranteedUpdate": func(t *testing.T, s *Store) {
			storagetesting.RunTestGuaranteedUpdate(t.Context(), t, withPrefixTransformer{s}, keyIsClean(s))
		},
		"GuaranteedUpdateChecksStoredData": func(t *testing.T, s *Store) {
			storagetesting.RunTestGuaranteedUpdateChecksStoredData(t.Context(), t, withPrefixTransformer{s})
		},
		"TransformationFailure": func(t *testing.T, s *Store) {
			storagetesting.RunTestTransformationFailure(t.Context(), t, withPrefixTransformer{s})
		},
		"WatchFromZero": func(t *testing.T, s *Store) {
			storagetesting.RunTestWatchFromZero(t.Context(), t, s, compaction(s.db))
		},
		"WatchError": func(t *testing.T, s *Store) {
			storagetesting.RunTestWatchError(t.Context(), t, withPrefixTransformer{s})
		},
		"WatchErrorIsBlockingFurtherEvents": func(t *testing.T, s *Store) {
			storagetesting.RunWatchErrorIsBlockingFurtherEvents(t.Context(), t, withPrefixTransformer{s})
		},
		"ProgressNotify": func(t *testing.T, s *Store) {
			storagetesting.RunOptionalTestProgressNotify(t.Context(), t, s, increaseRV(s.db))
		},
		"WatchDispatchBookmarkEvents": func(t *testing.T, s *Store) {
			storagetesting.RunTestWatchDispatchBookmarkEvents(t.Context(), t, s, false)
		},
	}
	for name, run := range special {
		t.Run(name, func(t *testing.T) { run(t, podStore(t)) })
	}
	for _, sizes := range []bool{true, false} {
		t.Run(fmt.Sprintf("Stats/sizes=%v", sizes), func(t *testing.T) {
			s := podStore(t)
			if sizes {
				if err := s.EnableResourceSizeEstimation(func(context.Context) ([]string, error) { return nil, nil }); err != nil {
					t.Fatal(err)
				}
			}
			storagetesting.RunTestStats(t.Context(), t, s, s.codec, s.transformer, sizes)
		})
	}
}

// Objects that cannot be read: with the feature on, as it is by default.
func TestSuiteMalformed(t *testing.T) {
	marked := &malformed{errors.New("bits flipped")}
	failing := func(t *testing.T) (*Store, func(bool)) {
		t.Helper()
		codec := &failingCodec{Codec: exampleCodec()}
		return suiteStore(t, codec, storagetesting.NewPrefixTransformer([]byte(valuePrefix), false)), codec.fail.Store
	}
	for name, run := range map[string]func(*testing.T){
		"DeleteWithConflictAndMissingExpectedTransformOrDecodeError": func(t *testing.T) {
			s, fail := failing(t)
			storagetesting.RunTestDeleteWithConflictAndMissingExpectedTransformOrDecodeError(t.Context(), t, s, fail)
		},
		"DeleteExpectedDecodeError": func(t *testing.T) {
			s, fail := failing(t)
			storagetesting.RunTestDeleteExpectedTransformOrDecodeError(t.Context(), t, s, fail)
		},
		"DeleteExpectedTransformError": func(t *testing.T) {
			tr := &failingTransformer{Transformer: storagetesting.NewPrefixTransformer([]byte(valuePrefix), false)}
			storagetesting.RunTestDeleteExpectedTransformOrDecodeError(t.Context(), t, suiteStore(t, exampleCodec(), tr), tr.fail.Store)
		},
		"DeleteWithSuggestionAndMissingExpectedTransformOrDecodeError": func(t *testing.T) {
			storagetesting.RunTestDeleteWithSuggestionAndMissingExpectedTransformOrDecodeError(t.Context(), t, podStore(t))
		},
		"GetListWithErrorAggregation": func(t *testing.T) {
			storagetesting.RunTestGetListWithErrorAggregation(t.Context(), t, withTransformer{podStore(t)}, marked)
		},
		"GetListWithoutErrorAggregation": func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, false)
			storagetesting.RunTestGetListWithoutErrorAggregation(t.Context(), t, withTransformer{podStore(t)}, marked)
		},
		"WatchWithUnsafeDelete": func(t *testing.T) {
			storagetesting.RunTestWatchWithUnsafeDelete(t.Context(), t, withTransformer{podStore(t)}, marked)
		},
	} {
		t.Run(name, run)
	}
}
