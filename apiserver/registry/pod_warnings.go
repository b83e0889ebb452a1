// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// podWarnings says what is odd about a new pod, in upstream's words.
func podWarnings(pod, old *corev1.Pod) []string {
	if old != nil {
		return nil
	}
	var out []string
	if why := validation.IsDNS1123Label(pod.Name); len(why) > 0 {
		out = append(out, fmt.Sprintf("metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label is recommended: %v", why))
	}
	return append(out, podSpecWarnings(nil, &pod.ObjectMeta, &pod.Spec)...)
}

// warnsOfTemplate makes the Warnings of a kind that has a pod template.
func warnsOfTemplate[T interface {
	runtime.Object
	metav1.Object
}](template func(T) *corev1.PodTemplateSpec) func(obj, old runtime.Object) []string {
	return func(obj, old runtime.Object) []string {
		var was *corev1.PodTemplateSpec
		if old != nil {
			was = template(old.(T))
		}
		return templateWarnings(obj.(T), template(obj.(T)), was)
	}
}

// templateWarnings says what is odd about the pods that a new object makes, or one
// whose template is another one; old is nil on create.
func templateWarnings(owner metav1.Object, t, old *corev1.PodTemplateSpec) []string {
	var out []string
	if old != nil && equality.Semantic.DeepEqual(t, old) {
		return nil
	}
	if old == nil {
		if why := validation.IsDNS1123Label(owner.GetName()); len(why) > 0 {
			out = append(out, fmt.Sprintf("metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: %v", why))
		}
	}
	if t == nil {
		return out
	}
	return append(out, podSpecWarnings(field.NewPath("spec", "template"), &t.ObjectMeta, &t.Spec)...)
}

// podSpecWarnings looks at a pod's spec, or a template's, which is at path.
func podSpecWarnings(path *field.Path, m *metav1.ObjectMeta, s *corev1.PodSpec) []string {
	spec := path.Child("spec")
	out := nodeLabelWarnings(spec, s)
	for _, key := range slices.Sorted(maps.Keys(m.Annotations)) {
		if key == corev1.SeccompPodAnnotationKey && s.SecurityContext != nil && s.SecurityContext.SeccompProfile != nil {
			continue // the field says it too
		}
		if why, ok := deprecatedAnnotations()[key]; ok {
			out = append(out, path.Child("metadata", "annotations").Key(key).String()+": "+why)
		}
	}
	for i := range s.Volumes {
		if name, why := removedVolume(&s.Volumes[i]); name != "" {
			out = append(out, spec.Child("volumes").Index(i).Child(name).String()+": "+why)
		}
	}
	seen := map[string]bool{}
	for i, a := range s.HostAliases {
		if seen["ip "+a.IP] {
			out = append(out, fmt.Sprintf("%s: duplicate ip %q", spec.Child("hostAliases").Index(i).Child("ip"), a.IP))
		}
		seen["ip "+a.IP] = true
	}
	for i, p := range s.ImagePullSecrets {
		at := spec.Child("imagePullSecrets").Index(i).Child("name")
		if seen["secret "+p.Name] {
			out = append(out, fmt.Sprintf("%s: duplicate name %q", at, p.Name))
		}
		if p.Name == "" {
			out = append(out, fmt.Sprintf("%s: invalid empty name %q", at, p.Name))
		}
		seen["secret "+p.Name] = true
	}
	ports := map[string][]namedPort{}
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"initContainers", s.InitContainers}, {"containers", s.Containers}} {
		for i := range list.containers {
			at := spec.Child(list.name).Index(i)
			out = append(out, containerWarnings(at, &list.containers[i])...)
			out = append(out, portWarnings(at.Child("ports"), list.containers[i].Ports, ports)...)
		}
	}
	if g := s.TerminationGracePeriodSeconds; g != nil && *g < 0 {
		out = append(out, spec.Child("terminationGracePeriodSeconds").String()+": must be >= 0; negative values are invalid and will be treated as 1")
	}
	return out
}

// deprecatedAnnotations are those of pods that do nothing any more.
func deprecatedAnnotations() map[string]string {
	return map[string]string{
		"scheduler.alpha.kubernetes.io/critical-pod":  `non-functional in v1.16+; use the "priorityClassName" field instead`,
		"security.alpha.kubernetes.io/sysctls":        `non-functional in v1.11+; use the "sysctls" field instead`,
		"security.alpha.kubernetes.io/unsafe-sysctls": `non-functional in v1.11+; use the "sysctls" field instead`,
		corev1.SeccompPodAnnotationKey:                `non-functional in v1.27+; use the "seccompProfile" field instead`,
	}
}

// removedVolume names the plugin of a volume that has none any more.
func removedVolume(v *corev1.Volume) (name, why string) {
	switch {
	case v.PhotonPersistentDisk != nil:
		return "photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"
	case v.GitRepo != nil:
		return "gitRepo", "deprecated in v1.11, and disabled by default in v1.33+"
	case v.ScaleIO != nil:
		return "scaleIO", "deprecated in v1.16, non-functional in v1.22+"
	case v.Flocker != nil:
		return "flocker", "deprecated in v1.22, non-functional in v1.25+"
	case v.StorageOS != nil:
		return "storageOS", "deprecated in v1.22, non-functional in v1.25+"
	case v.Quobyte != nil:
		return "quobyte", "deprecated in v1.22, non-functional in v1.25+"
	case v.Glusterfs != nil:
		return "glusterfs", "deprecated in v1.25, non-functional in v1.26+"
	case v.CephFS != nil:
		return "cephfs", "deprecated in v1.28, non-functional in v1.31+"
	case v.RBD != nil:
		return "rbd", "deprecated in v1.28, non-functional in v1.31+"
	}
	return "", ""
}

