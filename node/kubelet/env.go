// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"fmt"
	"net/netip"
	"sort"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// environment returns a container's variables as KEY=value: envFrom, then env, in
// the order of the spec, a later one over an earlier one.
func (k *Kubelet) environment(o *corev1.Pod, spec *corev1.Container, ips []netip.Addr) ([]string, error) {
	vars := map[string]string{}
	var order []string
	set := func(name, value string) {
		if _, had := vars[name]; !had {
			order = append(order, name)
		}
		vars[name] = value
	}
	for _, from := range spec.EnvFrom {
		if err := k.envFrom(o.Namespace, from, set); err != nil {
			return nil, err
		}
	}
	for _, e := range spec.Env {
		if e.ValueFrom == nil {
			set(e.Name, expand(e.Value, vars))
			continue
		}
		value, ok, err := k.envValue(o, spec, e.ValueFrom, ips)
		if err != nil {
			return nil, err
		}
		if ok {
			set(e.Name, value)
		}
	}
	env := make([]string, 0, len(order))
	for _, name := range order {
		env = append(env, name+"="+vars[name])
	}
	return env, nil
}

// envFrom sets all keys of a ConfigMap or Secret, in the order of their names.
func (k *Kubelet) envFrom(namespace string, from corev1.EnvFromSource, set func(name, value string)) error {
	data := map[string]string{}
	switch {
	case from.ConfigMapRef != nil:
		cm, err := k.configMap(namespace, from.ConfigMapRef.Name, from.ConfigMapRef.Optional)
		if err != nil || cm == nil {
			return err
		}
		data = cm.Data
	case from.SecretRef != nil:
		s, err := k.secret(namespace, from.SecretRef.Name, from.SecretRef.Optional)
		if err != nil || s == nil {
			return err
		}
		for key, v := range s.Data {
			data[key] = string(v)
		}
	}
	keys := make([]string, 0, len(data))
	for key := range data {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	for _, key := range keys {
		set(from.Prefix+key, data[key])
	}
	return nil
}

// envValue reads one valueFrom; false when an optional source has nothing.
func (k *Kubelet) envValue(o *corev1.Pod, spec *corev1.Container, from *corev1.EnvVarSource, ips []netip.Addr) (string, bool, error) {
	switch {
	case from.FieldRef != nil:
		v, err := k.field(o, from.FieldRef.FieldPath, ips)
		return v, err == nil, err
	case from.ResourceFieldRef != nil:
		target := spec
		if name := from.ResourceFieldRef.ContainerName; name != "" {
			target = containerSpec(o, name)
		}
		v, err := resourceField(target, from.ResourceFieldRef)
		return v, err == nil, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		cm, err := k.configMap(o.Namespace, ref.Name, ref.Optional)
		if err != nil || cm == nil {
			return "", false, err
		}
		v, ok := cm.Data[ref.Key]
		if !ok && (ref.Optional == nil || !*ref.Optional) {
			return "", false, fmt.Errorf("couldn't find key %s in ConfigMap %s/%s", ref.Key, o.Namespace, ref.Name)
		}
		return v, ok, nil
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		s, err := k.secret(o.Namespace, ref.Name, ref.Optional)
		if err != nil || s == nil {
			return "", false, err
		}
		v, ok := s.Data[ref.Key]
		if !ok && (ref.Optional == nil || !*ref.Optional) {
			return "", false, fmt.Errorf("couldn't find key %s in Secret %s/%s", ref.Key, o.Namespace, ref.Name)
		}
		return string(v), ok, nil
	}
	return "", false, fmt.Errorf("the source of the variable is not one that kplab knows")
}

// configMap reads a ConfigMap; nil without an error when it is optional and absent.
func (k *Kubelet) configMap(namespace, name string, optional *bool) (*corev1.ConfigMap, error) {
	cm, err := k.configMaps.ConfigMaps(namespace).Get(name)
	if apierrors.IsNotFound(err) {
		// The watch may be behind: the pod and its ConfigMap often come together.
		cm, err = k.cfg.Client.CoreV1().ConfigMaps(namespace).Get(k.workCtx, name, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) && optional != nil && *optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return cm, nil
}

// secret is configMap for a Secret.
func (k *Kubelet) secret(namespace, name string, optional *bool) (*corev1.Secret, error) {
	s, err := k.secrets.Secrets(namespace).Get(name)
	if apierrors.IsNotFound(err) {
		s, err = k.cfg.Client.CoreV1().Secrets(namespace).Get(k.workCtx, name, metav1.GetOptions{})
	}
	if apierrors.IsNotFound(err) && optional != nil && *optional {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// field reads what the downward API offers of a pod.
func (k *Kubelet) field(o *corev1.Pod, path string, ips []netip.Addr) (string, error) {
	if base, key, ok := strings.Cut(path, "['"); ok {
		key, _, _ = strings.Cut(key, "']")
		switch base {
		case "metadata.labels":
			return o.Labels[key], nil
		case "metadata.annotations":
			return o.Annotations[key], nil
		}
	}
	var all []string
	for _, ip := range ips {
		all = append(all, ip.String())
	}
	first := ""
	if len(all) > 0 {
		first = all[0]
	}
	switch path {
	case "metadata.name":
		return o.Name, nil
	case "metadata.namespace":
		return o.Namespace, nil
	case "metadata.uid":
		return string(o.UID), nil
	case "metadata.labels":
		return formatMap(o.Labels), nil
	case "metadata.annotations":
		return formatMap(o.Annotations), nil
	case "spec.nodeName":
		return o.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return o.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return k.cfg.NodeIP.String(), nil
	case "status.hostIPs":
		var all []string
		for _, ip := range k.cfg.nodeIPs() {
			all = append(all, ip.String())
		}
		return strings.Join(all, ","), nil
	case "status.podIP":
		return first, nil
	case "status.podIPs":
		return strings.Join(all, ","), nil
	}
	return "", fmt.Errorf("field %q of a pod cannot be given to a container", path)
}

// formatMap writes labels or annotations as the downward API does.
func formatMap(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for key, v := range m {
		lines = append(lines, fmt.Sprintf("%s=%q", key, v))
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

// resourceField reads a container's request or limit in units of the divisor,
// rounded up; 0 when there is none.
func resourceField(c *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	if c == nil {
		return "", fmt.Errorf("container %q of resource %q does not exist", ref.ContainerName, ref.Resource)
	}
	kind, name, _ := strings.Cut(ref.Resource, ".")
	var list corev1.ResourceList
	switch kind {
	case "limits":
		list = c.Resources.Limits
	case "requests":
		list = c.Resources.Requests
	default:
		return "", fmt.Errorf("resource %q: want limits.NAME or requests.NAME", ref.Resource)
	}
	q := list[corev1.ResourceName(name)]
	div := ref.Divisor
	if div.IsZero() {
		div = resource.MustParse("1")
	}
	if name == "cpu" {
		return strconv.FormatInt(ceilDiv(q.MilliValue(), div.MilliValue()), 10), nil
	}
	return strconv.FormatInt(ceilDiv(q.Value(), div.Value()), 10), nil
}

func ceilDiv(a, b int64) int64 {
	if b == 0 {
		return 0
	}
	return (a + b - 1) / b
}

// serviceLinks are the variables that tell a container of the Services there are
// when it starts: all of the pod's namespace, and the API server's in any case.
// Processes get them; servers in this process have no use for them.
func (k *Kubelet) serviceLinks(o *corev1.Pod) []string {
	var services []*corev1.Service
	if api, err := k.services.Services("default").Get("kubernetes"); err == nil {
		services = append(services, api)
	}
	if o.Spec.EnableServiceLinks == nil || *o.Spec.EnableServiceLinks {
		own, _ := k.services.Services(o.Namespace).List(labels.Everything()) // a lister of a cache has no errors
		for _, s := range own {
			if o.Namespace != "default" || s.Name != "kubernetes" {
				services = append(services, s)
			}
		}
	}
	sort.SliceStable(services, func(i, j int) bool { return services[i].Name < services[j].Name })
	var env []string
	for _, s := range services {
		if s.Spec.ClusterIP == "" || s.Spec.ClusterIP == corev1.ClusterIPNone || len(s.Spec.Ports) == 0 {
			continue
		}
		env = append(env, linksOf(s)...)
	}
	return env
}

func linksOf(s *corev1.Service) []string {
	upper := func(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "-", "_")) }
	base, ip := upper(s.Name), s.Spec.ClusterIP
	port := func(p corev1.ServicePort) string { return strconv.Itoa(int(p.Port)) }
	host := ip
	if strings.Contains(ip, ":") {
		host = "[" + ip + "]"
	}
	url := func(p corev1.ServicePort) string {
		return strings.ToLower(string(p.Protocol)) + "://" + host + ":" + port(p)
	}
	first := s.Spec.Ports[0]
	env := []string{base + "_SERVICE_HOST=" + ip, base + "_SERVICE_PORT=" + port(first)}
	for _, p := range s.Spec.Ports {
		if p.Name != "" {
			env = append(env, base+"_SERVICE_PORT_"+upper(p.Name)+"="+port(p))
		}
	}
	env = append(env, base+"_PORT="+url(first))
	for _, p := range s.Spec.Ports {
		prefix := base + "_PORT_" + port(p) + "_" + strings.ToUpper(string(p.Protocol))
		env = append(env, prefix+"="+url(p), prefix+"_PROTO="+strings.ToLower(string(p.Protocol)), prefix+"_PORT="+port(p), prefix+"_ADDR="+ip)
	}
	return env
}

// withDefaults adds variables that are not set yet.
func withDefaults(env, more []string) []string {
	have := envMap(env)
	out := append([]string{}, env...)
	for _, kv := range more {
		name, _, _ := strings.Cut(kv, "=")
		if _, set := have[name]; !set {
			out = append(out, kv)
		}
	}
	return out
}

func envMap(env []string) map[string]string {
	m := make(map[string]string, len(env))
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		m[name] = value
	}
	return m
}

// expand replaces $(NAME) by a variable's value; $$ is a dollar sign, and a name
// that is not set stays as it is written.
func expand(s string, vars map[string]string) string {
	if !strings.Contains(s, "$") {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		switch s[i+1] {
		case '$':
			b.WriteByte('$')
			i++
		case '(':
			end := strings.IndexByte(s[i:], ')')
			if end < 0 {
				b.WriteString(s[i:])
				return b.String()
			}
			name := s[i+2 : i+end]
			if v, ok := vars[name]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[i : i+end+1])
			}
			i += end
		default:
			b.WriteByte('$')
		}
	}
	return b.String()
}

func expandAll(all []string, vars map[string]string) []string {
	out := make([]string, len(all))
	for i, s := range all {
		out[i] = expand(s, vars)
	}
	return out
}

// refersTo reports whether a pod mounts or reads an object.
func refersTo(o *corev1.Pod, kind, name string) bool {
	for i := range o.Spec.Volumes {
		v := &o.Spec.Volumes[i]
		if kind == "ConfigMap" && v.ConfigMap != nil && v.ConfigMap.Name == name ||
			kind == "Secret" && v.Secret != nil && v.Secret.SecretName == name {
			return true
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if kind == "ConfigMap" && s.ConfigMap != nil && s.ConfigMap.Name == name ||
				kind == "Secret" && s.Secret != nil && s.Secret.Name == name {
				return true
			}
		}
	}
	return false
}
