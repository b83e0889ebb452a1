// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// maxPage bounds the growth of the pages in which a filtered list looks for matches.
const maxPage = 10_000

// Texts of the API for a list at a revision that is forgotten; clients and
// upstream's suite look for them.
const (
	listExpired     = "The resourceVersion for the provided list is too old."
	continueExpired = "The provided continue parameter is too old to display a consistent list result. " +
		"You can start a new list without the continue parameter, or go on with the token in this response: " +
		"the rest is then as it is now, which may not fit together with the pages before."
)

// GetList implements storage.Interface.
func (s *Store) GetList(ctx context.Context, key string, opts storage.ListOptions, listObj runtime.Object) error {
	key, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return err
	}
	items, err := itemsOf(listObj)
	if err != nil {
		return err
	}
	at, from, err := storage.ValidateListOptions(key, s.versioner, opts)
	if err != nil {
		return err
	}
	l := &lister{
		s: s, ctx: ctx, opts: opts, scope: scope{key, opts.Recursive}, at: at, from: from,
		items: items, newItem: newItemFunc(listObj, items),
		errs: listErrors{collect: s.unsafe, resource: s.resource},
	}
	if err := l.run(); err != nil {
		return err
	}
	if err := l.errs.result(); err != nil {
		return err
	}
	token, remaining, err := storage.PrepareContinueToken(l.last, key, l.at, l.left, l.more, opts)
	if err != nil {
		return err
	}
	if items.IsNil() {
		items.Set(reflect.MakeSlice(items.Type(), 0, 0)) // an empty list is [], not null
	}
	if err := s.versioner.UpdateList(listObj, uint64(l.at), token, remaining); err != nil {
		return err
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		opts.Predicate.SetShardInfoOnList(listObj)
	}
	return nil
}

// lister is one list on its way.
type lister struct {
	s       *Store
	ctx     context.Context
	opts    storage.ListOptions
	scope   scope
	at      int64  // revision of all pages, 0 until the first page has set it
	from    string // key to go on from
	items   reflect.Value
	newItem func() runtime.Object
	errs    listErrors

	last string // last key that was looked at
	left int64  // objects in the last page and behind it
	more bool   // something is behind last
}

// run reads pages until the limit is reached or nothing is left. A filter may
// drop most of what a page holds, so pages double; all are of one revision.
func (l *lister) run() error {
	limit := l.opts.Predicate.Limit
	count := limit > 0 && l.opts.Predicate.Empty() // only then is the count reported
	for size := limit; ; size = min(2*size, max(maxPage, limit)) {
		if l.s.onList != nil {
			l.s.onList(l.ctx, max(l.from, l.scope.key), l.at, size)
		}
		p, err := l.s.db.snapshot(l.scope, l.from, size, uint64(l.at), count)
		if err != nil {
			return l.readError(err, p.rev)
		}
		if l.at == 0 {
			if err := l.s.notOlder(l.opts.ResourceVersion, p.rev); err != nil {
				return err
			}
			l.at = int64(p.rev)
		}
		l.left = p.left
		full, err := l.add(p.items)
		if err != nil {
			return err
		}
		if l.more = p.more || full; full || !p.more || l.errs.abort != nil {
			return nil
		}
		if limit > 0 && int64(l.items.Len()) >= limit {
			return nil
		}
		l.from = l.last + "\x00"
	}
}

// add decodes a page and keeps what matches. full: the limit was reached with
// objects left over.
func (l *lister) add(page []item) (full bool, err error) {
	limit := l.opts.Predicate.Limit
	if l.items.Len() == 0 && l.opts.Predicate.Empty() {
		l.items.Set(reflect.MakeSlice(l.items.Type(), 0, len(page)))
	}
	for i := range page {
		it := &page[i]
		if limit > 0 && int64(l.items.Len()) >= limit {
			return true, nil
		}
		l.last = it.key
		if l.ctx.Err() != nil {
			return false, storage.NewTimeoutError(it.key, "request did not complete within requested timeout")
		}
		obj, err := l.decode(it)
		it.value = nil // a long list takes long; let go of what is done
		if err != nil {
			if l.errs.add(it.key, err) {
				return false, nil
			}
			continue
		}
		if ok, err := l.opts.Predicate.Matches(obj); err == nil && ok {
			l.items.Set(reflect.Append(l.items, reflect.ValueOf(obj).Elem()))
		}
	}
	return false, nil
}

func (l *lister) decode(it *item) (runtime.Object, error) {
	data, _, err := l.s.transformer.TransformFromStorage(l.ctx, it.value, keyContext(it.key))
	if err != nil {
		return nil, storage.NewInternalError(fmt.Errorf("unable to transform key %q: %w", it.key, err))
	}
	obj, _, err := l.s.codec.Decode(data, nil, l.newItem())
	if err != nil {
		return nil, err
	}
	return obj, l.s.versioner.UpdateObject(obj, it.rev)
}

// readError turns what the read path says about a revision into the API's errors.
func (l *lister) readError(err error, rev uint64) error {
	switch {
	case errors.Is(err, errFuture):
		return storage.NewTooLargeResourceVersionError(uint64(l.at), rev, 0)
	case !errors.Is(err, errCompacted):
		return err
	case l.opts.Predicate.Continue == "":
		return apierrors.NewResourceExpired(listExpired)
	}
	expired := apierrors.NewResourceExpired(continueExpired)
	// Revision -1 means: go on from this key with what is there now.
	token, err := storage.EncodeContinue(l.from, l.scope.key, -1)
	if err != nil {
		return err
	}
	expired.ErrStatus.Continue = token
	return expired
}

// itemsOf is the slice of items in a list object.
func itemsOf(listObj runtime.Object) (reflect.Value, error) {
	ptr, err := meta.GetItemsPtr(listObj)
	if err != nil {
		return reflect.Value{}, err
	}
	v, err := conversion.EnforcePtr(ptr)
	if err != nil {
		return reflect.Value{}, err
	}
	if v.Kind() != reflect.Slice {
		return reflect.Value{}, fmt.Errorf("items of %T are a %v, not a slice", listObj, v.Kind())
	}
	return v, nil
}

// newItemFunc makes empty items of the type in the list. Items of an
// unstructured list are of the version that the list has.
func newItemFunc(listObj runtime.Object, items reflect.Value) func() runtime.Object {
	if u, ok := listObj.(*unstructured.UnstructuredList); ok && u.GetAPIVersion() != "" {
		version := u.GetAPIVersion()
		return func() runtime.Object {
			return &unstructured.Unstructured{Object: map[string]any{"apiVersion": version}}
		}
	}
	elem := items.Type().Elem()
	return func() runtime.Object { return reflect.New(elem).Interface().(runtime.Object) }
}
