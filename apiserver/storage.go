// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/apiserver/crd"
	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/apiserver/store"
)

// keyPrefix begins the keys of all objects, as in a stock cluster's etcd.
const keyPrefix = "/registry/"

// restOptions gives each kind its part of the database, under the stock watch
// cache when the kind wants one. It implements generic.RESTOptionsGetter.
type restOptions struct {
	db     *store.DB
	codecs serializer.CodecFactory
	kinds  map[schema.GroupResource]registry.Kind
}

func newRESTOptions(db *store.DB, codecs serializer.CodecFactory, kinds []registry.Kind) restOptions {
	o := restOptions{db: db, codecs: codecs, kinds: map[schema.GroupResource]registry.Kind{}}
	for _, k := range kinds {
		o.kinds[schema.GroupResource{Group: k.GroupVersion.Group, Resource: k.Resource}] = k
	}
	return o
}

// storagePrefix is the key under which the objects of a resource are kept.
func storagePrefix(gr schema.GroupResource) string {
	if gr.Group == "" {
		return keyPrefix + gr.Resource
	}
	return keyPrefix + gr.Group + "/" + gr.Resource
}

// GetRESTOptions implements generic.RESTOptionsGetter.
func (o restOptions) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	kind, ok := o.kinds[gr]
	if !ok {
		// Asked for subresources' and views' groups, only to compare prefixes.
		return generic.RESTOptions{ResourcePrefix: storagePrefix(gr)}, nil
	}
	info, ok := runtime.SerializerInfoForMediaType(o.codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		return generic.RESTOptions{}, errors.New("the codecs know no protobuf")
	}
	gv := kind.GroupVersion
	codec := o.codecs.CodecForVersions(info.Serializer, o.codecs.UniversalDeserializer(), gv, runtime.InternalGroupVersioner)
	config := storagebackend.NewDefaultConfig(keyPrefix, kindless{codec}).ForResource(gr)
	config.EncodeVersioner = gv
	decorator := o.plain
	if kind.WatchCache {
		decorator = o.cached
	}
	return generic.RESTOptions{
		StorageConfig:           config,
		Decorator:               decorator,
		ResourcePrefix:          storagePrefix(gr),
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 4,
	}, nil
}

// kindless forgets the kind and version that a stored object names. Elsewhere a
// conversion to the internal type does that; here the types are the same, and the
// items of typed lists would name their kind, which upstream's do not.
type kindless struct{ runtime.Codec }

// Decode implements runtime.Decoder.
func (c kindless) Decode(data []byte, gvk *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, kind, err := c.Codec.Decode(data, gvk, into)
	if obj != nil {
		obj.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	}
	return obj, kind, err
}

// jsonOptions gives each resource its part of the database, encoded by codec. The
// custom resources have it, and their definitions, which no scheme of ours knows.
type jsonOptions struct {
	restOptions
	codec runtime.Codec
}

// GetRESTOptions implements generic.RESTOptionsGetter. There is no watch cache: a
// bundle of definitions has many kinds, of which few are ever used.
func (o jsonOptions) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig:           storagebackend.NewDefaultConfig(keyPrefix, o.codec).ForResource(gr),
		Decorator:               o.endable,
		ResourcePrefix:          storagePrefix(gr),
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 4,
	}, nil
}

// endable implements generic.StorageDecorator: our storage, which can be given up.
func (o jsonOptions) endable(config *storagebackend.ConfigForResource, prefix string,
	_ func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object,
	_ storage.AttrFunc, _ storage.IndexerFuncs, _ *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	s, end := crd.Endable(o.store(config, prefix, newFunc, newListFunc))
	return s, end, nil
}

// plain implements generic.StorageDecorator: our storage, as it is.
func (o restOptions) plain(config *storagebackend.ConfigForResource, prefix string,
	_ func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object,
	_ storage.AttrFunc, _ storage.IndexerFuncs, _ *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	return o.store(config, prefix, newFunc, newListFunc), func() {}, nil
}

func (o restOptions) store(config *storagebackend.ConfigForResource, prefix string, newFunc, newListFunc func() runtime.Object) storage.Interface {
	return o.db.NewStore(store.Config{
		Codec: config.Codec, NewFunc: newFunc, NewListFunc: newListFunc, Prefix: prefix, GroupResource: config.GroupResource,
	})
}

// cached implements generic.StorageDecorator: our storage, the watch cache over
// it.
func (o restOptions) cached(config *storagebackend.ConfigForResource, prefix string,
	keyFunc func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object,
	attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	raw := o.store(config, prefix, newFunc, newListFunc)
	c, err := cacher.NewCacherFromConfig(cacher.Config{
		Storage:             raw,
		Versioner:           storage.APIObjectVersioner{},
		GroupResource:       config.GroupResource,
		EventsHistoryWindow: config.EventsHistoryWindow,
		ResourcePrefix:      prefix,
		KeyFunc:             keyFunc,
		NewFunc:             newFunc,
		NewListFunc:         newListFunc,
		GetAttrsFunc:        attrs,
		IndexerFuncs:        triggers,
		Indexers:            indexers,
		Codec:               config.Codec,
	})
	if err != nil {
		return nil, nil, err
	}
	delegator := cacher.NewCacheDelegator(c, raw)
	// Views of a kind share its storage, so each may be destroyed twice.
	var once sync.Once
	return delegator, func() {
		once.Do(func() {
			delegator.Stop()
			c.Stop()
		})
	}, nil
}

// withoutSnapshots has the watch caches keep no snapshots of the past. They serve exact
// lists and later pages, for which our store needs no cache, and cost memory for each
// change. The setting is one for the whole process; setting it again changes nothing.
func withoutSnapshots() error {
	if !utilfeature.DefaultFeatureGate.Enabled(features.ListFromCacheSnapshot) {
		return nil
	}
	if err := utilfeature.DefaultMutableFeatureGate.Set(string(features.ListFromCacheSnapshot) + "=false"); err != nil {
		return fmt.Errorf("turn off the snapshots of the watch caches: %w", err)
	}
	return nil
}
