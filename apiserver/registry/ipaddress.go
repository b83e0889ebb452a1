// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

// ipAddressKind shows which cluster IP belongs to which Service. Upstream stores
// one object for each and allocates by them; here they are read from the Services,
// so that the two cannot disagree, and cannot be written.
func ipAddressKind() Kind {
	k := Kind{
		Resource: "ipaddresses", Singular: "ipaddress", Kind: "IPAddress",
		GroupVersion: networkingv1.SchemeGroupVersion,
		ShortNames:   []string{"ip"},
		New:          newObject[networkingv1.IPAddress], NewList: newObject[networkingv1.IPAddressList],
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("ParentRef", "string", "What the address belongs to."),
		},
		Row: row(func(ip *networkingv1.IPAddress) []any {
			p := ip.Spec.ParentRef
			return []any{ip.Name, p.Resource + "/" + p.Namespace + "/" + p.Name}
		}),
	}
	k.Virtual = func(deps Deps) rest.Storage {
		return ipAddressREST{newTableConvertor(k), k, deps}
	}
	return k
}

type ipAddressREST struct {
	tableConvertor
	kind Kind
	deps Deps
}

var (
	_ rest.Getter             = ipAddressREST{}
	_ rest.Lister             = ipAddressREST{}
	_ rest.Watcher            = ipAddressREST{}
	_ rest.ShortNamesProvider = ipAddressREST{}
)

func (r ipAddressREST) New() runtime.Object     { return r.kind.New() }
func (r ipAddressREST) NewList() runtime.Object { return r.kind.NewList() }
func (r ipAddressREST) Destroy()                {}
func (r ipAddressREST) NamespaceScoped() bool   { return false }
func (r ipAddressREST) GetSingularName() string { return r.kind.Singular }
func (r ipAddressREST) ShortNames() []string    { return r.kind.ShortNames }

// addressesOf makes the objects of one Service.
func addressesOf(s *corev1.Service) []networkingv1.IPAddress {
	var out []networkingv1.IPAddress
	if isExternalName(s) {
		return nil
	}
	for _, text := range s.Spec.ClusterIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			continue // None
		}
		out = append(out, networkingv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{
				Name: ip.String(), ResourceVersion: s.ResourceVersion, CreationTimestamp: s.CreationTimestamp,
				UID: types.UID(uuid.NewSHA1(uuid.NameSpaceOID, []byte(string(s.UID)+ip.String())).String()),
				Labels: map[string]string{
					networkingv1.LabelIPAddressFamily: string(familyOf(ip.String())),
					networkingv1.LabelManagedBy:       "ipallocator.k8s.io",
				},
			},
			Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
				Resource: "services", Namespace: s.Namespace, Name: s.Name,
			}},
		})
	}
	return out
}

// services is the context for a look at the Services of all namespaces.
func (r ipAddressREST) services(ctx context.Context) (context.Context, *Store) {
	return request.WithNamespace(ctx, metav1.NamespaceAll), r.deps.Lookup("services")
}

// Get implements rest.Getter.
func (r ipAddressREST) Get(ctx context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	list, err := r.List(ctx, &internalversion.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name)})
	if err != nil {
		return nil, err
	}
	if items := list.(*networkingv1.IPAddressList).Items; len(items) > 0 {
		return &items[0], nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Group: networkingv1.GroupName, Resource: r.kind.Resource}, name)
}

// List implements rest.Lister. It gives everything at once, whatever limit was
// asked for.
func (r ipAddressREST) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	ctx, store := r.services(ctx)
	found, err := store.List(ctx, &internalversion.ListOptions{ResourceVersion: options.ResourceVersion, ResourceVersionMatch: options.ResourceVersionMatch})
	if err != nil {
		return nil, err
	}
	services := found.(*corev1.ServiceList)
	list := &networkingv1.IPAddressList{ListMeta: services.ListMeta, Items: []networkingv1.IPAddress{}}
	for i := range services.Items {
		for _, ip := range addressesOf(&services.Items[i]) {
			if selects(options, &ip) {
				list.Items = append(list.Items, ip)
			}
		}
	}
	slices.SortFunc(list.Items, func(a, b networkingv1.IPAddress) int { return cmp.Compare(a.Name, b.Name) })
	return list, nil
}

