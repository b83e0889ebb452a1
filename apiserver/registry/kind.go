// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Store is the generic store of one kind.
type Store = registry.Store

// Kind describes one kind of the API. Only the names and the two constructors
// are required; a nil function does nothing.
//
// Functions may run at the same time on different objects, must not keep a
// reference to what they are given, and must not change an object called old.
type Kind struct {
	// Resource is the plural name in URLs ("configmaps"), Singular the name in
	// messages ("configmap"), Kind the name in manifests ("ConfigMap").
	Resource, Singular, Kind string
	GroupVersion             schema.GroupVersion
	Namespaced               bool
	// ShortNames and Categories are what kubectl accepts for Resource ("cm";
	// "all").
	ShortNames, Categories []string

	// New and NewList return empty objects of the published Go types.
	New, NewList func() runtime.Object

	// Name validates metadata.name; nil means a DNS subdomain.
	Name validation.ValidateNameFunc

	// Default sets what the writer left out. It runs on every decode, on every
	// result of a patch, and on every read from storage, so it must be pure,
	// and a second run must change nothing.
	Default func(obj runtime.Object)

	// TracksGeneration makes metadata.generation count the changes of spec.
	TracksGeneration bool

	// KeepStatusOnCreate keeps the status that the writer gives when it creates
	// the object, for kinds that register themselves.
	KeepStatusOnCreate bool

	// PrepareForCreate clears what a client may not set. When the kind has a
	// Status, its status has already been emptied.
	PrepareForCreate func(ctx context.Context, obj runtime.Object)
	// PrepareForUpdate is the same for an update of the main resource. When
	// the kind has a Status, obj already carries old's status.
	PrepareForUpdate func(ctx context.Context, obj, old runtime.Object)

	// Validate checks everything but metadata, which the framework checks. It
	// runs on create and on update.
	Validate func(obj runtime.Object) field.ErrorList
	// ValidateCreate checks what only a new object must satisfy. It runs after
	// Validate.
	ValidateCreate func(obj runtime.Object) field.ErrorList
	// ValidateUpdate checks what may not change. It runs after Validate.
	ValidateUpdate func(obj, old runtime.Object) field.ErrorList
	// Warnings returns texts for the Warning header; old is nil on create.
	Warnings func(obj, old runtime.Object) []string

	// Status, when not nil, gives the kind a /status subresource.
	Status *StatusStrategy

	// AllowCreateOnUpdate lets a PUT to a missing name create the object.
	AllowCreateOnUpdate bool
	// RequireResourceVersion refuses a PUT without metadata.resourceVersion.
	// Most kinds allow it (the write is then unconditional).
	RequireResourceVersion bool

	// Columns are the table columns; Row returns one cell for each, the wide
	// ones included. Without them a table has Name and Age.
	Columns []metav1.TableColumnDefinition
	Row     func(obj runtime.Object) (cells []any, conditions []metav1.TableRowCondition)

	// FieldLabels are the field selectors that the kind knows besides
	// metadata.name and metadata.namespace; Fields returns their values.
	FieldLabels []string
	Fields      func(obj runtime.Object) fields.Set
	// FieldAliases maps other names of a field label to the one in FieldLabels.
	FieldAliases map[string]string
	// IndexedField is the one of FieldLabels by which the watch cache finds
	// the watchers of an object, so that a thousand watchers of one node each
	// do not all look at every pod.
	IndexedField string

	// WatchCache keeps all objects of the kind, and its last events, decoded in
	// memory, for a kind that many clients watch or that changes often. It costs
	// goroutines and time at every start, so a kind that is seldom used does
	// without: its lists and watches come from the store, with the same meaning
	// but for the bookmarks that a cached watch gets once a minute.
	WatchCache bool

	// TTL, when not zero, is how long an object lives after its last write.
	TTL time.Duration

	// Hooks returns what runs around a write, for kinds that allocate.
	Hooks func(deps Deps) Hooks

	// OrphanByDefault keeps the dependants of an object whose deletion does not say
	// what becomes of them, as some kinds have done since before there was a choice.
	OrphanByDefault bool

	// Graceful, when not nil, decides how a deletion starts. It may set
	// options.GracePeriodSeconds, and returns true when the object stays, with
	// a deletionTimestamp, until it is deleted with a grace period of zero.
	Graceful func(ctx context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool

	// Wrap returns the storage to install in the place of store, for kinds
	// that change a verb (namespaces). It usually embeds store.
	Wrap func(store *Store, deps Deps) rest.Storage

	// Subresources returns the storages of Resource/NAME: "log", "scale".
	// "status" is not among them, see Status.
	Subresources func(store *Store, deps Deps) map[string]rest.Storage
	// SubresourceTypes are the types that Subresources reads or writes and
	// that are not kinds of the list, by their group version (Scale, Eviction).
	SubresourceTypes map[schema.GroupVersion][]runtime.Object
	// AddToScheme registers what decoding needs beyond the types, such as the
	// conversion from a query string to an options type.
	AddToScheme func(scheme *runtime.Scheme) error

	// Virtual, when not nil, is the storage of a kind that is not stored: a
	// question that is answered, or a view of other kinds. Of the rest only the
	// names, the types, Default and the field labels count then.
	Virtual func(deps Deps) rest.Storage

	// Views are further API versions over the same storage.
	Views []View
}

// View is a second API version of a kind. Its types differ from the kind's own
// in shape, not only in name, and are converted when read and written.
type View struct {
	GroupVersion schema.GroupVersion
	New, NewList func() runtime.Object
	// AddToScheme registers the conversions between the view's type and the
	// kind's, in both directions.
	AddToScheme func(scheme *runtime.Scheme) error
	FieldLabels []string
	// FieldAliases maps the view's field labels to the kind's.
	FieldAliases map[string]string
}

// StatusStrategy describes the /status subresource. An update through it keeps
// everything but status, annotations and finalizers from the stored object.
type StatusStrategy struct {
	// Prepare runs before the checks.
	Prepare func(ctx context.Context, obj, old runtime.Object)
	// Validate checks the new status.
	Validate func(obj, old runtime.Object) field.ErrorList
}

// Hooks run around a write, with the signatures of the generic registry.
type Hooks struct {
	// BeginCreate and BeginUpdate run before PrepareForCreate and Validate: an
	// object in them has been defaulted, not validated. The function that they
	// return is called exactly once; with false, it must give back what was
	// taken. A dry run (options.DryRun not empty) must leave nothing taken.
	//
	// BeginUpdate may run more than once for one request, when another write
	// came between; each run is finished before the next begins.
	BeginCreate registry.BeginCreateFunc
	BeginUpdate registry.BeginUpdateFunc
	// AfterCreate, AfterUpdate and AfterDelete run when the write is stored.
	AfterCreate registry.AfterCreateFunc
	AfterUpdate registry.AfterUpdateFunc
	AfterDelete registry.AfterDeleteFunc
}

// Deps is what hooks and subresources may use of the server.
type Deps struct {
	// ServiceCIDR is the range of cluster IPs. Its family is the default one.
	ServiceCIDR netip.Prefix
	// SecondaryServiceCIDR is a range of the other IP family, which makes the
	// cluster dual-stack; invalid for none.
	SecondaryServiceCIDR netip.Prefix
	// NodePortRange is the range of node ports.
	NodePortRange utilnet.PortRange
	// Lookup returns the store of a kind by its plural name, nil when there is
	// none. It answers only when all kinds are built: call it when a request
	// needs it, not in the function that receives Deps.
	Lookup func(resource string) *Store
	// KubeletDial opens a connection to addr (an address of the node and its
	// kubelet's port) from a place where the node can be reached.
	KubeletDial func(ctx context.Context, nodeName, addr string) (net.Conn, error)
	// KubeletTLS is the client side towards a kubelet: our client certificate,
	// the authority of its serving certificate.
	KubeletTLS *tls.Config
	// GroupVersions are those that the API serves, custom resources' included. Like
	// Lookup, it answers only when all is built.
	GroupVersions func() []schema.GroupVersion
	// Tokens signs service account tokens.
	Tokens TokenIssuer
	// Authorizer decides who may do what, and tells what somebody may do.
	Authorizer interface {
		authorizer.Authorizer
		authorizer.RuleResolver
	}
	// Authenticator tells who sends a request.
	Authenticator authenticator.Request
	// ClusterRoleWritten runs after each write of a ClusterRole, before the
	// answer; nil does nothing.
	ClusterRoleWritten func(ctx context.Context)
	// Components are the parts of the control plane, by the names that
	// ComponentStatuses have; each tells what is wrong with it, nil for nothing.
	Components map[string]func(context.Context) error
	// Signer signs approved requests for client certificates; nil leaves them
	// without one.
	Signer CertificateSigner
	// serviceRanges is how ServiceCIDRs and Services know of each other; Build
	// sets it.
	serviceRanges *serviceRanges
}

// TokenIssuer signs tokens for service accounts.
type TokenIssuer interface {
	// Issue returns a token for the service account that expires after ttl and
	// is bound to the account's UID, and to a pod's when podName is not empty.
	Issue(ctx context.Context, claims TokenClaims, ttl time.Duration) (token string, expires time.Time, err error)
	// DefaultAudience is the audience of a token for which none was asked.
	DefaultAudience() string
}

// TokenClaims is what a service account token states.
type TokenClaims struct {
	Namespace, Name, UID string
	Audiences            []string
	PodName, PodUID      string
	NodeName, NodeUID    string
	SecretName           string
	SecretUID            string
}
