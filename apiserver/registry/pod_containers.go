// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// countPointers counts the pointer fields of *v that are set, for the many
// types of which exactly one member must be.
func countPointers(v any) int {
	n := 0
	s := reflect.ValueOf(v).Elem()
	for i := range s.NumField() {
		if f := s.Field(i); f.Kind() == reflect.Pointer && !f.IsNil() {
			n++
		}
	}
	return n
}

// validateContainers checks containers or init containers. names collects the
// names of all containers of the pod.
func validateContainers(cs []corev1.Container, init bool, volumes map[string]corev1.VolumeSource, names sets.Set[string], p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range cs {
		c, cp := &cs[i], p.Index(i)
		errs = append(errs, validateContainerName(c.Name, names, cp.Child("name"))...)
		errs = append(errs, validateContainer(c, volumes, cp)...)
		sidecar := init && c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		if init && !sidecar {
			for name, set := range map[string]bool{"livenessProbe": c.LivenessProbe != nil, "readinessProbe": c.ReadinessProbe != nil, "startupProbe": c.StartupProbe != nil, "lifecycle": c.Lifecycle != nil} {
				if set {
					errs = append(errs, field.Forbidden(cp.Child(name), "may not be set for init containers without restartPolicy=Always"))
				}
			}
		}
	}
	return errs
}

func validateContainerName(name string, names sets.Set[string], p *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(p, "")}
	}
	errs := invalidIf(p, name, validation.IsDNS1123Label(name))
	if names.Has(name) {
		errs = append(errs, field.Duplicate(p, name))
	}
	names.Insert(name)
	return errs
}

// validateSidecars checks the restart policy of init containers.
func validateSidecars(cs []corev1.Container, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, c := range cs {
		if c.RestartPolicy != nil {
			errs = append(errs, oneOf(*c.RestartPolicy, p.Index(i).Child("restartPolicy"), corev1.ContainerRestartPolicyAlways)...)
		}
	}
	return errs
}

func validateEphemeralContainers(cs []corev1.EphemeralContainer, spec *corev1.PodSpec, p *field.Path) field.ErrorList {
	volumes := map[string]corev1.VolumeSource{}
	for _, v := range spec.Volumes {
		volumes[v.Name] = v.VolumeSource
	}
	names, targets := sets.New[string](), sets.New[string]()
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for _, c := range list {
			names.Insert(c.Name)
			targets.Insert(c.Name)
		}
	}
	var errs field.ErrorList
	for i := range cs {
		ep := p.Index(i)
		c := corev1.Container(cs[i].EphemeralContainerCommon)
		errs = append(errs, validateContainerName(c.Name, names, ep.Child("name"))...)
		errs = append(errs, validateContainer(&c, volumes, ep)...)
		for name, set := range map[string]bool{
			"ports": len(c.Ports) > 0, "livenessProbe": c.LivenessProbe != nil, "readinessProbe": c.ReadinessProbe != nil,
			"startupProbe": c.StartupProbe != nil, "lifecycle": c.Lifecycle != nil,
			"resources": len(c.Resources.Limits)+len(c.Resources.Requests) > 0,
		} {
			if set {
				errs = append(errs, field.Forbidden(ep.Child(name), "cannot be set for an Ephemeral Container"))
			}
		}
		if t := cs[i].TargetContainerName; t != "" && !targets.Has(t) {
			errs = append(errs, field.NotFound(ep.Child("targetContainerName"), t))
		}
	}
	return errs
}

