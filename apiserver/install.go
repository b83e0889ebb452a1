// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/admission"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"

	"github.com/kplab/kplab/apiserver/registry"
)

// minRequestTimeout is the least time after which the server ends a watch that
// named none; the real one is random between it and its double, so that not
// all watches come back at once.
const minRequestTimeout = 30 * time.Minute

// install puts every storage into the server's handlers and into discovery.
//
// The generic server's own InstallAPIGroup would build the OpenAPI schemas of
// each group while it is called, which is most of what a start costs. This does
// the same work but for that: schemas are built when something asks for them.
func install(s *genericapiserver.GenericAPIServer, config *genericapiserver.Config, scheme *runtime.Scheme, codecs serializer.CodecFactory, kinds []registry.Kind, storages registry.Storages) error {
	schemas, err := newSchemas(config.OpenAPIV3Config, scheme, storages)
	if err != nil {
		return err
	}
	parameters := runtime.NewParameterCodec(scheme)
	for _, gv := range groupVersions(kinds) {
		if err := installGroupVersion(s, gv, storages[gv], scheme, codecs, parameters, schemas, config.AdmissionControl); err != nil {
			return fmt.Errorf("install the API %s: %w", gv, err)
		}
	}
	legacy := aggregated.WrapAggregatedDiscoveryToHandler(
		discovery.NewLegacyRootAPIHandler(config.DiscoveryAddresses, s.Serializer, genericapiserver.DefaultLegacyAPIPrefix),
		s.AggregatedLegacyDiscoveryGroupManager, s.AggregatedLegacyDiscoveryGroupManager)
	s.Handler.GoRestfulContainer.Add(legacy.GenerateWebService(genericapiserver.DefaultLegacyAPIPrefix, metav1.APIVersions{}))
	for _, group := range groups(kinds) {
		installGroup(s, group)
	}
	return nil
}

// installGroup puts a group into discovery.
func installGroup(s *genericapiserver.GenericAPIServer, group metav1.APIGroup) {
	s.DiscoveryGroupManager.AddGroup(group)
	s.Handler.GoRestfulContainer.Add(discovery.NewAPIGroupHandler(s.Serializer, group).WebService())
}

func installGroupVersion(s *genericapiserver.GenericAPIServer, gv schema.GroupVersion, storage map[string]rest.Storage, scheme *runtime.Scheme, codecs serializer.CodecFactory, parameters runtime.ParameterCodec, schemas managedfields.TypeConverter, admit admission.Interface) error {
	served := map[string][]string{}
	for resource, st := range storage {
		served[resource] = []string{gv.String()}
		if r, ok := st.(rest.StorageWithReadiness); ok {
			s.StorageReadinessHook.RegisterStorage(metav1.GroupVersionResource{Group: gv.Group, Version: gv.Version, Resource: resource}, r)
		}
	}
	root, discoveryManager := genericapiserver.APIGroupPrefix, s.AggregatedDiscoveryGroupManager
	if gv.Group == "" {
		root, discoveryManager = genericapiserver.DefaultLegacyAPIPrefix, s.AggregatedLegacyDiscoveryGroupManager
	}
	api := &genericapi.APIGroupVersion{
		GroupVersion:                gv,
		Root:                        root,
		Storage:                     storage,
		AllServedVersionsByResource: served,
		OptionsExternalVersion:      &schema.GroupVersion{Version: "v1"},
		ParameterCodec:              parameters,
		Serializer:                  codecs,
		Creater:                     scheme,
		Convertor:                   scheme,
		ConvertabilityChecker:       scheme,
		UnsafeConvertor:             runtime.UnsafeObjectConvertor(scheme),
		Defaulter:                   scheme,
		Typer:                       scheme,
		Namer:                       runtime.Namer(meta.NewAccessor()),
		TypeConverter:               schemas,
		EquivalentResourceRegistry:  s.EquivalentResourceRegistry,
		Admit:                       admit,
		Authorizer:                  s.Authorizer,
		MinRequestTimeout:           minRequestTimeout,
		MaxRequestBodyBytes:         maxRequestBytes,
	}
	resources, _, err := api.InstallREST(s.Handler.GoRestfulContainer)
	if err != nil {
		return err
	}
	discoveryManager.AddGroupVersion(gv.Group, apidiscoveryv2.APIVersionDiscovery{
		Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent, Version: gv.Version, Resources: resources,
	})
	return nil
}

// groupVersions returns the group versions of kinds in the order of the list.
func groupVersions(kinds []registry.Kind) []schema.GroupVersion {
	var out []schema.GroupVersion
	add := func(gv schema.GroupVersion) {
		if !slices.Contains(out, gv) {
			out = append(out, gv)
		}
	}
	for _, k := range kinds {
		add(k.GroupVersion)
		for _, v := range k.Views {
			add(v.GroupVersion)
		}
	}
	return out
}

// groups returns the discovery entries of the named API groups, sorted. The
// first version of a group in the list of kinds is the preferred one.
func groups(kinds []registry.Kind) []metav1.APIGroup {
	byName := map[string]*metav1.APIGroup{}
	for _, gv := range groupVersions(kinds) {
		if gv.Group == "" {
			continue
		}
		v := metav1.GroupVersionForDiscovery{GroupVersion: gv.String(), Version: gv.Version}
		g := byName[gv.Group]
		if g == nil {
			g = &metav1.APIGroup{Name: gv.Group, PreferredVersion: v}
			byName[gv.Group] = g
		}
		g.Versions = append(g.Versions, v)
	}
	var out []metav1.APIGroup
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		out = append(out, *byName[name])
	}
	return out
}

// groupVersionOfPath is the opposite of the root path of a web service:
// "/apis/apps/v1" gives apps/v1.
func groupVersionOfPath(p string) (schema.GroupVersion, bool) {
	parts := strings.Split(strings.Trim(path.Clean(p), "/"), "/")
	switch {
	case len(parts) == 2 && parts[0] == "api":
		return schema.GroupVersion{Version: parts[1]}, true
	case len(parts) == 3 && parts[0] == "apis":
		return schema.GroupVersion{Group: parts[1], Version: parts[2]}, true
	default:
		return schema.GroupVersion{}, false
	}
}
