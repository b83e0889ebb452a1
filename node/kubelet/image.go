// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/sandbox/workload"
)

// The grammar of image references: an optional host, a path in lower case, and a tag,
// a digest or both.
var (
	imageHost   = regexp.MustCompile(`^(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])(?::[0-9]+)?$`)
	imagePath   = regexp.MustCompile(`^[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*$`)
	imageTag    = regexp.MustCompile(`^\w[\w.-]{0,127}$`)
	imageDigest = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}$`)
)

// errImageFormat is what container runtimes say of a name that is none.
var errImageFormat = errors.New("invalid reference format")

// checkImageName refuses what no registry could be asked for.
func checkImageName(image string) error {
	name, digest, digested := strings.Cut(image, "@")
	if digested && !imageDigest.MatchString(digest) {
		return errImageFormat
	}
	host, rest, found := strings.Cut(name, "/")
	if !found || !imageHost.MatchString(host) || !strings.ContainsAny(host, ".:") && host != "localhost" && strings.ToLower(host) == host {
		host, rest = "", name
	}
	path, tag, tagged := strings.Cut(rest, ":")
	switch {
	case tagged && !imageTag.MatchString(tag):
		return errImageFormat
	case imagePath.MatchString(path):
		return nil
	case imagePath.MatchString(strings.ToLower(path)):
		if host == "" && !strings.Contains(path, "/") {
			path = "library/" + path
		}
		return fmt.Errorf("%w: repository name (%s) must be lowercase", errImageFormat, path)
	}
	return errImageFormat
}

// ensureImage says why the container has no image, or nil when there is one. Any name
// is one for a container with a command: its programs are the host's.
func (k *Kubelet) ensureImage(p *pod, o *corev1.Pod, spec *corev1.Container, c *container) error {
	if err := checkImageName(spec.Image); err != nil {
		why := fmt.Sprintf("Failed to apply default image tag %q: couldn't parse image name %q: %v", spec.Image, spec.Image, err)
		k.containerEvent(o, spec.Name, corev1.EventTypeWarning, "InspectFailed", "%s", why)
		return &waitError{reason: "InvalidImageName", message: why, retry: crashBackoff}
	}
	if _, known := workload.Lookup(spec.Image); (known || len(spec.Command) > 0) && !workload.MissingTag(spec.Image) {
		return nil
	}
	if spec.ImagePullPolicy == corev1.PullNever {
		why := fmt.Sprintf("Container image %q is not present with pull policy of Never", spec.Image)
		k.containerEvent(o, spec.Name, corev1.EventTypeWarning, "ErrImageNeverPull", "%s", why)
		return &waitError{reason: "ErrImageNeverPull", message: why, retry: crashBackoff}
	}
	return k.missingImage(p, o, spec, c)
}

// missingImage says which images there are: nothing can be pulled here.
func (k *Kubelet) missingImage(p *pod, o *corev1.Pod, spec *corev1.Container, c *container) error {
	p.mu.Lock()
	c.pulls++
	pulls := c.pulls
	p.mu.Unlock()
	retry := backoffAfter(pulls, crashBackoff, maxBackoff)
	why := fmt.Sprintf("kplab has no image %q and pulls none; there are %s, and any image works for a container with a command",
		spec.Image, strings.Join(workload.Images(), ", "))
	if workload.MissingTag(spec.Image) {
		why = fmt.Sprintf("manifest for %s not found: kplab takes a version with a number above 99 for one that was never released", spec.Image)
	}
	if pulls > 1 {
		k.containerEvent(o, c.name, corev1.EventTypeNormal, "BackOff", "Back-off pulling image %q", spec.Image)
		return &waitError{reason: "ImagePullBackOff", message: fmt.Sprintf("Back-off pulling image %q: ErrImagePull: %s", spec.Image, why), retry: retry}
	}
	k.containerEvent(o, c.name, corev1.EventTypeNormal, "Pulling", "Pulling image %q", spec.Image)
	k.containerEvent(o, c.name, corev1.EventTypeWarning, "Failed", "Failed to pull image %q: %s", spec.Image, why)
	return &waitError{reason: "ErrImagePull", message: why, retry: retry}
}

// isBusybox reports whether the image is one whose programs are busybox's.
func isBusybox(image string) bool {
	name := image[strings.LastIndexByte(image, '/')+1:]
	name, _, _ = strings.Cut(name, "@")
	name, _, _ = strings.Cut(name, ":")
	return name == "busybox"
}

// imageID names what an image is here.
func imageID(image string) string {
	if _, ok := workload.Lookup(image); ok {
		return "kplab://builtin/" + image
	}
	return "kplab://host/" + image
}
