// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"fmt"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/kube-openapi/pkg/cached"
	"k8s.io/kube-openapi/pkg/handler"
	"k8s.io/kube-openapi/pkg/spec3"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// Form tells one state of the custom resources that are served from others; "" is for
// none.
func (s *Server) Form() string {
	e := s.engine.Load()
	if e == nil {
		return ""
	}
	return formOf(e.published.definitions())
}

// AddToSwagger returns the OpenAPI v2 document base with the custom resources added.
func (s *Server) AddToSwagger(base *spec.Swagger) (*spec.Swagger, error) {
	e := s.engine.Load()
	if e == nil {
		return base, nil
	}
	var parts []*spec.Swagger
	for _, crd := range e.published.definitions() {
		for _, v := range crd.Spec.Versions {
			if !v.Served {
				continue
			}
			part, err := builder.BuildOpenAPIV2(crd, v.Name, builder.Options{V2: true, IncludeSelectableFields: true})
			if err != nil {
				return nil, fmt.Errorf("describe %s in version %s: %w", crd.Name, v.Name, err)
			}
			part.Definitions = handler.PruneDefaults(part.Definitions)
			parts = append(parts, part)
		}
	}
	doc, err := builder.MergeSpecs(base, parts...)
	if err != nil {
		return nil, fmt.Errorf("join the OpenAPI documents: %w", err)
	}
	return doc, nil
}

// openAPIPath is where the document of a group version is, below /openapi/v3.
func openAPIPath(gv schema.GroupVersion) string { return "apis/" + gv.Group + "/" + gv.Version }

// documentOf is the OpenAPI document of a group version, made when it is asked for.
func documentOf(gv schema.GroupVersion, crds []*apiextensionsv1.CustomResourceDefinition, form string) cached.Value[*spec3.OpenAPI] {
	return cached.Once(cached.Func(func() (*spec3.OpenAPI, string, error) {
		var parts []*spec3.OpenAPI
		for _, crd := range crds {
			part, err := builder.BuildOpenAPIV3(crd, gv.Version, builder.Options{IncludeSelectableFields: true})
			if err != nil {
				return nil, "", fmt.Errorf("describe %s in %s: %w", crd.Name, gv, err)
			}
			parts = append(parts, part)
		}
		doc, err := builder.MergeSpecsV3(parts...)
		if err != nil {
			return nil, "", fmt.Errorf("join the OpenAPI documents of %s: %w", gv, err)
		}
		return doc, form, nil
	}))
}
