// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestPodWarnings(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *corev1.Pod)
		want   []string
	}{
		{"nothing odd", func(*corev1.Pod) {}, nil},
		{"a name with dots", func(p *corev1.Pod) { p.Name = "a.b" }, []string{"metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label is recommended: [must not contain dots]"}},
		{"old node labels", func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{"beta.kubernetes.io/os": "linux", "failure-domain.beta.kubernetes.io/zone": "a"}
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "beta.kubernetes.io/instance-type", LabelSelector: &metav1.LabelSelector{}}}
		}, []string{
			`spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use "kubernetes.io/os" instead`,
			`spec.nodeSelector[failure-domain.beta.kubernetes.io/zone]: deprecated since v1.17; use "topology.kubernetes.io/zone" instead`,
			`spec.topologySpreadConstraints[0].topologyKey: beta.kubernetes.io/instance-type is deprecated since v1.17; use "node.kubernetes.io/instance-type" instead`,
		}},
		{"an annotation without effect", func(p *corev1.Pod) {
			p.Annotations = map[string]string{"scheduler.alpha.kubernetes.io/critical-pod": ""}
		}, []string{`metadata.annotations[scheduler.alpha.kubernetes.io/critical-pod]: non-functional in v1.16+; use the "priorityClassName" field instead`}},
		{"ports of two containers", func(p *corev1.Pod) {
			port := []corev1.ContainerPort{{ContainerPort: 80, Protocol: corev1.ProtocolTCP}}
			p.Spec.Containers[0].Ports = port
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Ports: port}, corev1.Container{Name: "e", Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8080, Protocol: corev1.ProtocolTCP}}})
		}, []string{
			"spec.containers[1].ports[0]: duplicate port definition with spec.containers[0].ports[0]",
			"spec.containers[2].ports[0]: overlapping port definition with spec.containers[0].ports[0]",
			"spec.containers[2].ports[0]: overlapping port definition with spec.containers[1].ports[0]",
		}},
		{"variables twice", func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}, {Name: "A", Value: "$(A)2"}, {Name: "A", Value: "3"}}
		}, []string{`spec.containers[0].env[2]: hides previous definition of "A", which may be dropped when using apply`}},
		{"half a byte", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("1500m")}
		}, []string{`spec.containers[0].resources.limits[memory]: fractional byte value "1500m" is invalid, must be an integer`}},
		{"names twice", func(p *corev1.Pod) {
			p.Spec.HostAliases = []corev1.HostAlias{{IP: "1.1.1.1"}, {IP: "1.1.1.1"}}
			p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "s"}, {Name: "s"}}
		}, []string{`spec.hostAliases[1].ip: duplicate ip "1.1.1.1"`, `spec.imagePullSecrets[1].name: duplicate name "s"`}},
		{"a removed volume", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{RBD: &corev1.RBDVolumeSource{}}}}
		}, []string{"spec.volumes[0].rbd: deprecated in v1.28, non-functional in v1.31+"}},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
		c.change(p)
		if got := podWarnings(p, nil); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q", c.name, got)
		}
		if got := podWarnings(p, p); got != nil {
			t.Errorf("%s: an update says %q", c.name, got)
		}
	}
}

// A Deployment warns of its template when it comes and when the template changes.
func TestTemplateWarnings(t *testing.T) {
	warn := deploymentKind().Warnings
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "d"}}
	d.Spec.Template.Spec.NodeSelector = map[string]string{"beta.kubernetes.io/os": "linux"}
	want := []string{`spec.template.spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use "kubernetes.io/os" instead`}
	if got := warn(d, nil); !slices.Equal(got, want) {
		t.Errorf("on create: %q", got)
	}
	if got := warn(d, d.DeepCopy()); got != nil {
		t.Errorf("without a change: %q", got)
	}
	if got := warn(d, &appsv1.Deployment{}); !slices.Equal(got, want) {
		t.Errorf("with a change: %q", got)
	}
}
