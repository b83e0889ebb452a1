// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

// Imported is the outcome of one object.
type Imported struct {
	// Object as kubectl names it, "deployment.apps/web".
	Object string
	// Did is created, configured or unchanged.
	Did string
}

// ImportState applies the YAML documents in r to a running lab, by server-side
// apply, each object after those that it may need. Fields that others manage are
// taken over: the file says how it should be.
//
// All documents are tried without effect first, so that an invalid one leaves
// nothing half made; the error then names every document that was refused. done
// is told of each object that was applied, notice of what the person should know.
func ImportState(ctx context.Context, name string, r io.Reader, done func(Imported), notice func(string)) error {
	cfg, err := adminConfig(name)
	if err != nil {
		return err
	}
	cfg.WarningHandler = &warnings{notice: notice, said: map[string]bool{}}
	docs, err := readDocuments(r)
	if err != nil {
		return fmt.Errorf("%w; nothing was changed", err)
	}
	i, err := newImporter(cfg)
	if err != nil {
		return fmt.Errorf("lab %q: %w", name, err)
	}
	if i.docs = leaveOutDerived(docs, notice); len(i.docs) == 0 {
		return errors.New("there is no object to import")
	}
	if err := i.check(ctx); err != nil {
		return fmt.Errorf("lab %q refuses the import, nothing was changed:\n%w", name, err)
	}
	if err := i.apply(ctx, done); err != nil {
		return fmt.Errorf("lab %q: the import is not complete; mend these and repeat it:\n%w", name, err)
	}
	return nil
}

// warnings passes the server's warnings on, each once: the trial and the import
// get the same.
type warnings struct {
	notice func(string)
	said   map[string]bool
}

// HandleWarningHeader implements rest.WarningHandler.
func (w *warnings) HandleWarningHeader(code int, _ string, text string) {
	if code == 299 && text != "" && !w.said[text] {
		w.said[text] = true
		w.notice("Warning: " + text)
	}
}

// document is one object of a file.
type document struct {
	*unstructured.Unstructured
	number int // of the YAML document, from 1

	client dynamic.ResourceInterface // set when the API serves the kind
	scoped bool                      // the kind has namespaces
	before string                    // resource version of what is there, "" for nothing
}

func (d *document) errorf(format string, args ...any) error {
	return fmt.Errorf("document %d (%s): %w", d.number, objectName(d.Unstructured), fmt.Errorf(format, args...))
}

// readDocuments reads all objects. The error names every document that is none.
func readDocuments(r io.Reader) (docs []*document, err error) {
	var errs []error
	n := 0
	reader := utilyaml.NewYAMLReader(bufio.NewReader(r))
	for {
		data, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return docs, errors.Join(errs...)
		} else if err != nil {
			return nil, fmt.Errorf("after document %d: %w", n, err)
		}
		var obj map[string]any
		if data, err = yaml.YAMLToJSONStrict(data); err == nil {
			err = json.Unmarshal(data, &obj)
		}
		if err == nil && obj == nil {
			continue // nothing but comments
		}
		n++
		var found []*document
		if err == nil {
			found, err = objectsOf(obj, n)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("document %d: %w", n, err))
		}
		docs = append(docs, found...)
	}
}

// objectsOf is the object in a document, or those in a List.
func objectsOf(obj map[string]any, n int) ([]*document, error) {
	u := &unstructured.Unstructured{Object: obj}
	if u.GetKind() == "" || u.GetAPIVersion() == "" {
		return nil, errors.New("want an object with apiVersion and kind")
	}
	if u.IsList() {
		list, err := u.ToList()
		if err != nil {
			return nil, err
		}
		var docs []*document
		for i := range list.Items {
			found, err := objectsOf(list.Items[i].Object, n)
			if err != nil {
				return nil, err
			}
			docs = append(docs, found...)
		}
		return docs, nil
	}
	if u.GetName() == "" {
		return nil, fmt.Errorf("%s has no metadata.name", u.GetKind())
	}
	return []*document{{Unstructured: u, number: n}}, nil
}

