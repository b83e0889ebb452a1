// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/registry/customresourcedefinition"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/webhook"
	restclient "k8s.io/client-go/rest"
	"k8s.io/kube-openapi/pkg/handler3"
)

// Config is what the custom resources need of the API server.
type Config struct {
	// Definitions and Resources say where definitions and custom resources are kept.
	Definitions, Resources generic.RESTOptionsGetter
	// Stored says that the store holds a definition already.
	Stored bool
	// BuiltIn tells whether the API has a group of its own by that name.
	BuiltIn func(group string) bool

	// Admission is asked about each write of a custom resource, Authorizer whether who
	// updates an object that is not there may create it.
	Admission  admission.Interface
	Authorizer authorizer.UnconditionalAuthorizer

	// Client is how the controllers of the definitions reach this API server.
	Client *restclient.Config
	// Services and Dial find and reach the webhooks that convert between versions.
	Services webhook.ServiceResolver
	Dial     Dial

	// Groups, Aggregated and OpenAPI are the server's documents, which get the custom
	// resources besides the kinds that are built in.
	Groups     discovery.GroupManager
	Aggregated aggregated.ResourceManager
	OpenAPI    *handler3.OpenAPIService

	// NotFound answers what no definition is about.
	NotFound http.Handler

	// MinRequestTimeout is the least time after which a watch is ended,
	// MaxRequestBytes the largest body of a write.
	MinRequestTimeout time.Duration
	MaxRequestBytes   int64
}

// Server serves definitions and custom resources. It implements http.Handler for the
// paths below /apis/ that no other kind claims.
type Server struct {
	cfg         Config
	definitions *customresourcedefinition.REST
	storages    map[string]rest.Storage

	needOnce sync.Once
	needed   chan struct{} // closed when there is a definition
	synced   chan struct{} // closed when what is stored is served
	engine   atomic.Pointer[engine]
}

// New makes the storages of the definitions. Nothing runs before [Server.Run].
func New(cfg Config) (*Server, error) {
	definitions, err := customresourcedefinition.NewREST(Scheme(), cfg.Definitions)
	if err != nil {
		return nil, fmt.Errorf("build the store of %s: %w", Resource, err)
	}
	s := &Server{
		cfg: cfg, definitions: definitions, needed: make(chan struct{}), synced: make(chan struct{}),
		storages: map[string]rest.Storage{
			Resource:             definitions,
			Resource + "/status": customresourcedefinition.NewStatusREST(Scheme(), definitions),
		},
	}
	definitions.AfterCreate = func(runtime.Object, *metav1.CreateOptions) { s.need() }
	if cfg.Stored {
		s.need()
	}
	return s, nil
}

// Storages are the REST storages of the definitions, by path.
func (s *Server) Storages() map[string]rest.Storage { return s.storages }

// need has Run begin.
func (s *Server) need() { s.needOnce.Do(func() { close(s.needed) }) }

// Run waits for the first definition, then makes what the definitions say until ctx
// ends. The server must be listening.
func (s *Server) Run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.needed:
	}
	e, err := newEngine(ctx, s.cfg)
	if err != nil {
		return err
	}
	s.engine.Store(e)
	e.run(ctx, func() { close(s.synced) })
	return nil
}

// ReadinessCheck is an error while definitions that are stored are not served yet.
func (s *Server) ReadinessCheck() error {
	select {
	case <-s.needed:
	default:
		return nil
	}
	select {
	case <-s.synced:
		return nil
	default:
		return fmt.Errorf("the stored custom resource definitions are not served yet")
	}
}

// Resources are the custom resources that are served now.
func (s *Server) Resources() []schema.GroupResource {
	if e := s.engine.Load(); e != nil {
		return e.published.resources()
	}
	return nil
}

// GroupVersions are those of the custom resources that are served now.
func (s *Server) GroupVersions() []schema.GroupVersion {
	if e := s.engine.Load(); e != nil {
		return e.published.groupVersions()
	}
	return nil
}

// ServeHTTP implements http.Handler. A request that comes while the definitions are
// being read waits for them: it would otherwise be told that its kind does not exist.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case <-s.needed:
	default:
		s.cfg.NotFound.ServeHTTP(w, r)
		return
	}
	select {
	case <-s.synced:
		s.engine.Load().ServeHTTP(w, r)
	case <-r.Context().Done():
		http.Error(w, "the custom resource definitions are still being read; try again", http.StatusServiceUnavailable)
	}
}
