// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	restregistry "k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/rest"
	"k8s.io/kube-openapi/pkg/handler3"

	"github.com/kplab/kplab/apiserver/crd"
	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/apiserver/store"
)

// flushTime is enough for an answer to leave after its handler has returned.
const flushTime = 10 * time.Millisecond

// DatabaseFile is the name of the database in Config.StateDir.
const DatabaseFile = "state.db"

// Config says what a server serves and where. All fields without a note that
// they may be empty are required.
type Config struct {
	// StateDir holds the database and the directory pki. It must exist.
	StateDir string
	// Listeners are where the server answers, all alike. The first must be
	// reachable from this process: ClientConfig uses its address. The server
	// closes them.
	Listeners []net.Listener
	// ServiceCIDR is the range of cluster IPs. Its first address belongs to the
	// Service kubernetes and is in the serving certificate.
	ServiceCIDR netip.Prefix
	// SecondaryServiceCIDR is a range of the other IP family, which makes the
	// cluster dual-stack. It may be empty.
	SecondaryServiceCIDR netip.Prefix
	// NodePortRange is the range of node ports; empty means 30000-32767.
	NodePortRange utilnet.PortRange
	// ServerNames and ServerIPs are further names and addresses for the serving
	// certificate, besides those that every cluster has (localhost, 127.0.0.1,
	// kubernetes.default.svc and so on). Both may be empty.
	ServerNames []string
	ServerIPs   []netip.Addr
	// DenyServiceExternalIPs refuses new spec.externalIPs of Services, as
	// upstream's admission plugin of that name does where it is turned on: who
	// may set them can draw anybody's traffic to a Service.
	DenyServiceExternalIPs bool
	// NoFsync lets the database lose its last writes in a power failure.
	NoFsync bool
	// Version is kplab's own version, shown after the Kubernetes version. It
	// may be empty.
	Version string
	// KubeletDial connects to addr (host:port of a node's kubelet) from a place
	// where the node's address is reachable. Nil dials from this process's
	// network namespace.
	KubeletDial func(ctx context.Context, nodeName, addr string) (net.Conn, error)
	// Components are the parts of the control plane that are no part of this
	// server, for kubectl get componentstatuses: each tells what is wrong with
	// it. It may be nil.
	Components map[string]func(context.Context) error
	// Audit says which requests are recorded, and where; the zero value records none.
	Audit Audit
	// Log is where the server reports; nil discards.
	Log *slog.Logger

	// noWatchCache has every kind do without the watch cache: tests prove that
	// clients cannot tell.
	noWatchCache bool
}

// Server is the API of one lab.
type Server struct {
	cfg      Config
	db       *store.DB
	pki      *pki
	local    *localTokens
	listener *manyListener
	generic  *genericapiserver.GenericAPIServer
	kinds    []registry.Kind
	storages registry.Storages
	custom   *crd.Server
	audit    *os.File // nil when requests are not recorded
	stop     *stopSignal
	// background is what hooks have started; it ends with stop.
	background sync.WaitGroup
	ready      chan struct{}
}

