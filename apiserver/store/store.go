// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// Config says what a Store holds.
type Config struct {
	// Codec encodes objects for the file and decodes them.
	Codec runtime.Codec
	// NewFunc makes an empty object of the kind, NewListFunc an empty list.
	NewFunc, NewListFunc func() runtime.Object
	// Prefix is the resource prefix, for example "/pods". All keys of the
	// resource begin with it and a slash, and no keys of another resource do.
	Prefix string
	// GroupResource is used in error messages.
	GroupResource schema.GroupResource
	// Transformer changes the encoded bytes on their way to the file and back.
	// Default: not at all.
	Transformer value.Transformer
}

// Store is the storage.Interface of one resource in a DB.
type Store struct {
	db          *DB
	prefix      string // with a slash at both ends
	resource    schema.GroupResource
	codec       runtime.Codec
	transformer value.Transformer
	newFunc     func() runtime.Object
	versioner   storage.APIObjectVersioner
	unsafe      bool        // malformed objects can be listed and deleted, see corrupt.go
	sizes       atomic.Bool // Stats has sizes
	configErr   error

	onList func(ctx context.Context, key string, rev, limit int64) // tests: a read of the file for a list
}

var _ storage.Interface = (*Store)(nil)

// NewStore gives the storage.Interface of one resource. It belongs to the DB
// and needs no closing. A mistake in cfg is the error of every call to it.
func (db *DB) NewStore(cfg Config) storage.Interface { return db.newStore(cfg) }

func (db *DB) newStore(cfg Config) *Store {
	s := &Store{
		db:          db,
		prefix:      cleanPrefix(cfg.Prefix),
		resource:    cfg.GroupResource,
		codec:       cfg.Codec,
		transformer: cfg.Transformer,
		newFunc:     cfg.NewFunc,
		unsafe:      utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion),
	}
	switch {
	case strings.Trim(cfg.Prefix, "/") == "":
		s.configErr = errors.New("store: Config.Prefix is empty; it says where the keys of the resource begin")
	case cfg.Codec == nil:
		s.configErr = fmt.Errorf("store for %s: Config.Codec is missing", cfg.Prefix)
	case cfg.NewFunc == nil:
		s.configErr = fmt.Errorf("store for %s: Config.NewFunc is missing", cfg.Prefix)
	}
	if s.transformer == nil {
		s.transformer = identity.NewEncryptCheckTransformer()
	}
	if s.unsafe {
		s.transformer = markingTransformer{s.transformer}
		s.codec = markingCodec{s.codec}
	}
	return s
}

// keyContext is the value.Context of a key.
type keyContext string

// AuthenticatedData binds stored bytes to their key.
func (k keyContext) AuthenticatedData() []byte { return []byte(k) }

// Versioner implements storage.Interface.
func (s *Store) Versioner() storage.Versioner { return s.versioner }

// ReadinessCheck implements storage.Interface: a DB that could be opened is ready.
func (s *Store) ReadinessCheck() error {
	if s.configErr != nil {
		return s.configErr
	}
	return s.db.ctx.Err()
}

// CompactRevision implements storage.Interface.
func (s *Store) CompactRevision() int64 { return int64(s.db.compactRevision()) }

// GetCurrentResourceVersion implements storage.Interface. The watch cache asks
// for it before it waits to be that new, so those of its watches that have
// nothing to report are told at once; it would otherwise ask for progress on a
// 100 ms tick.
func (s *Store) GetCurrentResourceVersion(context.Context) (uint64, error) {
	if s.configErr != nil {
		return 0, s.configErr
	}
	return s.progress(false)
}

// RequestWatchProgress implements storage.Interface: the watches of this
// resource that asked for progress get a bookmark.
func (s *Store) RequestWatchProgress(context.Context) error {
	_, err := s.progress(true)
	return err
}

func (s *Store) progress(always bool) (uint64, error) {
	s.db.mu.RLock()
	defer s.db.mu.RUnlock()
	if s.db.closed {
		return 0, ErrClosed
	}
	rev := s.db.state.rev
	for w := range s.db.watchers {
		if w.store != s {
			continue
		}
		if always {
			w.told.Store(0)
		}
		w.wantProgress(rev)
	}
	return rev, nil
}

// Stats implements storage.Interface. It costs nothing: the numbers are kept.
func (s *Store) Stats(context.Context) (storage.Stats, error) {
	if s.configErr != nil {
		return storage.Stats{}, s.configErr
	}
	t := s.db.tally(s.prefix)
	st := storage.Stats{ObjectCount: int64(t.count)}
	if s.sizes.Load() && t.count > 0 {
		st.EstimatedAverageObjectSizeBytes = int64(t.bytes / t.count)
	}
	return st, nil
}

