// SPDX-License-Identifier: Apache-2.0

package labtest_test

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kplab/kplab/cluster/labtest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

const web = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: nginx, image: nginx}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80, nodePort: 30123}]}
`

// TestServicePath sends packets along every way to a Service.
func TestServicePath(t *testing.T) {
	lab := labtest.Start(t, labtest.Options{})
	lab.Apply(web)
	lab.Settle()
	vip := lab.ClusterIP("default", "web")
	answered := regexp.MustCompile(`(?m)^X-Kplab-Pod: (\S+)\r?$`)
	for where, url := range map[string]string{
		"master":  "http://" + vip,
		"node1":   "http://" + vip,
		"outside": "http://10.0.0.131:30123",
		"node2":   "http://127.0.0.1:30123",
	} {
		out := lab.Exec(where, "curl", "-sS", "-m", "20", "-o", "/dev/null", "-D", "-", "-H", "Connection: close", url+"/?[1-40]")
		pods := map[string]bool{}
		all := answered.FindAllStringSubmatch(out, -1)
		for _, m := range all {
			pods[m[1]] = true
		}
		if len(all) != 40 || len(pods) != 2 {
			t.Errorf("from %s to %s: %d of 40 answers, by %d pods, want 2", where, url, len(all), len(pods))
		}
	}
	if out, err := lab.TryExec("outside", "curl", "-sS", "-m", "2", "http://"+vip); err == nil {
		t.Errorf("outside reaches a ClusterIP: %s", out)
	}

	// Nobody left: a quick refusal, and not a wait.
	if err := lab.Client.AppsV1().Deployments("default").Delete(context.Background(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	lab.Settle()
	if out, err := lab.TryExec("node1", "curl", "-sS", "-m", "5", "http://"+vip); err == nil || !strings.Contains(err.Error(), "(7)") {
		t.Errorf("a Service without endpoints: %q, %v; want a refusal", out, err)
	}
}

// TestStateOutlivesALab starts two labs, one after the other, on one state.
func TestStateOutlivesALab(t *testing.T) {
	dir, err := os.MkdirTemp("", "kplab-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	var before string
	t.Run("first", func(t *testing.T) {
		lab := labtest.Start(t, labtest.Options{Dir: dir, Nodes: 2})
		lab.Apply(web)
		lab.Settle()
		before = lab.ClusterIP("default", "web")
	})
	t.Run("second", func(t *testing.T) {
		lab := labtest.Start(t, labtest.Options{Dir: dir, Nodes: 2})
		lab.Settle()
		if now := lab.ClusterIP("default", "web"); now != before {
			t.Errorf("the ClusterIP was %s and is %s", before, now)
		}
		if out := lab.Exec("master", "curl", "-sS", "-m", "5", "http://"+before); !strings.Contains(out, "Welcome to nginx!") {
			t.Errorf("after the restart the Service answers %q", out)
		}
	})
}

// A lab in a test: objects go in through the API, packets come out of the kernel.
func Example() {
	t, end := exampleT()
	defer end()

	lab := labtest.Start(t, labtest.Options{Nodes: 2})
	lab.Apply(web)
	lab.Settle()
	page := lab.Exec("master", "curl", "-sS", "http://"+lab.ClusterIP("default", "web"))
	fmt.Println(strings.Contains(page, "Welcome to nginx!"))
	// Output: true
}

// stand is a test for an example, which has none of its own.
type stand struct {
	testing.TB
	cleanups []func()
}

func exampleT() (*stand, func()) {
	s := &stand{}
	return s, func() {
		for i := len(s.cleanups) - 1; i >= 0; i-- {
			s.cleanups[i]()
		}
	}
}

func (s *stand) Helper()                      {}
func (s *stand) Context() context.Context     { return context.Background() }
func (s *stand) Failed() bool                 { return false }
func (s *stand) Cleanup(f func())             { s.cleanups = append(s.cleanups, f) }
func (s *stand) Logf(f string, args ...any)   { fmt.Printf(f+"\n", args...) }
func (s *stand) Errorf(f string, args ...any) { fmt.Printf(f+"\n", args...) }
func (s *stand) Error(args ...any)            { fmt.Println(args...) }
func (s *stand) Fatalf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }

// Skip fails: an example cannot be skipped, and one that did nothing has not passed.
func (s *stand) Skip(args ...any)  { panic(fmt.Sprint(args...)) }
func (s *stand) Fatal(args ...any) { panic(fmt.Sprint(args...)) }
