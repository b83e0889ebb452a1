// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
)

// An object whose bytes are sound but cannot be decoded (written by another
// version of a kind, say) must not make its whole resource unusable. With the
// upstream feature AllowUnsafeMalformedObjectDeletion (KEP-3926) a list names
// all such objects instead of stopping at the first, and
// DeleteOptions.ignoreStoreReadErrorWithClusterBreakingPotential deletes one.

// maxMalformed is how many malformed objects one list names, as upstream.
const maxMalformed = 100

// errTooMany is the text that upstream's suite asks for.
var errTooMany = errors.New("too many errors, the list is truncated")

// malformed marks the failure to transform or decode one object.
type malformed struct{ err error }

func (m *malformed) Error() string { return "object cannot be read from the store: " + m.err.Error() }
func (m *malformed) Unwrap() error { return m.err }

func isMalformed(err error) bool {
	var m *malformed
	return errors.As(err, &m)
}

// markingTransformer marks the errors of reading through a transformer.
type markingTransformer struct{ value.Transformer }

func (t markingTransformer) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	out, stale, err := t.Transformer.TransformFromStorage(ctx, data, dataCtx)
	if err != nil {
		err = &malformed{err}
	}
	return out, stale, err
}

// markingCodec marks the errors of decoding.
type markingCodec struct{ runtime.Codec }

func (c markingCodec) Decode(data []byte, gvk *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, kind, err := c.Codec.Decode(data, gvk, into)
	if err != nil {
		err = &malformed{err}
	}
	return obj, kind, err
}

// listErrors collects what went wrong with single objects of one list.
type listErrors struct {
	collect  bool // go on after a malformed object
	resource schema.GroupResource
	objects  []error
	abort    error
}

// add takes one error and reports whether the list has to end.
func (l *listErrors) add(key string, err error) (end bool) {
	if !l.collect || !isMalformed(err) {
		l.abort = err
		return true
	}
	l.objects = append(l.objects, storage.NewCorruptObjError(key, err))
	if len(l.objects) >= maxMalformed {
		l.abort = errTooMany
		return true
	}
	return false
}

// result is the error of the list: nil, the one that ended it, or a Status
// that names all objects that cannot be read.
func (l *listErrors) result() error {
	if len(l.objects) == 0 {
		return l.abort
	}
	causes := make([]metav1.StatusCause, 0, len(l.objects)+1)
	for _, err := range l.objects {
		var se *storage.StorageError
		if errors.As(err, &se) {
			causes = append(causes, metav1.StatusCause{
				Type:    metav1.CauseTypeUnexpectedServerResponse,
				Field:   se.Key,
				Message: err.Error(),
			})
		}
	}
	if l.abort != nil {
		kind := metav1.CauseTypeUnexpectedServerResponse
		if errors.Is(l.abort, errTooMany) {
			kind = metav1.CauseTypeTooMany
		}
		causes = append(causes, metav1.StatusCause{Type: kind, Message: l.abort.Error()})
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure,
		Code:   http.StatusInternalServerError,
		Reason: metav1.StatusReasonStoreReadError,
		Details: &metav1.StatusDetails{
			Group:  l.resource.Group,
			Kind:   l.resource.Resource,
			Name:   "list",
			Causes: causes,
		},
		Message: fmt.Sprintf("%d of the %s in the store cannot be read, the first: %v", len(l.objects), l.resource, l.objects[0]),
	}}
}

// deletedMalformed is the watch error for the deletion of an object that
// cannot be decoded: watchers must relist.
func deletedMalformed(err error) *apierrors.StatusError {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonStoreReadError,
		Message: fmt.Sprintf("saw a DELETED event, but object data is corrupt - %v", err),
	}}
}
