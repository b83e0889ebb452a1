// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"reflect"
	"strings"
	"sync"

	"github.com/emicklei/go-restful/v3"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/kube-openapi/pkg/builder3"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/util"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"sigs.k8s.io/structured-merge-diff/v6/typed"

	"github.com/kplab/kplab/apiserver/crd"
	generated "github.com/kplab/kplab/apiserver/openapi"
	"github.com/kplab/kplab/apiserver/registry"
)

// maxRequestBytes is the largest body of a write, as upstream's.
const maxRequestBytes = 3 << 20

// openAPIConfig describes the API for OpenAPI v3. The definitions of all types
// are made when they are first needed.
func openAPIConfig(scheme *runtime.Scheme) (*common.OpenAPIV3Config, error) {
	namer, err := definitionNamer(scheme)
	if err != nil {
		return nil, err
	}
	c := genericapiserver.DefaultOpenAPIV3Config(func(common.ReferenceCallback) map[string]common.OpenAPIDefinition { return nil }, namer)
	c.Definitions = nil
	c.GetDefinitions = openAPIDefinitions
	c.Info.Title = "Kubernetes"
	c.Info.Version = KubernetesVersion
	return c, nil
}

// definitionNamer knows what the types of the API are called in its documents.
func definitionNamer(scheme *runtime.Scheme) (*openapi.DefinitionNamer, error) {
	definitions, err := crd.Published()
	if err != nil {
		return nil, fmt.Errorf("build the scheme of %s: %w", crd.Resource, err)
	}
	return openapi.NewDefinitionNamer(published(scheme), definitions), nil
}

// openAPIDefinitions describes the types of the API.
func openAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	out := generated.GetOpenAPIDefinitions(ref)
	for name, d := range crd.OpenAPIDefinitions(ref) {
		if _, ok := out[name]; !ok {
			out[name] = d
		}
	}
	return out
}

// published returns a scheme with the published versions of scheme's types:
// that a type is also the internal one is nothing to tell a client.
func published(scheme *runtime.Scheme) *runtime.Scheme {
	out := runtime.NewScheme()
	for gvk, t := range scheme.AllKnownTypes() {
		if gvk.Version != runtime.APIVersionInternal {
			if obj, ok := reflect.New(t).Interface().(runtime.Object); ok {
				out.AddKnownTypeWithName(gvk, obj)
			}
		}
	}
	return out
}

// schemas tells server-side apply and the field manager how types merge. It
// implements managedfields.TypeConverter, and builds the real one at the first
// use.
type schemas struct {
	build func() (managedfields.TypeConverter, error)
}

func newSchemas(config *common.OpenAPIV3Config, scheme *runtime.Scheme, storages registry.Storages) (schemas, error) {
	var names []string
	for gv, paths := range storages {
		for p, storage := range paths {
			kind, err := genericapi.GetResourceKind(gv, storage, scheme)
			if err != nil {
				return schemas{}, fmt.Errorf("find the kind of %s in %s: %w", p, gv, err)
			}
			obj, err := scheme.New(kind)
			if err != nil {
				return schemas{}, fmt.Errorf("find the type of %s in %s: %w", p, gv, err)
			}
			names = append(names, util.GetCanonicalTypeName(obj))
		}
	}
	return schemas{sync.OnceValues(func() (managedfields.TypeConverter, error) {
		defs, err := builder3.BuildOpenAPIDefinitionsForResources(config, names...)
		if err != nil {
			return nil, fmt.Errorf("build the schemas of the API's types: %w", err)
		}
		return managedfields.NewTypeConverter(defs, false)
	})}, nil
}

// ObjectToTyped implements managedfields.TypeConverter.
func (s schemas) ObjectToTyped(obj runtime.Object, opts ...typed.ValidationOptions) (*typed.TypedValue, error) {
	c, err := s.build()
	if err != nil {
		return nil, err
	}
	return c.ObjectToTyped(obj, opts...)
}

// TypedToObject implements managedfields.TypeConverter.
func (s schemas) TypedToObject(v *typed.TypedValue) (runtime.Object, error) {
	c, err := s.build()
	if err != nil {
		return nil, err
	}
	return c.TypedToObject(v)
}

// serveOpenAPI serves /openapi/v3. The document of a group version is built
// when it is first asked for.
func serveOpenAPI(s *genericapiserver.GenericAPIServer, config *common.OpenAPIV3Config, service *handler3.OpenAPIService) error {
	if err := service.RegisterOpenAPIV3VersionedService("/openapi/v3", s.Handler.NonGoRestfulMux); err != nil {
		return fmt.Errorf("serve OpenAPI: %w", err)
	}
	for _, ws := range s.Handler.GoRestfulContainer.RegisteredWebServices() {
		routes := restfuladapter.AdaptWebServices([]*restful.WebService{ws})
		name := strings.TrimPrefix(ws.RootPath(), "/")
		service.UpdateGroupVersionLazy(name, cached.Once(cached.Func(func() (*spec3.OpenAPI, string, error) {
			doc, err := builder3.BuildOpenAPISpecFromRoutes(routes, config)
			if err != nil {
				return nil, "", fmt.Errorf("build the OpenAPI document of %s: %w", name, err)
			}
			if gv, ok := groupVersionOfPath(name); ok {
				keepOwnKinds(doc.Components.Schemas, gv.Group, gv.Version)
			}
			return doc, name, nil
		})))
	}
	return nil
}

// keepOwnKinds drops from the types that belong to every group version (such
// as DeleteOptions) the mention of all the others.
func keepOwnKinds(all map[string]*spec.Schema, group, version string) {
	const extension = "x-kubernetes-group-version-kind"
	for _, s := range all {
		kinds, ok := s.Extensions[extension].([]any)
		if !ok || len(kinds) < 3 {
			continue
		}
		var own []any
		for _, k := range kinds {
			m, ok := k.(map[string]any)
			if ok && ((m["group"] == group && m["version"] == version) || (m["group"] == "" && m["version"] == "v1")) {
				own = append(own, k)
			}
		}
		s.Extensions[extension] = own
	}
}
