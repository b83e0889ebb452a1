// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestExpand(t *testing.T) {
	vars := map[string]string{"A": "1", "B": "two words"}
	for in, want := range map[string]string{
		"": "", "plain": "plain", "$(A)": "1", "x$(B)y": "xtwo wordsy", "$(NOPE)": "$(NOPE)", "$$(A)": "$(A)", "$A": "$A", "$(A": "$(A", "cost$": "cost$", "$(A)$(B)": "1two words",
	} {
		if got := expand(in, vars); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestServiceLinks(t *testing.T) {
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "my-nginx"}, Spec: corev1.ServiceSpec{
		ClusterIP: "10.96.1.2", Ports: []corev1.ServicePort{{Name: "http-web", Port: 80, Protocol: "TCP"}, {Port: 53, Protocol: "UDP"}},
	}}
	got := strings.Join(linksOf(svc), "\n")
	want := `MY_NGINX_SERVICE_HOST=10.96.1.2
MY_NGINX_SERVICE_PORT=80
MY_NGINX_SERVICE_PORT_HTTP_WEB=80
MY_NGINX_PORT=tcp://10.96.1.2:80
MY_NGINX_PORT_80_TCP=tcp://10.96.1.2:80
MY_NGINX_PORT_80_TCP_PROTO=tcp
MY_NGINX_PORT_80_TCP_PORT=80
MY_NGINX_PORT_80_TCP_ADDR=10.96.1.2
MY_NGINX_PORT_53_UDP=udp://10.96.1.2:53
MY_NGINX_PORT_53_UDP_PROTO=udp
MY_NGINX_PORT_53_UDP_PORT=53
MY_NGINX_PORT_53_UDP_ADDR=10.96.1.2`
	if got != want {
		t.Errorf("links are\n%s\nwant\n%s", got, want)
	}
}

func TestResolvConf(t *testing.T) {
	k := &Kubelet{cfg: Config{ClusterDNS: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, ClusterDomain: "cluster.local"}}
	two := "2"
	for _, c := range []struct {
		name string
		spec corev1.PodSpec
		want string
	}{
		{"default", corev1.PodSpec{}, "search web.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"host network", corev1.PodSpec{HostNetwork: true}, ""},
		{"host network with cluster DNS", corev1.PodSpec{HostNetwork: true, DNSPolicy: corev1.DNSClusterFirstWithHostNet}, "search web.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"none with its own", corev1.PodSpec{DNSPolicy: corev1.DNSNone, DNSConfig: &corev1.PodDNSConfig{
			Nameservers: []string{"192.0.2.1"}, Searches: []string{"example.org"}, Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "edns0"}},
		}}, "search example.org\nnameserver 192.0.2.1\noptions ndots:2 edns0\n"},
		{"an option over the default", corev1.PodSpec{DNSConfig: &corev1.PodDNSConfig{Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}}}},
			"search web.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:2\n"},
	} {
		if got := k.resolvConf(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "web"}, Spec: c.spec}); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestVolumeChangesAtOneMoment(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "v")
	write := func(files map[string]string) {
		t.Helper()
		all := map[string]file{}
		for name, text := range files {
			all[name] = file{[]byte(text), 0o640}
		}
		if err := writeVolume(dir, all); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err.Error()
		}
		return string(b)
	}
	write(map[string]string{"a": "1", "sub/b": "2"})
	data, err := os.Readlink(filepath.Join(dir, "..data"))
	if err != nil {
		t.Fatal(err)
	}
	write(map[string]string{"a": "1", "sub/b": "2"})
	if again, _ := os.Readlink(filepath.Join(dir, "..data")); again != data {
		t.Error("a volume that did not change was written again")
	}
	if read("a") != "1" || read("sub/b") != "2" {
		t.Errorf("files are %q and %q", read("a"), read("sub/b"))
	}
	write(map[string]string{"a": "new", "c": "3"})
	if read("a") != "new" || read("c") != "3" || !strings.Contains(read("sub/b"), "no such file") {
		t.Errorf("files are %q, %q and %q", read("a"), read("c"), read("sub/b"))
	}
	if st, err := os.Stat(filepath.Join(dir, "a")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode is %v, %v", st.Mode(), err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 4 { // a, c, ..data and what it points to
		t.Errorf("the directory holds %v, %v", entries, err)
	}
}

