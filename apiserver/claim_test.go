// SPDX-License-Identifier: Apache-2.0

package apiserver

import "testing"

// TestDefaultStorageClass is given to new claims that say nothing of a class.
func TestDefaultStorageClass(t *testing.T) {
	_, w := startWire(t)
	const claims, classes = "/api/v1/namespaces/default/persistentvolumeclaims", "/apis/storage.k8s.io/v1/storageclasses"
	spec := func(name, class string) string {
		return `{"metadata":{"name":"` + name + `"},"spec":{"accessModes":["ReadWriteOnce"],` + class + `"resources":{"requests":{"storage":"1Gi"}}}}`
	}
	m := w.mustPost(claims, spec("a", ""))
	if field(m, "spec", "storageClassName") != nil || text(m, "metadata", "finalizers", 0) != "kubernetes.io/pvc-protection" {
		t.Errorf("without a default: %v", m)
	}
	w.mustPost(classes, `{"metadata":{"name":"slow"},"provisioner":"example.com/p"}`)
	w.mustPost(classes, `{"metadata":{"name":"fast","annotations":{"storageclass.kubernetes.io/is-default-class":"true"}},"provisioner":"example.com/p"}`)
	if m = w.mustPost(claims, spec("b", "")); text(m, "spec", "storageClassName") != "fast" {
		t.Errorf("with a default: %v", field(m, "spec"))
	}
	if m = w.mustPost(claims, spec("c", `"storageClassName":"",`)); text(m, "spec", "storageClassName") != "" {
		t.Errorf("none was asked for: %v", field(m, "spec"))
	}
}
