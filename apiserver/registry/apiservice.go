// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/registry/rest"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// apiServiceKind lists the group versions that the API serves. All of them are this
// server's own: there is no aggregation of others, so that none can be created. Their
// priorities are those that custom resources have upstream; nothing here orders by them.
func apiServiceKind() Kind {
	k := Kind{
		Resource: "apiservices", Singular: "apiservice", Kind: "APIService",
		GroupVersion: apiregistrationv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[apiregistrationv1.APIService], NewList: newObject[apiregistrationv1.APIServiceList],
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Service", "string", "Who serves the group version; Local for this server."),
			column("Available", "string", "Whether it answers."),
			ageColumn,
		},
		Row: row(func(s *apiregistrationv1.APIService) []any {
			return []any{s.Name, "Local", "True", age(s.CreationTimestamp)}
		}),
	}
	k.Virtual = func(deps Deps) rest.Storage {
		return apiServiceREST{newTableConvertor(k), k, deps, metav1.NewTime(time.Now().Truncate(time.Second))}
	}
	return k
}

type apiServiceREST struct {
	tableConvertor
	kind Kind
	deps Deps
	// since is when the server began.
	since metav1.Time
}

var (
	_ rest.Getter             = apiServiceREST{}
	_ rest.Lister             = apiServiceREST{}
	_ rest.CategoriesProvider = apiServiceREST{}
)

func (r apiServiceREST) New() runtime.Object     { return r.kind.New() }
func (r apiServiceREST) NewList() runtime.Object { return r.kind.NewList() }
func (r apiServiceREST) Destroy()                {}
func (r apiServiceREST) NamespaceScoped() bool   { return false }
func (r apiServiceREST) GetSingularName() string { return r.kind.Singular }
func (r apiServiceREST) Categories() []string    { return r.kind.Categories }

// Get implements rest.Getter.
func (r apiServiceREST) Get(_ context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	for _, s := range r.all() {
		if s.Name == name {
			return &s, nil
		}
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Group: r.kind.GroupVersion.Group, Resource: r.kind.Resource}, name)
}

// List implements rest.Lister.
func (r apiServiceREST) List(_ context.Context, options *internalversion.ListOptions) (runtime.Object, error) {
	byLabel, byField := selectorsOf(options)
	list := &apiregistrationv1.APIServiceList{Items: slices.DeleteFunc(r.all(), func(s apiregistrationv1.APIService) bool {
		return !byLabel.Matches(labels.Set(s.Labels)) || !byField.Matches(fields.Set{"metadata.name": s.Name})
	})}
	return list, nil
}

// all makes an object for each group version that is served now, by name.
func (r apiServiceREST) all() []apiregistrationv1.APIService {
	out := []apiregistrationv1.APIService{}
	for _, gv := range r.deps.GroupVersions() {
		s := apiregistrationv1.APIService{
			ObjectMeta: metav1.ObjectMeta{
				// That of the core group ends with the dot.
				Name:              gv.Version + "." + gv.Group,
				UID:               types.UID(uuid.NewSHA1(uuid.NameSpaceOID, []byte(gv.String())).String()),
				CreationTimestamp: r.since,
				Labels:            map[string]string{"kube-aggregator.kubernetes.io/automanaged": "true"},
			},
			Spec: apiregistrationv1.APIServiceSpec{Group: gv.Group, Version: gv.Version, GroupPriorityMinimum: 1000, VersionPriority: 100},
			Status: apiregistrationv1.APIServiceStatus{Conditions: []apiregistrationv1.APIServiceCondition{{
				Type: apiregistrationv1.Available, Status: apiregistrationv1.ConditionTrue, LastTransitionTime: r.since,
				Reason: "Local", Message: "Local APIServices are always available",
			}}},
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b apiregistrationv1.APIService) int { return strings.Compare(a.Name, b.Name) })
	return out
}
