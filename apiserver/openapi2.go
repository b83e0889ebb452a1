// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/common/restfuladapter"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"github.com/kplab/kplab/apiserver/crd"
)

// serveOpenAPIV2 serves /openapi/v2, for clients that know no other: one document of
// everything. It is built when somebody asks for it, and again when the custom
// resources have changed since; a lab whose clients are all newer never pays for it.
func serveOpenAPIV2(s *genericapiserver.GenericAPIServer, scheme *runtime.Scheme, custom *crd.Server) {
	static := sync.OnceValues(func() (*spec.Swagger, error) {
		namer, err := definitionNamer(scheme)
		if err != nil {
			return nil, err
		}
		config := genericapiserver.DefaultOpenAPIConfig(openAPIDefinitions, namer)
		config.Info.Title, config.Info.Version = "Kubernetes", KubernetesVersion
		doc, err := builder.BuildOpenAPISpecFromRoutes(restfuladapter.AdaptWebServices(s.Handler.GoRestfulContainer.RegisteredWebServices()), config)
		if err != nil {
			return nil, fmt.Errorf("build the OpenAPI document: %w", err)
		}
		doc.Definitions = handler.PruneDefaults(doc.Definitions)
		return doc, nil
	})
	var mu sync.Mutex
	var doc *spec.Swagger
	of := ""
	service := handler.NewOpenAPIServiceLazy(cached.Func(func() (*spec.Swagger, string, error) {
		base, err := static()
		if err != nil {
			return nil, "", err
		}
		mu.Lock()
		defer mu.Unlock()
		form := KubernetesVersion + custom.Form()
		if doc == nil || form != of {
			if doc, err = custom.AddToSwagger(base); err != nil {
				return nil, "", err
			}
			of = form
		}
		return doc, form, nil
	}))
	service.RegisterOpenAPIVersionedService("/openapi/v2", s.Handler.NonGoRestfulMux)
}