// leaveOutDerived drops what the lab makes by itself, which is in a file that
// was exported with everything, and cleans the rest.
func leaveOutDerived(docs []*document, notice func(string)) []*document {
	before := len(docs)
	docs = slices.DeleteFunc(docs, func(d *document) bool {
		return controlled(d.Unstructured) || madeByLab(d.Unstructured) || thereFromStart(d.Unstructured)
	})
	if n := before - len(docs); n > 0 {
		notice(fmt.Sprintf("%d objects that the lab makes by itself are left out", n))
	}
	for _, d := range docs {
		if len(d.GetManagedFields()) > 0 {
			cleanObject(d.Unstructured)
		} else {
			cleanMetadata(d.Unstructured)
			unstructured.RemoveNestedField(d.Object, "status")
		}
	}
	return docs
}

// importer applies documents to one lab.
type importer struct {
	client dynamic.Interface
	mapper meta.ResettableRESTMapper
	docs   []*document
}

func newImporter(cfg *rest.Config) (*importer, error) {
	disco, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, err
	}
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	return &importer{client: client, mapper: restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(disco))}, nil
}

// find sets the document's client.
func (i *importer) find(d *document) error {
	gvk := d.GroupVersionKind()
	m, err := i.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("the lab serves no kind %s in %s: %w", gvk.Kind, d.GetAPIVersion(), err)
	} else if err != nil {
		return err
	}
	d.scoped = m.Scope.Name() == meta.RESTScopeNameNamespace
	switch {
	case !d.scoped:
		d.SetNamespace("")
	case d.GetNamespace() == "":
		d.SetNamespace(metav1.NamespaceDefault)
	}
	d.client = i.in(m.Resource, d.GetNamespace())
	return nil
}

func (i *importer) in(resource schema.GroupVersionResource, namespace string) dynamic.ResourceInterface {
	if namespace == "" {
		return i.client.Resource(resource)
	}
	return i.client.Resource(resource).Namespace(namespace)
}

// check finds what would be refused, without any effect.
func (i *importer) check(ctx context.Context) error {
	var errs []error
	defined := definedKinds(i.docs)
	for _, d := range i.docs {
		err := i.find(d)
		if err != nil && !slices.Contains(defined, d.GroupVersionKind().GroupKind()) {
			errs = append(errs, d.errorf("%w", err))
		}
	}
	slices.SortStableFunc(i.docs, func(a, b *document) int { return compareForImport(a.Unstructured, b.Unstructured) })
	errs = append(errs, twice(i.docs)...)
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := i.readBefore(ctx); err != nil {
		return err
	}
	errs = i.dryRun(ctx)
	taken, err := i.takenTwice(ctx)
	return errors.Join(append(errs, taken, err)...)
}

// definedKinds are the kinds that the documents themselves define.
func definedKinds(docs []*document) (kinds []schema.GroupKind) {
	for _, d := range docs {
		if !isKind(d.Unstructured, "apiextensions.k8s.io", "CustomResourceDefinition") {
			continue
		}
		group, _, _ := unstructured.NestedString(d.Object, "spec", "group")
		kind, _, _ := unstructured.NestedString(d.Object, "spec", "names", "kind")
		kinds = append(kinds, schema.GroupKind{Group: group, Kind: kind})
	}
	return kinds
}

// twice finds objects that are in the file more than once. The documents are
// sorted, so that they are neighbours.
func twice(docs []*document) (errs []error) {
	for n := 1; n < len(docs); n++ {
		if a, b := docs[n-1], docs[n]; compareForImport(a.Unstructured, b.Unstructured) == 0 {
			errs = append(errs, b.errorf("is the same object as document %d", a.number))
		}
	}
	return errs
}

// readBefore notes what is there.
func (i *importer) readBefore(ctx context.Context) error {
	for _, d := range i.docs {
		if d.client == nil {
			continue
		}
		now, err := d.client.Get(ctx, d.GetName(), metav1.GetOptions{})
		if err == nil {
			d.before = now.GetResourceVersion()
		} else if !apierrors.IsNotFound(err) {
			return d.errorf("%w", err)
		}
	}
	return nil
}

// dryRun tries every document whose kind is served already.
func (i *importer) dryRun(ctx context.Context) (errs []error) {
	made := map[string]bool{} // what the file makes, as "Kind/namespace/name"
	for _, d := range i.docs {
		if d.before == "" {
			made[d.GetKind()+"/"+d.GetNamespace()+"/"+d.GetName()] = true
		}
	}
	for _, d := range i.docs {
		if d.client == nil {
			continue
		}
		stand, err := i.standIn(ctx, d, made)
		if err == nil {
			_, err = stand.applyTo(ctx, true)
		}
		if err != nil {
			errs = append(errs, d.errorf("%w", err))
		}
	}
	return errs
}

