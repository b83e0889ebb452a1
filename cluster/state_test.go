// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/apiserver"
	"github.com/kplab/kplab/internal/nettest"
)

// TestMain silences the API server's own log: what a test wants to know is in its
// failure.
func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	nettest.Main(m)
}

// stateLab is the API of a lab without anything else, at the places where the
// commands look for it.
type stateLab struct {
	name  string
	paths Paths
	// people and lab act as a person and as the lab's controllers.
	people, lab kubernetes.Interface
	stop        func()
}

func startStateLab(t *testing.T, name string) *stateLab {
	t.Helper()
	paths := PathsOf(name)
	for _, dir := range []string{paths.State, paths.Runtime} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := apiserver.New(apiserver.Config{StateDir: paths.State, Listeners: []net.Listener{ln}, ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"), NoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	serving := newGroup()
	serving.run("API server", s.Run)
	l := &stateLab{name: name, paths: paths}
	l.stop = func() {
		serving.stop()
		if err := os.RemoveAll(paths.Runtime); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(l.stop)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := serving.await(ctx, s.Ready); err != nil {
		t.Fatal(err)
	}
	data, err := s.AdminKubeconfig(name, "https://"+ln.Addr().String())
	if err == nil {
		err = errors.Join(writeFile(paths.Kubeconfig(), data, 0o600), writeDaemon(paths.Daemon()))
	}
	if err != nil {
		t.Fatal(err)
	}
	if l.people, err = kubernetes.NewForConfig(s.ClientConfig("someone", "system:masters")); err != nil {
		t.Fatal(err)
	}
	if l.lab, err = kubernetes.NewForConfig(s.ClientConfig("system:kube-controller-manager", "system:masters")); err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
		l.makeNamespace(t, l.lab, ns)
	}
	return l
}

// makeNamespace also does what the controllers do in a new namespace.
func (l *stateLab) makeNamespace(t *testing.T, as kubernetes.Interface, name string) {
	t.Helper()
	must(t)(as.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))
	l.furnish(t, name)
}

func (l *stateLab) furnish(t *testing.T, namespace string) {
	t.Helper()
	must(t)(l.lab.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))
	ca := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "kube-root-ca.crt"}, Data: map[string]string{"ca.crt": "x"}}
	must(t)(l.lab.CoreV1().ConfigMaps(namespace).Create(t.Context(), ca, metav1.CreateOptions{}))
}

func must(t *testing.T) func(obj any, err error) {
	t.Helper()
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// statePlace gives the test's labs a place of their own.
func statePlace(t *testing.T) {
	t.Helper()
	nettest.LeakCheck(t)
	dir := t.TempDir()
	t.Setenv("KPLAB_STATE", dir+"/state")
	t.Setenv("KPLAB_RUN", dir+"/run")
}

func podTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "nginx"}}},
	}
}

// fill makes a bit of everything, as people and as the lab.
func (l *stateLab) fill(t *testing.T) {
	t.Helper()
	ctx, c := t.Context(), metav1.CreateOptions{}
	l.makeNamespace(t, l.people, "shop")
	people, lab := l.people.CoreV1(), l.lab.CoreV1()
	must(t)(people.ServiceAccounts("shop").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "robot"}}, c))
	must(t)(people.Secrets("shop").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "password"}, Data: map[string][]byte{"k": []byte("v")}}, c))
	must(t)(people.ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name: "settings", Finalizers: []string{"example.com/mine", "foregroundDeletion"}, Annotations: map[string]string{
			"kubectl.kubernetes.io/last-applied-configuration": "{}", "note": "kept",
		}}}, c))
	must(t)(people.Services("shop").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}, Selector: map[string]string{"app": "web"},
	}}, c))
	must(t)(people.Pods("shop").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "alone"}, Spec: corev1.PodSpec{
		ServiceAccountName: "robot", Containers: []corev1.Container{{Name: "c", Image: "nginx"}},
	}}, c))
	if err := lab.Pods("shop").Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "alone"}, Target: corev1.ObjectReference{Name: "node1"}}, c); err != nil {
		t.Fatal(err)
	}
	must(t)(people.Pods("shop").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "pinned"}, Spec: corev1.PodSpec{
		NodeName: "node2", Containers: []corev1.Container{{Name: "c", Image: "nginx"}},
	}}, c))
	d, err := l.people.AppsV1().Deployments("shop").Create(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To[int32](2), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: podTemplate(),
	}}, c)
	must(t)(d, err)
	revision := []byte(`{"metadata":{"annotations":{"deployment.kubernetes.io/revision":"1"}}}`)
	must(t)(l.lab.AppsV1().Deployments("shop").Patch(ctx, "web", types.MergePatchType, revision, metav1.PatchOptions{}))
	// What controllers make of it, one of them with a label that people added.
	must(t)(l.lab.AppsV1().ReplicaSets("shop").Create(ctx, &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web-1", OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, appsv1.SchemeGroupVersion.WithKind("Deployment"))}},
		Spec:       appsv1.ReplicaSetSpec{Selector: d.Spec.Selector, Template: podTemplate()},
	}, c))
	must(t)(l.people.AppsV1().ReplicaSets("shop").Patch(ctx, "web-1", types.MergePatchType, []byte(`{"metadata":{"labels":{"seen":"yes"}}}`), metav1.PatchOptions{}))
	slice := func(name string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.9.9.9"}}}}
	}
	must(t)(l.lab.DiscoveryV1().EndpointSlices("shop").Create(ctx, slice("web-x"), c))
	must(t)(l.people.DiscoveryV1().EndpointSlices("shop").Create(ctx, slice("by-hand"), c))
	must(t)(lab.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, c))
	must(t)(people.Nodes().Patch(ctx, "node1", types.MergePatchType, []byte(`{"metadata":{"labels":{"disk":"ssd"}}}`), metav1.PatchOptions{}))
	must(t)(l.lab.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}, c))
	must(t)(people.Namespaces().Patch(ctx, "kube-public", types.MergePatchType, []byte(`{"metadata":{"labels":{"mine":"yes"}}}`), metav1.PatchOptions{}))
	must(t)(lab.Events("shop").Create(ctx, &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: "e"}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: "alone"}, Type: "Normal", Reason: "R"}, c))
}