func validateContainer(c *corev1.Container, volumes map[string]corev1.VolumeSource, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case c.Image == "":
		errs = append(errs, field.Required(p.Child("image"), ""))
	case strings.TrimSpace(c.Image) != c.Image:
		errs = append(errs, field.Invalid(p.Child("image"), c.Image, "must not have leading or trailing whitespace"))
	}
	errs = append(errs, oneOf(c.TerminationMessagePolicy, p.Child("terminationMessagePolicy"), corev1.TerminationMessageReadFile, corev1.TerminationMessageFallbackToLogsOnError)...)
	errs = append(errs, oneOf(c.ImagePullPolicy, p.Child("imagePullPolicy"), corev1.PullAlways, corev1.PullIfNotPresent, corev1.PullNever)...)
	errs = append(errs, validatePorts(c.Ports, p.Child("ports"))...)
	errs = append(errs, validateEnv(c.Env, p.Child("env"))...)
	for i, from := range c.EnvFrom {
		ep := p.Child("envFrom").Index(i)
		if n := countPointers(&from); n == 0 {
			errs = append(errs, field.Invalid(ep, "", "must specify one of: `configMapRef` or `secretRef`"))
		} else if n > 1 {
			errs = append(errs, field.Invalid(ep, "", "may not have more than one field specified at a time"))
		}
	}
	errs = append(errs, validateMounts(c.VolumeMounts, volumes, p.Child("volumeMounts"))...)
	errs = append(errs, validateProbe(c.LivenessProbe, c, p.Child("livenessProbe"))...)
	errs = append(errs, validateProbe(c.ReadinessProbe, c, p.Child("readinessProbe"))...)
	errs = append(errs, validateProbe(c.StartupProbe, c, p.Child("startupProbe"))...)
	for name, probe := range map[string]*corev1.Probe{"livenessProbe": c.LivenessProbe, "startupProbe": c.StartupProbe} {
		if probe != nil && probe.SuccessThreshold != 1 {
			errs = append(errs, field.Invalid(p.Child(name, "successThreshold"), probe.SuccessThreshold, "must be 1"))
		}
	}
	if c.Lifecycle != nil {
		lp := p.Child("lifecycle")
		for name, h := range map[string]*corev1.LifecycleHandler{"postStart": c.Lifecycle.PostStart, "preStop": c.Lifecycle.PreStop} {
			if h != nil {
				errs = append(errs, validateHandler(countPointers(h), h.HTTPGet, h.TCPSocket, h.Exec, c, lp.Child(name))...)
			}
		}
	}
	errs = append(errs, validateResources(&c.Resources, p.Child("resources"))...)
	if sc := c.SecurityContext; sc != nil {
		sp := p.Child("securityContext")
		errs = append(errs, validateID(sc.RunAsUser, sp.Child("runAsUser"))...)
		errs = append(errs, validateID(sc.RunAsGroup, sp.Child("runAsGroup"))...)
		if sc.AllowPrivilegeEscalation != nil && !*sc.AllowPrivilegeEscalation && sc.Privileged != nil && *sc.Privileged {
			errs = append(errs, field.Invalid(sp, *sc.AllowPrivilegeEscalation, "cannot set `allowPrivilegeEscalation` to false and `privileged` to true"))
		}
	}
	return errs
}

