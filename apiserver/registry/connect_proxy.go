// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	utilproxy "k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apiserver/pkg/registry/rest"
)

// proxyREST passes a request on to what an object stands for: its path, method and
// body, and upgrades. It is the subresource "proxy" of pods, services and nodes.
type proxyREST struct {
	options func() runtime.Object
	// locate says where [SCHEME:]NAME[:PORT] is and how to get there.
	locate func(ctx context.Context, id string) (*url.URL, *http.Transport, error)
}

var _ rest.Connecter = proxyREST{}

// New implements rest.Storage. The published schema bears the kind of what it
// returns: with the object's own, a client that looks for what the object's PATCH
// can do may find this one, which passes everything on.
func (r proxyREST) New() runtime.Object { return r.options() }
func (proxyREST) Destroy()              {}

// ConnectMethods implements rest.Connecter.
func (proxyREST) ConnectMethods() []string {
	return []string{"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
}

// NewConnectOptions implements rest.Connecter: what follows "proxy" in the path is
// the options' path.
func (r proxyREST) NewConnectOptions() (runtime.Object, bool, string) {
	return r.options(), true, "path"
}

// Connect implements rest.Connecter.
func (r proxyREST) Connect(ctx context.Context, id string, opts runtime.Object, responder rest.Responder) (http.Handler, error) {
	path := ""
	switch o := opts.(type) {
	case *corev1.PodProxyOptions:
		path = o.Path
	case *corev1.ServiceProxyOptions:
		path = o.Path
	case *corev1.NodeProxyOptions:
		path = o.Path
	default:
		return nil, apierrors.NewInternalError(fmt.Errorf("invalid options object: %#v", opts))
	}
	location, transport, err := r.locate(ctx, id)
	if err != nil {
		return nil, err
	}
	location.Path = utilnet.JoinPreservingTrailingSlash(location.Path, path)
	return utilproxy.NewUpgradeAwareHandler(location, transport, true, false, utilproxy.NewErrorResponder(responder)), nil
}

// split takes [SCHEME:]NAME[:PORT] apart.
func split(kind, id string) (scheme, name, port string, err error) {
	scheme, name, port, ok := utilnet.SplitSchemeNamePort(id)
	if !ok {
		return "", "", "", apierrors.NewBadRequest(fmt.Sprintf("invalid %s request %q", kind, id))
	}
	return scheme, name, port, nil
}

// podTransport reaches pods from where the API server is in the cluster. Whose
// certificate a pod shows is not checked, as upstream has it.
func podTransport(deps Deps) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			return deps.KubeletDial(ctx, "", addr)
		},
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		TLSHandshakeTimeout: 10 * time.Second,
		DisableKeepAlives:   true,
	}
}

// checkProxyable refuses addresses that are not a pod's or a node's.
func checkProxyable(address string) error {
	ip, err := netip.ParseAddr(address)
	if err != nil || ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() {
		return apierrors.NewBadRequest("address not allowed")
	}
	return nil
}

// podProxy is pods/proxy: without a port it is the first that the pod declares.
func podProxy(store *Store, deps Deps) rest.Storage {
	pods := kubeletProxy{store: store, deps: deps}
	return proxyREST{
		options: newObject[corev1.PodProxyOptions],
		locate: func(ctx context.Context, id string) (*url.URL, *http.Transport, error) {
			scheme, name, port, err := split("pod", id)
			if err != nil {
				return nil, nil, err
			}
			pod, err := pods.read(ctx, name)
			if err != nil {
				return nil, nil, err
			}
			for i := 0; port == "" && i < len(pod.Spec.Containers); i++ {
				if ports := pod.Spec.Containers[i].Ports; len(ports) > 0 {
					port = strconv.Itoa(int(ports[0].ContainerPort))
				}
			}
			if err := checkProxyable(pod.Status.PodIP); err != nil {
				return nil, nil, err
			}
			host := pod.Status.PodIP
			if port != "" {
				host = net.JoinHostPort(host, port)
			}
			return &url.URL{Scheme: scheme, Host: host}, podTransport(deps), nil
		},
	}
}

// serviceSubresources are services/proxy, which goes to a ready endpoint.
func serviceSubresources(store *Store, deps Deps) map[string]rest.Storage {
	return map[string]rest.Storage{"proxy": proxyREST{
		options: newObject[corev1.ServiceProxyOptions],
		locate: func(ctx context.Context, id string) (*url.URL, *http.Transport, error) {
			scheme, name, port, err := split("service", id)
			if err != nil {
				return nil, nil, err
			}
			obj, err := store.Get(ctx, name, &metav1.GetOptions{})
			if err != nil {
				return nil, nil, err
			}
			svc, ok := obj.(*corev1.Service)
			if !ok {
				return nil, nil, apierrors.NewInternalError(errNotA("service", obj))
			}
			if n, err := strconv.ParseInt(port, 10, 32); err == nil {
				// Slices know a port by its name.
				i := slices.IndexFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return int64(p.Port) == n })
				if i < 0 {
					return nil, nil, apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", n, name))
				}
				port = svc.Spec.Ports[i].Name
			}
			addr, err := readyEndpoint(ctx, deps, svc, port, id)
			if err != nil {
				return nil, nil, err
			}
			return &url.URL{Scheme: scheme, Host: addr}, podTransport(deps), nil
		},
	}}
}

// readyEndpoint picks one of the Service's ready endpoints for the port by that
// name.
func readyEndpoint(ctx context.Context, deps Deps, svc *corev1.Service, port, id string) (string, error) {
	slices, err := List[*discoveryv1.EndpointSliceList](ctx, deps.Lookup, "endpointslices", svc.Namespace,
		labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: svc.Name}))
	if err != nil {
		return "", err
	}
	var found []string
	for _, slice := range slices.Items {
		for _, p := range slice.Ports {
			if p.Port == nil || slice.AddressType == discoveryv1.AddressTypeFQDN || (p.Name == nil && port != "") || (p.Name != nil && *p.Name != port) {
				continue
			}
			for _, e := range slice.Endpoints {
				if len(e.Addresses) > 0 && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
					found = append(found, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*p.Port))))
				}
			}
		}
	}
	if len(found) == 0 {
		return "", apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", id))
	}
	addr := found[rand.IntN(len(found))] //nolint:gosec // any will do
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return "", apierrors.NewInternalError(err)
	}
	return addr, checkProxyable(host)
}

// nodeSubresources are nodes/proxy: the node's kubelet, or another port of the node.
func nodeSubresources(_ *Store, deps Deps) map[string]rest.Storage {
	kubelets := kubeletProxy{deps: deps}
	return map[string]rest.Storage{"proxy": proxyREST{
		options: newObject[corev1.NodeProxyOptions],
		locate: func(ctx context.Context, id string) (*url.URL, *http.Transport, error) {
			scheme, name, port, err := split("node", id)
			if err != nil {
				return nil, nil, err
			}
			location, transport, err := kubelets.kubelet(ctx, name)
			if err != nil {
				return nil, nil, err
			}
			if err := checkProxyable(location.Hostname()); err != nil {
				return nil, nil, err
			}
			if port != "" && port != location.Port() {
				return &url.URL{Scheme: scheme, Host: net.JoinHostPort(location.Hostname(), port)}, podTransport(deps), nil
			}
			return location, transport, nil
		},
	}}
}
