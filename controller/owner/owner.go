// SPDX-License-Identifier: Apache-2.0

// Package owner settles which objects belong to a controller: those whose controller
// reference names it, plus orphans that its selector matches, minus those that it
// owns and no longer matches.
package owner

import (
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// Controller is the object that owns others.
type Controller struct {
	Object   metav1.Object
	Ref      metav1.OwnerReference
	Selector labels.Selector
	// Finalizers are what an adopted object gets with its owner.
	Finalizers []string
	// Live reads the owner from the API, past the cache. It is asked once, and only
	// when an orphan is about to be adopted: an owner that is being deleted, or was
	// deleted and made again under the same name, must not adopt.
	Live func() (metav1.Object, error)
	// Patch applies a strategic merge patch to the dependant of that name.
	Patch func(name string, patch []byte) error
}

// Verdict is what becomes of one object.
type Verdict int

// The verdicts of Judge.
const (
	Ignore  Verdict = iota // another controller's, or no match
	Keep                   // ours
	Adopt                  // an orphan that matches: make it ours
	Release                // ours, but it no longer matches: let it go
)

// Judge decides about one object. adoptable says that the object is fit to be
// adopted (a finished pod, for one, is not).
func Judge(c Controller, obj metav1.Object, adoptable bool) Verdict {
	matches := c.Selector.Matches(labels.Set(obj.GetLabels()))
	ref := metav1.GetControllerOf(obj)
	switch {
	case ref != nil && ref.UID != c.Object.GetUID():
		return Ignore
	case ref != nil && matches:
		return Keep
	case ref != nil:
		if c.Object.GetDeletionTimestamp() != nil {
			return Ignore // the garbage collector decides now
		}
		return Release
	case matches && adoptable && c.Object.GetDeletionTimestamp() == nil && obj.GetDeletionTimestamp() == nil:
		return Adopt
	}
	return Ignore
}

// Claim judges every object, writes adoptions and releases, and returns those that
// are the controller's afterwards. Objects that vanish meanwhile are left out.
func Claim[T metav1.Object](c Controller, objects []T, adoptable func(T) bool) ([]T, error) {
	var ours []T
	var errs []error
	mayAdopt := mayAdoptOnce(c)
	for _, obj := range objects {
		switch Judge(c, obj, adoptable == nil || adoptable(obj)) {
		case Keep:
			ours = append(ours, obj)
		case Adopt:
			if err := mayAdopt(); err != nil {
				errs = append(errs, fmt.Errorf("adopt %s: %w", obj.GetName(), err))
				continue
			}
			switch err := c.Patch(obj.GetName(), adoption(c.Ref, obj.GetUID(), c.Finalizers)); {
			case apierrors.IsNotFound(err):
			case err != nil:
				errs = append(errs, fmt.Errorf("adopt %s: %w", obj.GetName(), err))
			default:
				ours = append(ours, obj)
			}
		case Release:
			// Invalid means that the UID differs or the reference is gone: not ours
			// either way.
			err := c.Patch(obj.GetName(), release(c.Object.GetUID(), obj.GetUID()))
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) {
				errs = append(errs, fmt.Errorf("release %s: %w", obj.GetName(), err))
			}
		case Ignore:
		}
	}
	return ours, errors.Join(errs...)
}

// mayAdoptOnce returns a function that asks the API once whether the owner may
// adopt, and remembers the answer.
func mayAdoptOnce(c Controller) func() error {
	var asked bool
	var answer error
	return func() error {
		if asked {
			return answer
		}
		asked = true
		live, err := c.Live()
		switch {
		case err != nil:
			answer = fmt.Errorf("read the owner: %w", err)
		case live.GetUID() != c.Object.GetUID():
			answer = fmt.Errorf("the owner was replaced by one with UID %s", live.GetUID())
		case live.GetDeletionTimestamp() != nil:
			answer = errors.New("the owner is being deleted")
		}
		return answer
	}
}

// adoption is the patch that adds ref to the object with that UID. The UID makes the
// patch fail when the name has come to mean another object.
func adoption(ref metav1.OwnerReference, uid types.UID, finalizers []string) []byte {
	meta := map[string]any{"uid": uid, "ownerReferences": []metav1.OwnerReference{ref}}
	if len(finalizers) > 0 {
		meta["finalizers"] = finalizers
	}
	return mustJSON(map[string]any{"metadata": meta})
}

// release is the patch that takes the reference to owner off.
func release(owner, uid types.UID) []byte {
	return mustJSON(map[string]any{"metadata": map[string]any{
		"uid": uid, "ownerReferences": []any{map[string]any{"$patch": "delete", "uid": owner}},
	}})
}

// mustJSON encodes values made only of strings, lists and maps, which cannot fail.
func mustJSON(v any) []byte {
	b, _ := json.Marshal(v)
	return b
}
