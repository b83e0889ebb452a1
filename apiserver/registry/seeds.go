// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
)

// Seeds are objects that every cluster has, on their way to the store. They are
// written all at the same time, so that they share transactions, before the
// server answers. They must be complete and valid: no hook and no check sees
// them. The zero value is ready.
type Seeds struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

// Add stores an object of a kind without a namespace. That it exists already is
// success.
func (s *Seeds) Add(ctx context.Context, store *Store, obj runtime.Object) {
	m, err := meta.Accessor(obj)
	if err != nil {
		s.fail(err)
		return
	}
	s.wg.Go(func() {
		if err := seed(ctx, store, m, obj); err != nil && !storage.IsExist(err) {
			s.fail(fmt.Errorf("store %s %s: %w", store.SingularQualifiedResource.Resource, m.GetName(), err))
		}
	})
}

func seed(ctx context.Context, store *Store, m metav1.Object, obj runtime.Object) error {
	ctx = request.WithNamespace(ctx, metav1.NamespaceNone)
	key, err := store.KeyFunc(ctx, m.GetName())
	if err != nil {
		return err
	}
	rest.FillObjectMetaSystemFields(m)
	return store.Storage.Create(ctx, key, obj, store.New(), 0, false)
}

func (s *Seeds) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errs = append(s.errs, err)
}

// Wait returns when all are stored.
func (s *Seeds) Wait() error {
	s.wg.Wait()
	return errors.Join(s.errs...)
}
