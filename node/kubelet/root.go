// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/sandbox"
)

const (
	sigTerm = unix.SIGTERM
	sigKill = unix.SIGKILL
)

// rootFS is what a process of a container finds beside the programs.
type rootFS struct {
	files        map[string][]byte
	mounts       []sandbox.Mount
	user         sandbox.User
	readOnly     bool
	privileged   bool
	escalate     bool
	capabilities sandbox.Capabilities
}

// rootOf makes what a process needs on the host and describes it. attempt is the
// one whose termination message is mounted; below 0 there is none.
func (k *Kubelet) rootOf(p *pod, o *corev1.Pod, spec *corev1.Container, attempt int) (rootFS, error) {
	r := rootFS{files: map[string][]byte{
		"/etc/hostname":    []byte(hostname(o) + "\n"),
		"/etc/hosts":       []byte(k.hostsFile(p, o)),
		"/etc/resolv.conf": []byte(k.resolvConf(o)),
	}}
	if err := k.ensureTokens(k.workCtx, p, o); err != nil {
		return r, err
	}
	for _, m := range spec.VolumeMounts {
		src := k.volumePath(o, m)
		if src == "" {
			return r, fmt.Errorf("container %s mounts volume %q, which the pod does not have", spec.Name, m.Name)
		}
		if m.SubPath != "" {
			if err := inside(m.SubPath); err != nil {
				return r, err
			}
			// A subPath that is not there is a directory to be made.
			if _, err := os.Stat(src); errors.Is(err, os.ErrNotExist) {
				if err := os.MkdirAll(src, 0o777); err != nil {
					return r, err
				}
			}
		}
		r.mounts = append(r.mounts, sandbox.Mount{Source: src, Target: m.MountPath, ReadOnly: m.ReadOnly || readOnlyVolume(o, m.Name)})
		if src == k.nodeRoot() {
			programs, err := k.nodePrograms(m.MountPath)
			if err != nil {
				return r, err
			}
			r.mounts = append(r.mounts, programs...)
		}
	}
	if spec.TerminationMessagePath != "" && attempt >= 0 {
		file := k.messageFile(o.UID, spec.Name, attempt)
		f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY, 0o666)
		if err != nil {
			return r, err
		}
		if err := errors.Join(f.Chmod(0o666), f.Close()); err != nil {
			return r, err
		}
		r.mounts = append(r.mounts, sandbox.Mount{Source: file, Target: spec.TerminationMessagePath})
	}
	r.secure(o, spec)
	return r, nil
}

// readOnlyVolume reports whether a volume's content is the API's and not the pod's.
func readOnlyVolume(o *corev1.Pod, name string) bool {
	for i := range o.Spec.Volumes {
		if v := &o.Spec.Volumes[i]; v.Name == name {
			return v.ConfigMap != nil || v.Secret != nil || v.DownwardAPI != nil || v.Projected != nil
		}
	}
	return false
}

// secure reads the security contexts; the container's own wins over the pod's.
func (r *rootFS) secure(o *corev1.Pod, spec *corev1.Container) {
	// Programs gain rights unless the spec says no: the API's default.
	r.escalate = true
	r.user = userOf(o, spec)
	s := spec.SecurityContext
	if s == nil {
		return
	}
	if s.ReadOnlyRootFilesystem != nil {
		r.readOnly = *s.ReadOnlyRootFilesystem
	}
	if s.AllowPrivilegeEscalation != nil {
		r.escalate = *s.AllowPrivilegeEscalation
	}
	if s.Privileged != nil && *s.Privileged {
		r.privileged = true
	}
	if s.Capabilities != nil {
		for _, c := range s.Capabilities.Add {
			r.capabilities.Add = append(r.capabilities.Add, string(c))
		}
		for _, c := range s.Capabilities.Drop {
			r.capabilities.Drop = append(r.capabilities.Drop, string(c))
		}
	}
}

