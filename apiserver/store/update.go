// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
)

// version is one version of an object as an update or a delete sees it.
type version struct {
	obj    runtime.Object // nil when it is malformed and that is what the caller wants
	rev    uint64         // 0 = the key is not there
	data   []byte         // encoded, not transformed
	stale  bool           // has to be written even when nothing changed
	expire int64
	// sure: read from the file, not the suggestion of the caller. It may
	// have been overtaken nevertheless; the write itself finds out.
	sure bool
}

// reader reads versions of one key.
type reader struct {
	s              *Store
	key            string
	out            reflect.Value // gives the type
	ignoreNotFound bool
	wantMalformed  bool // only an object that cannot be decoded is acceptable
}

// current reads the version in the file.
func (r *reader) current() (*version, error) {
	rec, _, err := r.s.db.get(r.key)
	if err != nil {
		return nil, err
	}
	return r.version(rec)
}

// version decodes a record; nil is a key that is not there.
func (r *reader) version(rec *record) (*version, error) {
	v := &version{obj: empty(r.out), sure: true}
	if rec == nil {
		if !r.ignoreNotFound {
			return nil, storage.NewKeyNotFoundError(r.key, 0)
		}
		return v, runtime.SetZeroValue(v.obj)
	}
	v.rev, v.expire = rec.rev, rec.expire
	data, stale, err := r.s.fromStorage(r.key, rec.value)
	if err != nil {
		if !r.wantMalformed {
			return nil, storage.NewInternalError(err)
		}
		v.obj, v.stale = nil, true
		return v, nil
	}
	v.data, v.stale = data, stale
	if err := r.s.decode(data, v.obj, rec.rev); err != nil {
		if !r.wantMalformed {
			return nil, err
		}
		v.obj = nil
		return v, nil
	}
	if r.wantMalformed {
		return nil, storage.NewInvalidObjError(r.key, "the object can be read, so it cannot be deleted as an unreadable one")
	}
	return v, nil
}

// suggested makes a version of an object that the caller has, from a cache.
func (r *reader) suggested(obj runtime.Object) (*version, error) {
	rev, err := r.s.versioner.ObjectResourceVersion(obj)
	if err != nil {
		return nil, fmt.Errorf("the resource version of the cached object: %w", err)
	}
	data, err := r.s.encode(obj) // takes the resource version off
	if err != nil {
		return nil, err
	}
	return &version{obj: obj, rev: rev, data: data}, r.s.versioner.UpdateObject(obj, rev)
}

// first is the version to begin with: the suggestion, if there is one.
func (r *reader) first(suggestion runtime.Object) (*version, error) {
	if suggestion == nil || r.wantMalformed {
		return r.current()
	}
	return r.suggested(suggestion)
}

// doubt handles the refusal of a version by the caller's functions. Against a
// version from the file the refusal stands. A suggestion may be stale, so the
// file is read; if the suggestion was right the refusal stands too, else the
// caller tries again with what is returned.
func (r *reader) doubt(v *version, refusal error) (*version, error) {
	if v.sure {
		return nil, refusal
	}
	now, err := r.current()
	if err != nil {
		return nil, err
	}
	if now.rev == v.rev {
		return nil, refusal
	}
	return now, nil
}

// Delete implements storage.Interface.
func (s *Store) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, suggestion runtime.Object, opts storage.DeleteOptions,
) error {
	key, err := s.prepareKey(key, false)
	if err != nil {
		return err
	}
	outValue, err := conversion.EnforcePtr(out)
	if err != nil {
		return fmt.Errorf("the object to decode into: %w", err)
	}
	r := &reader{s: s, key: key, out: outValue, wantMalformed: s.unsafe && opts.ExpectTransformOrDecodeError}
	v, err := r.first(suggestion)
	for {
		if err != nil {
			return err
		}
		refusal := preconditions.Check(key, v.obj)
		if refusal == nil {
			refusal = validate(ctx, v.obj)
		}
		if refusal != nil {
			v, err = r.doubt(v, refusal)
			continue
		}
		o := &op{kind: opDelete, key: key, prefix: s.prefix, expect: v.rev}
		if err := s.db.submit(ctx, o); err != nil {
			return err
		}
		if o.conflict {
			v, err = r.version(o.current)
			continue
		}
		if r.wantMalformed {
			return nil
		}
		return s.decode(v.data, out, o.rev)
	}
}

// GuaranteedUpdate implements storage.Interface. A nil TTL from tryUpdate keeps
// the time at which the object ends, as the interface says.
func (s *Store) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, suggestion runtime.Object,
) error {
	key, err := s.prepareKey(key, false)
	if err != nil {
		return err
	}
	outValue, err := conversion.EnforcePtr(out)
	if err != nil {
		return fmt.Errorf("the object to decode into: %w", err)
	}
	r := &reader{s: s, key: key, out: outValue, ignoreNotFound: ignoreNotFound}
	v, err := r.first(suggestion)
	for {
		if err != nil {
			return err
		}
		var next runtime.Object
		var ttl *uint64
		refusal := preconditions.Check(key, v.obj)
		if refusal == nil {
			next, ttl, refusal = tryUpdate(v.obj, storage.ResponseMeta{ResourceVersion: v.rev, TTL: s.secondsLeft(v.expire)})
		}
		if refusal != nil {
			v, err = r.doubt(v, refusal)
			continue
		}
		var data []byte
		if data, err = s.encode(next); err != nil {
			return err
		}
		if !v.stale && v.rev != 0 && bytes.Equal(data, v.data) {
			// Nothing to write, if that is really what is in the file.
			if !v.sure {
				if v, err = r.current(); err != nil {
					return err
				}
				if !bytes.Equal(data, v.data) {
					continue
				}
			}
			if !v.stale {
				return s.decode(v.data, out, v.rev)
			}
		}
		var stored []byte
		if stored, err = s.transformer.TransformToStorage(ctx, data, keyContext(key)); err != nil {
			return storage.NewInternalError(err)
		}
		o := &op{kind: opPut, key: key, prefix: s.prefix, expect: v.rev, value: stored, keepExpire: ttl == nil}
		if ttl != nil {
			o.expire = s.expireAt(*ttl)
		}
		if err := s.db.submit(ctx, o); err != nil {
			return err
		}
		if o.conflict {
			v, err = r.version(o.current)
			continue
		}
		return s.decode(data, out, o.rev)
	}
}

// secondsLeft is the rest of an object's life, rounded up; 0 = it has no end.
// What should have ended already counts as one second.
func (s *Store) secondsLeft(expire int64) int64 {
	if expire == 0 {
		return 0
	}
	ms := expire - s.db.opts.Clock.Now().UnixMilli()
	return max(1, (ms+999)/1000)
}