// nodeLabelWarnings finds the node labels that have other names now.
func nodeLabelWarnings(spec *field.Path, s *corev1.PodSpec) []string {
	var out []string
	for _, key := range slices.Sorted(maps.Keys(s.NodeSelector)) {
		if why := deprecatedNodeLabel(key); why != "" {
			out = append(out, spec.Child("nodeSelector").Key(key).String()+": "+why)
		}
	}
	term := func(at *field.Path, t *corev1.NodeSelectorTerm) {
		for i, e := range t.MatchExpressions {
			if why := deprecatedNodeLabel(e.Key); why != "" {
				out = append(out, fmt.Sprintf("%s: %s is %s", at.Child("matchExpressions").Index(i).Child("key"), e.Key, why))
			}
		}
	}
	if s.Affinity != nil && s.Affinity.NodeAffinity != nil {
		n, at := s.Affinity.NodeAffinity, spec.Child("affinity", "nodeAffinity")
		if r := n.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
			for i := range r.NodeSelectorTerms {
				term(at.Child("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms").Index(i), &r.NodeSelectorTerms[i])
			}
		}
		for i := range n.PreferredDuringSchedulingIgnoredDuringExecution {
			term(at.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i).Child("preference"), &n.PreferredDuringSchedulingIgnoredDuringExecution[i].Preference)
		}
	}
	for i, c := range s.TopologySpreadConstraints {
		at := spec.Child("topologySpreadConstraints").Index(i)
		if why := deprecatedNodeLabel(c.TopologyKey); why != "" {
			out = append(out, fmt.Sprintf("%s: %s is %s", at.Child("topologyKey"), c.TopologyKey, why))
		}
		if c.LabelSelector == nil {
			out = append(out, at.Child("labelSelector").String()+": a null labelSelector results in matching no pod")
		}
	}
	return out
}

// deprecatedNodeLabel says what has taken the place of a node label, "" when it
// stands.
func deprecatedNodeLabel(key string) string {
	switch key {
	case "beta.kubernetes.io/arch", "beta.kubernetes.io/os":
		return fmt.Sprintf("deprecated since v1.14; use %q instead", strings.TrimPrefix(key, "beta."))
	case "failure-domain.beta.kubernetes.io/region", "failure-domain.beta.kubernetes.io/zone":
		return fmt.Sprintf("deprecated since v1.17; use %q instead", strings.Replace(key, "failure-domain.beta.", "topology.", 1))
	case "beta.kubernetes.io/instance-type":
		return fmt.Sprintf("deprecated since v1.17; use %q instead", corev1.LabelInstanceTypeStable)
	}
	return ""
}

// containerWarnings looks at one container.
func containerWarnings(at *field.Path, c *corev1.Container) []string {
	var out []string
	for _, list := range []struct {
		name      string
		resources corev1.ResourceList
	}{{"limits", c.Resources.Limits}, {"requests", c.Resources.Requests}} {
		for _, name := range []corev1.ResourceName{corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			if q, ok := list.resources[name]; ok && fractional(q) {
				out = append(out, fmt.Sprintf("%s: fractional byte value %q is invalid, must be an integer", at.Child("resources", list.name).Key(string(name)), q.String()))
			}
		}
	}
	seen := map[string]bool{}
	for i, e := range c.Env {
		// A value that builds on the one before is meant so.
		ref := "$(" + e.Name + ")"
		if seen[e.Name] && (e.ValueFrom != nil || e.Value == ref || !strings.Contains(e.Value, ref)) {
			out = append(out, fmt.Sprintf("%s: hides previous definition of %q, which may be dropped when using apply", at.Child("env").Index(i), e.Name))
		}
		seen[e.Name] = true
	}
	return out
}

func fractional(q resource.Quantity) bool { return q.MilliValue()%1000 != 0 }

// namedPort is a port and where it is defined.
type namedPort struct {
	at   *field.Path
	port corev1.ContainerPort
}

// portWarnings finds ports that others of the pod have too; seen has those so far.
func portWarnings(at *field.Path, list []corev1.ContainerPort, seen map[string][]namedPort) []string {
	var out []string
	for i, p := range list {
		here := at.Index(i)
		if p.HostIP != "" && p.HostPort == 0 {
			out = append(out, fmt.Sprintf("%s: hostIP set without hostPort: %+v", here, p))
		}
		key := fmt.Sprintf("%d/%s", p.ContainerPort, p.Protocol)
		for _, other := range seen[key] {
			switch {
			case p.HostIP == other.port.HostIP && p.HostPort == other.port.HostPort:
				out = append(out, fmt.Sprintf("%s: duplicate port definition with %s", here, other.at))
			case p.HostPort == 0 || other.port.HostPort == 0:
				out = append(out, fmt.Sprintf("%s: overlapping port definition with %s", here, other.at))
			}
		}
		seen[key] = append(seen[key], namedPort{here, p})
	}
	return out
}