// wanted is what export takes of it, in order.
func wanted() []string {
	return []string{
		"namespace/kube-public", "namespace/shop", "serviceaccount/robot in shop", "configmap/settings", "secret/password in shop",
		"service/web in shop", "endpointslice.discovery.k8s.io/by-hand in shop", "pod/alone in shop", "pod/pinned in shop", "deployment.apps/web in shop",
	}
}

func namesIn(e *Export) (names []string) {
	for _, u := range e.Objects {
		names = append(names, objectName(u))
	}
	return names
}

func exportText(t *testing.T, name string, opts ExportOptions) (string, *Export) {
	t.Helper()
	e, err := ExportState(t.Context(), name, opts)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := e.WriteYAML(&b); err != nil {
		t.Fatal(err)
	}
	_, objects, _ := strings.Cut(b.String(), "\n") // the first line names the revision
	return objects, e
}

func TestExport(t *testing.T) {
	statePlace(t)
	l := startStateLab(t, "one")
	l.fill(t)
	text, e := exportText(t, "one", ExportOptions{})
	if got := namesIn(e); !slices.Equal(got, wanted()) {
		t.Errorf("exported %q\nwant %q", got, wanted())
	}
	for _, no := range []string{
		"uid:", "resourceVersion:", "managedFields:", "creationTimestamp: \"", "status:", "generation:", "deployment.kubernetes.io/revision",
		"last-applied-configuration", "foregroundDeletion", "nodeName: node1", "kube-api-access", "seen:", "ownerReferences", "- kubernetes\n",
	} {
		if strings.Contains(text, no) {
			t.Errorf("%q is in the export", no)
		}
	}
	for _, yes := range []string{"note: kept", "example.com/mine", "nodeName: node2", "clusterIP: 10.", "nodePort: 3", "mine: \"yes\"", "k: dg==", "serviceAccountName: robot"} {
		if !strings.Contains(text, yes) {
			t.Errorf("%q is not in the export:\n%s", yes, text)
		}
	}
	notices := strings.Join(e.Notices, "\n")
	for _, want := range []string{"Secrets are in it (1)", "node/node1 is the lab's own"} {
		if !strings.Contains(notices, want) {
			t.Errorf("notices %q lack %q", notices, want)
		}
	}
	all, everything := exportText(t, "one", ExportOptions{All: true})
	for _, want := range []string{"kind: Lease", "kind: Event", "kind: ReplicaSet", "kube-root-ca.crt", "managedFields:", "uid:", "kind: Node"} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is not in the export of all", want)
		}
	}
	seen := map[types.UID]bool{}
	for _, u := range everything.Objects {
		if seen[u.GetUID()] {
			t.Errorf("%s is there twice", objectName(u))
		}
		seen[u.GetUID()] = true
	}

	// A stopped lab gives the same, from its file.
	l.stop()
	offline, e := exportText(t, "one", ExportOptions{})
	if offline != text {
		t.Errorf("from the file:\n%s\nfrom the API:\n%s", offline, text)
	}
	if n := strings.Join(e.Notices, "\n"); !strings.Contains(n, "does not run: read from "+l.paths.Database()) {
		t.Errorf("notices %q", n)
	}
}

