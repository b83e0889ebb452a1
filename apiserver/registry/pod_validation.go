// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"net/netip"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validatePod(pod *corev1.Pod) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validatePodSpec(&pod.Spec, spec)
	errs = append(errs, validateEphemeralContainers(pod.Spec.EphemeralContainers, &pod.Spec, spec.Child("ephemeralContainers"))...)
	return errs
}

// validatePodTemplate checks the pod template of a workload whose pods may have
// the given restart policies.
func validatePodTemplate(t *corev1.PodTemplateSpec, path *field.Path, restart ...corev1.RestartPolicy) field.ErrorList {
	errs := metavalidation.ValidateLabels(t.Labels, path.Child("labels"))
	errs = append(errs, apivalidation.ValidateAnnotations(t.Annotations, path.Child("annotations"))...)
	errs = append(errs, validatePodSpec(&t.Spec, path.Child("spec"))...)
	if len(t.Spec.EphemeralContainers) > 0 {
		errs = append(errs, field.Forbidden(path.Child("spec", "ephemeralContainers"), "ephemeral containers not allowed in pod template"))
	}
	if len(restart) > 0 && t.Spec.RestartPolicy != "" {
		errs = append(errs, oneOf(t.Spec.RestartPolicy, path.Child("spec", "restartPolicy"), restart...)...)
	}
	return errs
}

// oneOf is the error of a value that is not among the allowed ones.
func oneOf[T ~string](value T, path *field.Path, allowed ...T) field.ErrorList {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	// Sorted, as upstream lists them.
	return field.ErrorList{field.NotSupported(path, value, slices.Sorted(slices.Values(allowed)))}
}

// invalidIf turns the messages of the validation package into errors at path.
func invalidIf(path *field.Path, value any, messages []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range messages {
		errs = append(errs, field.Invalid(path, value, m))
	}
	return errs
}

