// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// file is one file of a volume.
type file struct {
	data []byte
	mode os.FileMode
}

// ensureVolumes makes the pod's volumes and brings those that follow an object up
// to date. Service-account tokens are left out for a pod in which nothing but
// built-in servers runs: nobody could read them. They come with the first process.
func (k *Kubelet) ensureVolumes(ctx context.Context, p *pod, o *corev1.Pod) error {
	for i := range o.Spec.Volumes {
		v := &o.Spec.Volumes[i]
		if v.Projected != nil && hasToken(v.Projected) {
			continue
		}
		if err := k.ensureVolume(ctx, o, v, p); err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
	}
	return nil
}

// ensureTokens makes the volumes that ensureVolumes leaves out, and renews tokens.
func (k *Kubelet) ensureTokens(ctx context.Context, p *pod, o *corev1.Pod) error {
	for i := range o.Spec.Volumes {
		v := &o.Spec.Volumes[i]
		if v.Projected == nil || !hasToken(v.Projected) {
			continue
		}
		if err := k.ensureVolume(ctx, o, v, p); err != nil {
			return fmt.Errorf("volume %q: %w", v.Name, err)
		}
	}
	return nil
}

func hasToken(v *corev1.ProjectedVolumeSource) bool {
	for _, s := range v.Sources {
		if s.ServiceAccountToken != nil {
			return true
		}
	}
	return false
}

// ensureVolume makes a volume, and gives it to the pod's fsGroup where it is the pod's
// alone: directories of the node stay as they are, as upstream leaves them.
func (k *Kubelet) ensureVolume(ctx context.Context, o *corev1.Pod, v *corev1.Volume, p *pod) error {
	if err := k.fillVolume(ctx, o, v, p); err != nil {
		return err
	}
	if s := o.Spec.SecurityContext; s != nil && s.FSGroup != nil && v.HostPath == nil && v.PersistentVolumeClaim == nil {
		return giveToGroup(k.volumeDir(o, v), int(*s.FSGroup), v.EmptyDir != nil)
	}
	return nil
}

func (k *Kubelet) fillVolume(ctx context.Context, o *corev1.Pod, v *corev1.Volume, p *pod) error {
	dir := k.volumeDir(o, v)
	switch {
	case v.EmptyDir != nil:
		if info, err := os.Stat(dir); err == nil && info.Mode().Perm() == 0o777 {
			return nil
		}
		// Everybody in the pod may write, whoever it runs as.
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return err
		}
		return os.Chmod(dir, 0o777)
	case v.HostPath != nil:
		if v.HostPath.Type != nil && *v.HostPath.Type == corev1.HostPathFile {
			_, err := os.Stat(dir)
			return err
		}
		return os.MkdirAll(dir, 0o755)
	case v.ConfigMap != nil:
		files, err := k.configMapFiles(o.Namespace, v.ConfigMap.Name, v.ConfigMap.Items, v.ConfigMap.Optional, v.ConfigMap.DefaultMode)
		if err != nil {
			return err
		}
		return writeVolume(dir, files)
	case v.Secret != nil:
		files, err := k.secretFiles(o.Namespace, v.Secret.SecretName, v.Secret.Items, v.Secret.Optional, v.Secret.DefaultMode)
		if err != nil {
			return err
		}
		return writeVolume(dir, files)
	case v.DownwardAPI != nil:
		files, err := k.downwardFiles(o, v.DownwardAPI.Items, v.DownwardAPI.DefaultMode, p)
		if err != nil {
			return err
		}
		return writeVolume(dir, files)
	case v.Projected != nil:
		return k.ensureProjected(ctx, o, v.Projected, dir, p)
	case v.PersistentVolumeClaim != nil:
		return k.ensureClaim(ctx, o.Namespace, v.PersistentVolumeClaim.ClaimName, k.claimLink(o, v))
	}
	return errors.New("kplab has emptyDir, hostPath, configMap, secret, downwardAPI, projected and persistentVolumeClaim volumes, and no others")
}