func TestImageNames(t *testing.T) {
	for image, want := range map[string]string{
		"nginx":                         "",
		"nginx:1.27-alpine":             "",
		"registry.k8s.io/a/b_c/d--e:v1": "",
		"localhost:5000/x":              "",
		"[::1]:5000/x":                  "",
		"x@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef":   "",
		"x:1@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef": "",
		"Nginx":             "invalid reference format: repository name (library/Nginx) must be lowercase",
		"team/Nginx:1":      "invalid reference format: repository name (team/Nginx) must be lowercase",
		"nginx:":            "invalid reference format",
		"nginx:la test":     "invalid reference format",
		"a:b:c":             "invalid reference format",
		"/nginx":            "invalid reference format",
		"x@sha256:123":      "invalid reference format",
		"http://a.com/x":    "invalid reference format",
		"example.com/a//b":  "invalid reference format",
		"example.com:x/a/b": "invalid reference format",
	} {
		got := ""
		if err := checkImageName(image); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: %q, want %q", image, got, want)
		}
	}
}

func TestMountAndUserStatus(t *testing.T) {
	p := newTestPod("web", "nginx")
	user, group := int64(1000), int64(2000)
	p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &user, FSGroup: &group, SupplementalGroups: []int64{0, 5}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "a", MountPath: "/a"}, {Name: "b", MountPath: "/b", ReadOnly: true}}
	st := containerStatus(p, &p.Spec.Containers[0], &container{name: "main", id: "x"}, "")
	if u := st.User.Linux; u.UID != user || u.GID != 0 || !slices.Equal(u.SupplementalGroups, []int64{0, 5, group}) {
		t.Errorf("user is %+v", u)
	}
	if m := st.VolumeMounts; len(m) != 2 || m[0].MountPath != "/a" || m[0].RecursiveReadOnly != nil || m[1].RecursiveReadOnly == nil || *m[1].RecursiveReadOnly != corev1.RecursiveReadOnlyDisabled {
		t.Errorf("mounts are %+v", m)
	}
}

func TestContainerRefSaysWhichContainer(t *testing.T) {
	p := newTestPod("web", "nginx")
	p.Spec.InitContainers = []corev1.Container{{Name: "first"}}
	p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "look"}}}
	for name, want := range map[string]string{
		"main": "spec.containers{main}", "first": "spec.initContainers{first}", "look": "spec.ephemeralContainers{look}",
	} {
		ref := containerRef(p, name)
		if ref.FieldPath != want || ref.Kind != "Pod" || ref.APIVersion != "v1" || ref.Name != "web" || ref.Namespace != "default" || ref.UID != p.UID {
			t.Errorf("%s: %+v", name, ref)
		}
	}
}

func TestBackoff(t *testing.T) {
	c := &container{}
	now := time.Now()
	for i, want := range []time.Duration{0, 10, 20, 40, 80, 160, 300, 300} {
		c.exit = &corev1.ContainerStateTerminated{StartedAt: metav1.NewTime(now), FinishedAt: metav1.NewTime(now)}
		c.planRestart()
		if got := c.startDue.Sub(now); got != want*time.Second {
			t.Errorf("wait before restart %d is %s, want %ds", i+1, got, want)
		}
	}
	c.exit.StartedAt = metav1.NewTime(now.Add(-time.Hour))
	c.planRestart()
	if !c.startDue.Equal(now) {
		t.Error("an hour of good work is not forgiven")
	}
}

func TestReadLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	text := "2026-01-01T00:00:01.5Z stdout F one\n2026-01-01T00:00:02Z stderr F two\nbroken line\n2026-01-01T00:00:03Z stdout P thr\n2026-01-01T00:00:03Z stdout F ee\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	since := metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 2, 0, time.UTC))
	for _, c := range []struct {
		name string
		opts corev1.PodLogOptions
		want string
	}{
		{"all", corev1.PodLogOptions{}, "one\ntwo\nthree\n"},
		{"one stream", corev1.PodLogOptions{Stream: ptr.To(corev1.LogStreamStderr)}, "two\n"},
		{"since", corev1.PodLogOptions{SinceTime: &since}, "two\nthree\n"},
		{"limit", corev1.PodLogOptions{LimitBytes: ptr.To[int64](5)}, "one\nt"},
		{"stamps", corev1.PodLogOptions{Timestamps: true, TailLines: ptr.To[int64](1)}, "2026-01-01T00:00:03Z ee\n"},
	} {
		var out bytes.Buffer
		if err := readLog(context.Background(), path, &c.opts, nil, &out); err != nil || out.String() != c.want {
			t.Errorf("%s: %q, %v; want %q", c.name, out.String(), err, c.want)
		}
	}
}

func TestResourceField(t *testing.T) {
	c := &corev1.Container{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("64Mi")}}}
	for _, x := range []struct{ res, div, want string }{
		{"limits.cpu", "", "2"}, {"limits.cpu", "1m", "1500"}, {"limits.memory", "1Mi", "64"}, {"requests.cpu", "", "0"},
	} {
		ref := &corev1.ResourceFieldSelector{Resource: x.res}
		if x.div != "" {
			ref.Divisor = resource.MustParse(x.div)
		}
		if got, err := resourceField(c, ref); got != x.want || err != nil {
			t.Errorf("%s / %q = %q, %v; want %q", x.res, x.div, got, err, x.want)
		}
	}
}

// A process sees its variables, its files and its volumes.
func TestEnvironmentAndVolumes(t *testing.T) {
	h := newHarness(t)
	ctx := context.Background()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "conf", Namespace: "default"}, Data: map[string]string{"color": "red", "size": "9"}}
	if _, err := h.client.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "key", Namespace: "default"}, Data: map[string][]byte{"pass": []byte("s3cret")}}
	if _, err := h.client.CoreV1().Secrets("default").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p := newTestPod("env", "busybox", "sh", "-c", `echo "$NAME $IP $COLOR $CONF_size $PASS $BOTH"; cat /conf/color /key/pass /info/labels; echo; cat /conf/color > /data/copy; cat /data/copy; echo; touch /conf/x 2>/dev/null || echo readonly; while :; do sleep 1; done`)
	p.Labels = map[string]string{"app": "demo"}
	c := &p.Spec.Containers[0]
	from := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	c.Env = []corev1.EnvVar{
		{Name: "NAME", ValueFrom: from("metadata.name")}, {Name: "IP", ValueFrom: from("status.podIP")},
		{Name: "COLOR", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}, Key: "color"}}},
		{Name: "PASS", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "key"}, Key: "pass"}}},
		{Name: "BOTH", Value: "$(NAME)-$(COLOR)"},
	}
	c.EnvFrom = []corev1.EnvFromSource{{Prefix: "CONF_", ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}}}}
	p.Spec.Volumes = []corev1.Volume{
		{Name: "conf", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "conf"}}}},
		{Name: "key", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "key"}}},
		{Name: "info", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}}},
		{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
	}
	for _, v := range p.Spec.Volumes {
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: "/" + v.Name})
	}
	h.create(p)
	p = h.until("env", "ready", isReady)
	want := "env " + p.Status.PodIP + " red 9 s3cret env-red\nreds3cretapp=\"demo\"\nred\nreadonly\n"
	h.eventuallyLog(p, want)

	// A ConfigMap that changes reaches the volume, one that is missing is named.
	cm.Data["color"] = "blue"
	if _, err := h.client.CoreV1().ConfigMaps("default").Update(ctx, cm, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	h.eventuallyExec("env", []string{"cat", "/conf/color"}, "blue")
	lost := newTestPod("lost", "nginx")
	lost.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "nope"}}}}
	h.create(lost)
	h.until("lost", "waiting for its ConfigMap", func(p *corev1.Pod) bool {
		w := status0(p).State.Waiting
		return w != nil && w.Reason == "CreateContainerConfigError" && strings.Contains(w.Message, `"nope" not found`)
	})
}