// New opens the state in cfg.StateDir and builds a server. It does not serve
// yet: call Run, or Close when it is not wanted after all. An error of the
// database is the store's (store.ErrCorrupt, store.ErrLocked).
func New(cfg Config) (s *Server, err error) {
	if len(cfg.Listeners) == 0 {
		return nil, errors.New("an API server needs at least one listener")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.NodePortRange.Size == 0 {
		cfg.NodePortRange = utilnet.PortRange{Base: 30000, Size: 2768}
	}
	if cfg.KubeletDial == nil {
		cfg.KubeletDial = func(ctx context.Context, _, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", addr)
		}
	}
	if err := registry.CheckServiceRanges(serviceDeps(cfg)); err != nil {
		return nil, err
	}
	if err := withoutSnapshots(); err != nil {
		return nil, err
	}
	kinds := registry.Kinds()
	for i := range kinds {
		kinds[i].WatchCache = kinds[i].WatchCache && !cfg.noWatchCache
	}
	s = &Server{cfg: cfg, local: newLocalTokens(), kinds: kinds, stop: newStopSignal(), ready: make(chan struct{})}
	names, ips := certificateSubjects(cfg)
	if s.pki, err = openPKI(filepath.Join(cfg.StateDir, "pki"), names, ips); err != nil {
		return nil, err
	}
	if s.db, err = store.Open(filepath.Join(cfg.StateDir, DatabaseFile), store.Options{NoFsync: cfg.NoFsync}); err != nil {
		return nil, fmt.Errorf("open the lab's state: %w", err)
	}
	if err := s.build(); err != nil {
		return nil, errors.Join(err, s.closeAudit(), s.db.Close())
	}
	return s, nil
}

// serviceDeps is the part of the kinds' dependencies that says from where Services
// get their addresses and ports.
func serviceDeps(cfg Config) registry.Deps {
	return registry.Deps{
		ServiceCIDR: cfg.ServiceCIDR, SecondaryServiceCIDR: cfg.SecondaryServiceCIDR, NodePortRange: cfg.NodePortRange,
	}
}

// build makes the generic server and installs the kinds.
func (s *Server) build() error {
	scheme, err := registry.NewScheme(s.kinds)
	if err != nil {
		return fmt.Errorf("build the API's scheme: %w", err)
	}
	addUnversioned(scheme)
	codecs := serializer.NewCodecFactory(scheme, serializer.WithStreamingCollectionEncodingToJSON(), serializer.WithStreamingCollectionEncodingToProtobuf())
	getter := newRESTOptions(s.db, codecs, s.kinds)
	signer, err := newTokens(s.pki.tokens)
	if err != nil {
		return err
	}
	kubeletTLS, err := s.kubeletTLS()
	if err != nil {
		return err
	}
	clientCA, err := dynamiccertificates.NewStaticCAContent("client-ca", s.pki.clients.pem)
	if err != nil {
		return fmt.Errorf("load the client authority: %w", err)
	}
	auth := s.newAuth(clientCA, signer)
	deps := serviceDeps(s.cfg)
	deps.KubeletDial, deps.KubeletTLS, deps.Tokens = s.cfg.KubeletDial, kubeletTLS, signer
	deps.Authorizer, deps.Authenticator, deps.Signer = auth.authorizer, auth.authenticator, s.pki.signClient
	deps.ClusterRoleWritten, deps.GroupVersions = auth.clusterRoleWritten, s.groupVersions
	deps.Components = map[string]func(context.Context) error{"etcd-0": func(ctx context.Context) error {
		// A kind without a watch cache: the database itself has to answer.
		_, err := registry.List[*corev1.LimitRangeList](ctx, auth.lookup, "limitranges", metav1.NamespaceAll, labels.Everything())
		return err
	}}
	maps.Copy(deps.Components, s.cfg.Components)
	storages, lookup, err := registry.Build(s.kinds, scheme, getter, deps)
	if err != nil {
		return err
	}
	signer.lookup, auth.lookup = lookup, lookup
	s.storages = storages
	if err := s.seed(context.Background(), auth); err != nil {
		return fmt.Errorf("store what every cluster has: %w", err)
	}
	s.listener = newManyListener(s.cfg.Listeners)
	config, err := s.genericConfig(scheme, codecs, getter, auth)
	if err != nil {
		return errors.Join(err, s.listener.Close())
	}
	if s.audit, err = s.cfg.Audit.open(config); err != nil {
		return errors.Join(err, s.listener.Close())
	}
	if s.generic, err = config.Complete(nil).New("kplab", genericapiserver.NewEmptyDelegate()); err != nil {
		return errors.Join(fmt.Errorf("build the generic API server: %w", err), s.listener.Close())
	}
	// Long-running requests end when the server stops, so nothing that is worth
	// waiting for is left after this.
	s.generic.ShutdownTimeout = 200 * time.Millisecond
	s.generic.RegisterDestroyFunc(func() {
		for _, paths := range storages {
			for _, storage := range paths {
				storage.Destroy()
			}
		}
	})
	documents := handler3.NewOpenAPIService()
	if err := install(s.generic, config, scheme, codecs, s.kinds, storages); err != nil {
		return errors.Join(err, s.listener.Close())
	}
	if err := s.installCustomResources(config, getter, documents, lookup); err != nil {
		return errors.Join(err, s.listener.Close())
	}
	if err := serveOpenAPI(s.generic, config.OpenAPIV3Config, documents); err != nil {
		return errors.Join(err, s.listener.Close())
	}
	serveOpenAPIV2(s.generic, scheme, s.custom)
	if err := s.generic.AddPostStartHook("kplab-services", func(c genericapiserver.PostStartHookContext) error {
		// An error here would end the process; the first write tries again.
		if err := registry.ReportServiceProblems(c, storages, s.cfg.Log); err != nil && c.Err() == nil {
			s.cfg.Log.Warn("the Services could not be checked", "err", err)
		}
		return nil
	}); err != nil {
		return errors.Join(err, s.listener.Close())
	}
	return s.generic.AddPostStartHook("kplab-ready", func(genericapiserver.PostStartHookContext) error {
		close(s.ready)
		return nil
	})
}

// seed stores what every cluster has and is missing.
func (s *Server) seed(ctx context.Context, auth *auth) error {
	var seeds registry.Seeds
	err := auth.authorizer.Bootstrap(ctx, &seeds)
	if s.newestRevision("networking.k8s.io", "servicecidrs") == 0 && s.cfg.ServiceCIDR.IsValid() {
		seeds.Add(ctx, auth.lookup("servicecidrs"), registry.DefaultServiceCIDR(s.cfg.ServiceCIDR, s.cfg.SecondaryServiceCIDR))
	}
	for _, class := range registry.SystemPriorityClasses() {
		seeds.Add(ctx, auth.lookup("priorityclasses"), class)
	}
	return errors.Join(err, seeds.Wait())
}

// Run serves until ctx ends, then stops: requests in flight are answered, watches
// and streams are ended, the database is closed. It may be called once.
func (s *Server) Run(ctx context.Context) error {
	cut := make(chan struct{})
	defer context.AfterFunc(ctx, func() {
		defer close(cut)
		s.stop.stop()
		s.cutConnections()
	})()
	err := s.generic.PrepareRun().RunWithContext(ctx)
	if ctx.Err() != nil {
		<-cut
	}
	s.listener.closeConns()
	s.background.Wait()
	return errors.Join(err, s.close())
}

// cutConnections closes the connections that are left when all requests have
// been answered. HTTP/2 connections would otherwise take a second to say
// goodbye.
func (s *Server) cutConnections() {
	s.generic.NonLongRunningRequestWaitGroup.Wait()
	// The wait is over when the handlers have returned; the last bytes of their
	// answers leave a moment later.
	<-time.After(flushTime)
	s.listener.closeConns()
}

// Close releases what New opened, for a server that is never run.
func (s *Server) Close() error {
	s.stop.stop()
	s.generic.Destroy()
	return s.close()
}

func (s *Server) close() error {
	err := s.listener.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, s.closeAudit(), s.db.Close())
}

