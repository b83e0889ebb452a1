// SPDX-License-Identifier: Apache-2.0

package crd

import (
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apiserver"
	generated "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kube-openapi/pkg/common"
)

// Resource is the plural name of the definitions.
const Resource = "customresourcedefinitions"

// GroupVersion is the API that the definitions belong to.
func GroupVersion() schema.GroupVersion { return apiextensionsv1.SchemeGroupVersion }

// GroupResource is the resource of the definitions.
func GroupResource() schema.GroupResource { return apiextensionsv1.Resource(Resource) }

// Scheme knows the types of the definitions. It is not the scheme of the other kinds:
// the checks of the library are written for internal types, which the others do not
// have.
func Scheme() *runtime.Scheme { return apiextensions.Scheme }

// Codecs encode and decode the definitions for clients.
func Codecs() serializer.CodecFactory {
	return serializer.NewCodecFactory(apiextensions.Scheme,
		serializer.WithStreamingCollectionEncodingToJSON(), serializer.WithStreamingCollectionEncodingToProtobuf())
}

// StorageCodec encodes the definitions for the store: as JSON, like all that the
// scheme of the other kinds does not know.
func StorageCodec() runtime.Codec {
	return apiextensions.Codecs.LegacyCodec(apiextensionsv1.SchemeGroupVersion)
}

// Published is a scheme with the types that clients see.
func Published() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, apiextensionsv1.AddToScheme(s)
}

// OpenAPIDefinitions describes the types of the definitions.
func OpenAPIDefinitions(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	return generated.GetOpenAPIDefinitions(ref)
}
