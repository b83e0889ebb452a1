// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/yaml"

	"github.com/kplab/kplab/apiserver/store"
)

// bench is a set of kinds over the real store, without HTTP: objects are
// defaulted as a decoder would do it and go through the REST storages.
type bench struct {
	t        testing.TB
	path     string
	deps     Deps
	db       *store.DB
	scheme   *runtime.Scheme
	storages map[string]rest.Storage
	warnings warnings
}

func newBench(tb testing.TB, deps Deps, kinds ...Kind) *bench {
	tb.Helper()
	return openBench(tb, filepath.Join(tb.TempDir(), "db"), deps, kinds...)
}

func openBench(tb testing.TB, path string, deps Deps, kinds ...Kind) *bench {
	tb.Helper()
	scheme, err := NewScheme(kinds)
	if err != nil {
		tb.Fatal(err)
	}
	db, err := store.Open(path, store.Options{NoFsync: true})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := db.Close(); err != nil {
			tb.Error(err)
		}
	})
	versions := map[string]schema.GroupVersion{}
	for _, k := range kinds {
		versions[k.Resource] = k.GroupVersion
	}
	built, _, err := Build(kinds, scheme, benchGetter{db, serializer.NewCodecFactory(scheme), versions}, deps)
	if err != nil {
		tb.Fatal(err)
	}
	b := &bench{t: tb, path: path, deps: deps, db: db, scheme: scheme, storages: map[string]rest.Storage{}}
	for _, paths := range built {
		for path, s := range paths {
			b.storages[path] = s
		}
	}
	return b
}

// benchGetter gives the stores the real storage, without a watch cache.
type benchGetter struct {
	db       *store.DB
	codecs   serializer.CodecFactory
	versions map[string]schema.GroupVersion
}

func (g benchGetter) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	info, ok := runtime.SerializerInfoForMediaType(g.codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return generic.RESTOptions{}, fmt.Errorf("no serializer for %s", gr)
	}
	gv := g.versions[gr.Resource]
	codec := g.codecs.CodecForVersions(info.Serializer, g.codecs.UniversalDeserializer(), gv, runtime.InternalGroupVersioner)
	return generic.RESTOptions{
		StorageConfig:           storagebackend.NewDefaultConfig("/registry/", codec).ForResource(gr),
		ResourcePrefix:          "/registry/" + gr.Resource,
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 1,
		Decorator: func(config *storagebackend.ConfigForResource, prefix string, _ func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object, _ storage.AttrFunc, _ storage.IndexerFuncs, _ *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
			return g.db.NewStore(store.Config{Codec: config.Codec, NewFunc: newFunc, NewListFunc: newListFunc, Prefix: prefix}), func() {}, nil
		},
	}, nil
}

// warnings records what a client would see as Warning headers.
type warnings struct {
	mu   sync.Mutex
	text []string
}

// AddWarning implements warning.Recorder.
func (w *warnings) AddWarning(_, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, text)
}

func (w *warnings) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := w.text
	w.text = nil
	return text
}

func (b *bench) ctx() context.Context {
	ctx := genericapirequest.WithNamespace(b.t.Context(), "default")
	return warning.WithWarningRecorder(ctx, &b.warnings)
}

// parse makes an object of resource from a manifest, with the defaults.
func (b *bench) parse(resource, manifest string) runtime.Object {
	b.t.Helper()
	obj := b.storages[resource].New()
	if err := yaml.UnmarshalStrict([]byte(manifest), obj); err != nil {
		b.t.Fatalf("%v in:\n%s", err, manifest)
	}
	b.scheme.Default(obj)
	return obj
}

// create creates obj; dry asks for a dry run.
func (b *bench) create(resource string, obj runtime.Object, dry bool) (runtime.Object, error) {
	return b.storages[resource].(rest.Creater).Create(b.ctx(), obj, nil, &metav1.CreateOptions{DryRun: dryRun(dry)})
}

func dryRun(dry bool) []string {
	if dry {
		return []string{metav1.DryRunAll}
	}
	return nil
}

// put replaces an object as a PUT would; path may name a subresource.
func (b *bench) put(path string, obj runtime.Object) (runtime.Object, error) {
	b.t.Helper()
	m, err := meta.Accessor(obj)
	if err != nil {
		b.t.Fatal(err)
	}
	b.scheme.Default(obj)
	out, _, err := b.storages[path].(rest.Updater).Update(b.ctx(), m.GetName(), rest.DefaultUpdatedObjectInfo(obj), nil, nil, false, &metav1.UpdateOptions{})
	return out, err
}

// patch changes an object as a merge patch would: change gets a copy of what is
// stored, without a resourceVersion.
func (b *bench) patch(resource, name string, change func(runtime.Object)) (runtime.Object, error) {
	b.t.Helper()
	obj := b.get(resource, name).DeepCopyObject()
	m, err := meta.Accessor(obj)
	if err != nil {
		b.t.Fatal(err)
	}
	m.SetResourceVersion("")
	change(obj)
	return b.put(resource, obj)
}

func (b *bench) get(resource, name string) runtime.Object {
	b.t.Helper()
	obj, err := b.storages[resource].(rest.Getter).Get(b.ctx(), name, &metav1.GetOptions{})
	if err != nil {
		b.t.Fatal(err)
	}
	return obj
}

func (b *bench) remove(resource, name string) {
	b.t.Helper()
	if _, _, err := b.storages[resource].(rest.GracefulDeleter).Delete(b.ctx(), name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}); err != nil {
		b.t.Fatal(err)
	}
}

// table returns the cells of an object's row.
func (b *bench) table(resource string, obj runtime.Object) map[string]any {
	b.t.Helper()
	table, err := b.storages[resource].(rest.TableConvertor).ConvertToTable(b.ctx(), obj, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	if len(table.Rows) != 1 || len(table.Rows[0].Cells) != len(table.ColumnDefinitions) {
		b.t.Fatalf("%d rows, %d cells for %d columns", len(table.Rows), len(table.Rows[0].Cells), len(table.ColumnDefinitions))
	}
	cells := map[string]any{}
	for i, c := range table.ColumnDefinitions {
		cells[c.Name] = table.Rows[0].Cells[i]
	}
	return cells
}

// serviceDeps are ranges like a lab's.
func serviceDeps(cidr string, size int) Deps {
	return Deps{ServiceCIDR: netip.MustParsePrefix(cidr), NodePortRange: utilnet.PortRange{Base: 30000, Size: size}}
}

// wantError checks that err's text contains all of want.
func wantError(tb testing.TB, err error, want ...string) {
	tb.Helper()
	if err == nil {
		tb.Errorf("no error, want %q", want)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			tb.Errorf("error %q\n  lacks %q", err, w)
		}
	}
}
