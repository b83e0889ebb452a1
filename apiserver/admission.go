// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"

	"github.com/kplab/kplab/apiserver/rbac"
	"github.com/kplab/kplab/apiserver/registry"
)

// newAdmission returns what is asked about every write before it is stored, in
// this order.
func (s *Server) newAdmission(a *auth) admission.Interface {
	stored := func(resource string) func() bool {
		return func() bool { return s.newestRevision("", resource) > 0 }
	}
	plugins := []admission.Interface{
		namespaceLifecycle{a.lookup},
		limitAdmission{a.lookup, stored("limitranges")},
		podAdmission{a.lookup},
		priorityAdmission{a.lookup},
		claimAdmission{a.lookup},
		certificateAdmission{a.authorizer},
		rbac.NewEscalation(a.authorizer),
	}
	if s.cfg.DenyServiceExternalIPs {
		plugins = append(plugins, denyServiceExternalIPs{})
	}
	// Last, since what it lets through is charged.
	plugins = append(plugins, newQuotaAdmission(a.lookup, stored("resourcequotas"), s.stop.ctx.Done()))
	return admission.NewChainHandler(plugins...)
}

// immortal are the namespaces that cannot be deleted.
func immortal(name string) bool {
	switch name {
	case metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease:
		return true
	}
	return false
}

// namespaceLifecycle refuses new content in a namespace that does not exist or
// is being deleted, and the deletion of the namespaces that every cluster has.
// It implements admission.MutationInterface, as upstream's plugin of the same
// name does, so that it is asked before anything changes the object.
type namespaceLifecycle struct {
	lookup func(string) *registry.Store
}

// Handles implements admission.Interface.
func (namespaceLifecycle) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Delete
}

// Admit implements admission.MutationInterface.
func (n namespaceLifecycle) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	isNamespace := a.GetKind().GroupKind() == schema.GroupKind{Kind: "Namespace"}
	if a.GetOperation() == admission.Delete {
		if isNamespace && a.GetSubresource() == "" && immortal(a.GetName()) {
			return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), fmt.Errorf("this namespace may not be deleted"))
		}
		return nil
	}
	if isNamespace || a.GetNamespace() == "" {
		return nil
	}
	ns, err := registry.Read[*corev1.Namespace](ctx, n.lookup, "namespaces", metav1.NamespaceNone, a.GetNamespace())
	if err != nil {
		return err
	}
	if ns.DeletionTimestamp == nil && ns.Status.Phase != corev1.NamespaceTerminating {
		return nil
	}
	refused := admission.NewForbidden(a, fmt.Errorf("unable to create new content in namespace %s because it is being terminated", ns.Name))
	if status, ok := refused.(apierrors.APIStatus); ok {
		s := status.Status()
		s.Details.Causes = append(s.Details.Causes, metav1.StatusCause{
			Type:    corev1.NamespaceTerminatingCause,
			Message: fmt.Sprintf("namespace %s is being terminated", ns.Name),
			Field:   "metadata.namespace",
		})
		return &apierrors.StatusError{ErrStatus: s}
	}
	return refused
}

// accountWait is how long the creation of a pod waits for its service account:
// the account default is made by a controller a moment after its namespace.
const accountWait = 2 * time.Second

// denyServiceExternalIPs refuses external IPs that a Service does not have yet. It
// implements admission.ValidationInterface.
type denyServiceExternalIPs struct{}

// Handles implements admission.Interface.
func (denyServiceExternalIPs) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// Validate implements admission.ValidationInterface.
func (denyServiceExternalIPs) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	s, ok := a.GetObject().(*corev1.Service)
	if !ok || a.GetSubresource() != "" {
		return nil
	}
	var had []string
	if old, ok := a.GetOldObject().(*corev1.Service); ok {
		had = old.Spec.ExternalIPs
	}
	for _, ip := range s.Spec.ExternalIPs {
		if !slices.Contains(had, ip) {
			return admission.NewForbidden(a, externalIPDenied{})
		}
	}
	return nil
}

// externalIPDenied has upstream's sentence, capital letter and all.
type externalIPDenied struct{}

func (externalIPDenied) Error() string { return "Use of external IPs is denied by admission control" }
