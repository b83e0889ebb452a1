// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/resourcequota"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"

	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/internal/usage"
)

// quotaWorkers is how many namespaces are looked at at the same time. The requests of
// one namespace that wait together are charged with one write.
const quotaWorkers = 2

// quotaAdmission refuses what a ResourceQuota of the namespace leaves no room for, and
// charges the quota for the rest. It is upstream's evaluator with our stores and our
// measures. Nothing of it is made before the first quota is stored.
type quotaAdmission struct {
	any       func() bool
	evaluator func() resourcequota.Evaluator
}

var _ admission.ValidationInterface = quotaAdmission{}

// newQuotaAdmission returns the plugin; any is false while no quota was ever stored,
// and stop ends its workers.
func newQuotaAdmission(lookup func(string) *registry.Store, any func() bool, stop <-chan struct{}) quotaAdmission {
	return quotaAdmission{any, sync.OnceValue(func() resourcequota.Evaluator {
		measures := generic.NewRegistry(nil)
		for _, r := range []string{"pods", "services", "persistentvolumeclaims", "configmaps", "secrets", "replicationcontrollers", "resourcequotas"} {
			measures.Add(measure{schema.GroupResource{Resource: r}})
		}
		return resourcequota.NewQuotaEvaluator(quotaStore{lookup}, uncounted(), measures, nil, nil, quotaWorkers, stop)
	})}
}

// uncounted are the resources that no quota counts.
func uncounted() map[schema.GroupResource]struct{} {
	return map[schema.GroupResource]struct{}{
		{Resource: "bindings"}: {}, {Resource: "events"}: {}, {Group: "events.k8s.io", Resource: "events"}: {},
		{Group: "authorization.k8s.io", Resource: "localsubjectaccessreviews"}: {},
	}
}

// Handles implements admission.Interface.
func (quotaAdmission) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// Validate implements admission.ValidationInterface.
func (q quotaAdmission) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetNamespace() == "" || a.GetKind().Kind == "Namespace" || !q.any() {
		return nil
	}
	return q.evaluator().Evaluate(a)
}

// quotaStore implements resourcequota.QuotaAccessor on what is stored.
type quotaStore struct {
	lookup func(string) *registry.Store
}

// GetQuotas implements resourcequota.QuotaAccessor.
func (s quotaStore) GetQuotas(namespace string) ([]corev1.ResourceQuota, error) {
	list, err := registry.List[*corev1.ResourceQuotaList](context.Background(), s.lookup, "resourcequotas", namespace, labels.Everything())
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// UpdateQuotaStatus implements resourcequota.QuotaAccessor. The error is a conflict
// when the quota is not what was looked at.
func (s quotaStore) UpdateQuotaStatus(q *corev1.ResourceQuota) error {
	return registry.Change(context.Background(), s.lookup, "resourcequotas", q.Namespace, q.Name, false, func(stored *corev1.ResourceQuota) error {
		if stored.UID != q.UID || stored.ResourceVersion != q.ResourceVersion {
			return apierrors.NewConflict(schema.GroupResource{Resource: "resourcequotas"}, q.Name, errors.New("the quota was changed meanwhile"))
		}
		stored.Status.Used = q.Status.Used
		return nil
	})
}

// measure implements quota.Evaluator for the objects of one resource.
type measure struct{ resource schema.GroupResource }

var _ quota.Evaluator = measure{}

// GroupResource implements quota.Evaluator.
func (m measure) GroupResource() schema.GroupResource { return m.resource }

// Handles implements quota.Evaluator: which requests may take more than before.
func (m measure) Handles(a admission.Attributes) bool {
	switch {
	case m.resource.Resource == "pods" && a.GetSubresource() == "resize":
		return a.GetOperation() == admission.Update
	case a.GetSubresource() != "":
		return false
	case m.resource.Resource == "services" || m.resource.Resource == "persistentvolumeclaims":
		return true
	}
	return a.GetOperation() == admission.Create
}

// Constraints implements quota.Evaluator.
func (m measure) Constraints(required []corev1.ResourceName, item runtime.Object) error {
	if pod, ok := item.(*corev1.Pod); ok {
		if missing := usage.Missing(pod, required); missing != "" {
			return errors.New(missing)
		}
	}
	return nil
}

// Matches implements quota.Evaluator.
func (m measure) Matches(q *corev1.ResourceQuota, item runtime.Object) (bool, error) {
	return generic.Matches(q, item, m.MatchingResources, func(r corev1.ScopedResourceSelectorRequirement, obj runtime.Object) (bool, error) {
		return usage.InScope(obj, r)
	})
}

// MatchingScopes implements quota.Evaluator.
func (m measure) MatchingScopes(item runtime.Object, all []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	var out []corev1.ScopedResourceSelectorRequirement
	for _, r := range all {
		match, err := usage.InScope(item, r)
		if err != nil {
			return nil, err
		}
		if match {
			out = append(out, r)
		}
	}
	return out, nil
}

// UncoveredQuotaScopes implements quota.Evaluator: nothing is limited by default.
func (measure) UncoveredQuotaScopes(_, _ []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return nil, nil
}

// MatchingResources implements quota.Evaluator.
func (m measure) MatchingResources(names []corev1.ResourceName) []corev1.ResourceName {
	var out []corev1.ResourceName
	for _, name := range names {
		if usage.Resource(name) == m.resource {
			out = append(out, name)
		}
	}
	return out
}

// Usage implements quota.Evaluator.
func (m measure) Usage(item runtime.Object) (corev1.ResourceList, error) {
	return usage.Of(m.resource, item, time.Now()), nil
}

// UsageStats implements quota.Evaluator. The quota controller counts, not the API.
func (m measure) UsageStats(quota.UsageStatsOptions) (quota.UsageStats, error) {
	return quota.UsageStats{}, errors.New("the API server does not count what is stored")
}
