// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilproxy "k8s.io/apimachinery/pkg/util/proxy"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrest "k8s.io/apiserver/pkg/registry/generic/rest"
	"k8s.io/apiserver/pkg/registry/rest"
)

// kubeletProxy finds the kubelet of a pod and what to ask it. It is embedded in
// the subresources that a kubelet serves.
type kubeletProxy struct {
	store *Store
	deps  Deps
}

func (kubeletProxy) New() runtime.Object { return &corev1.Pod{} }
func (kubeletProxy) Destroy()            {}

// read reads the pod of a request.
func (k kubeletProxy) read(ctx context.Context, name string) (*corev1.Pod, error) {
	obj, err := k.store.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, apierrors.NewInternalError(errNotA("pod", obj))
	}
	return pod, nil
}

// pod reads the pod and checks the container's name; an empty one is the only
// container.
func (k kubeletProxy) pod(ctx context.Context, name, container string) (*corev1.Pod, string, error) {
	pod, err := k.read(ctx, name)
	if err != nil {
		return nil, "", err
	}
	if container != "" {
		for _, n := range containerNames(pod) {
			if n == container {
				return pod, container, nil
			}
		}
		return nil, "", apierrors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", container, pod.Name))
	}
	switch {
	case len(pod.Spec.Containers) == 1:
		return pod, pod.Spec.Containers[0].Name, nil
	case len(pod.Spec.Containers) == 0:
		return nil, "", apierrors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s", pod.Name))
	}
	names := make([]string, 0, len(pod.Spec.Containers))
	for _, c := range pod.Spec.Containers {
		names = append(names, c.Name)
	}
	message := fmt.Sprintf("a container name must be specified for pod %s, choose one of: [%s]", pod.Name, strings.Join(names, " "))
	if len(pod.Spec.InitContainers) > 0 {
		inits := make([]string, 0, len(pod.Spec.InitContainers))
		for _, c := range pod.Spec.InitContainers {
			inits = append(inits, c.Name)
		}
		message += fmt.Sprintf(" or one of the init containers: [%s]", strings.Join(inits, " "))
	}
	return nil, "", apierrors.NewBadRequest(message)
}

func containerNames(pod *corev1.Pod) []string {
	var out []string
	for _, c := range pod.Spec.InitContainers {
		out = append(out, c.Name)
	}
	for _, c := range pod.Spec.Containers {
		out = append(out, c.Name)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		out = append(out, c.Name)
	}
	return out
}

// locate returns the URL of path at the pod's kubelet and how to get there.
func (k kubeletProxy) locate(ctx context.Context, pod *corev1.Pod, path string, query url.Values) (*url.URL, *http.Transport, error) {
	if pod.Spec.NodeName == "" {
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("pod %s does not have a host assigned", pod.Name))
	}
	u, transport, err := k.kubelet(ctx, pod.Spec.NodeName)
	if err != nil {
		return nil, nil, err
	}
	u.Path, u.RawQuery = path, query.Encode()
	return u, transport, nil
}

// kubelet returns where a node's kubelet is and how to get there.
func (k kubeletProxy) kubelet(ctx context.Context, node string) (*url.URL, *http.Transport, error) {
	n, err := Read[*corev1.Node](ctx, k.deps.Lookup, "nodes", metav1.NamespaceNone, node)
	if err != nil {
		return nil, nil, err
	}
	host := ""
	for _, want := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName} {
		for _, a := range n.Status.Addresses {
			if a.Type == want && host == "" {
				host = a.Address
			}
		}
	}
	port := n.Status.DaemonEndpoints.KubeletEndpoint.Port
	if host == "" || port == 0 {
		return nil, nil, apierrors.NewServiceUnavailable(fmt.Sprintf("node %s has not told the address of its kubelet yet", node))
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			return k.deps.KubeletDial(ctx, node, addr)
		},
		TLSClientConfig:     k.deps.KubeletTLS.Clone(),
		TLSHandshakeTimeout: 10 * time.Second,
		// One request each: streams do not share, and logs are rare.
		DisableKeepAlives: true,
	}
	return &url.URL{Scheme: "https", Host: net.JoinHostPort(host, strconv.Itoa(int(port)))}, transport, nil
}

// stream returns the handler that joins the caller's connection with one to the
// kubelet, which speaks whatever protocol the caller does: SPDY, or WebSockets up
// to version 5 and with SPDY inside.
func stream(location *url.URL, transport *http.Transport, responder rest.Responder) *utilproxy.UpgradeAwareHandler {
	return utilproxy.NewUpgradeAwareHandler(location, transport, false, true, utilproxy.NewErrorResponder(responder))
}

// upgradeMethods: SPDY clients post, WebSocket clients get.
func upgradeMethods() []string { return []string{"GET", "POST"} }

