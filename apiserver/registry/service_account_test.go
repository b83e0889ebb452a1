// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
)

var errDisk = errors.New("no space left on device")

// badDisk is a storage whose writes fail, before or after they are written.
type badDisk struct {
	storage.Interface
	written, broken bool
}

func (d *badDisk) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if !d.broken {
		return d.Interface.Create(ctx, key, obj, out, ttl)
	}
	if d.written {
		return errors.Join(d.Interface.Create(ctx, key, obj, out, ttl), errDisk)
	}
	return errDisk
}

func (d *badDisk) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool, pre *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	if !d.broken {
		return d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, update, cached)
	}
	if d.written {
		return errors.Join(d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, update, cached), errDisk)
	}
	// The hooks have run, the write has not happened.
	lost := func(obj runtime.Object, meta storage.ResponseMeta) (runtime.Object, *uint64, error) {
		if _, _, err := update(obj, meta); err != nil {
			return nil, nil, err
		}
		return nil, nil, errDisk
	}
	return d.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, pre, lost, cached)
}

// TestServiceDiskFull lets writes fail below the API. What they took stays taken
// until the store can be asked, and then is taken only if it is stored.
func TestServiceDiskFull(t *testing.T) {
	for _, written := range []bool{false, true} {
		name := "lost"
		if written {
			name = "written all the same"
		}
		t.Run(name, func(t *testing.T) {
			b := newServiceBench(t)
			b.mustCreate("a", web)
			disk := &badDisk{Interface: b.storages["services"].(*serviceREST).Storage.Storage, written: written}
			b.storages["services"].(*serviceREST).Storage.Storage = disk
			before := b.taken()

			disk.broken = true
			_, err := b.tryCreate("x", web+"\nclusterIP: 10.96.0.50")
			wantError(t, err, errDisk.Error())
			_, err = b.tryPatch("a", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
			wantError(t, err, errDisk.Error())
			disk.broken = false

			_, err = b.tryCreate("again", web+"\nclusterIP: 10.96.0.50")
			if (err != nil) != written {
				t.Errorf("taking the address again: %v", err)
			}
			b.agree()
			if err == nil {
				b.remove("services", "again")
				if after := b.taken(); !slices.Equal(before, after) {
					t.Errorf("before %q, after %q", before, after)
				}
			}
		})
	}
}
