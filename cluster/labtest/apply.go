// SPDX-License-Identifier: Apache-2.0

package labtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
)

// Apply applies each object of a YAML text as `kubectl apply --server-side` does.
func (l *Lab) Apply(text string) {
	l.t.Helper()
	if err := l.TryApply(text); err != nil {
		l.t.Fatal(err)
	}
}

// TryApply is Apply for objects that the API may refuse.
func (l *Lab) TryApply(text string) error {
	client, err := dynamic.NewForConfig(l.REST)
	if err != nil {
		return err
	}
	groups, err := restmapper.GetAPIGroupResources(l.Client.Discovery())
	if err != nil {
		return err
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader([]byte(text)), 4096); ; {
		obj := &unstructured.Unstructured{}
		if err := decoder.Decode(obj); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read the manifest: %w", err)
		}
		if len(obj.Object) == 0 {
			continue // nothing but a comment between two separators
		}
		gvk := obj.GroupVersionKind()
		m, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			return err
		}
		var to dynamic.ResourceInterface = client.Resource(m.Resource)
		if m.Scope.Name() == "namespace" {
			namespace := obj.GetNamespace()
			if namespace == "" {
				namespace = metav1.NamespaceDefault
			}
			to = client.Resource(m.Resource).Namespace(namespace)
		}
		if _, err := to.Apply(context.Background(), obj.GetName(), obj, metav1.ApplyOptions{FieldManager: "labtest", Force: true}); err != nil {
			return fmt.Errorf("apply %s %s: %w", strings.ToLower(gvk.Kind), obj.GetName(), err)
		}
	}
}
