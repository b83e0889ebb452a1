// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/internal/execx"
	"github.com/kplab/kplab/internal/nettest"
)

// kubectls are the kubectl programs to test with: those of the environment
// variable KPLAB_KUBECTL, separated by colons, else the machine's.
func kubectls(t *testing.T) []string {
	t.Helper()
	if list := os.Getenv("KPLAB_KUBECTL"); list != "" {
		return strings.Split(list, ":")
	}
	for _, path := range []string{"/usr/local/bin/kubectl", "/usr/bin/kubectl"} {
		if _, err := os.Stat(path); err == nil {
			return []string{path}
		}
	}
	t.Skip("no kubectl in /usr/local/bin or /usr/bin, and KPLAB_KUBECTL is empty; the transcripts run the embedded one")
	return nil
}

// kubectl runs commands of one program against one server.
type kubectl struct {
	t    *testing.T
	path string
	env  []string
}

func newKubectl(t *testing.T, s *testServer, path string) kubectl {
	t.Helper()
	return kubectl{t, path, []string{"KUBECONFIG=" + s.kubeconfig, "HOME=" + t.TempDir()}}
}

// run returns what the command says on both streams, and whether it succeeded.
func (k kubectl) run(stdin string, args ...string) (string, bool) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), time.Minute)
	defer cancel()
	res, err := execx.Host().Run(ctx, execx.Cmd{Path: k.path, Args: args, Env: k.env, Stdin: []byte(stdin)})
	return string(res.Stdout) + string(res.Stderr), err == nil
}

// want runs a command that must succeed (ok) or fail, and compares what it says
// with a regular expression.
func (k kubectl) want(ok bool, expression, stdin string, args ...string) {
	k.t.Helper()
	out, success := k.run(stdin, args...)
	if success != ok || !regexp.MustCompile("(?s)"+expression).MatchString(out) {
		k.t.Errorf("kubectl %s: success %v, want %v and %q:\n%s", strings.Join(args, " "), success, ok, expression, out)
	}
}

const (
	goodMap  = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"},"data":{"k":"1"}}`
	otherMap = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c"},"data":{"k":"2"}}`
	badMap   = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"bad"},"dada":{"k":"1"}}`
	podYAML  = `
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {app: p}}
spec:
  containers:
  - name: web
    image: nginx
    ports: [{containerPort: 80}]
`
)

func TestKubectl(t *testing.T) {
	for _, path := range kubectls(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			s := startServer(t, "")
			makeNamespace(t, s, "default")
			k := newKubectl(t, s, path)

			k.want(true, `Server Version: v1\.37\.2\+kplab`, "", "version")
			k.want(true, `pods +po +v1 +true +Pod\n.*leases +coordination\.k8s\.io/v1 +true +Lease`, "", "api-resources")
			k.want(true, `NAME +STATUS +AGE\ndefault +Active`, "", "get", "namespaces")

			k.want(true, `^configmap/c created`, goodMap, "apply", "-f", "-")
			k.want(true, `^configmap/c unchanged`, goodMap, "apply", "-f", "-")
			k.want(false, `-  k: "1"\n\+  k: "2"`, otherMap, "diff", "-f", "-")
			k.want(true, `^configmap/c configured`, otherMap, "apply", "-f", "-")
			k.want(false, `unknown field "dada"`, badMap, "apply", "-f", "-")
			k.want(false, `unknown field "dada"`, badMap, "create", "-f", "-")
			k.want(true, `configmap/bad created\nWarning: unknown field "dada"`, badMap, "create", "--validate=warn", "-f", "-")
			k.want(true, `^configmap/c serverside-applied`, otherMap, "apply", "--server-side", "--force-conflicts", "-f", "-")
			k.want(false, `conflict with "kubectl"`, goodMap, "apply", "--server-side", "--field-manager=bob", "-f", "-")
			k.want(true, `c +1 +\S+ +<none>`, "", "get", "cm", "-A", "--show-labels")

			k.want(true, `FIELD: ports <\[\]ContainerPort>.*containerPort`, "", "explain", "pod.spec.containers.ports")
			k.want(true, `KIND: +Lease\nVERSION: +coordination.k8s.io/v1|GROUP: +coordination.k8s.io\nKIND: +Lease`, "", "explain", "lease")
			k.want(true, `FIELD: ports <\[\]ServicePort>.*nodePort`, "", "explain", "service.spec.ports")

			k.want(true, `^pod/p created`, podYAML, "apply", "-f", "-")
			k.want(true, `^pod/p unchanged`, podYAML, "apply", "-f", "-")
			k.want(true, `NAME +READY +STATUS +RESTARTS +AGE +IP +NODE +NOMINATED NODE +READINESS GATES\np +0/1 +Pending +0 +\S+ +<none> +<none> +<none> +<none>`, "", "get", "pods", "-o", "wide")
			k.want(true, `pod/p labeled`, "", "label", "pod", "p", "tier=front")
			k.want(true, `pod/p patched`, "", "patch", "pod", "p", "--type=json", "-p", `[{"op":"add","path":"/metadata/annotations/x","value":"y"}]`)
			k.want(true, `pod/p image updated`, "", "set", "image", "pod/p", "web=nginx:2")
			k.want(false, `pod updates may not change fields other than`, "", "patch", "pod", "p", "-p", `{"spec":{"hostNetwork":true}}`)
			k.want(true, `Name: +p\n.*Status: +Pending.*QoS Class: +BestEffort.*Events: +<none>`, "", "describe", "pod", "p")
			k.want(false, `field label not supported: spec.foo`, "", "get", "pods", "--field-selector=spec.foo=bar")
			k.want(false, `namespaces "nowhere" not found`, "", "create", "configmap", "x", "-n", "nowhere")
			k.want(false, `namespaces "default" is forbidden: this namespace may not be deleted`, "", "delete", "namespace", "default")
			k.want(true, `^ey`, "", "create", "token", "default")
			k.want(true, `\[\+\]ping ok`, "", "get", "--raw", "/readyz?verbose")
			k.want(true, `condition met`, "", "wait", "--for=jsonpath={.status.phase}=Pending", "pod/p", "--timeout=20s")
			k.want(true, `pod "p" (force )?deleted`, "", "delete", "pod", "p")
			k.want(true, `configmap "c" deleted`, "", "delete", "configmap", "c")
		})
	}
}

// TestKubectlWatch: the first change after "get -w" started is shown.
func TestKubectlWatch(t *testing.T) {
	for _, path := range kubectls(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			s := startServer(t, "")
			makeNamespace(t, s, "default")
			k := newKubectl(t, s, path)
			k.want(true, `^pod/p created`, podYAML, "apply", "-f", "-")
			done := make(chan string, 1)
			watching := s.watchers("pods")
			go func() {
				out, _ := k.run("", "get", "pod", "p", "-w", "--request-timeout=3s", "-o", "custom-columns=L:.metadata.labels.first")
				done <- out
			}()
			nettest.Eventually(t, waitTime, "kubectl to watch", func() error { return s.moreWatchers("pods", watching) })
			if out, ok := k.run("", "label", "pod", "p", "first=change"); !ok {
				t.Fatal(out)
			}
			if out := <-done; !strings.Contains(out, "change") {
				t.Errorf("get -w shows:\n%s", out)
			}
			if err := s.client.CoreV1().Pods("default").Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
}