func validatePorts(ports []corev1.ContainerPort, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	names := sets.New[string]()
	for i, port := range ports {
		pp := p.Index(i)
		if port.Name != "" {
			if messages := validation.IsValidPortName(port.Name); len(messages) > 0 {
				errs = append(errs, invalidIf(pp.Child("name"), port.Name, messages)...)
			} else if names.Has(port.Name) {
				errs = append(errs, field.Duplicate(pp.Child("name"), port.Name))
			}
			names.Insert(port.Name)
		}
		if port.ContainerPort == 0 {
			errs = append(errs, field.Required(pp.Child("containerPort"), ""))
		} else {
			errs = append(errs, invalidIf(pp.Child("containerPort"), port.ContainerPort, validation.IsValidPortNum(int(port.ContainerPort)))...)
		}
		if port.HostPort != 0 {
			errs = append(errs, invalidIf(pp.Child("hostPort"), port.HostPort, validation.IsValidPortNum(int(port.HostPort)))...)
		}
		if port.Protocol == "" {
			errs = append(errs, field.Required(pp.Child("protocol"), ""))
		} else {
			errs = append(errs, oneOf(port.Protocol, pp.Child("protocol"), corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		}
	}
	return errs
}

// validateHostPorts checks that no two ports of the pod want the same port of
// the node, and that with the node's network the two are the same.
func validateHostPorts(s *corev1.PodSpec, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	taken := sets.New[string]()
	for i, c := range s.Containers {
		for j, port := range c.Ports {
			if port.HostPort == 0 {
				continue
			}
			pp := p.Index(i).Child("ports").Index(j)
			key := fmt.Sprintf("%s/%s/%d", port.Protocol, port.HostIP, port.HostPort)
			if taken.Has(key) {
				errs = append(errs, field.Duplicate(pp.Child("hostPort"), key))
			}
			taken.Insert(key)
			if s.HostNetwork && port.HostPort != port.ContainerPort {
				errs = append(errs, field.Invalid(pp.Child("containerPort"), port.ContainerPort, "must match `hostPort` when `hostNetwork` is true"))
			}
		}
	}
	return errs
}

func validateEnv(env []corev1.EnvVar, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, e := range env {
		ep := p.Index(i)
		if e.Name == "" {
			errs = append(errs, field.Required(ep.Child("name"), ""))
		} else {
			errs = append(errs, invalidIf(ep.Child("name"), e.Name, validation.IsRelaxedEnvVarName(e.Name))...)
		}
		if e.ValueFrom == nil {
			continue
		}
		vp := ep.Child("valueFrom")
		switch n := countPointers(e.ValueFrom); {
		case n == 0:
			errs = append(errs, field.Invalid(vp, "", "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"))
		case e.Value != "":
			errs = append(errs, field.Invalid(vp, "", "may not be specified when `value` is not empty"))
		case n > 1:
			errs = append(errs, field.Invalid(vp, "", "may not have more than one field specified at a time"))
		}
		if ref := e.ValueFrom.FieldRef; ref != nil {
			errs = append(errs, validateFieldRef(ref, vp.Child("fieldRef"))...)
		}
		if ref := e.ValueFrom.ConfigMapKeyRef; ref != nil {
			errs = append(errs, validateKeyRef(ref.Name, ref.Key, vp.Child("configMapKeyRef"))...)
		}
		if ref := e.ValueFrom.SecretKeyRef; ref != nil {
			errs = append(errs, validateKeyRef(ref.Name, ref.Key, vp.Child("secretKeyRef"))...)
		}
	}
	return errs
}

func validateFieldRef(ref *corev1.ObjectFieldSelector, p *field.Path) field.ErrorList {
	path := ref.FieldPath
	if strings.HasPrefix(path, "metadata.annotations['") || strings.HasPrefix(path, "metadata.labels['") {
		return nil
	}
	known := []string{
		"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName",
		"status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs",
	}
	if path == "" {
		return field.ErrorList{field.Required(p.Child("fieldPath"), "")}
	}
	return oneOf(path, p.Child("fieldPath"), known...)
}

func validateKeyRef(name, key string, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(p.Child("name"), ""))
	}
	if key == "" {
		return append(errs, field.Required(p.Child("key"), ""))
	}
	return append(errs, invalidIf(p.Child("key"), key, validation.IsConfigMapKey(key))...)
}

func validateMounts(mounts []corev1.VolumeMount, volumes map[string]corev1.VolumeSource, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	paths := sets.New[string]()
	for i, m := range mounts {
		mp := p.Index(i)
		if m.Name == "" {
			errs = append(errs, field.Required(mp.Child("name"), ""))
		} else if _, ok := volumes[m.Name]; !ok {
			errs = append(errs, field.NotFound(mp.Child("name"), m.Name))
		}
		if m.MountPath == "" {
			errs = append(errs, field.Required(mp.Child("mountPath"), ""))
		} else if paths.Has(m.MountPath) {
			errs = append(errs, field.Invalid(mp.Child("mountPath"), m.MountPath, "must be unique"))
		}
		paths.Insert(m.MountPath)
		if m.SubPath != "" && m.SubPathExpr != "" {
			errs = append(errs, field.Invalid(mp.Child("subPathExpr"), m.SubPathExpr, "subPathExpr and subPath are mutually exclusive"))
		}
		errs = append(errs, validateNoBacksteps(m.SubPath, mp.Child("subPath"))...)
	}
	return errs
}

