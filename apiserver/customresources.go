// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/kube-openapi/pkg/handler3"

	"github.com/kplab/kplab/apiserver/crd"
	"github.com/kplab/kplab/apiserver/registry"
)

// installCustomResources puts the kind CustomResourceDefinition into the server, and
// what serves the resources that they define behind all that is built in.
func (s *Server) installCustomResources(config *genericapiserver.Config, getter restOptions, documents *handler3.OpenAPIService, lookup func(string) *registry.Store) error {
	builtIn := groups(s.kinds)
	cfg := crd.Config{
		Definitions: jsonOptions{getter, crd.StorageCodec()},
		Resources:   jsonOptions{getter, unstructured.UnstructuredJSONScheme},
		Stored:      s.newestRevision(crd.GroupVersion().Group, crd.Resource) > 0,
		BuiltIn: func(group string) bool {
			return slices.ContainsFunc(builtIn, func(g metav1.APIGroup) bool { return g.Name == group })
		},
		Admission:         config.AdmissionControl,
		Authorizer:        s.generic.Authorizer,
		Client:            s.ClientConfig("system:apiserver", "system:masters"),
		Services:          serviceAddresses{lookup},
		Dial:              func(ctx context.Context, _, addr string) (net.Conn, error) { return s.cfg.KubeletDial(ctx, "", addr) },
		Groups:            s.generic.DiscoveryGroupManager,
		Aggregated:        s.generic.AggregatedDiscoveryGroupManager,
		OpenAPI:           documents,
		NotFound:          http.NotFoundHandler(),
		MinRequestTimeout: minRequestTimeout,
		MaxRequestBytes:   maxRequestBytes,
	}
	var err error
	if s.custom, err = crd.New(cfg); err != nil {
		return err
	}
	storages := registry.Storages{crd.GroupVersion(): s.custom.Storages()}
	schemas, err := newSchemas(config.OpenAPIV3Config, crd.Scheme(), storages)
	if err != nil {
		return err
	}
	gv := crd.GroupVersion()
	if err := installGroupVersion(s.generic, gv, storages[gv], crd.Scheme(), crd.Codecs(), metav1.ParameterCodec, schemas, config.AdmissionControl); err != nil {
		return fmt.Errorf("install the API %s: %w", gv, err)
	}
	v := metav1.GroupVersionForDiscovery{GroupVersion: gv.String(), Version: gv.Version}
	installGroup(s.generic, metav1.APIGroup{Name: gv.Group, Versions: []metav1.GroupVersionForDiscovery{v}, PreferredVersion: v})
	s.generic.Handler.NonGoRestfulMux.HandlePrefix(genericapiserver.APIGroupPrefix+"/", s.custom)
	return s.generic.AddPostStartHook("kplab-custom-resources", func(genericapiserver.PostStartHookContext) error {
		s.background.Go(func() {
			// An error leaves the custom resources unserved, which their clients are told.
			if err := s.custom.Run(s.stop.ctx); err != nil {
				s.cfg.Log.Error("custom resources are not served", "err", err)
			}
		})
		return nil
	})
}

// groupVersions are those that the server serves now.
func (s *Server) groupVersions() []schema.GroupVersion {
	return append(append(groupVersions(s.kinds), crd.GroupVersion()), s.custom.GroupVersions()...)
}

// serviceAddresses finds Services for webhooks. It implements webhook.ServiceResolver.
type serviceAddresses struct {
	lookup func(string) *registry.Store
}

// ResolveEndpoint implements webhook.ServiceResolver: the cluster IP, so that the
// request takes the way of any other to the Service.
func (a serviceAddresses) ResolveEndpoint(namespace, name string, port int32) (*url.URL, error) {
	svc, err := registry.Read[*corev1.Service](context.Background(), a.lookup, "services", namespace, name)
	if err != nil {
		return nil, err
	}
	if svc.Spec.ClusterIP == "" || svc.Spec.ClusterIP == corev1.ClusterIPNone {
		return nil, errors.New("service " + namespace + "/" + name + " has no cluster IP")
	}
	return &url.URL{Scheme: "https", Host: net.JoinHostPort(svc.Spec.ClusterIP, strconv.Itoa(int(port)))}, nil
}
