// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
)

func podSubresources(store *Store, deps Deps) map[string]rest.Storage {
	kubelet := kubeletProxy{store: store, deps: deps}
	return map[string]rest.Storage{
		"binding":             bindingREST{store},
		"eviction":            evictionREST{store, deps.Lookup},
		"ephemeralcontainers": newPodPartREST(store, func(s strategy) rest.RESTUpdateStrategy { return ephemeralStrategy{s} }),
		"log":                 logREST{kubelet},
		"exec":                execREST{kubelet},
		"attach":              attachREST{kubelet},
		"portforward":         portForwardREST{kubelet},
		"proxy":               podProxy(store, deps),
		"resize":              newPodPartREST(store, func(s strategy) rest.RESTUpdateStrategy { return resizeStrategy{s} }),
	}
}

func podSubresourceTypes() map[schema.GroupVersion][]runtime.Object {
	return map[schema.GroupVersion][]runtime.Object{
		corev1.SchemeGroupVersion: {
			&corev1.Binding{}, &corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{},
			&corev1.PodPortForwardOptions{}, &corev1.PodProxyOptions{},
		},
		policyv1.SchemeGroupVersion: {&policyv1.Eviction{}},
	}
}

// addPodOptions registers the options of the pod's subresources.
func addPodOptions(s *runtime.Scheme) error {
	for _, obj := range []runtime.Object{&corev1.PodLogOptions{}, &corev1.PodExecOptions{}, &corev1.PodAttachOptions{}, &corev1.PodPortForwardOptions{}, &corev1.PodProxyOptions{}} {
		if err := addOptions(obj)(s); err != nil {
			return err
		}
	}
	return nil
}

// addOptions registers how a query string becomes an options object.
func addOptions(obj runtime.Object) func(*runtime.Scheme) error {
	return func(s *runtime.Scheme) error {
		return s.AddConversionFunc((*url.Values)(nil), obj, func(in, out any, _ conversion.Scope) error {
			return decodeQuery(*in.(*url.Values), out)
		})
	}
}

// bindingREST assigns a pod to a node, once.
type bindingREST struct{ store *Store }

var (
	_ rest.NamedCreater                   = bindingREST{}
	_ rest.SubresourceObjectMetaPreserver = bindingREST{}
)

func (bindingREST) New() runtime.Object   { return &corev1.Binding{} }
func (bindingREST) Destroy()              {}
func (bindingREST) NamespaceScoped() bool { return true }

// PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate keeps the UID in the
// binding, which says which pod of that name is meant.
func (bindingREST) PreserveRequestObjectMetaSystemFieldsOnSubresourceCreate() bool { return true }

func (r bindingREST) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	binding, ok := obj.(*corev1.Binding)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Binding object: %T", obj))
	}
	if name != binding.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Binding object")
	}
	target := field.NewPath("target")
	var errs field.ErrorList
	if binding.Target.Kind != "" && binding.Target.Kind != "Node" {
		errs = append(errs, field.NotSupported(target.Child("kind"), binding.Target.Kind, []string{"Node", "<empty>"}))
	}
	if binding.Target.Name == "" {
		errs = append(errs, field.Required(target.Child("name"), ""))
	}
	if len(errs) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Binding"}, name, errs)
	}
	if validate != nil {
		if err := validate(ctx, binding.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	if err := r.bind(ctx, binding, dryrun.IsDryRun(options.DryRun)); err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

func (r bindingREST) bind(ctx context.Context, b *corev1.Binding, dryRun bool) error {
	key, err := r.store.KeyFunc(ctx, b.Name)
	if err != nil {
		return err
	}
	var pre *storage.Preconditions
	if b.UID != "" || b.ResourceVersion != "" {
		pre = &storage.Preconditions{}
		if b.UID != "" {
			pre.UID = &b.UID
		}
		if b.ResourceVersion != "" {
			pre.ResourceVersion = &b.ResourceVersion
		}
	}
	resource := schema.GroupResource{Resource: "pods/binding"}
	err = r.store.Storage.GuaranteedUpdate(ctx, key, &corev1.Pod{}, false, pre, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		pod, ok := obj.(*corev1.Pod)
		switch {
		case !ok:
			return nil, fmt.Errorf("unexpected object: %#v", obj)
		case pod.DeletionTimestamp != nil:
			return nil, apierrors.NewConflict(resource, b.Name, fmt.Errorf("pod %s is being deleted, cannot be assigned to a host", pod.Name))
		case pod.Spec.NodeName != "":
			return nil, apierrors.NewConflict(resource, b.Name, fmt.Errorf("pod %s is already assigned to node %q", pod.Name, pod.Spec.NodeName))
		case len(pod.Spec.SchedulingGates) > 0:
			return nil, apierrors.NewConflict(resource, b.Name, fmt.Errorf("pod %s has non-empty .spec.schedulingGates", pod.Name))
		}
		pod.Spec.NodeName = b.Target.Name
		if pod.Annotations == nil && len(b.Annotations) > 0 {
			pod.Annotations = map[string]string{}
		}
		maps.Copy(pod.Annotations, b.Annotations)
		pod.Status.Conditions = withCondition(pod.Status.Conditions, corev1.PodCondition{
			Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(), ObservedGeneration: pod.Generation,
		})
		return pod, nil
	}), dryRun, nil)
	if err == nil || apierrors.IsConflict(err) {
		return err
	}
	return storeerr.InterpretUpdateError(err, schema.GroupResource{Resource: "pods"}, b.Name)
}

