// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/util/compatibility"
	basecompatibility "k8s.io/component-base/compatibility"
)

// KubernetesVersion is the version of the API that this server speaks: the one
// of the k8s.io modules it is built from.
const KubernetesVersion = "v1.37.2"

// maxStreams is how many requests and watches one HTTP/2 connection carries.
// All informers of a process share one.
const maxStreams = 1000

// certificateSubjects returns the names and addresses of the serving
// certificate.
func certificateSubjects(cfg Config) ([]string, []net.IP) {
	names := append([]string{
		"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
	}, cfg.ServerNames...)
	ips := []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}
	for _, cidr := range []netip.Prefix{cfg.ServiceCIDR, cfg.SecondaryServiceCIDR} {
		if cidr.IsValid() {
			ips = append(ips, cidr.Masked().Addr().Next().AsSlice())
		}
	}
	for _, ip := range cfg.ServerIPs {
		ips = append(ips, ip.AsSlice())
	}
	for _, l := range cfg.Listeners {
		if a, ok := l.Addr().(*net.TCPAddr); ok && !a.IP.IsUnspecified() && !a.IP.IsLoopback() {
			ips = append(ips, a.IP)
		}
	}
	return names, uniqueIPs(ips)
}

func uniqueIPs(ips []net.IP) []net.IP {
	seen := sets.New[string]()
	var out []net.IP
	for _, ip := range ips {
		if !seen.Has(ip.String()) {
			seen.Insert(ip.String())
			out = append(out, ip)
		}
	}
	return out
}

// addUnversioned registers the types that belong to no API group.
func addUnversioned(scheme *runtime.Scheme) {
	unversioned := schema.GroupVersion{Version: "v1"}
	metav1.AddToGroupVersion(scheme, unversioned)
	scheme.AddUnversionedTypes(unversioned,
		&metav1.Status{}, &metav1.APIVersions{}, &metav1.APIGroupList{}, &metav1.APIGroup{}, &metav1.APIResourceList{})
}

func (s *Server) genericConfig(scheme *runtime.Scheme, codecs serializer.CodecFactory, getter generic.RESTOptionsGetter, auth *auth) (*genericapiserver.Config, error) {
	c := genericapiserver.NewConfig(codecs)
	c.EffectiveVersion = s.version()
	c.RESTOptionsGetter = getter

	serving, err := dynamiccertificates.NewStaticCertKeyContent("serving", s.pki.server.cert, s.pki.server.key)
	if err != nil {
		return nil, fmt.Errorf("load the serving certificate: %w", err)
	}
	c.SecureServing = &genericapiserver.SecureServingInfo{
		Listener:                     s.listener,
		Cert:                         serving,
		ClientCA:                     auth.clientCA,
		HTTP2MaxStreamsPerConnection: maxStreams,
	}
	c.ExternalAddress = s.listener.Addr().String()
	c.LoopbackClientConfig = s.ClientConfig("system:apiserver", "system:masters")

	c.Authentication.Authenticator = auth.authenticator
	c.Authentication.APIAudiences = authenticator.Audiences{issuer}
	c.Authorization.Authorizer = auth.authorizer
	c.AdmissionControl = s.newAdmission(auth)

	if c.OpenAPIV3Config, err = openAPIConfig(scheme); err != nil {
		return nil, err
	}
	// Served by install, which builds it at the first request.
	c.SkipOpenAPIInstallation = true

	c.EnableProfiling = false
	// The hook only keeps a metric up to date, every second.
	c.DisabledPostStartHooks.Insert("max-in-flight-filter")
	// Only priority and fairness asks it.
	c.StorageObjectCountTracker = nil
	c.EnableIndex = true
	c.LongRunningFunc = filters.BasicLongRunningRequestCheck(
		sets.NewString("watch", "proxy"),
		sets.NewString("attach", "exec", "proxy", "log", "portforward"),
	)
	c.BuildHandlerChainFunc = func(handler http.Handler, c *genericapiserver.Config) http.Handler {
		return s.stop.endLongRunning(genericapiserver.DefaultBuildHandlerChain(handler, c), c)
	}
	return c, nil
}

// endLongRunning ends watches and streams when the server stops; without it
// each would hold up the stop until a timeout.
func (s *stopSignal) endLongRunning(next http.Handler, c *genericapiserver.Config) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, err := c.RequestInfoResolver.NewRequestInfo(r)
		if err != nil || !c.LongRunningFunc(r, info) {
			next.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(request.WithRequestInfo(r.Context(), info))
		defer cancel()
		defer context.AfterFunc(s.ctx, cancel)()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// version is what /version tells.
func (s *Server) version() basecompatibility.EffectiveVersion {
	v := compatibility.DefaultBuildEffectiveVersion()
	return labVersion{v, s.cfg.Version}
}

// labVersion is the Kubernetes version with kplab's as build metadata, which
// clients ignore when they compare versions.
type labVersion struct {
	basecompatibility.EffectiveVersion
	kplab string
}

// Info implements basecompatibility.EffectiveVersion.
func (v labVersion) Info() *version.Info {
	info := *v.EffectiveVersion.Info()
	info.GitVersion = KubernetesVersion
	parts := strings.SplitN(strings.TrimPrefix(KubernetesVersion, "v"), ".", 3)
	info.Major, info.Minor = parts[0], parts[1]
	suffix := "kplab"
	if v.kplab != "" {
		suffix += "." + strings.TrimPrefix(v.kplab, "v")
	}
	info.GitVersion += "+" + suffix
	info.GitTreeState = "clean"
	return &info
}
