// SPDX-License-Identifier: Apache-2.0

// Package history keeps the revisions of a pod template as ControllerRevisions, for
// StatefulSets and DaemonSets: kubectl rollout history shows them, and kubectl rollout
// undo applies the patch that each of them holds.
package history

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/owner"
)

// hashLabel is the label of a revision with its hash, upstream's own.
const hashLabel = "controller.kubernetes.io/hash"

// Parent is the object whose template has revisions.
type Parent struct {
	Object   metav1.Object
	Kind     schema.GroupVersionKind
	Selector labels.Selector
	Template *corev1.PodTemplateSpec
	// Collisions is the status's count of names that were taken by another template.
	Collisions *int32
	// Live reads the parent from the API.
	Live func() (metav1.Object, error)
}

// Keeper reads and writes revisions.
type Keeper struct {
	client kubernetes.Interface
	lister appslisters.ControllerRevisionLister
}

// New returns a keeper that reads from d's informer.
func New(d loop.Deps) *Keeper {
	return &Keeper{client: d.Client, lister: d.Informers.Apps().V1().ControllerRevisions().Lister()}
}

// Revisions are the revisions of one parent.
type Revisions struct {
	// All are its revisions, the oldest first, Update among them.
	All []*appsv1.ControllerRevision
	// Update is the one of the present template.
	Update *appsv1.ControllerRevision
	// Collisions is the count to store in the parent's status.
	Collisions *int32
}

// Find returns the revision of that name, nil when there is none.
func (r Revisions) Find(name string) *appsv1.ControllerRevision {
	for _, rev := range r.All {
		if rev.Name == name {
			return rev
		}
	}
	return nil
}

// Hash is the short name of a revision.
func Hash(r *appsv1.ControllerRevision) string { return r.Labels[hashLabel] }

// Sync makes sure that the present template has a revision and that it is the newest:
// a template that comes back, by a rollback, gets a new number.
func (k *Keeper) Sync(ctx context.Context, p Parent) (Revisions, error) {
	out := Revisions{Collisions: p.Collisions}
	var err error
	if out.All, err = k.claim(ctx, p); err != nil {
		return out, err
	}
	slices.SortFunc(out.All, older)
	var highest int64
	for _, r := range out.All {
		highest = max(highest, r.Revision)
	}
	data, err := patchOf(p.Template)
	if err != nil {
		return out, err
	}
	last := -1
	for i, r := range out.All {
		if bytes.Equal(r.Data.Raw, data) {
			last = i
		}
	}
	switch {
	case last < 0:
		// The cache may lack one that was made a moment ago, whose number is taken.
		if highest, err = k.highest(ctx, p, highest); err != nil {
			return out, err
		}
		out.Update, out.Collisions, err = k.create(ctx, p, data, highest+1)
		if err != nil {
			return out, err
		}
		out.All = append(out.All, out.Update)
	case last == len(out.All)-1:
		out.Update = out.All[last]
	default:
		update := out.All[last].DeepCopy()
		update.Revision = highest + 1
		if out.Update, err = k.client.AppsV1().ControllerRevisions(update.Namespace).Update(ctx, update, metav1.UpdateOptions{}); err != nil {
			return out, fmt.Errorf("make revision %s the newest: %w", update.Name, err)
		}
		out.All = append(slices.Delete(out.All, last, last+1), out.Update)
	}
	return out, nil
}

// highest returns the highest number among the parent's revisions as they are stored now,
// and at least the one that the caller knows.
func (k *Keeper) highest(ctx context.Context, p Parent, known int64) (int64, error) {
	stored, err := k.client.AppsV1().ControllerRevisions(p.Object.GetNamespace()).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, fmt.Errorf("list the revisions of %s: %w", p.Object.GetName(), err)
	}
	for i := range stored.Items {
		if metav1.IsControlledBy(&stored.Items[i], p.Object) {
			known = max(known, stored.Items[i].Revision)
		}
	}
	return known, nil
}

