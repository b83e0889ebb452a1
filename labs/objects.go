// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
)

// labLabel marks the namespaces that a lab made: only these it removes.
const labLabel = "kplab.dev/lab"

// memCache knows the kinds of the cluster.
type memCache struct {
	discovery.CachedDiscoveryInterface
	mapper *restmapper.DeferredDiscoveryRESTMapper
}

// resource finds the kind that a person calls so: svc, deployments.apps, Pod.
func (m *memCache) resource(name string) (*meta.RESTMapping, error) {
	mapper := restmapper.NewShortcutExpander(m.mapper, m.CachedDiscoveryInterface, nil)
	gr := schema.ParseGroupResource(strings.ToLower(name))
	gvk, err := mapper.KindFor(gr.WithVersion(""))
	if err != nil {
		return nil, fmt.Errorf("the cluster has no kind %q: %w", name, err)
	}
	return mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
}

// Get returns an object, KIND/NAME, or for KIND alone the list of those that the
// selector selects.
func (w *World) Get(ctx context.Context, what, namespace, selector string) (map[string]any, error) {
	kind, name, one := strings.Cut(what, "/")
	m, err := w.discovery.resource(kind)
	if err != nil {
		return nil, err
	}
	var from dynamic.ResourceInterface = w.dynamic.Resource(m.Resource)
	if m.Scope.Name() == meta.RESTScopeNameNamespace {
		from = w.dynamic.Resource(m.Resource).Namespace(namespace)
	}
	if one {
		o, err := from.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return o.Object, nil
	}
	list, err := from.List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, err
	}
	return list.UnstructuredContent(), nil
}

// decodeObjects reads the objects of a manifest, as a first look at what is wrong
// with it.
func decodeObjects(text string) ([]*unstructured.Unstructured, error) {
	var all []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader([]byte(text)), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("manifest: %w", err)
		}
		if len(o.Object) == 0 {
			continue
		}
		if o.GetAPIVersion() == "" || o.GetKind() == "" || o.GetName() == "" {
			return nil, fmt.Errorf("manifest: an object without apiVersion, kind or metadata.name")
		}
		all = append(all, o)
	}
	if len(all) == 0 {
		return nil, errors.New("manifest: no object in it")
	}
	return all, nil
}

// makeNamespaces makes a lab's namespaces and waits until pods can be made in them.
func (w *World) makeNamespaces(ctx context.Context, l *Lab, names []string) error {
	for _, name := range names {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labLabel: l.slug()}}}
		_, err := w.client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			var old *corev1.Namespace
			if old, err = w.client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{}); err == nil && old.Labels[labLabel] != l.slug() {
				return fmt.Errorf("namespace %s exists and is not this lab's: rename or delete it", name)
			}
		}
		if err != nil {
			return fmt.Errorf("make namespace %s: %w", name, err)
		}
	}
	for _, name := range names {
		err := w.until(ctx, time.Minute, func() (bool, error) {
			_, err := w.client.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			return err == nil, err
		})
		if err != nil {
			return fmt.Errorf("wait for the service account of namespace %s: %w", name, err)
		}
	}
	return nil
}

// removeNamespaces removes what a lab made, its pods without grace, and waits for it.
func (w *World) removeNamespaces(ctx context.Context, l *Lab, names []string) error {
	var gone []string
	for _, name := range names {
		ns, err := w.client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return fmt.Errorf("look for namespace %s: %w", name, err)
		}
		if ns.Labels[labLabel] != l.slug() {
			continue // not ours
		}
		if err := w.client.CoreV1().Namespaces().Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete namespace %s: %w", name, err)
		}
		now := int64(0)
		// The namespace takes no new pods any more, so that this catches all.
		err = w.client.CoreV1().Pods(name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete the pods of namespace %s: %w", name, err)
		}
		gone = append(gone, name)
	}
	for _, name := range gone {
		err := w.until(ctx, 2*time.Minute, func() (bool, error) {
			_, err := w.client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return false, err
		})
		if err != nil {
			return fmt.Errorf("wait for the end of namespace %s: %w", name, err)
		}
	}
	return nil
}

// pollInterval is the time between two looks at the API.
const pollInterval = 20 * time.Millisecond

// until looks again and again.
func (w *World) until(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
