// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	"github.com/kplab/kplab/controller/loop"
)

// content is what was found in a namespace after all of it was asked to go.
type content struct {
	instances  map[string]int // by "resource.group"
	finalizers map[string]int // by finalizer
	discovery  error          // which kinds there are could not be fully learnt
	deletion   error          // some content could not be deleted
}

func (c content) empty() bool {
	return len(c.instances) == 0 && c.discovery == nil && c.deletion == nil
}

// empty deletes everything in a namespace that is being deleted and lets it go when
// nothing is left. What takes its time (pods that stop, finalizers) brings the loop
// back by its events.
func (c *Controller) empty(ctx context.Context, ns *corev1.Namespace) error {
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return nil
	}
	left := c.sweep(ctx, ns.Name)
	if err := c.report(ctx, ns, left); err != nil {
		return err
	}
	if err := errors.Join(left.discovery, left.deletion); err != nil {
		return err
	}
	if !left.empty() {
		c.loop.After(loop.Key{Name: ns.Name}, recheck)
		return nil
	}
	// A newer state than the cache's, so that the finalizers of others survive.
	live, err := c.client.CoreV1().Namespaces().Get(ctx, ns.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || (err == nil && live.UID != ns.UID) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the namespace: %w", err)
	}
	live.Spec.Finalizers = slices.DeleteFunc(live.Spec.Finalizers, func(f corev1.FinalizerName) bool { return f == corev1.FinalizerKubernetes })
	if _, err := c.client.CoreV1().Namespaces().Finalize(ctx, live, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("finalize the namespace: %w", err)
	}
	return nil
}

// sweep asks every kind of content to go and counts what stays.
func (c *Controller) sweep(ctx context.Context, namespace string) content {
	out := content{instances: map[string]int{}, finalizers: map[string]int{}}
	kinds, err := c.contentKinds()
	out.discovery = err
	for _, gvr := range kinds {
		client := c.metadata.Resource(gvr).Namespace(namespace)
		background := metav1.DeletePropagationBackground
		err := client.DeleteCollection(ctx, metav1.DeleteOptions{PropagationPolicy: &background}, metav1.ListOptions{})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsMethodNotSupported(err) {
			out.deletion = errors.Join(out.deletion, fmt.Errorf("delete all %s: %w", gvr.Resource, err))
			continue
		}
		list, err := client.List(ctx, metav1.ListOptions{})
		if err != nil {
			if !apierrors.IsNotFound(err) && !apierrors.IsMethodNotSupported(err) {
				out.deletion = errors.Join(out.deletion, fmt.Errorf("list %s: %w", gvr.Resource, err))
			}
			continue
		}
		for i := range list.Items {
			// Upstream writes the core group as nothing after the dot: "pods.".
			out.instances[gvr.Resource+"."+gvr.Group]++
			for _, f := range list.Items[i].Finalizers {
				out.finalizers[f]++
			}
		}
	}
	return out
}

// contentKinds asks the API which kinds of objects live in namespaces.
func (c *Controller) contentKinds() ([]schema.GroupVersionResource, error) {
	lists, err := discovery.ServerPreferredNamespacedResources(c.client.Discovery())
	var kinds []schema.GroupVersionResource
	for _, list := range lists {
		gv, parseErr := schema.ParseGroupVersion(list.GroupVersion)
		if parseErr != nil {
			return nil, fmt.Errorf("parse group version %q: %w", list.GroupVersion, parseErr)
		}
		for i := range list.APIResources {
			r := &list.APIResources[i]
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "deletecollection") || !slices.Contains(r.Verbs, "list") {
				continue
			}
			kinds = append(kinds, gv.WithResource(r.Name))
		}
	}
	if err != nil {
		return kinds, fmt.Errorf("learn which kinds there are: %w", err)
	}
	return kinds, nil
}

// report writes the conditions that tell a user why a namespace is still there, in
// upstream's words.
func (c *Controller) report(ctx context.Context, ns *corev1.Namespace, left content) error {
	update := ns.DeepCopy()
	for _, next := range conditions(left) {
		next.LastTransitionTime = metav1.NewTime(c.clock.Now())
		i := slices.IndexFunc(update.Status.Conditions, func(had corev1.NamespaceCondition) bool { return had.Type == next.Type })
		switch {
		case i < 0:
			update.Status.Conditions = append(update.Status.Conditions, next)
		case update.Status.Conditions[i].Status != next.Status || update.Status.Conditions[i].Message != next.Message:
			if update.Status.Conditions[i].Status == next.Status {
				next.LastTransitionTime = update.Status.Conditions[i].LastTransitionTime
			}
			update.Status.Conditions[i] = next
		}
	}
	// An empty namespace goes at once: nobody will read its conditions.
	if equality.Semantic.DeepEqual(ns.Status, update.Status) || (left.empty() && len(ns.Status.Conditions) == 0) {
		return nil
	}
	_, err := c.client.CoreV1().Namespaces().UpdateStatus(ctx, update, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the conditions: %w", err)
	}
	return nil
}

// conditions says what is left, as upstream does.
func conditions(left content) []corev1.NamespaceCondition {
	say := func(t corev1.NamespaceConditionType, bad bool, badReason, goodReason, badText, goodText string) corev1.NamespaceCondition {
		if bad {
			return corev1.NamespaceCondition{Type: t, Status: corev1.ConditionTrue, Reason: badReason, Message: badText}
		}
		return corev1.NamespaceCondition{Type: t, Status: corev1.ConditionFalse, Reason: goodReason, Message: goodText}
	}
	return []corev1.NamespaceCondition{
		say(corev1.NamespaceDeletionDiscoveryFailure, left.discovery != nil, "DiscoveryFailed", "ResourcesDiscovered",
			fmt.Sprintf("Discovery failed for some groups: %v", left.discovery), "All resources successfully discovered"),
		say(corev1.NamespaceDeletionGVParsingFailure, false, "", "ParsedGroupVersions", "", "All legacy kube types successfully parsed"),
		say(corev1.NamespaceDeletionContentFailure, left.deletion != nil, "ContentDeletionFailed", "ContentDeleted",
			fmt.Sprintf("Failed to delete all resource types: %v", left.deletion), "All content successfully deleted, may be waiting on finalization"),
		say(corev1.NamespaceContentRemaining, len(left.instances) > 0, "SomeResourcesRemain", "ContentRemoved",
			"Some resources are remaining: "+listing(left.instances, "%s has %d resource instances"), "All content successfully removed"),
		say(corev1.NamespaceFinalizersRemaining, len(left.finalizers) > 0, "SomeFinalizersRemain", "ContentHasNoFinalizers",
			"Some content in the namespace has finalizers remaining: "+listing(left.finalizers, "%s in %d resource instances"), "All content-preserving finalizers finished"),
	}
}

func listing(counts map[string]int, format string) string {
	parts := make([]string, 0, len(counts))
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf(format, name, counts[name]))
	}
	return strings.Join(parts, ", ")
}
