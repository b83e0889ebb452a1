// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/client-go/util/retry"
	"k8s.io/component-helpers/apps/poddisruptionbudget"
)

const (
	// maxDisrupted is how many evictions may wait to be seen by the disruption
	// controller, for one budget.
	maxDisrupted = 2000
	// evictionRetry is after how many seconds an eviction is tried again that came
	// before its budget was counted. Where the budget is spent nobody can know.
	evictionRetry = 10
)

// evictionREST deletes a pod when its disruption budget allows it, for drain. The
// budget's status is spent in the same write in which it is checked, so that however
// many evictions come at the same time, no more are let through than it allows.
type evictionREST struct {
	store  *Store
	lookup func(resource string) *Store
}

var (
	_ rest.NamedCreater             = evictionREST{}
	_ rest.GroupVersionKindProvider = evictionREST{}
)

func (evictionREST) New() runtime.Object   { return &policyv1.Eviction{} }
func (evictionREST) Destroy()              {}
func (evictionREST) NamespaceScoped() bool { return true }

// GroupVersionKind implements rest.GroupVersionKindProvider: drain looks for
// policy/v1 in the discovery of pods/eviction.
func (evictionREST) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return policyv1.SchemeGroupVersion.WithKind("Eviction")
}

// Create implements rest.NamedCreater.
func (r evictionREST) Create(ctx context.Context, name string, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	eviction, ok := obj.(*policyv1.Eviction)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("not a Eviction object: %T", obj))
	}
	if name != eviction.Name {
		return nil, apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	deletion, err := evictionOptions(eviction, options)
	if err != nil {
		return nil, err
	}
	if validate != nil {
		if err := validate(ctx, eviction.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	pod, err := r.withoutBudget(ctx, name, deletion)
	if err != nil {
		return nil, err
	}
	if pod == nil {
		return &metav1.Status{Status: metav1.StatusSuccess}, nil
	}
	budgets, err := r.budgets(ctx, pod)
	if err != nil {
		return nil, err
	}
	switch len(budgets) {
	case 0:
		err = r.evict(ctx, name, deletion)
	case 1:
		err = r.evictWithin(ctx, pod, budgets[0], deletion)
	default:
		return &metav1.Status{
			Status: metav1.StatusFailure, Code: http.StatusInternalServerError,
			Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
		}, nil
	}
	if err != nil {
		return nil, err
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// evictionOptions returns the options of the deletion. A dry run may be asked for in
// the request or in the object.
func evictionOptions(eviction *policyv1.Eviction, options *metav1.CreateOptions) (*metav1.DeleteOptions, error) {
	if eviction.DeleteOptions == nil {
		return &metav1.DeleteOptions{DryRun: options.DryRun}, nil
	}
	deletion := eviction.DeleteOptions.DeepCopy()
	switch {
	case len(deletion.DryRun) == 0:
		deletion.DryRun = options.DryRun
	case len(options.DryRun) > 0 && !reflect.DeepEqual(options.DryRun, deletion.DryRun):
		return nil, fmt.Errorf("Non-matching dry-run options in request and content: %v and %v", options.DryRun, deletion.DryRun) //nolint:staticcheck // upstream's sentence
	}
	return deletion, nil
}

// withoutBudget deletes a pod whose end disrupts nothing: one that has ended, is being
// deleted, or has not started. Otherwise it returns the pod.
func (r evictionREST) withoutBudget(ctx context.Context, name string, deletion *metav1.DeleteOptions) (*corev1.Pod, error) {
	conditional := hasVersion(deletion)
	var pod *corev1.Pod
	err := retry.OnError(retry.DefaultBackoff, func(err error) bool { return apierrors.IsConflict(err) && !conditional }, func() error {
		obj, err := r.store.Get(ctx, name, &metav1.GetOptions{})
		if err != nil {
			return err
		}
		var ok bool
		if pod, ok = obj.(*corev1.Pod); !ok {
			return apierrors.NewInternalError(errNotA("pod", obj))
		}
		ended := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed || pod.DeletionTimestamp != nil
		if !ended && pod.Status.Phase != corev1.PodPending {
			return nil
		}
		options := deletion
		if !ended && !conditional {
			// It must not become ready in between.
			options = withVersion(deletion, pod.ResourceVersion)
		}
		if _, _, err := r.store.Delete(ctx, name, rest.ValidateAllObjectFunc, options); err != nil {
			return err
		}
		pod = nil
		return nil
	})
	if err != nil {
		return nil, err
	}
	return pod, nil
}

func hasVersion(options *metav1.DeleteOptions) bool {
	return options.Preconditions != nil && options.Preconditions.ResourceVersion != nil
}

// withVersion returns options that hold only for this version of the object.
func withVersion(options *metav1.DeleteOptions, version string) *metav1.DeleteOptions {
	options = options.DeepCopy()
	if options.Preconditions == nil {
		options.Preconditions = &metav1.Preconditions{}
	}
	options.Preconditions.ResourceVersion = &version
	return options
}

// budgets returns those that select the pod.
func (r evictionREST) budgets(ctx context.Context, pod *corev1.Pod) ([]*policyv1.PodDisruptionBudget, error) {
	store, ctx, err := elsewhere(ctx, r.lookup, "poddisruptionbudgets", pod.Namespace)
	if err != nil {
		return nil, err
	}
	obj, err := store.List(ctx, &internalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	list, ok := obj.(*policyv1.PodDisruptionBudgetList)
	if !ok {
		return nil, apierrors.NewInternalError(errNotA("list of poddisruptionbudgets", obj))
	}
	var out []*policyv1.PodDisruptionBudget
	for i := range list.Items {
		selector, err := metav1.LabelSelectorAsSelector(list.Items[i].Spec.Selector)
		// One that selects everything protects nothing, as upstream has it.
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			out = append(out, &list.Items[i])
		}
	}
	return out, nil
}

// evictWithin evicts a pod that has one budget.
func (r evictionREST) evictWithin(ctx context.Context, pod *corev1.Pod, budget *policyv1.PodDisruptionBudget, deletion *metav1.DeleteOptions) error {
	if podReady(pod) || !unhealthyMayGo(budget) {
		if err := r.spend(ctx, pod, budget, dryrun.IsDryRun(deletion.DryRun)); err != nil {
			return err
		}
		return r.evict(ctx, pod.Name, deletion)
	}
	// An unhealthy pod costs nothing, as long as it stays unhealthy.
	err := r.evict(ctx, pod.Name, withVersion(deletion, pod.ResourceVersion))
	if apierrors.IsConflict(err) && !hasVersion(deletion) {
		return budgetNotCounted(budget.Name)
	}
	return err
}

// unhealthyMayGo reports whether a budget has no say about pods that are not ready.
func unhealthyMayGo(budget *policyv1.PodDisruptionBudget) bool {
	if p := budget.Spec.UnhealthyPodEvictionPolicy; p != nil && *p == policyv1.AlwaysAllow {
		return true
	}
	s := &budget.Status
	return s.CurrentHealthy >= s.DesiredHealthy && s.DesiredHealthy > 0
}

func podReady(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// spend takes one disruption from the budget as it is stored, and writes down for
// which pod.
func (r evictionREST) spend(ctx context.Context, pod *corev1.Pod, budget *policyv1.PodDisruptionBudget, dryRun bool) error {
	return Change(ctx, r.lookup, "poddisruptionbudgets", pod.Namespace, budget.Name, dryRun, func(b *policyv1.PodDisruptionBudget) error {
		if err := mayDisrupt(b); err != nil {
			return err
		}
		b.Status.DisruptionsAllowed--
		if b.Status.DisruptionsAllowed == 0 {
			poddisruptionbudget.UpdateDisruptionAllowedCondition(b)
		}
		if b.Status.DisruptedPods == nil {
			b.Status.DisruptedPods = map[string]metav1.Time{}
		}
		b.Status.DisruptedPods[pod.Name] = metav1.NewTime(time.Now())
		return nil
	})
}

// mayDisrupt is nil when the budget allows one more eviction.
func mayDisrupt(b *policyv1.PodDisruptionBudget) error {
	resource := policyv1.Resource("poddisruptionbudget")
	switch s := &b.Status; {
	case s.ObservedGeneration < b.Generation:
		return budgetNotCounted(b.Name)
	case s.DisruptionsAllowed < 0:
		return apierrors.NewForbidden(resource, b.Name, fmt.Errorf("pdb disruptions allowed is negative"))
	case len(s.DisruptedPods) > maxDisrupted:
		return apierrors.NewForbidden(resource, b.Name, fmt.Errorf("DisruptedPods map too big - too many evictions not confirmed by PDB controller"))
	case s.DisruptionsAllowed == 0:
		return tooManyEvictions(0, fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently", b.Name, s.DesiredHealthy, s.CurrentHealthy))
	}
	return nil
}

// budgetNotCounted is the answer while the disruption controller has not caught up.
func budgetNotCounted(name string) error {
	return tooManyEvictions(evictionRetry, fmt.Sprintf("The disruption budget %s is still being processed by the server.", name))
}

// tooManyEvictions asks to come again, after so many seconds unless that is 0.
func tooManyEvictions(after int, why string) error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", after)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: why})
	return err
}

// evict says in the pod's status why it goes, and deletes it.
func (r evictionREST) evict(ctx context.Context, name string, deletion *metav1.DeleteOptions) error {
	if !dryrun.IsDryRun(deletion.DryRun) {
		version, err := r.announce(ctx, name, deletion.Preconditions)
		if err != nil {
			return err
		}
		if hasVersion(deletion) {
			deletion = withVersion(deletion, version)
		}
	}
	_, _, err := r.store.Delete(ctx, name, rest.ValidateAllObjectFunc, deletion)
	return err
}

// announce sets the pod's condition DisruptionTarget, when the preconditions hold, and
// returns the pod's new version.
func (r evictionREST) announce(ctx context.Context, name string, pre *metav1.Preconditions) (string, error) {
	key, err := r.store.KeyFunc(ctx, name)
	if err != nil {
		return "", err
	}
	var refused error
	out := &corev1.Pod{}
	err = r.store.Storage.GuaranteedUpdate(ctx, key, out, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return nil, apierrors.NewInternalError(errNotA("pod", obj))
		}
		if refused = holds(pre, pod); refused != nil {
			return nil, refused
		}
		pod.Status.Conditions = withCondition(pod.Status.Conditions, corev1.PodCondition{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(),
			Reason: "EvictionByEvictionAPI", Message: "Eviction API: evicting",
		})
		return pod, nil
	}), false, nil)
	if refused != nil {
		return "", refused
	}
	if err != nil {
		return "", storeerr.InterpretUpdateError(err, r.store.DefaultQualifiedResource, name)
	}
	return out.ResourceVersion, nil
}

// holds is nil when the preconditions mean this pod in this version.
func holds(pre *metav1.Preconditions, pod *corev1.Pod) error {
	if pre == nil {
		return nil
	}
	var why error
	if uid := pre.UID; uid != nil && *uid != "" && *uid != pod.UID {
		why = errUID(*uid, pod.UID)
	} else if v := pre.ResourceVersion; v != nil && *v != "" && *v != pod.ResourceVersion {
		why = fmt.Errorf("the ResourceVersion in the precondition (%s) does not match the ResourceVersion in record (%s). The object might have been modified", *v, pod.ResourceVersion)
	}
	if why == nil {
		return nil
	}
	return apierrors.NewConflict(schema.GroupResource{Resource: "Pod"}, pod.Name, why)
}