// streamQuery is the kubelet's form of what an exec or attach wants.
func streamQuery(stdin, stdout, stderr, tty bool, command []string) url.Values {
	q := url.Values{}
	for name, set := range map[string]bool{"input": stdin, "output": stdout, "error": stderr, "tty": tty} {
		if set {
			q.Set(name, "1")
		}
	}
	for _, c := range command {
		q.Add("command", c)
	}
	return q
}

// checkStreams is upstream's rule that a terminal has no separate stderr.
func checkStreams(stdin, stdout, stderr, tty bool) error {
	if tty && stderr {
		return apierrors.NewBadRequest("tty and stderr cannot both be true")
	}
	if !stdin && !stdout && !stderr {
		return apierrors.NewBadRequest("you must specify at least 1 of stdin, stdout, stderr")
	}
	return nil
}

// connect joins the caller with a container, for exec and attach.
func (k kubeletProxy) connect(ctx context.Context, name, verb string, o corev1.PodExecOptions, responder rest.Responder) (http.Handler, error) {
	stderr := o.Stderr && !o.TTY
	if err := checkStreams(o.Stdin, o.Stdout, stderr, o.TTY); err != nil {
		return nil, err
	}
	pod, container, err := k.pod(ctx, name, o.Container)
	if err != nil {
		return nil, err
	}
	location, transport, err := k.locate(ctx, pod, fmt.Sprintf("/%s/%s/%s/%s", verb, pod.Namespace, pod.Name, container),
		streamQuery(o.Stdin, o.Stdout, stderr, o.TTY, o.Command))
	if err != nil {
		return nil, err
	}
	return stream(location, transport, responder), nil
}

type execREST struct{ kubeletProxy }

var _ rest.Connecter = execREST{}

func (execREST) New() runtime.Object      { return &corev1.PodExecOptions{} }
func (execREST) ConnectMethods() []string { return upgradeMethods() }
func (execREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodExecOptions{}, false, ""
}

func (r execREST) Connect(ctx context.Context, name string, opts runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := opts.(*corev1.PodExecOptions)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("invalid options object: %#v", opts))
	}
	if len(o.Command) == 0 {
		return nil, apierrors.NewBadRequest("you must specify a command to execute")
	}
	return r.connect(ctx, name, "exec", *o, responder)
}

type attachREST struct{ kubeletProxy }

var _ rest.Connecter = attachREST{}

func (attachREST) New() runtime.Object      { return &corev1.PodAttachOptions{} }
func (attachREST) ConnectMethods() []string { return upgradeMethods() }
func (attachREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodAttachOptions{}, false, ""
}

func (r attachREST) Connect(ctx context.Context, name string, opts runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := opts.(*corev1.PodAttachOptions)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("invalid options object: %#v", opts))
	}
	return r.connect(ctx, name, "attach", corev1.PodExecOptions{
		Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr, TTY: o.TTY, Container: o.Container,
	}, responder)
}

type portForwardREST struct{ kubeletProxy }

var _ rest.Connecter = portForwardREST{}

func (portForwardREST) New() runtime.Object      { return &corev1.PodPortForwardOptions{} }
func (portForwardREST) ConnectMethods() []string { return upgradeMethods() }
func (portForwardREST) NewConnectOptions() (runtime.Object, bool, string) {
	return &corev1.PodPortForwardOptions{}, false, ""
}

func (r portForwardREST) Connect(ctx context.Context, name string, opts runtime.Object, responder rest.Responder) (http.Handler, error) {
	o, ok := opts.(*corev1.PodPortForwardOptions)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("invalid options object: %#v", opts))
	}
	pod, err := r.read(ctx, name)
	if err != nil {
		return nil, err
	}
	q := url.Values{}
	if len(o.Ports) > 0 {
		ports := make([]string, 0, len(o.Ports))
		for _, p := range o.Ports {
			ports = append(ports, strconv.Itoa(int(p)))
		}
		q.Set("port", strings.Join(ports, ","))
	}
	location, transport, err := r.locate(ctx, pod, fmt.Sprintf("/portForward/%s/%s", pod.Namespace, pod.Name), q)
	if err != nil {
		return nil, err
	}
	return stream(location, transport, responder), nil
}

type logREST struct{ kubeletProxy }

var (
	_ rest.GetterWithOptions = logREST{}
	_ rest.StorageMetadata   = logREST{}
)

// ProducesMIMETypes implements rest.StorageMetadata.
func (logREST) ProducesMIMETypes(string) []string { return []string{"text/plain"} }

// ProducesObject implements rest.StorageMetadata.
func (logREST) ProducesObject(string) any { return "" }

func (logREST) NewGetOptions() (runtime.Object, bool, string) {
	return &corev1.PodLogOptions{}, false, ""
}