func validateProbe(probe *corev1.Probe, c *corev1.Container, p *field.Path) field.ErrorList {
	if probe == nil {
		return nil
	}
	errs := validateHandler(countPointers(&probe.ProbeHandler), probe.HTTPGet, probe.TCPSocket, probe.Exec, c, p)
	if probe.GRPC != nil {
		errs = append(errs, invalidIf(p.Child("grpc", "port"), probe.GRPC.Port, validation.IsValidPortNum(int(probe.GRPC.Port)))...)
	}
	const negative = "must be greater than or equal to 0"
	for name, v := range map[string]int32{
		"initialDelaySeconds": probe.InitialDelaySeconds, "timeoutSeconds": probe.TimeoutSeconds, "periodSeconds": probe.PeriodSeconds,
		"successThreshold": probe.SuccessThreshold, "failureThreshold": probe.FailureThreshold,
	} {
		if v < 0 {
			errs = append(errs, field.Invalid(p.Child(name), v, negative))
		}
	}
	if v := probe.TerminationGracePeriodSeconds; v != nil && *v <= 0 {
		errs = append(errs, field.Invalid(p.Child("terminationGracePeriodSeconds"), *v, "must be greater than 0"))
	}
	return errs
}

func validateHandler(count int, get *corev1.HTTPGetAction, tcp *corev1.TCPSocketAction, exec *corev1.ExecAction, c *corev1.Container, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	if count == 0 {
		return field.ErrorList{field.Required(p, "must specify a handler type")}
	}
	if count > 1 {
		errs = append(errs, field.Forbidden(p, "may not specify more than 1 handler type"))
	}
	if exec != nil && len(exec.Command) == 0 {
		errs = append(errs, field.Required(p.Child("exec", "command"), ""))
	}
	if get != nil {
		gp := p.Child("httpGet")
		if get.Path == "" {
			errs = append(errs, field.Required(gp.Child("path"), ""))
		}
		errs = append(errs, validatePortReference(get.Port, c, gp.Child("port"))...)
		errs = append(errs, oneOf(get.Scheme, gp.Child("scheme"), corev1.URISchemeHTTP, corev1.URISchemeHTTPS)...)
		for i, h := range get.HTTPHeaders {
			errs = append(errs, invalidIf(gp.Child("httpHeaders").Index(i), h.Name, validation.IsHTTPHeaderName(h.Name))...)
		}
	}
	if tcp != nil {
		errs = append(errs, validatePortReference(tcp.Port, c, p.Child("tcpSocket", "port"))...)
	}
	return errs
}

func validatePortReference(port intstr.IntOrString, _ *corev1.Container, p *field.Path) field.ErrorList {
	if port.Type == intstr.Int {
		return invalidIf(p, port.IntValue(), validation.IsValidPortNum(port.IntValue()))
	}
	return invalidIf(p, port.StrVal, validation.IsValidPortName(port.StrVal))
}

func validateResources(r *corev1.ResourceRequirements, p *field.Path) field.ErrorList {
	errs := validateQuantities(r.Limits, p.Child("limits"))
	errs = append(errs, validateQuantities(r.Requests, p.Child("requests"))...)
	for name, request := range r.Requests {
		limit, ok := r.Limits[name]
		if ok && request.Cmp(limit) > 0 {
			errs = append(errs, field.Invalid(p.Child("requests"), request.String(), fmt.Sprintf("must be less than or equal to %s limit of %s", name, limit.String())))
		}
	}
	return errs
}

func validateQuantities(list corev1.ResourceList, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for name, q := range list {
		np := p.Key(string(name))
		errs = append(errs, invalidIf(np, string(name), validation.IsQualifiedName(string(name)))...)
		if !strings.Contains(string(name), "/") {
			switch n := string(name); {
			case n == "cpu", n == "memory", n == "ephemeral-storage", strings.HasPrefix(n, corev1.ResourceHugePagesPrefix):
			default:
				errs = append(errs, field.Invalid(np, n, "must be a standard resource type or fully qualified"))
			}
		}
		if q.Sign() < 0 {
			errs = append(errs, field.Invalid(np, q.String(), "must be greater than or equal to 0"))
		}
	}
	return errs
}