// EnableResourceSizeEstimation implements storage.Interface. The sizes are
// known exactly, so the keys are not asked for.
func (s *Store) EnableResourceSizeEstimation(keys storage.KeysFunc) error {
	if keys == nil {
		return errors.New("the function that lists the keys is missing")
	}
	if !s.sizes.CompareAndSwap(false, true) {
		return errors.New("size estimation is already enabled")
	}
	return nil
}

// prepareKey checks that key belongs to the resource.
func (s *Store) prepareKey(key string, recursive bool) (string, error) {
	if s.configErr != nil {
		return "", s.configErr
	}
	return storage.PrepareKey(s.prefix, key, recursive)
}

// Get implements storage.Interface.
func (s *Store) Get(_ context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	key, err := s.prepareKey(key, false)
	if err != nil {
		return err
	}
	rec, rev, err := s.db.get(key)
	if err != nil {
		return err
	}
	if err := s.notOlder(opts.ResourceVersion, rev); err != nil {
		return err
	}
	if rec == nil {
		if opts.IgnoreNotFound {
			return runtime.SetZeroValue(out)
		}
		return storage.NewKeyNotFoundError(key, 0)
	}
	data, _, err := s.fromStorage(key, rec.value)
	if err == nil {
		err = s.decode(data, out, rec.rev)
	} else {
		err = storage.NewInternalError(err)
	}
	if s.unsafe && isMalformed(err) {
		return storage.NewCorruptObjError(key, err)
	}
	return err
}

// Create implements storage.Interface.
func (s *Store) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	key, err := s.prepareKey(key, false)
	if err != nil {
		return err
	}
	if v, err := s.versioner.ObjectResourceVersion(obj); err == nil && v != 0 {
		return storage.ErrResourceVersionSetOnCreate
	}
	data, err := s.encode(obj)
	if err != nil {
		return err
	}
	stored, err := s.transformer.TransformToStorage(ctx, data, keyContext(key))
	if err != nil {
		return storage.NewInternalError(err)
	}
	o := &op{kind: opPut, key: key, prefix: s.prefix, value: stored, expire: s.expireAt(ttl)}
	if err := s.db.submit(ctx, o); err != nil {
		return err
	}
	if o.conflict {
		return storage.NewKeyExistsError(key, 0)
	}
	if out == nil {
		return nil
	}
	return s.decode(data, out, o.rev)
}

// expireAt turns seconds to live into a time; 0 stays 0.
func (s *Store) expireAt(ttl uint64) int64 {
	if ttl == 0 {
		return 0
	}
	return s.db.opts.Clock.Now().Add(time.Duration(ttl) * time.Second).UnixMilli()
}

// encode gives the bytes of obj as they are stored, without a resource version.
func (s *Store) encode(obj runtime.Object) ([]byte, error) {
	if err := s.versioner.PrepareObjectForStorage(obj); err != nil {
		return nil, fmt.Errorf("preparing the object for the store: %w", err)
	}
	return runtime.Encode(s.codec, obj)
}

func (s *Store) fromStorage(key string, stored []byte) (data []byte, stale bool, err error) {
	return s.transformer.TransformFromStorage(context.Background(), stored, keyContext(key))
}

// decode reads data into out and sets the resource version.
func (s *Store) decode(data []byte, out runtime.Object, rev uint64) error {
	if _, err := conversion.EnforcePtr(out); err != nil {
		return fmt.Errorf("the object to decode into: %w", err)
	}
	if _, _, err := s.codec.Decode(data, nil, out); err != nil {
		return err
	}
	return s.versioner.UpdateObject(out, rev)
}

// decodeNew is decode into a new object of the resource.
func (s *Store) decodeNew(key string, stored []byte, rev uint64) (runtime.Object, error) {
	data, _, err := s.fromStorage(key, stored)
	if err != nil {
		return nil, err
	}
	obj, _, err := s.codec.Decode(data, nil, s.newFunc())
	if err != nil {
		return nil, err
	}
	return obj, s.versioner.UpdateObject(obj, rev)
}

// notOlder is an error when the DB has not reached the resource version yet
// that a caller has seen somewhere.
func (s *Store) notOlder(resourceVersion string, rev uint64) error {
	if resourceVersion == "" {
		return nil
	}
	want, err := s.versioner.ParseResourceVersion(resourceVersion)
	if err != nil {
		return apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	if want > rev {
		return storage.NewTooLargeResourceVersionError(want, rev, 0)
	}
	return nil
}

// empty makes a zero object of the type that v, the element of a pointer, has.
func empty(v reflect.Value) runtime.Object {
	if u, ok := v.Addr().Interface().(runtime.Unstructured); ok {
		return u.NewEmptyInstance()
	}
	return reflect.New(v.Type()).Interface().(runtime.Object)
}