func selects(options *internalversion.ListOptions, obj metav1.Object) bool {
	if options == nil {
		return true
	}
	return (options.LabelSelector == nil || options.LabelSelector.Matches(labels.Set(obj.GetLabels()))) &&
		(options.FieldSelector == nil || options.FieldSelector.Matches(fields.Set{"metadata.name": obj.GetName()}))
}

// Watch implements rest.Watcher: a watch of the Services, told in addresses.
func (r ipAddressREST) Watch(ctx context.Context, options *internalversion.ListOptions) (watch.Interface, error) {
	ctx, store := r.services(ctx)
	o := options.DeepCopy()
	o.LabelSelector, o.FieldSelector = nil, nil
	before, err := store.List(ctx, &internalversion.ListOptions{})
	if err != nil {
		return nil, err
	}
	services, err := store.Watch(ctx, o)
	if err != nil {
		return nil, err
	}
	w := addressWatch{incoming: services, out: make(chan watch.Event), options: options, known: map[types.UID][]networkingv1.IPAddress{}}
	if from := options.ResourceVersion; from != "" && from != "0" && !ptr.Deref(options.SendInitialEvents, false) {
		// The watcher has listed; what a Service had is needed to tell what it
		// gives back.
		for i := range before.(*corev1.ServiceList).Items {
			s := &before.(*corev1.ServiceList).Items[i]
			w.known[s.UID] = addressesOf(s)
		}
	}
	go w.run()
	return w, nil
}

// addressWatch turns events of Services into events of addresses. Its goroutine
// ends with the watch of the Services.
type addressWatch struct {
	incoming watch.Interface
	out      chan watch.Event
	options  *internalversion.ListOptions
	// known is what each Service has, by its UID.
	known map[types.UID][]networkingv1.IPAddress
}

// Stop implements watch.Interface.
func (w addressWatch) Stop() { w.incoming.Stop() }

// ResultChan implements watch.Interface.
func (w addressWatch) ResultChan() <-chan watch.Event { return w.out }

func (w addressWatch) run() {
	defer close(w.out)
	for event := range w.incoming.ResultChan() {
		for _, e := range w.translate(event) {
			w.out <- e
		}
	}
}

// translate returns what an event of a Service means for addresses.
func (w addressWatch) translate(event watch.Event) []watch.Event {
	obj := event.Object
	if c, ok := obj.(runtime.CacheableObject); ok {
		// The watch cache shares one encoding among its watchers.
		obj = c.GetObject()
	}
	s, ok := obj.(*corev1.Service)
	if !ok {
		return []watch.Event{event} // an error
	}
	if event.Type == watch.Bookmark {
		return []watch.Event{{Type: watch.Bookmark, Object: &networkingv1.IPAddress{
			ObjectMeta: metav1.ObjectMeta{ResourceVersion: s.ResourceVersion, Annotations: s.Annotations},
		}}}
	}
	had, has := w.known[s.UID], addressesOf(s)
	w.known[s.UID] = has
	if event.Type == watch.Deleted {
		had, has = has, nil
		delete(w.known, s.UID)
	}
	var out []watch.Event
	add := func(t watch.EventType, list, other []networkingv1.IPAddress) {
		for _, ip := range list {
			known := slices.ContainsFunc(other, func(o networkingv1.IPAddress) bool { return o.Name == ip.Name })
			if !known && selects(w.options, &ip) {
				ip.ResourceVersion = s.ResourceVersion
				out = append(out, watch.Event{Type: t, Object: &ip})
			}
		}
	}
	add(watch.Deleted, had, has)
	add(watch.Added, has, had)
	return out
}