func (r logREST) Get(ctx context.Context, name string, opts runtime.Object) (runtime.Object, error) {
	o, ok := opts.(*corev1.PodLogOptions)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("invalid options object: %#v", opts))
	}
	if err := checkLogOptions(name, o); err != nil {
		return nil, err
	}
	pod, container, err := r.pod(ctx, name, o.Container)
	if err != nil {
		return nil, err
	}
	if pod.Spec.NodeName == "" {
		// Nothing runs it, so there is nothing to read: as upstream, no error.
		return &genericrest.LocationStreamer{}, nil
	}
	location, transport, err := r.locate(ctx, pod, fmt.Sprintf("/containerLogs/%s/%s/%s", pod.Namespace, pod.Name, container), logQuery(o))
	if err != nil {
		return nil, err
	}
	return &genericrest.LocationStreamer{
		Location:        location,
		Transport:       transport,
		ContentType:     "text/plain",
		Flush:           o.Follow,
		ResponseChecker: genericrest.NewGenericHttpResponseChecker(schema.GroupResource{Resource: "pods/log"}, name),
		RedirectChecker: genericrest.PreventRedirects,
	}, nil
}

func logQuery(o *corev1.PodLogOptions) url.Values {
	q := url.Values{}
	for name, set := range map[string]bool{"follow": o.Follow, "previous": o.Previous, "timestamps": o.Timestamps} {
		if set {
			q.Set(name, "true")
		}
	}
	if o.SinceSeconds != nil {
		q.Set("sinceSeconds", strconv.FormatInt(*o.SinceSeconds, 10))
	}
	if o.SinceTime != nil {
		q.Set("sinceTime", o.SinceTime.Format(time.RFC3339))
	}
	if o.TailLines != nil {
		q.Set("tailLines", strconv.FormatInt(*o.TailLines, 10))
	}
	if o.LimitBytes != nil {
		q.Set("limitBytes", strconv.FormatInt(*o.LimitBytes, 10))
	}
	if o.Stream != nil {
		q.Set("stream", *o.Stream)
	}
	return q
}

// decodeQuery fills a pod options object from a query string, by its JSON field
// names. Booleans and numbers that do not parse are errors of the client.
func decodeQuery(q url.Values, out any) error {
	s := reflect.ValueOf(out).Elem()
	for i := range s.NumField() {
		name, _, _ := strings.Cut(s.Type().Field(i).Tag.Get("json"), ",")
		values, ok := q[name]
		if name == "" || !ok || len(values) == 0 {
			continue
		}
		if err := setFromQuery(s.Field(i), values); err != nil {
			return apierrors.NewBadRequest(fmt.Sprintf("query parameter %s: %v", name, err))
		}
	}
	return nil
}

func setFromQuery(f reflect.Value, values []string) error {
	if t, ok := f.Addr().Interface().(**metav1.Time); ok {
		parsed, err := time.Parse(time.RFC3339, values[0])
		if err != nil {
			return err
		}
		*t = &metav1.Time{Time: parsed}
		return nil
	}
	switch f.Kind() {
	case reflect.Pointer:
		v := reflect.New(f.Type().Elem())
		if err := setFromQuery(v.Elem(), values); err != nil {
			return err
		}
		f.Set(v)
	case reflect.String:
		f.SetString(values[0])
	case reflect.Bool:
		// A parameter without a value is set, as in upstream's conversion.
		b := strings.ToLower(values[0])
		f.SetBool(b != "false" && b != "0")
	case reflect.Int32, reflect.Int64:
		n, err := strconv.ParseInt(values[0], 10, 64)
		if err != nil {
			return err
		}
		f.SetInt(n)
	case reflect.Slice:
		list := reflect.MakeSlice(f.Type(), len(values), len(values))
		for i := range values {
			if err := setFromQuery(list.Index(i), values[i:i+1]); err != nil {
				return err
			}
		}
		f.Set(list)
	}
	return nil
}

// checkLogOptions refuses combinations that mean nothing.
func checkLogOptions(name string, o *corev1.PodLogOptions) error {
	var errs field.ErrorList
	if o.TailLines != nil && *o.TailLines < 0 {
		errs = append(errs, field.Invalid(field.NewPath("tailLines"), *o.TailLines, "must be greater than or equal to 0"))
	}
	if o.LimitBytes != nil && *o.LimitBytes < 1 {
		errs = append(errs, field.Invalid(field.NewPath("limitBytes"), *o.LimitBytes, "must be greater than 0"))
	}
	switch {
	case o.SinceSeconds != nil && o.SinceTime != nil:
		errs = append(errs, field.Forbidden(field.NewPath(""), "at most one of `sinceTime` or `sinceSeconds` may be specified"))
	case o.SinceSeconds != nil && *o.SinceSeconds < 1:
		errs = append(errs, field.Invalid(field.NewPath("sinceSeconds"), *o.SinceSeconds, "must be greater than 0"))
	}
	if len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Kind: "PodLogOptions"}, name, errs)
	}
	return nil
}