// importText imports into a lab and says what happened.
func importText(t *testing.T, name, text string) (done, notices []string, err error) {
	t.Helper()
	err = ImportState(t.Context(), name, strings.NewReader(text),
		func(i Imported) { done = append(done, i.Object+" "+i.Did) }, func(s string) { notices = append(notices, s) })
	return done, notices, err
}

// What was exported makes the same again in a lab that is new, twice does nothing
// more, and an export of everything does as well.
func TestImportRoundTrip(t *testing.T) {
	statePlace(t)
	one := startStateLab(t, "one")
	one.fill(t)
	text, _ := exportText(t, "one", ExportOptions{})
	all, _ := exportText(t, "one", ExportOptions{All: true})
	one.stop()
	for name, file := range map[string]string{"two": text, "three": all} {
		l := startStateLab(t, name)
		// The controller's part in the new namespace comes after it.
		furnished := make(chan error, 1)
		w, err := l.lab.CoreV1().Namespaces().Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=shop"})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			<-w.ResultChan()
			_, err := l.lab.CoreV1().ServiceAccounts("shop").Create(context.Background(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
			furnished <- err
		}()
		done, notices, err := importText(t, name, file)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		w.Stop()
		if err := <-furnished; err != nil {
			t.Error(err)
		}
		if want := "service/web created"; !slices.Contains(done, want) || done[0] != "namespace/kube-public configured" {
			t.Errorf("%s: %q", name, done)
		}
		if name == "three" && !strings.Contains(strings.Join(notices, "\n"), "objects that the lab makes by itself are left out") {
			t.Errorf("notices %q", notices)
		}
		again, _ := exportText(t, name, ExportOptions{})
		if again != text {
			t.Errorf("%s: exported again:\n%s\nbefore:\n%s", name, again, text)
		}
		done, _, err = importText(t, name, file)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range done {
			if !strings.HasSuffix(line, " unchanged") {
				t.Errorf("the second time: %s", line)
			}
		}
		l.stop()
	}
}

func configMap(namespace, name string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, namespace: %s}\ndata: {k: v}\n", name, namespace)
}

func nodePortService(name string, port int) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {type: NodePort, ports: [{port: 80, nodePort: %d}]}\n", name, port)
}

// A file with anything wrong in it leaves nothing half made, and every document
// that is wrong is named.
func TestImportRefusals(t *testing.T) {
	statePlace(t)
	l := startStateLab(t, "one")
	good := configMap("default", "good")
	namespace := "apiVersion: v1\nkind: Namespace\nmetadata: {name: new}\n"
	must(t)(l.people.CoreV1().Services("default").Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "there"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30001}},
	}}, metav1.CreateOptions{}))
	for name, c := range map[string]struct {
		docs []string
		want []string
	}{
		"not YAML":       {[]string{good, "a: [1\n"}, []string{"document 2", "nothing was changed"}},
		"a key twice":    {[]string{good, "kind: A\nkind: B\n"}, []string{"document 2", "already set"}},
		"no kind":        {[]string{"a: b\n", good}, []string{"document 1: want an object with apiVersion and kind"}},
		"no name":        {[]string{good, "apiVersion: v1\nkind: ConfigMap\n"}, []string{"document 2: ConfigMap has no metadata.name"}},
		"unknown kind":   {[]string{good, "apiVersion: v1\nkind: Wish\nmetadata: {name: x}\n"}, []string{"document 2 (wish/x)", "serves no kind Wish in v1"}},
		"unknown field":  {[]string{good, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndate: {}\n"}, []string{"document 2 (configmap/x)", "date"}},
		"invalid":        {[]string{good, nodePortService("x", 80), namespace}, []string{"document 2 (service/x)", "not in the valid range"}},
		"no namespace":   {[]string{good, configMap("nowhere", "x")}, []string{"document 2 (configmap/x in nowhere)", `"nowhere" not found`}},
		"the same twice": {[]string{good, namespace, good}, []string{"document 3 (configmap/good): is the same object as document 1"}},
		"port twice":     {[]string{good, nodePortService("a", 30500), nodePortService("b", 30500)}, []string{"node port 30500 belongs to service default/a and to service default/b"}},
		"port taken":     {[]string{good, nodePortService("a", 30001)}, []string{"node port 30001 belongs to service default/a and to service default/there"}},
		"in a new one":   {[]string{namespace, configMap("new", "UPPER"), good}, []string{"document 2 (configmap/UPPER in new)"}},
		"nothing":        {[]string{"# a comment\n"}, []string{"no object to import"}},
	} {
		done, _, err := importText(t, "one", strings.Join(c.docs, "---\n"))
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}
		if len(done) > 0 {
			t.Errorf("%s: did %q", name, done)
		}
		if _, err := l.people.CoreV1().ConfigMaps("default").Get(t.Context(), "good", metav1.GetOptions{}); err == nil {
			t.Fatalf("%s: the good document was applied", name)
		}
		if _, err := l.people.CoreV1().Namespaces().Get(t.Context(), "new", metav1.GetOptions{}); err == nil {
			t.Fatalf("%s: the namespace was made", name)
		}
	}
	// The same file with a port that is free, and a List.
	list := "apiVersion: v1\nkind: List\nitems:\n- " + strings.ReplaceAll(strings.TrimSpace(configMap("new", "listed")), "\n", "\n  ") + "\n"
	done, _, err := importText(t, "one", strings.Join([]string{good, nodePortService("a", 30500), list, namespace}, "---\n"))
	if want := []string{"namespace/new created", "configmap/good created", "configmap/listed created", "service/a created"}; err != nil || !slices.Equal(done, want) {
		t.Errorf("%q, %v, want %q", done, err, want)
	}
	l.stop()
	if _, _, err := importText(t, "one", good); !errors.Is(err, ErrNotRunning) {
		t.Errorf("into a lab that does not run: %v", err)
	}
}

