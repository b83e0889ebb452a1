// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// setDefault sets *p to value when nothing is there.
func setDefault[T any](p **T, value T) {
	if *p == nil {
		*p = &value
	}
}

// setIfZero sets *p to value when it holds its type's zero value.
func setIfZero[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// defaultPod sets what upstream defaults in a pod, beyond what it defaults in a
// pod template.
func defaultPod(pod *corev1.Pod) {
	defaultPodSpec(&pod.Spec)
	setDefault(&pod.Spec.EnableServiceLinks, corev1.DefaultEnableServiceLinks)
	requestsFromLimits(pod.Spec.InitContainers)
	requestsFromLimits(pod.Spec.Containers)
}

// requestsFromLimits makes a container that only names a limit request as much.
func requestsFromLimits(containers []corev1.Container) {
	for i := range containers {
		r := &containers[i].Resources
		for name, limit := range r.Limits {
			if _, said := r.Requests[name]; said {
				continue
			}
			if r.Requests == nil {
				r.Requests = corev1.ResourceList{}
			}
			r.Requests[name] = limit.DeepCopy()
		}
	}
}

// defaultPodSpec sets what upstream defaults in the spec of a pod and of a pod
// template.
func defaultPodSpec(spec *corev1.PodSpec) {
	setIfZero(&spec.DNSPolicy, corev1.DNSClusterFirst)
	setIfZero(&spec.RestartPolicy, corev1.RestartPolicyAlways)
	setIfZero(&spec.SchedulerName, corev1.DefaultSchedulerName)
	setDefault(&spec.TerminationGracePeriodSeconds, int64(corev1.DefaultTerminationGracePeriodSeconds))
	setDefault(&spec.SecurityContext, corev1.PodSecurityContext{})
	defaultContainers(spec.InitContainers, spec.HostNetwork)
	defaultContainers(spec.Containers, spec.HostNetwork)
	for i := range spec.EphemeralContainers {
		// The two types have the same fields, by contract with upstream.
		c := corev1.Container(spec.EphemeralContainers[i].EphemeralContainerCommon)
		defaultContainer(&c, spec.HostNetwork)
		spec.EphemeralContainers[i].EphemeralContainerCommon = corev1.EphemeralContainerCommon(c)
	}
	for i := range spec.Volumes {
		defaultVolume(&spec.Volumes[i].VolumeSource)
	}
	for i := range spec.TopologySpreadConstraints {
		c := &spec.TopologySpreadConstraints[i]
		setDefault(&c.NodeAffinityPolicy, corev1.NodeInclusionPolicyHonor)
		setDefault(&c.NodeTaintsPolicy, corev1.NodeInclusionPolicyIgnore)
	}
}

func defaultContainers(containers []corev1.Container, hostNetwork bool) {
	for i := range containers {
		defaultContainer(&containers[i], hostNetwork)
	}
}

func defaultContainer(c *corev1.Container, hostNetwork bool) {
	setIfZero(&c.TerminationMessagePath, corev1.TerminationMessagePathDefault)
	setIfZero(&c.TerminationMessagePolicy, corev1.TerminationMessageReadFile)
	if c.ImagePullPolicy == "" {
		c.ImagePullPolicy = corev1.PullIfNotPresent
		if imageIsLatest(c.Image) {
			c.ImagePullPolicy = corev1.PullAlways
		}
	}
	for i := range c.Ports {
		setIfZero(&c.Ports[i].Protocol, corev1.ProtocolTCP)
		if hostNetwork {
			setIfZero(&c.Ports[i].HostPort, c.Ports[i].ContainerPort)
		}
	}
	for i := range c.Env {
		if from := c.Env[i].ValueFrom; from != nil && from.FieldRef != nil {
			setIfZero(&from.FieldRef.APIVersion, "v1")
		}
	}
	for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
		if p == nil {
			continue
		}
		setIfZero(&p.TimeoutSeconds, 1)
		setIfZero(&p.PeriodSeconds, 10)
		setIfZero(&p.SuccessThreshold, 1)
		setIfZero(&p.FailureThreshold, 3)
		defaultHTTPGet(p.HTTPGet)
		if p.GRPC != nil {
			setDefault(&p.GRPC.Service, "")
		}
	}
	if c.Lifecycle != nil {
		for _, h := range []*corev1.LifecycleHandler{c.Lifecycle.PostStart, c.Lifecycle.PreStop} {
			if h != nil {
				defaultHTTPGet(h.HTTPGet)
			}
		}
	}
}

func defaultHTTPGet(get *corev1.HTTPGetAction) {
	if get != nil {
		setIfZero(&get.Path, "/")
		setIfZero(&get.Scheme, corev1.URISchemeHTTP)
	}
}

// imageIsLatest says whether an image reference has the tag latest, or none and
// no digest, which means the same.
func imageIsLatest(image string) bool {
	name, _, digest := strings.Cut(image, "@")
	if digest {
		return false
	}
	last := name[strings.LastIndex(name, "/")+1:]
	_, tag, tagged := strings.Cut(last, ":")
	return !tagged || tag == "latest"
}

func defaultVolume(v *corev1.VolumeSource) {
	const mode = corev1.ConfigMapVolumeSourceDefaultMode
	switch {
	case v.Secret != nil:
		setDefault(&v.Secret.DefaultMode, mode)
	case v.ConfigMap != nil:
		setDefault(&v.ConfigMap.DefaultMode, mode)
	case v.DownwardAPI != nil:
		setDefault(&v.DownwardAPI.DefaultMode, mode)
		defaultFieldRefs(v.DownwardAPI.Items)
	case v.HostPath != nil:
		setDefault(&v.HostPath.Type, corev1.HostPathUnset)
	case v.Projected != nil:
		setDefault(&v.Projected.DefaultMode, mode)
		for i := range v.Projected.Sources {
			s := &v.Projected.Sources[i]
			if s.ServiceAccountToken != nil {
				setDefault(&s.ServiceAccountToken.ExpirationSeconds, int64(3600))
			}
			if s.DownwardAPI != nil {
				defaultFieldRefs(s.DownwardAPI.Items)
			}
		}
	case *v == (corev1.VolumeSource{}):
		v.EmptyDir = &corev1.EmptyDirVolumeSource{}
	}
}

func defaultFieldRefs(items []corev1.DownwardAPIVolumeFile) {
	for i := range items {
		if items[i].FieldRef != nil {
			setIfZero(&items[i].FieldRef.APIVersion, "v1")
		}
	}
}
