// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
)

// published keeps the documents that tell clients of custom resources: discovery,
// plain and aggregated, and OpenAPI. Each update looks at all definitions; there are
// few, and they seldom change.
type published struct {
	cfg    Config
	lister listers.CustomResourceDefinitionLister
	codecs serializer.CodecFactory

	mu       sync.Mutex
	groups   map[string]http.Handler
	versions map[schema.GroupVersion]versionDoc
	served   []*apiextensionsv1.CustomResourceDefinition
}

// versionDoc is what is published of one group version.
type versionDoc struct {
	handler http.Handler
	// form is another one when the schemas are others.
	form string
}

func newPublished(cfg Config, lister listers.CustomResourceDefinitionLister) *published {
	cfg.Aggregated = cfg.Aggregated.WithSource(aggregated.CRDSource)
	return &published{
		cfg: cfg, lister: lister, codecs: Codecs(),
		groups: map[string]http.Handler{}, versions: map[schema.GroupVersion]versionDoc{},
	}
}

// handler answers /apis/GROUP and /apis/GROUP/VERSION; nil for all else.
func (p *published) handler(path string) http.Handler {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	p.mu.Lock()
	defer p.mu.Unlock()
	switch len(parts) {
	case 2:
		return p.groups[parts[1]]
	case 3:
		return p.versions[schema.GroupVersion{Group: parts[1], Version: parts[2]}].handler
	}
	return nil
}

// definitions are those whose resources are served.
func (p *published) definitions() []*apiextensionsv1.CustomResourceDefinition {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.served)
}

func (p *published) resources() (out []schema.GroupResource) {
	for _, crd := range p.definitions() {
		out = append(out, schema.GroupResource{Group: crd.Spec.Group, Resource: crd.Status.AcceptedNames.Plural})
	}
	return out
}

func (p *published) groupVersions() []schema.GroupVersion {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.versions))
}