// raw is an object that goes past the API into the file.
func (l *stateLab) raw(t *testing.T, key string, obj runtime.Object) {
	t.Helper()
	writeRaw(t, l.paths.Database(), key, obj)
}

func TestCheckState(t *testing.T) {
	statePlace(t)
	if _, err := CheckState(t.Context(), "none"); !errors.Is(err, ErrNoState) || !strings.Contains(err.Error(), "kplab up --name none") {
		t.Errorf("no lab: %v", err)
	}
	l := startStateLab(t, "one")
	l.fill(t)
	for what, try := range map[string]func() error{
		"check":   func() error { _, err := CheckState(t.Context(), "one"); return err },
		"compact": func() error { _, err := CompactState(t.Context(), "one"); return err },
	} {
		if err := try(); !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), "kplab down --name one") {
			t.Errorf("%s of a lab that runs: %v", what, err)
		}
	}
	l.stop()
	r, err := CheckState(t.Context(), "one")
	if err != nil || len(r.Problems) > 0 {
		t.Fatalf("%v, %+v", err, r)
	}
	if r.Kinds["Deployment.apps"] != 1 || r.ClusterIPs != 1 || r.NodePorts != 1 || r.Objects < 20 || r.Revision < 20 {
		t.Errorf("%+v", r)
	}
	before, _ := exportText(t, "one", ExportOptions{All: true})
	c, err := CompactState(t.Context(), "one")
	if err != nil || c.After >= c.Before || c.File != l.paths.Database() {
		t.Errorf("%+v, %v", c, err)
	}
	if after, _ := exportText(t, "one", ExportOptions{All: true}); after != before {
		t.Error("compacting changed the objects")
	}

	twin := func(name, ip string, port int32) *corev1.Service {
		return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "shop"}, Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Ports: []corev1.ServicePort{{Port: 80, NodePort: port}, {Port: 80, Protocol: "UDP", NodePort: port}}}}
	}
	l.raw(t, "/registry/services/shop/a", twin("a", "10.99.0.1", 31999))
	l.raw(t, "/registry/services/shop/b", twin("b", "10.99.0.1", 31999))
	l.raw(t, "/registry/services/shop/lost", twin("elsewhere", "None", 0))
	if r, err = CheckState(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	var problems []string
	for _, p := range r.Problems {
		problems = append(problems, p.What)
		if p.Do == "" {
			t.Errorf("%q comes without advice", p.What)
		}
	}
	if want := []string{
		`object "/registry/services/shop/lost": is called "shop/elsewhere", which is not its place`,
		"cluster IP 10.99.0.1 belongs to service shop/a and to service shop/b",
		"node port 31999 belongs to service shop/a and to service shop/b",
	}; !slices.Equal(problems, want) {
		t.Errorf("problems %q\nwant %q", problems, want)
	}
	// What can be read is saved.
	_, e := exportText(t, "one", ExportOptions{})
	if names := namesIn(e); !slices.Contains(names, "service/web in shop") || slices.Contains(names, "service/elsewhere in shop") {
		t.Errorf("exported %q", names)
	}
	if n := strings.Join(e.Notices, "\n"); !strings.Contains(n, "damaged: object") {
		t.Errorf("notices %q", n)
	}
	if err := os.WriteFile(l.paths.Database(), bytes.Repeat([]byte("garbage\n"), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if r, err = CheckState(t.Context(), "one"); err != nil || len(r.Problems) != 1 || !strings.Contains(r.Problems[0].What, "no meta page is valid") {
		t.Errorf("garbage: %v, %+v", err, r)
	}
}