func (k *Keeper) claim(ctx context.Context, p Parent) ([]*appsv1.ControllerRevision, error) {
	namespace := p.Object.GetNamespace()
	all, err := k.lister.ControllerRevisions(namespace).List(labels.Everything())
	if err != nil {
		return nil, err
	}
	return owner.Claim(owner.Controller{
		Object: p.Object, Ref: *metav1.NewControllerRef(p.Object, p.Kind), Selector: p.Selector, Live: p.Live,
		Patch: func(name string, patch []byte) error {
			_, err := k.client.AppsV1().ControllerRevisions(namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, all, nil)
}

// older sorts revisions, the oldest first.
func older(a, b *appsv1.ControllerRevision) int {
	return cmp.Or(cmp.Compare(a.Revision, b.Revision), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
}

// create makes a revision. Its name has the hash of its content; when another content
// has that name already, the count of collisions becomes part of the hash.
func (k *Keeper) create(ctx context.Context, p Parent, data []byte, number int64) (*appsv1.ControllerRevision, *int32, error) {
	collisions := p.Collisions
	for {
		r := newRevision(p, data, number, collisions)
		made, err := k.client.AppsV1().ControllerRevisions(r.Namespace).Create(ctx, r, metav1.CreateOptions{})
		if err == nil || !apierrors.IsAlreadyExists(err) {
			if err != nil {
				err = fmt.Errorf("create revision %s: %w", r.Name, err)
			}
			return made, collisions, err
		}
		had, err := k.client.AppsV1().ControllerRevisions(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
		switch {
		case err != nil:
			return nil, collisions, fmt.Errorf("read revision %s: %w", r.Name, err)
		case bytes.Equal(had.Data.Raw, data) && metav1.IsControlledBy(had, p.Object):
			return had, collisions, nil // ours, and the cache has not seen it
		}
		next := int32(1)
		if collisions != nil {
			next = *collisions + 1
		}
		collisions = &next
	}
}

func newRevision(p Parent, data []byte, number int64, collisions *int32) *appsv1.ControllerRevision {
	hash := hashOf(data, collisions)
	named := maps.Clone(p.Template.Labels)
	if named == nil {
		named = map[string]string{}
	}
	named[hashLabel] = hash
	return &appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Object.GetName() + "-" + hash, Namespace: p.Object.GetNamespace(),
			Labels: named, Annotations: maps.Clone(p.Object.GetAnnotations()),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(p.Object, p.Kind)},
		},
		Data: runtime.RawExtension{Raw: data}, Revision: number,
	}
}

func hashOf(data []byte, collisions *int32) string {
	h := fnv.New32()
	h.Write(data)
	if collisions != nil {
		h.Write([]byte(strconv.Itoa(int(*collisions))))
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10))
}

// patchOf is the strategic merge patch that puts the template back.
func patchOf(t *corev1.PodTemplateSpec) ([]byte, error) {
	template, err := runtime.DefaultUnstructuredConverter.ToUnstructured(t)
	if err != nil {
		return nil, fmt.Errorf("encode the pod template: %w", err)
	}
	template["$patch"] = "replace"
	return json.Marshal(map[string]any{"spec": map[string]any{"template": template}})
}

// Template is the pod template that a revision holds.
func Template(r *appsv1.ControllerRevision) (*corev1.PodTemplateSpec, error) {
	var patch struct {
		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(r.Data.Raw, &patch); err != nil {
		return nil, fmt.Errorf("decode revision %s: %w", r.Name, err)
	}
	return &patch.Spec.Template, nil
}

// Tidy deletes the oldest revisions that are not in use, all but limit of them.
func (k *Keeper) Tidy(ctx context.Context, r Revisions, limit *int32, inUse func(*appsv1.ControllerRevision) bool) error {
	if limit == nil {
		return nil
	}
	var unused []*appsv1.ControllerRevision
	for _, rev := range r.All {
		if rev != r.Update && !inUse(rev) {
			unused = append(unused, rev)
		}
	}
	for _, rev := range unused[:max(0, len(unused)-int(*limit))] {
		err := k.client.AppsV1().ControllerRevisions(rev.Namespace).Delete(ctx, rev.Name, metav1.DeleteOptions{
			Preconditions: metav1.NewUIDPreconditions(string(rev.UID)),
		})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete the old revision %s: %w", rev.Name, err)
		}
	}
	return nil
}