// update publishes what the definitions say now.
func (p *published) update() {
	// The lister of an informer's cache returns no error.
	all, _ := p.lister.List(labels.Everything())
	slices.SortFunc(all, func(a, b *apiextensionsv1.CustomResourceDefinition) int { return strings.Compare(a.Name, b.Name) })
	byVersion := map[schema.GroupVersion][]*apiextensionsv1.CustomResourceDefinition{}
	var served []*apiextensionsv1.CustomResourceDefinition
	for _, crd := range all {
		// The kinds of a group that is built in have taken all its paths, as upstream.
		if !apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Established) || p.cfg.BuiltIn(crd.Spec.Group) {
			continue
		}
		served = append(served, crd)
		for _, v := range crd.Spec.Versions {
			if v.Served {
				gv := schema.GroupVersion{Group: crd.Spec.Group, Version: v.Name}
				byVersion[gv] = append(byVersion[gv], crd)
			}
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.served = served
	p.updateVersions(byVersion)
	p.updateGroups(byVersion)
}

func (p *published) updateVersions(all map[schema.GroupVersion][]*apiextensionsv1.CustomResourceDefinition) {
	for gv, crds := range all {
		plain, agg := resourcesOf(gv, crds)
		v := versionDoc{
			form:    formOf(crds),
			handler: discovery.NewAPIVersionHandler(p.codecs, gv, discovery.APIResourceListerFunc(func() []metav1.APIResource { return plain })),
		}
		if p.versions[gv].form != v.form {
			p.cfg.OpenAPI.UpdateGroupVersionLazy(openAPIPath(gv), documentOf(gv, crds, v.form))
		}
		p.versions[gv] = v
		p.cfg.Aggregated.AddGroupVersion(gv.Group, apidiscoveryv2.APIVersionDiscovery{
			Freshness: apidiscoveryv2.DiscoveryFreshnessCurrent, Version: gv.Version, Resources: agg,
		})
		// Upstream's priorities: behind the groups that are built in.
		p.cfg.Aggregated.SetGroupVersionPriority(metav1.GroupVersion(gv), 1000, 100)
	}
	for gv := range p.versions {
		if _, ok := all[gv]; !ok {
			delete(p.versions, gv)
			p.cfg.OpenAPI.DeleteGroupVersion(openAPIPath(gv))
			p.cfg.Aggregated.RemoveGroupVersion(metav1.GroupVersion(gv))
		}
	}
}

func (p *published) updateGroups(all map[schema.GroupVersion][]*apiextensionsv1.CustomResourceDefinition) {
	groups := map[string]metav1.APIGroup{}
	for gv := range all {
		g := groups[gv.Group]
		g.Name = gv.Group
		g.Versions = append(g.Versions, metav1.GroupVersionForDiscovery{GroupVersion: gv.String(), Version: gv.Version})
		groups[gv.Group] = g
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		slices.SortFunc(g.Versions, func(a, b metav1.GroupVersionForDiscovery) int {
			return version.CompareKubeAwareVersionStrings(b.Version, a.Version)
		})
		g.PreferredVersion = g.Versions[0]
		p.groups[name] = discovery.NewAPIGroupHandler(p.codecs, g)
		p.cfg.Groups.AddGroup(g)
	}
	for name := range p.groups {
		if _, ok := groups[name]; !ok {
			delete(p.groups, name)
			p.cfg.Groups.RemoveGroup(name)
		}
	}
}

// formOf tells one state of some definitions from others.
func formOf(crds []*apiextensionsv1.CustomResourceDefinition) string {
	var b strings.Builder
	for _, crd := range crds {
		fmt.Fprintf(&b, "%s,%d,%s;", crd.UID, crd.Generation, crd.Status.AcceptedNames.Plural)
	}
	return b.String()
}

// resourcesOf lists the resources of a group version for both forms of discovery.
func resourcesOf(gv schema.GroupVersion, crds []*apiextensionsv1.CustomResourceDefinition) (plain []metav1.APIResource, agg []apidiscoveryv2.APIResourceDiscovery) {
	for _, crd := range crds {
		names := crd.Status.AcceptedNames
		scope, namespaced := apidiscoveryv2.ScopeCluster, crd.Spec.Scope == apiextensionsv1.NamespaceScoped
		if namespaced {
			scope = apidiscoveryv2.ScopeNamespace
		}
		verbs := metav1.Verbs{"delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"}
		if apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Terminating) {
			verbs = metav1.Verbs{"delete", "deletecollection", "get", "list", "watch"}
		}
		plain = append(plain, metav1.APIResource{
			Name: names.Plural, SingularName: names.Singular, Namespaced: namespaced, Kind: names.Kind, Verbs: verbs,
			ShortNames: names.ShortNames, Categories: names.Categories, StorageVersionHash: storageHash(crd),
		})
		kind := metav1.GroupVersionKind{Group: gv.Group, Version: gv.Version, Kind: names.Kind}
		d := apidiscoveryv2.APIResourceDiscovery{
			Resource: names.Plural, SingularResource: names.Singular, Scope: scope, ResponseKind: &kind, Verbs: verbs,
			ShortNames: names.ShortNames, Categories: names.Categories,
		}
		subVerbs := metav1.Verbs{"get", "patch", "update"}
		add := func(name string, kind metav1.GroupVersionKind, plainGroup, plainVersion string) {
			plain = append(plain, metav1.APIResource{
				Name: names.Plural + "/" + name, Namespaced: namespaced, Group: plainGroup, Version: plainVersion, Kind: kind.Kind, Verbs: subVerbs,
			})
			d.Subresources = append(d.Subresources, apidiscoveryv2.APISubresourceDiscovery{Subresource: name, ResponseKind: &kind, Verbs: subVerbs})
		}
		// A version that is not there has no subresources.
		if sub, err := apihelpers.GetSubresourcesForVersion(crd, gv.Version); err == nil && sub != nil {
			if sub.Status != nil {
				add("status", kind, "", "")
			}
			if sub.Scale != nil {
				scale := autoscalingv1.SchemeGroupVersion
				add("scale", metav1.GroupVersionKind{Group: scale.Group, Version: scale.Version, Kind: "Scale"}, scale.Group, scale.Version)
			}
		}
		agg = append(agg, d)
	}
	return plain, agg
}

// storageHash tells clients when the stored version of a kind changes.
func storageHash(crd *apiextensionsv1.CustomResourceDefinition) string {
	v, err := apihelpers.GetCRDStorageVersion(crd)
	if err != nil {
		return ""
	}
	return discovery.StorageVersionHash(crd.Spec.Group, v, crd.Spec.Names.Kind)
}