// userOf is who a container's processes are; the images here have no user of their
// own, so it is root where the security contexts say nothing.
func userOf(o *corev1.Pod, spec *corev1.Container) sandbox.User {
	var user sandbox.User
	if s := o.Spec.SecurityContext; s != nil {
		if s.RunAsUser != nil {
			user.UID = uint32(*s.RunAsUser)
		}
		if s.RunAsGroup != nil {
			user.GID = uint32(*s.RunAsGroup)
		}
		for _, g := range s.SupplementalGroups {
			user.Groups = append(user.Groups, uint32(g))
		}
		if s.FSGroup != nil {
			user.Groups = append(user.Groups, uint32(*s.FSGroup))
		}
	}
	if s := spec.SecurityContext; s != nil {
		if s.RunAsUser != nil {
			user.UID = uint32(*s.RunAsUser)
		}
		if s.RunAsGroup != nil {
			user.GID = uint32(*s.RunAsGroup)
		}
	}
	return user
}

// messageFile is where a process leaves its termination message.
func (k *Kubelet) messageFile(uid types.UID, name string, attempt int) string {
	return filepath.Join(k.podDir(uid), "message."+name+"."+strconv.Itoa(attempt))
}

// hostsFile writes /etc/hosts as upstream does.
func (k *Kubelet) hostsFile(p *pod, o *corev1.Pod) string {
	var b strings.Builder
	b.WriteString("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n")
	name := hostname(o)
	for _, ip := range p.addresses() {
		if o.Spec.Subdomain != "" {
			fmt.Fprintf(&b, "%s\t%s.%s.%s.svc.%s\t%s\n", ip, name, o.Spec.Subdomain, o.Namespace, k.cfg.ClusterDomain, name)
			continue
		}
		fmt.Fprintf(&b, "%s\t%s\n", ip, name)
	}
	if len(o.Spec.HostAliases) > 0 {
		b.WriteString("\n# Entries added by HostAliases.\n")
		for _, a := range o.Spec.HostAliases {
			fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, "\t"))
		}
	}
	return b.String()
}

// resolvConf writes /etc/resolv.conf by the pod's dnsPolicy. A node of a lab has no
// name server of its own, so a policy that asks for the node's gives none.
func (k *Kubelet) resolvConf(o *corev1.Pod) string {
	var servers, searches, options []string
	policy := o.Spec.DNSPolicy
	if policy == "" {
		policy = corev1.DNSClusterFirst
	}
	if policy == corev1.DNSClusterFirst && o.Spec.HostNetwork {
		policy = corev1.DNSDefault
	}
	if policy == corev1.DNSClusterFirst || policy == corev1.DNSClusterFirstWithHostNet {
		for _, ip := range k.cfg.ClusterDNS {
			servers = append(servers, ip.String())
		}
		if d := k.cfg.ClusterDomain; d != "" {
			searches = []string{o.Namespace + ".svc." + d, "svc." + d, d}
		}
		options = []string{"ndots:5"}
	}
	if c := o.Spec.DNSConfig; c != nil {
		servers = append(servers, c.Nameservers...)
		searches = append(searches, c.Searches...)
		for _, opt := range c.Options {
			s := opt.Name
			if opt.Value != nil {
				s += ":" + *opt.Value
			}
			// An option given twice counts with its last value.
			options = append(dropOption(options, opt.Name), s)
		}
	}
	var b strings.Builder
	if len(searches) > 0 {
		b.WriteString("search " + strings.Join(unique(searches), " ") + "\n")
	}
	for _, s := range unique(servers) {
		b.WriteString("nameserver " + s + "\n")
	}
	if len(options) > 0 {
		b.WriteString("options " + strings.Join(options, " ") + "\n")
	}
	return b.String()
}

func dropOption(options []string, name string) []string {
	var out []string
	for _, o := range options {
		if base, _, _ := strings.Cut(o, ":"); base != name {
			out = append(out, o)
		}
	}
	return out
}

func unique(all []string) []string {
	seen := map[string]bool{}
	var out []string
	for _, s := range all {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}
