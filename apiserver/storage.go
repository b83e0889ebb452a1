// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"errors"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/apiserver/store"
)

// keyPrefix begins the keys of all objects, as in a stock cluster's etcd.
const keyPrefix = "/registry/"

// restOptions gives each kind its part of the database, under the stock watch
// cache. It implements generic.RESTOptionsGetter.
type restOptions struct {
	db     *store.DB
	codecs serializer.CodecFactory
	// versions are the group versions in which each resource is stored.
	versions map[schema.GroupResource]schema.GroupVersion
}

func newRESTOptions(db *store.DB, codecs serializer.CodecFactory, kinds []registry.Kind) restOptions {
	o := restOptions{db: db, codecs: codecs, versions: map[schema.GroupResource]schema.GroupVersion{}}
	for _, k := range kinds {
		o.versions[schema.GroupResource{Group: k.GroupVersion.Group, Resource: k.Resource}] = k.GroupVersion
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
	gv, ok := o.versions[gr]
	if !ok {
		// Asked for subresources' and views' groups, only to compare prefixes.
		return generic.RESTOptions{ResourcePrefix: storagePrefix(gr)}, nil
	}
	info, ok := runtime.SerializerInfoForMediaType(o.codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		return generic.RESTOptions{}, errors.New("the codecs know no protobuf")
	}
	codec := o.codecs.CodecForVersions(info.Serializer, o.codecs.UniversalDeserializer(), gv, runtime.InternalGroupVersioner)
	config := storagebackend.NewDefaultConfig(keyPrefix, codec).ForResource(gr)
	config.EncodeVersioner = gv
	return generic.RESTOptions{
		StorageConfig:           config,
		Decorator:               o.decorate,
		ResourcePrefix:          storagePrefix(gr),
		EnableGarbageCollection: true,
		DeleteCollectionWorkers: 4,
	}, nil
}

// decorate implements generic.StorageDecorator: our storage, the watch cache
// over it.
func (o restOptions) decorate(config *storagebackend.ConfigForResource, prefix string,
	keyFunc func(runtime.Object) (string, error), newFunc, newListFunc func() runtime.Object,
	attrs storage.AttrFunc, triggers storage.IndexerFuncs, indexers *cache.Indexers,
) (storage.Interface, factory.DestroyFunc, error) {
	raw := o.db.NewStore(store.Config{
		Codec: config.Codec, NewFunc: newFunc, NewListFunc: newListFunc, Prefix: prefix,
	})
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