// validatePodSpec checks a defaulted pod spec.
func validatePodSpec(s *corev1.PodSpec, p *field.Path) field.ErrorList {
	volumes, errs := validateVolumes(s.Volumes, p.Child("volumes"))
	if len(s.Containers) == 0 {
		errs = append(errs, field.Required(p.Child("containers"), ""))
	}
	names := sets.New[string]()
	errs = append(errs, validateContainers(s.InitContainers, true, volumes, names, p.Child("initContainers"))...)
	errs = append(errs, validateContainers(s.Containers, false, volumes, names, p.Child("containers"))...)
	errs = append(errs, validateHostPorts(s, p.Child("containers"))...)
	errs = append(errs, validateSidecars(s.InitContainers, p.Child("initContainers"))...)

	if s.RestartPolicy == "" {
		errs = append(errs, field.Required(p.Child("restartPolicy"), ""))
	} else {
		errs = append(errs, oneOf(s.RestartPolicy, p.Child("restartPolicy"), corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)...)
	}
	errs = append(errs, oneOf(s.DNSPolicy, p.Child("dnsPolicy"), corev1.DNSClusterFirstWithHostNet, corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)...)
	errs = append(errs, validateDNSConfig(s, p.Child("dnsConfig"))...)
	if s.TerminationGracePeriodSeconds != nil && *s.TerminationGracePeriodSeconds < 0 {
		errs = append(errs, field.Invalid(p.Child("terminationGracePeriodSeconds"), *s.TerminationGracePeriodSeconds, apivalidation.IsNegativeErrorMsg))
	}
	if v := s.ActiveDeadlineSeconds; v != nil {
		if *v < 1 || *v > 1<<31-1 {
			errs = append(errs, field.Invalid(p.Child("activeDeadlineSeconds"), *v, validation.InclusiveRangeError(1, 1<<31-1)))
		}
	}
	errs = append(errs, metavalidation.ValidateLabels(s.NodeSelector, p.Child("nodeSelector"))...)
	if s.ServiceAccountName != "" {
		errs = append(errs, invalidIf(p.Child("serviceAccountName"), s.ServiceAccountName, apivalidation.ValidateServiceAccountName(s.ServiceAccountName, false))...)
	}
	if s.NodeName != "" {
		errs = append(errs, invalidIf(p.Child("nodeName"), s.NodeName, apivalidation.NameIsDNSSubdomain(s.NodeName, false))...)
	}
	if s.Hostname != "" {
		errs = append(errs, invalidIf(p.Child("hostname"), s.Hostname, validation.IsDNS1123Label(s.Hostname))...)
	}
	if s.Subdomain != "" {
		errs = append(errs, invalidIf(p.Child("subdomain"), s.Subdomain, validation.IsDNS1123Label(s.Subdomain))...)
	}
	for i, r := range s.ImagePullSecrets {
		if r.Name == "" {
			errs = append(errs, field.Required(p.Child("imagePullSecrets").Index(i).Child("name"), ""))
		}
	}
	for i, h := range s.HostAliases {
		hp := p.Child("hostAliases").Index(i)
		if _, err := netip.ParseAddr(h.IP); err != nil {
			errs = append(errs, field.Invalid(hp.Child("ip"), h.IP, "must be a valid IP address"))
		}
		for j, name := range h.Hostnames {
			errs = append(errs, invalidIf(hp.Child("hostnames").Index(j), name, validation.IsDNS1123Subdomain(name))...)
		}
	}
	for i, g := range s.ReadinessGates {
		errs = append(errs, invalidIf(p.Child("readinessGates").Index(i).Child("conditionType"), string(g.ConditionType), validation.IsQualifiedName(string(g.ConditionType)))...)
	}
	gates := sets.New[string]()
	for i, g := range s.SchedulingGates {
		gp := p.Child("schedulingGates").Index(i)
		errs = append(errs, invalidIf(gp.Child("name"), g.Name, validation.IsQualifiedName(g.Name))...)
		if gates.Has(g.Name) {
			errs = append(errs, field.Duplicate(gp, g.Name))
		}
		gates.Insert(g.Name)
	}
	if s.PreemptionPolicy != nil {
		errs = append(errs, oneOf(*s.PreemptionPolicy, p.Child("preemptionPolicy"), corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	}
	if s.OS != nil {
		errs = append(errs, oneOf(s.OS.Name, p.Child("os").Child("name"), corev1.Linux, corev1.Windows)...)
	}
	errs = append(errs, validateTolerations(s.Tolerations, p.Child("tolerations"))...)
	errs = append(errs, validatePodAffinity(s.Affinity, p.Child("affinity"))...)
	errs = append(errs, validateSpread(s.TopologySpreadConstraints, p.Child("topologySpreadConstraints"))...)
	errs = append(errs, validatePodSecurity(s, p.Child("securityContext"))...)
	return errs
}

func validatePodSecurity(s *corev1.PodSpec, p *field.Path) field.ErrorList {
	c := s.SecurityContext
	if c == nil {
		return nil
	}
	var errs field.ErrorList
	for name, id := range map[string]*int64{"runAsUser": c.RunAsUser, "runAsGroup": c.RunAsGroup, "fsGroup": c.FSGroup} {
		errs = append(errs, validateID(id, p.Child(name))...)
	}
	for i, g := range c.SupplementalGroups {
		errs = append(errs, validateID(&g, p.Child("supplementalGroups").Index(i))...)
	}
	if s.ShareProcessNamespace != nil && *s.ShareProcessNamespace && s.HostPID {
		errs = append(errs, field.Invalid(p.Child("shareProcessNamespace"), *s.ShareProcessNamespace, "ShareProcessNamespace and HostPID cannot both be enabled"))
	}
	if c.FSGroupChangePolicy != nil {
		errs = append(errs, oneOf(*c.FSGroupChangePolicy, p.Child("fsGroupChangePolicy"), corev1.FSGroupChangeOnRootMismatch, corev1.FSGroupChangeAlways)...)
	}
	sysctls := sets.New[string]()
	for i, sysctl := range c.Sysctls {
		sp := p.Child("sysctls").Index(i).Child("name")
		if sysctl.Name == "" {
			errs = append(errs, field.Required(sp, ""))
		} else if sysctls.Has(sysctl.Name) {
			errs = append(errs, field.Duplicate(sp, sysctl.Name))
		}
		sysctls.Insert(sysctl.Name)
	}
	return errs
}

func validateID(id *int64, p *field.Path) field.ErrorList {
	if id != nil && (*id < 0 || *id > 1<<31-1) {
		return field.ErrorList{field.Invalid(p, *id, validation.InclusiveRangeError(0, 1<<31-1))}
	}
	return nil
}

func validateDNSConfig(s *corev1.PodSpec, p *field.Path) field.ErrorList {
	c := s.DNSConfig
	if s.DNSPolicy == corev1.DNSNone && (c == nil || len(c.Nameservers) == 0) {
		return field.ErrorList{field.Required(p.Child("nameservers"), "must provide at least one DNS nameserver when `dnsPolicy` is None")}
	}
	if c == nil {
		return nil
	}
	var errs field.ErrorList
	if len(c.Nameservers) > 3 {
		errs = append(errs, field.Invalid(p.Child("nameservers"), c.Nameservers, "must not have more than 3 nameservers"))
	}
	for i, ns := range c.Nameservers {
		if _, err := netip.ParseAddr(ns); err != nil {
			errs = append(errs, field.Invalid(p.Child("nameservers").Index(i), ns, "must be a valid IP address"))
		}
	}
	if len(c.Searches) > 32 {
		errs = append(errs, field.Invalid(p.Child("searches"), c.Searches, "must not have more than 32 search paths"))
	}
	for i, search := range c.Searches {
		if search != "." {
			errs = append(errs, invalidIf(p.Child("searches").Index(i), search, validation.IsDNS1123SubdomainWithUnderscore(strings.TrimSuffix(search, ".")))...)
		}
	}
	for i, o := range c.Options {
		if o.Name == "" {
			errs = append(errs, field.Required(p.Child("options").Index(i), "must not be empty"))
		}
	}
	return errs
}

// validateVolumes returns the volumes by name, too.
func validateVolumes(volumes []corev1.Volume, p *field.Path) (map[string]corev1.VolumeSource, field.ErrorList) {
	var errs field.ErrorList
	byName := map[string]corev1.VolumeSource{}
	for i := range volumes {
		v, vp := &volumes[i], p.Index(i)
		if v.Name == "" {
			errs = append(errs, field.Required(vp.Child("name"), ""))
		} else {
			errs = append(errs, invalidIf(vp.Child("name"), v.Name, validation.IsDNS1123Label(v.Name))...)
		}
		if _, twice := byName[v.Name]; twice {
			errs = append(errs, field.Duplicate(vp.Child("name"), v.Name))
		}
		byName[v.Name] = v.VolumeSource
		errs = append(errs, validateVolumeSource(&v.VolumeSource, vp)...)
	}
	return byName, errs
}

func validateVolumeSource(v *corev1.VolumeSource, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	count := countPointers(v)
	if count == 0 {
		return field.ErrorList{field.Required(p, "must specify a volume type")}
	}
	if count > 1 {
		errs = append(errs, field.Forbidden(p, "may not specify more than 1 volume type"))
	}
	if v.HostPath != nil {
		hp := p.Child("hostPath")
		if v.HostPath.Path == "" {
			errs = append(errs, field.Required(hp.Child("path"), ""))
		}
		errs = append(errs, validateNoBacksteps(v.HostPath.Path, hp.Child("path"))...)
		if v.HostPath.Type != nil {
			errs = append(errs, oneOf(*v.HostPath.Type, hp.Child("type"), corev1.HostPathUnset, corev1.HostPathDirectoryOrCreate, corev1.HostPathDirectory, corev1.HostPathFileOrCreate, corev1.HostPathFile, corev1.HostPathSocket, corev1.HostPathCharDev, corev1.HostPathBlockDev)...)
		}
	}
	if v.EmptyDir != nil && v.EmptyDir.SizeLimit != nil && v.EmptyDir.SizeLimit.Sign() < 0 {
		errs = append(errs, field.Forbidden(p.Child("emptyDir", "sizeLimit"), "SizeLimit field must be a valid resource quantity"))
	}
	if v.Secret != nil {
		if v.Secret.SecretName == "" {
			errs = append(errs, field.Required(p.Child("secret", "secretName"), ""))
		}
		errs = append(errs, validateMode(v.Secret.DefaultMode, p.Child("secret", "defaultMode"))...)
		errs = append(errs, validateKeyPaths(v.Secret.Items, p.Child("secret", "items"))...)
	}
	if v.ConfigMap != nil {
		if v.ConfigMap.Name == "" {
			errs = append(errs, field.Required(p.Child("configMap", "name"), ""))
		}
		errs = append(errs, validateMode(v.ConfigMap.DefaultMode, p.Child("configMap", "defaultMode"))...)
		errs = append(errs, validateKeyPaths(v.ConfigMap.Items, p.Child("configMap", "items"))...)
	}
	if v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == "" {
		errs = append(errs, field.Required(p.Child("persistentVolumeClaim", "claimName"), ""))
	}
	if v.Projected != nil {
		errs = append(errs, validateMode(v.Projected.DefaultMode, p.Child("projected", "defaultMode"))...)
		for i := range v.Projected.Sources {
			sp := p.Child("projected", "sources").Index(i)
			if n := countPointers(&v.Projected.Sources[i]); n == 0 {
				errs = append(errs, field.Required(sp, "must specify a source"))
			} else if n > 1 {
				errs = append(errs, field.Forbidden(sp, "may not specify more than 1 volume type per source"))
			}
			if t := v.Projected.Sources[i].ServiceAccountToken; t != nil {
				if t.Path == "" {
					errs = append(errs, field.Required(sp.Child("serviceAccountToken", "path"), ""))
				}
				if t.ExpirationSeconds != nil && *t.ExpirationSeconds < 600 {
					errs = append(errs, field.Invalid(sp.Child("serviceAccountToken", "expirationSeconds"), *t.ExpirationSeconds, "may not specify a duration less than 10 minutes"))
				}
			}
		}
	}
	return errs
}

func validateMode(mode *int32, p *field.Path) field.ErrorList {
	if mode != nil && (*mode < 0 || *mode > 0o777) {
		return field.ErrorList{field.Invalid(p, *mode, "must be a number between 0 and 0777 (octal), both inclusive")}
	}
	return nil
}

func validateKeyPaths(items []corev1.KeyToPath, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, item := range items {
		if item.Key == "" {
			errs = append(errs, field.Required(p.Index(i).Child("key"), ""))
		}
		if item.Path == "" {
			errs = append(errs, field.Required(p.Index(i).Child("path"), ""))
		}
		if path.IsAbs(item.Path) {
			errs = append(errs, field.Invalid(p.Index(i).Child("path"), item.Path, "must be a relative path"))
		}
		errs = append(errs, validateNoBacksteps(item.Path, p.Index(i).Child("path"))...)
		errs = append(errs, validateMode(item.Mode, p.Index(i).Child("mode"))...)
	}
	return errs
}

func validateNoBacksteps(value string, p *field.Path) field.ErrorList {
	for _, part := range strings.Split(value, "/") {
		if part == ".." {
			return field.ErrorList{field.Invalid(p, value, "must not contain '..'")}
		}
	}
	return nil
}

func validateTolerations(ts []corev1.Toleration, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, t := range ts {
		tp := p.Index(i)
		if t.Key != "" {
			errs = append(errs, invalidIf(tp.Child("key"), t.Key, validation.IsQualifiedName(t.Key))...)
		} else if t.Operator != corev1.TolerationOpExists {
			errs = append(errs, field.Invalid(tp.Child("operator"), t.Operator, "operator must be Exists when `key` is empty, which means \"match all values and all keys\""))
		}
		if t.TolerationSeconds != nil && t.Effect != corev1.TaintEffectNoExecute {
			errs = append(errs, field.Invalid(tp.Child("effect"), t.Effect, "effect must be 'NoExecute' when `tolerationSeconds` is set"))
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			errs = append(errs, invalidIf(tp.Child("operator"), t.Value, validation.IsValidLabelValue(t.Value))...)
		case corev1.TolerationOpExists:
			if t.Value != "" {
				errs = append(errs, field.Invalid(tp.Child("operator"), t.Operator, "value must be empty when `operator` is 'Exists'"))
			}
		default:
			errs = append(errs, field.NotSupported(tp.Child("operator"), t.Operator, []corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			errs = append(errs, oneOf(t.Effect, tp.Child("effect"), corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)...)
		}
	}
	return errs
}

func validateSpread(cs []corev1.TopologySpreadConstraint, p *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, c := range cs {
		cp := p.Index(i)
		if c.MaxSkew <= 0 {
			errs = append(errs, field.Invalid(cp.Child("maxSkew"), c.MaxSkew, "must be greater than zero"))
		}
		if c.TopologyKey == "" {
			errs = append(errs, field.Required(cp.Child("topologyKey"), "can not be empty"))
		}
		errs = append(errs, oneOf(c.WhenUnsatisfiable, cp.Child("whenUnsatisfiable"), corev1.DoNotSchedule, corev1.ScheduleAnyway)...)
		errs = append(errs, validateSelector(c.LabelSelector, cp.Child("labelSelector"))...)
	}
	return errs
}

func validateSelector(s *metav1.LabelSelector, p *field.Path) field.ErrorList {
	return metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, p)
}