// ensureClaim makes link point to the directory of the node that a claim is bound to.
func (k *Kubelet) ensureClaim(ctx context.Context, namespace, name, link string) error {
	core := k.cfg.Client.CoreV1()
	claim, err := core.PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read the claim: %w", err)
	}
	if claim.Status.Phase != corev1.ClaimBound {
		return fmt.Errorf("error processing PVC %s/%s: PVC is not bound", namespace, name)
	}
	volume, err := core.PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read the volume of claim %s: %w", name, err)
	}
	path := ""
	switch {
	case volume.Spec.HostPath != nil:
		path = volume.Spec.HostPath.Path
	case volume.Spec.Local != nil:
		path = volume.Spec.Local.Path
	default:
		return fmt.Errorf("persistent volume %s: kplab mounts hostPath and local volumes, and no others", volume.Name)
	}
	dir := k.nodePath(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if old, err := os.Readlink(link); err == nil && old == dir {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(dir, link)
}

// ensureProjected joins several sources in one directory.
func (k *Kubelet) ensureProjected(ctx context.Context, o *corev1.Pod, v *corev1.ProjectedVolumeSource, dir string, p *pod) error {
	all := map[string]file{}
	for _, s := range v.Sources {
		var files map[string]file
		var err error
		switch {
		case s.ConfigMap != nil:
			files, err = k.configMapFiles(o.Namespace, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.Optional, v.DefaultMode)
		case s.Secret != nil:
			files, err = k.secretFiles(o.Namespace, s.Secret.Name, s.Secret.Items, s.Secret.Optional, v.DefaultMode)
		case s.DownwardAPI != nil:
			files, err = k.downwardFiles(o, s.DownwardAPI.Items, v.DefaultMode, p)
		case s.ServiceAccountToken != nil:
			files, err = k.tokenFile(ctx, o, s.ServiceAccountToken, dir)
		}
		if err != nil {
			return err
		}
		for name, f := range files {
			all[name] = f
		}
	}
	return writeVolume(dir, all)
}

// tokenFile asks the API for a token of the pod's service account, or keeps the one
// that is there while it has more than a fifth of its life left.
func (k *Kubelet) tokenFile(ctx context.Context, o *corev1.Pod, src *corev1.ServiceAccountTokenProjection, dir string) (map[string]file, error) {
	life := time.Hour
	if src.ExpirationSeconds != nil {
		life = time.Duration(*src.ExpirationSeconds) * time.Second
	}
	old := filepath.Join(dir, src.Path)
	if st, err := os.Stat(old); err == nil && time.Since(st.ModTime()) < life*4/5 {
		if text, err := os.ReadFile(old); err == nil {
			return map[string]file{src.Path: {text, 0o644}}, nil
		}
	}
	var audiences []string
	if src.Audience != "" {
		audiences = []string{src.Audience}
	}
	account := o.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	lifeSeconds := int64(life / time.Second)
	tr, err := k.cfg.Client.CoreV1().ServiceAccounts(o.Namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{
			Audiences: audiences, ExpirationSeconds: &lifeSeconds,
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: o.Name, UID: o.UID},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token of service account %s/%s: %w", o.Namespace, account, err)
	}
	return map[string]file{src.Path: {[]byte(tr.Status.Token), 0o644}}, nil
}

func (k *Kubelet) configMapFiles(namespace, name string, items []corev1.KeyToPath, optional *bool, mode *int32) (map[string]file, error) {
	cm, err := k.configMap(namespace, name, optional)
	if err != nil || cm == nil {
		return map[string]file{}, err
	}
	data := make(map[string][]byte, len(cm.Data)+len(cm.BinaryData))
	for key, v := range cm.Data {
		data[key] = []byte(v)
	}
	for key, v := range cm.BinaryData {
		data[key] = v
	}
	return pick(data, items, optional, mode, "ConfigMap "+namespace+"/"+name)
}

func (k *Kubelet) secretFiles(namespace, name string, items []corev1.KeyToPath, optional *bool, mode *int32) (map[string]file, error) {
	s, err := k.secret(namespace, name, optional)
	if err != nil || s == nil {
		return map[string]file{}, err
	}
	return pick(s.Data, items, optional, mode, "Secret "+namespace+"/"+name)
}

// pick turns keys into files: all of them, or those that items names.
func pick(data map[string][]byte, items []corev1.KeyToPath, optional *bool, mode *int32, of string) (map[string]file, error) {
	files := map[string]file{}
	if len(items) == 0 {
		for key, v := range data {
			files[key] = file{v, fileMode(nil, mode)}
		}
		return files, nil
	}
	for _, it := range items {
		v, ok := data[it.Key]
		if !ok {
			if optional != nil && *optional {
				continue
			}
			return nil, fmt.Errorf("%s has no key %q", of, it.Key)
		}
		if err := inside(it.Path); err != nil {
			return nil, err
		}
		files[it.Path] = file{v, fileMode(it.Mode, mode)}
	}
	return files, nil
}

func (k *Kubelet) downwardFiles(o *corev1.Pod, items []corev1.DownwardAPIVolumeFile, mode *int32, p *pod) (map[string]file, error) {
	files := map[string]file{}
	for _, it := range items {
		if err := inside(it.Path); err != nil {
			return nil, err
		}
		var text string
		var err error
		switch {
		case it.FieldRef != nil:
			text, err = k.field(o, it.FieldRef.FieldPath, p.addresses())
		case it.ResourceFieldRef != nil:
			text, err = resourceField(containerSpec(o, it.ResourceFieldRef.ContainerName), it.ResourceFieldRef)
		}
		if err != nil {
			return nil, err
		}
		files[it.Path] = file{[]byte(text), fileMode(it.Mode, mode)}
	}
	return files, nil
}

func fileMode(own, byDefault *int32) os.FileMode {
	switch {
	case own != nil:
		return os.FileMode(*own) & os.ModePerm
	case byDefault != nil:
		return os.FileMode(*byDefault) & os.ModePerm
	}
	return 0o644
}

// inside refuses a path that leaves the volume.
func inside(path string) error {
	if !filepath.IsLocal(path) {
		return fmt.Errorf("path %q leaves the volume", path)
	}
	return nil
}

// volumeDir is where a volume is on the host. A hostPath is a path of the node, and
// a node's files are below the kubelet's own directory.
func (k *Kubelet) volumeDir(o *corev1.Pod, v *corev1.Volume) string {
	if v.HostPath != nil {
		return k.nodePath(v.HostPath.Path)
	}
	if v.PersistentVolumeClaim != nil {
		if dir, err := os.Readlink(k.claimLink(o, v)); err == nil {
			return dir
		}
	}
	if v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory {
		return filepath.Join(k.memoryDir(o.UID), v.Name)
	}
	return filepath.Join(k.podDir(o.UID), "volumes", v.Name)
}

// memoryDir holds the pod's emptyDir volumes of medium Memory: directories of the
// runtime directory, which is a tmpfs on every common system.
func (k *Kubelet) memoryDir(uid types.UID) string {
	return filepath.Join(k.cfg.MemoryDir, string(uid))
}

// nodePath is where a path of the node is on the host.
func (k *Kubelet) nodePath(path string) string {
	return filepath.Join(k.nodeRoot(), filepath.Clean("/"+path))
}

// claimLink is what remembers to which directory a claim of the pod led, so that a
// container that starts later gets the same one.
func (k *Kubelet) claimLink(o *corev1.Pod, v *corev1.Volume) string {
	return filepath.Join(k.podDir(o.UID), "volumes", v.Name)
}

// volumePath is where the host has what a container mounts.
func (k *Kubelet) volumePath(o *corev1.Pod, m corev1.VolumeMount) string {
	for i := range o.Spec.Volumes {
		if o.Spec.Volumes[i].Name == m.Name {
			return filepath.Join(k.volumeDir(o, &o.Spec.Volumes[i]), filepath.Clean("/"+m.SubPath))
		}
	}
	return ""
}

// writeVolume makes dir hold exactly these files and changes all of them at one
// moment: the names are links through "..data", which is replaced as a whole.
func writeVolume(dir string, files map[string]file) error {
	if same(dir, files) {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	fresh, err := os.MkdirTemp(dir, "..v")
	if err != nil {
		return err
	}
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	for name, f := range files {
		path := filepath.Join(fresh, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.data, f.mode); err != nil {
			return err
		}
		if err := os.Chmod(path, f.mode); err != nil { // whatever the umask is
			return err
		}
	}
	old, _ := os.Readlink(filepath.Join(dir, "..data"))
	tmp := filepath.Join(dir, "..data_tmp")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(filepath.Base(fresh), tmp); err != nil {
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, "..data")); err != nil {
		return err
	}
	if err := linkNames(dir, files); err != nil {
		return err
	}
	if old != "" {
		return os.RemoveAll(filepath.Join(dir, filepath.Base(old)))
	}
	return nil
}

// linkNames makes a link for each top-level name and removes those of before.
func linkNames(dir string, files map[string]file) error {
	want := map[string]bool{}
	for name := range files {
		top, _, _ := strings.Cut(filepath.Clean(name), string(os.PathSeparator))
		want[top] = true
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := e.Name()
		if want[name] || strings.HasPrefix(name, "..") {
			delete(want, name)
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	for name := range want {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// same reports whether the volume holds these files already.
func same(dir string, files map[string]file) bool {
	data := filepath.Join(dir, "..data")
	if _, err := os.Stat(data); err != nil {
		return false
	}
	for name, f := range files {
		text, err := os.ReadFile(filepath.Join(data, name))
		if err != nil || string(text) != string(f.data) {
			return false
		}
	}
	count := 0
	root, err := filepath.EvalSymlinks(data)
	if err != nil {
		return false
	}
	err = filepath.WalkDir(root, func(_ string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			count++
		}
		return err
	})
	return err == nil && count == len(files)
}