// withCondition sets a condition; its transition time only moves with its
// status.
func withCondition(conditions []corev1.PodCondition, c corev1.PodCondition) []corev1.PodCondition {
	out := slices.Clone(conditions)
	for i := range out {
		if out[i].Type == c.Type {
			if out[i].Status == c.Status {
				c.LastTransitionTime = out[i].LastTransitionTime
			}
			out[i] = c
			return out
		}
	}
	return append(out, c)
}

// podPartREST changes one part of a pod that the pod's own updates leave alone; its
// strategy says which.
type podPartREST struct{ store *Store }

var _ rest.Patcher = podPartREST{}

// newPodPartREST makes the storage of a part; with makes its strategy from the pods'.
func newPodPartREST(store *Store, with func(strategy) rest.RESTUpdateStrategy) podPartREST {
	s := *store
	if base, ok := store.UpdateStrategy.(strategy); ok {
		s.UpdateStrategy = with(base)
		s.ResetFieldsStrategy = nil
	}
	return podPartREST{&s}
}

func (r podPartREST) New() runtime.Object { return r.store.New() }

// Destroy does nothing: the store belongs to the pods.
func (podPartREST) Destroy() {}

// Get implements rest.Getter.
func (r podPartREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

// Update implements rest.Updater. It never creates a pod.
func (r podPartREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, info, create, update, false, options)
}

// ephemeralStrategy adds ephemeral containers, for kubectl debug.
type ephemeralStrategy struct{ strategy }

func (s ephemeralStrategy) AllowCreateOnUpdate(context.Context) bool { return false }

func (s ephemeralStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	pod, ok := obj.(*corev1.Pod)
	was, okOld := old.(*corev1.Pod)
	if !ok || !okOld {
		return
	}
	added := pod.Spec.EphemeralContainers
	meta := pod.ObjectMeta
	*pod = *was.DeepCopy()
	pod.ManagedFields, pod.ResourceVersion = meta.ManagedFields, meta.ResourceVersion
	pod.Spec.EphemeralContainers = added
	if !equality.Semantic.DeepEqual(added, was.Spec.EphemeralContainers) {
		pod.Generation++
	}
}

func (s ephemeralStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	pod, ok := obj.(*corev1.Pod)
	was, okOld := old.(*corev1.Pod)
	if !ok || !okOld {
		return nil
	}
	p := field.NewPath("spec", "ephemeralContainers")
	errs := validateEphemeralContainers(pod.Spec.EphemeralContainers, &pod.Spec, p)
	for _, c := range was.Spec.EphemeralContainers {
		i := slices.IndexFunc(pod.Spec.EphemeralContainers, func(n corev1.EphemeralContainer) bool { return n.Name == c.Name })
		if i < 0 {
			errs = append(errs, field.Forbidden(p, fmt.Sprintf("existing ephemeral containers %q may not be removed\n", c.Name)))
		} else if !equality.Semantic.DeepEqual(c, pod.Spec.EphemeralContainers[i]) {
			errs = append(errs, field.Forbidden(p, fmt.Sprintf("existing ephemeral containers %q may not be changed\n", c.Name)))
		}
	}
	return errs
}
