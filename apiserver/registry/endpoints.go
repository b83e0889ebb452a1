// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"net"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"
)

func endpointsKind() Kind {
	k := Kind{
		Resource: "endpoints", Singular: "endpoints", Kind: "Endpoints",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache:          true,
		ShortNames:          []string{"ep"},
		New:                 newObject[corev1.Endpoints],
		NewList:             newObject[corev1.EndpointsList],
		Default:             forObject(defaultEndpoints),
		Validate:            validates(validateEndpoints),
		Warnings:            warns(endpointsWarnings),
		AllowCreateOnUpdate: true,
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Endpoints", "string", "Addresses and ports of the backends that are ready."),
			ageColumn,
		},
		Row: row(func(e *corev1.Endpoints) []any {
			return []any{e.Name, shortList(readyEndpoints(e), none), age(e.CreationTimestamp)}
		}),
	}
	k.Wrap = func(store *Store, _ Deps) rest.Storage { return endpointsREST{kindREST{store, k}} }
	return k
}

func defaultEndpoints(e *corev1.Endpoints) {
	for i := range e.Subsets {
		for j := range e.Subsets[i].Ports {
			setIfZero(&e.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
		}
	}
}

func validateEndpoints(e *corev1.Endpoints) field.ErrorList {
	var errs field.ErrorList
	for i, s := range e.Subsets {
		path := field.NewPath("subsets").Index(i)
		if len(s.Addresses) == 0 && len(s.NotReadyAddresses) == 0 {
			errs = append(errs, field.Required(path, "must specify `addresses` or `notReadyAddresses`"))
		}
		for j, a := range s.Addresses {
			errs = append(errs, validateEndpointAddress(a, path.Child("addresses").Index(j))...)
		}
		for j, a := range s.NotReadyAddresses {
			errs = append(errs, validateEndpointAddress(a, path.Child("notReadyAddresses").Index(j))...)
		}
		for j, p := range s.Ports {
			path := path.Child("ports").Index(j)
			if p.Name == "" && len(s.Ports) > 1 {
				errs = append(errs, field.Required(path.Child("name"), ""))
			} else if p.Name != "" {
				errs = append(errs, invalidIf(path.Child("name"), p.Name, utilvalidation.IsDNS1123Label(p.Name))...)
			}
			errs = append(errs, invalidIf(path.Child("port"), p.Port, utilvalidation.IsValidPortNum(int(p.Port)))...)
			errs = append(errs, validateTransport(path.Child("protocol"), p.Protocol)...)
			if p.AppProtocol != nil {
				errs = append(errs, invalidIf(path.Child("appProtocol"), *p.AppProtocol, utilvalidation.IsQualifiedName(*p.AppProtocol))...)
			}
		}
	}
	return errs
}

func validateEndpointAddress(a corev1.EndpointAddress, path *field.Path) field.ErrorList {
	errs := utilvalidation.IsValidIPForLegacyField(path.Child("ip"), a.IP, true, nil)
	errs = append(errs, validateOrdinaryIP(path.Child("ip"), a.IP)...)
	if a.Hostname != "" {
		errs = append(errs, invalidIf(path.Child("hostname"), a.Hostname, utilvalidation.IsDNS1123Label(a.Hostname))...)
	}
	if a.NodeName != nil {
		errs = append(errs, invalidIf(path.Child("nodeName"), *a.NodeName, utilvalidation.IsDNS1123Subdomain(*a.NodeName))...)
	}
	return errs
}

func endpointsWarnings(e, _ *corev1.Endpoints) []string {
	var w []string
	for i, s := range e.Subsets {
		path := field.NewPath("subsets").Index(i)
		for j, a := range s.Addresses {
			w = append(w, utilvalidation.GetWarningsForIP(path.Child("addresses").Index(j).Child("ip"), a.IP)...)
		}
		for j, a := range s.NotReadyAddresses {
			w = append(w, utilvalidation.GetWarningsForIP(path.Child("notReadyAddresses").Index(j).Child("ip"), a.IP)...)
		}
	}
	return w
}

// readyEndpoints lists address:port of every ready backend, or the bare addresses
// of a subset without ports.
func readyEndpoints(e *corev1.Endpoints) []string {
	var all []string
	for _, s := range e.Subsets {
		if len(s.Ports) == 0 {
			for _, a := range s.Addresses {
				all = append(all, a.IP)
			}
		}
		for _, p := range s.Ports {
			for _, a := range s.Addresses {
				all = append(all, net.JoinHostPort(a.IP, strconv.Itoa(int(p.Port))))
			}
		}
	}
	return all
}

// endpointsREST says with every verb that Endpoints are superseded, as upstream
// does since 1.33.
type endpointsREST struct{ kindREST }

var _ rest.StandardStorage = endpointsREST{}

func deprecated(ctx context.Context) {
	warning.AddWarning(ctx, "", "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice")
}

// Get implements rest.Getter.
func (r endpointsREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	deprecated(ctx)
	return r.Store.Get(ctx, name, options)
}

// List implements rest.Lister.
func (r endpointsREST) List(ctx context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	deprecated(ctx)
	return r.Store.List(ctx, options)
}

// Watch implements rest.Watcher.
func (r endpointsREST) Watch(ctx context.Context, options *internalversion.ListOptions) (watch.Interface, error) {
	deprecated(ctx)
	return r.Store.Watch(ctx, options)
}

// Create implements rest.Creater.
func (r endpointsREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc, options *metav1.CreateOptions) (runtime.Object, error) {
	deprecated(ctx)
	return r.Store.Create(ctx, obj, validate, options)
}

// Update implements rest.Updater.
func (r endpointsREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, forceCreate bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	deprecated(ctx)
	return r.Store.Update(ctx, name, info, create, update, forceCreate, options)
}

// Delete implements rest.GracefulDeleter.
func (r endpointsREST) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	deprecated(ctx)
	return r.Store.Delete(ctx, name, validate, options)
}

// DeleteCollection implements rest.CollectionDeleter.
func (r endpointsREST) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions, list *internalversion.ListOptions) (runtime.Object, error) {
	deprecated(ctx)
	return r.Store.DeleteCollection(ctx, validate, options, list)
}