func (s *Server) closeAudit() error {
	if s.audit == nil {
		return nil
	}
	return s.audit.Close()
}

// Ready returns when the server answers, with every kind's watch cache filled.
// Run must have been called, or must be called soon.
func (s *Server) Ready(ctx context.Context) error {
	select {
	case <-s.ready:
	case <-ctx.Done():
		return fmt.Errorf("wait for the API server to start: %w", context.Cause(ctx))
	}
	client, err := rest.UnversionedRESTClientFor(rest.CopyConfig(s.unversionedConfig()))
	if err != nil {
		return fmt.Errorf("make a client for the API server: %w", err)
	}
	for {
		body, err := client.Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			err = s.cachesReady()
		}
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the API server to be ready: %w (last answer: %w: %s)", context.Cause(ctx), err, body)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// cachesReady is nil when every kind's watch cache has read the store.
func (s *Server) cachesReady() error {
	for _, paths := range s.storages {
		for path, storage := range paths {
			if r, ok := storage.(restregistry.StorageWithReadiness); ok {
				if err := r.ReadinessCheck(); err != nil {
					return fmt.Errorf("watch cache of %s: %w", path, err)
				}
			}
		}
	}
	return s.custom.ReadinessCheck()
}

// NewestRevisions returns the newest revision of each kind by its resource
// name, deletions included, in which something of it was written; 0 for none.
// Custom resources are called by their full names ("crontabs.example.com"). A client
// that has seen these has seen everything.
func (s *Server) NewestRevisions() map[string]uint64 {
	out := make(map[string]uint64, len(s.kinds))
	for _, k := range s.kinds {
		if k.Virtual == nil {
			out[k.Resource] = s.newestRevision(k.GroupVersion.Group, k.Resource)
		}
	}
	out[crd.Resource] = s.newestRevision(crd.GroupVersion().Group, crd.Resource)
	for _, gr := range s.custom.Resources() {
		out[gr.String()] = s.newestRevision(gr.Group, gr.Resource)
	}
	return out
}

func (s *Server) newestRevision(group, resource string) uint64 {
	return s.db.NewestRevision(storagePrefix(schema.GroupResource{Group: group, Resource: resource}) + "/")
}

// Revision is the newest revision of the whole store.
func (s *Server) Revision() uint64 { return s.db.Revision() }

// stopSignal ends the contexts of long-running requests.
type stopSignal struct {
	ctx  context.Context
	stop context.CancelFunc
}

func newStopSignal() *stopSignal {
	ctx, cancel := context.WithCancel(context.Background())
	return &stopSignal{ctx, cancel}
}