// standIn is the document as it can be tried before what it needs is made: in a
// namespace that exists and where no object has its name, and, for a pod,
// without what admission would look for.
func (i *importer) standIn(ctx context.Context, d *document, made map[string]bool) (*document, error) {
	c := d
	if d.scoped && made["Namespace//"+d.GetNamespace()] {
		gvk := d.GroupVersionKind()
		m, err := i.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			return nil, err
		}
		c = d.copy()
		for _, namespace := range []string{"kube-node-lease", "kube-public", metav1.NamespaceDefault} {
			c.SetNamespace(namespace)
			c.client = i.in(m.Resource, namespace)
			if _, err := c.client.Get(ctx, c.GetName(), metav1.GetOptions{}); apierrors.IsNotFound(err) {
				break
			}
		}
	}
	if !isKind(d.Unstructured, "", "Pod") {
		return c, nil
	}
	needed := func(field string) string {
		name, _, _ := unstructured.NestedString(d.Object, "spec", field)
		return name
	}
	c = c.copy()
	if made["ServiceAccount/"+d.GetNamespace()+"/"+needed("serviceAccountName")] {
		unstructured.RemoveNestedField(c.Object, "spec", "serviceAccountName")
		unstructured.RemoveNestedField(c.Object, "spec", "serviceAccount")
	}
	if made["PriorityClass//"+needed("priorityClassName")] {
		unstructured.RemoveNestedField(c.Object, "spec", "priorityClassName")
	}
	return c, nil
}

func (d *document) copy() *document {
	c := *d
	c.Unstructured = d.DeepCopy()
	return &c
}

// takenTwice finds addresses and ports that belong to two Services, of the file
// or of the lab: a dry run reserves nothing and so cannot tell.
func (i *importer) takenTwice(ctx context.Context) (problems, err error) {
	var before, after claims
	inFile := map[string]bool{}
	for _, d := range i.docs {
		if isKind(d.Unstructured, "", "Service") {
			after.add(d.Unstructured)
			inFile[d.GetNamespace()+"/"+d.GetName()] = true
		}
	}
	if len(inFile) == 0 {
		return nil, nil
	}
	there, err := i.client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "services"}).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list the lab's Services: %w", err)
	}
	for n := range there.Items {
		s := &there.Items[n]
		before.add(s)
		if !inFile[s.GetNamespace()+"/"+s.GetName()] {
			after.add(s)
		}
	}
	var errs []error
	for _, p := range after.problems() {
		if !slices.Contains(before.problems(), p) {
			errs = append(errs, errors.New(p))
		}
	}
	return errors.Join(errs...), nil
}

// applyTo sends one document to the server. The answer is what is then there.
func (d *document) applyTo(ctx context.Context, dryRun bool) (*unstructured.Unstructured, error) {
	opts := metav1.ApplyOptions{FieldManager: importManager, Force: true}
	if dryRun {
		opts.DryRun = []string{metav1.DryRunAll}
	}
	return d.client.Apply(ctx, d.GetName(), d.Unstructured, opts)
}

// apply applies all documents. One that fails does not keep the others from it.
func (i *importer) apply(ctx context.Context, done func(Imported)) error {
	var errs []error
	for _, d := range i.docs {
		if d.client == nil {
			if err := i.awaitKind(ctx, d); err != nil {
				errs = append(errs, d.errorf("%w", err))
				continue
			}
		}
		now, err := d.applyTo(ctx, false)
		if err != nil {
			errs = append(errs, d.errorf("%w", err))
			continue
		}
		did := "configured"
		switch d.before {
		case "":
			did = "created"
		case now.GetResourceVersion():
			did = "unchanged"
		}
		done(Imported{Object: kubectlName(d.Unstructured), Did: did})
	}
	return errors.Join(errs...)
}

// kindTimeout is how long a kind may take to be served after its definition.
const kindTimeout = 10 * time.Second

// awaitKind waits until the API serves a kind that was defined a moment ago.
func (i *importer) awaitKind(ctx context.Context, d *document) error {
	ctx, cancel := context.WithTimeout(ctx, kindTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		i.mapper.Reset()
		err := i.find(d)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not served %s after its definition: %w", kindTimeout, err)
		case <-tick.C:
		}
	}
}
