// SPDX-License-Identifier: Apache-2.0

package rbac

import (
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
)

// Verbs, as upstream's roles combine them.
const (
	read      = "get list watch"
	write     = "create delete deletecollection patch update"
	readWrite = read + " " + write
	everyVerb = "*"
)

// API groups of the rules.
const (
	core          = ""
	admissionReg  = "admissionregistration.k8s.io"
	apps          = "apps"
	authn         = "authentication.k8s.io"
	authz         = "authorization.k8s.io"
	autoscaling   = "autoscaling"
	batch         = "batch"
	certificates  = "certificates.k8s.io"
	coordination  = "coordination.k8s.io"
	discovery     = "discovery.k8s.io"
	events        = "events.k8s.io"
	metrics       = "metrics.k8s.io"
	networking    = "networking.k8s.io"
	node          = "node.k8s.io"
	policy        = "policy"
	rbacGroup     = rbacv1.GroupName
	storageGroup  = "storage.k8s.io"
	accountsSpace = metav1.NamespaceSystem
)

const (
	bootstrapLabel      = "kubernetes.io/bootstrapping"
	autoUpdate          = "rbac.authorization.kubernetes.io/autoupdate"
	aggregateToAdmin    = "rbac.authorization.k8s.io/aggregate-to-admin"
	aggregateToEdit     = "rbac.authorization.k8s.io/aggregate-to-edit"
	aggregateToView     = "rbac.authorization.k8s.io/aggregate-to-view"
	controllersIdentity = "system:kube-controller-manager"
)

// rule allows verbs on resources of the API groups. Lists are separated by
// spaces, groups by commas, since one group is the empty text.
func rule(verbs, groups, resources string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: strings.Fields(verbs), APIGroups: strings.Split(groups, ","), Resources: strings.Fields(resources)}
}

// paths allows to read paths that are no resources.
func paths(list string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: []string{"get"}, NonResourceURLs: strings.Fields(list)}
}

// recordEvents is what every component that tells of what it does needs.
func recordEvents() rbacv1.PolicyRule {
	return rule("create patch update", core+","+events, "events")
}

func bootstrapMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:        name,
		Labels:      map[string]string{bootstrapLabel: "rbac-defaults"},
		Annotations: map[string]string{autoUpdate: "true"},
	}
}

func clusterRole(name string, rules ...rbacv1.PolicyRule) *rbacv1.ClusterRole {
	return &rbacv1.ClusterRole{ObjectMeta: bootstrapMeta(name), Rules: rules}
}

func labelled(r *rbacv1.ClusterRole, label string) *rbacv1.ClusterRole {
	r.Labels[label] = "true"
	return r
}

// bind gives a ClusterRole to subjects under the role's own name.
func bind(role string, subjects ...rbacv1.Subject) *rbacv1.ClusterRoleBinding {
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: bootstrapMeta(role),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacGroup, Kind: "ClusterRole", Name: role},
		Subjects:   subjects,
	}
}

func toGroup(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.GroupKind, APIGroup: rbacGroup, Name: name}
}

func toUser(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacGroup, Name: name}
}

// toAccount names a service account of kube-system.
func toAccount(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: accountsSpace, Name: name}
}

// Policy returns what a new cluster has, under upstream's names. The objects are
// the caller's.
func Policy() ([]*rbacv1.ClusterRole, []*rbacv1.ClusterRoleBinding) {
	all := slices.Concat(peoplesRoles(), componentsRoles())
	bindings := []*rbacv1.ClusterRoleBinding{
		bind("cluster-admin", toGroup(user.SystemPrivilegedGroup)),
		bind("system:discovery", toGroup(user.AllAuthenticated)),
		bind("system:basic-user", toGroup(user.AllAuthenticated)),
		bind("system:public-info-viewer", toGroup(user.AllAuthenticated), toGroup(user.AllUnauthenticated)),
		bind("system:monitoring", toGroup(user.MonitoringGroup)),
		bind("system:service-account-issuer-discovery", toGroup("system:serviceaccounts")),
		bind("system:node", toGroup(user.NodesGroup)),
		bind("system:node-proxier", toUser("system:kube-proxy")),
		bind(controllersIdentity, toUser(controllersIdentity)),
		// The scheduler is one of the controllers of a lab.
		bind("system:kube-scheduler", toUser("system:kube-scheduler"), toUser(controllersIdentity)),
		bind("system:volume-scheduler", toUser("system:kube-scheduler"), toUser(controllersIdentity)),
		bind("system:kube-dns", toAccount("kube-dns")),
		bind("system:coredns", toAccount("coredns")),
	}
	for _, r := range controllersRoles() {
		all = append(all, r)
		bindings = append(bindings, bind(r.Name, toAccount(strings.TrimPrefix(r.Name, controllerPrefix)), toUser(controllersIdentity)))
	}
	return all, bindings
}

// peoplesRoles are those that administrators give to people.
func peoplesRoles() []*rbacv1.ClusterRole {
	view, edit, admin := viewRules(), editRules(), adminRules()
	aggregate := func(r *rbacv1.ClusterRole, label string) *rbacv1.ClusterRole {
		r.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{label: "true"}}}}
		return r
	}
	// The rules of the aggregating roles are what Aggregate would make of them.
	figures := []rbacv1.PolicyRule{rule(read, metrics, "nodes pods")}
	viewAll := slices.Concat(view, figures)
	editAll := slices.Concat(edit, viewAll)
	return []*rbacv1.ClusterRole{
		clusterRole("cluster-admin", rule(everyVerb, "*", "*"), rbacv1.PolicyRule{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}}),
		aggregate(clusterRole("admin", slices.Concat(editAll, admin)...), aggregateToAdmin),
		labelled(aggregate(clusterRole("edit", editAll...), aggregateToEdit), aggregateToAdmin),
		labelled(aggregate(clusterRole("view", viewAll...), aggregateToView), aggregateToEdit),
		labelled(clusterRole("system:aggregate-to-admin", admin...), aggregateToAdmin),
		labelled(clusterRole("system:aggregate-to-edit", edit...), aggregateToEdit),
		labelled(clusterRole("system:aggregate-to-view", view...), aggregateToView),
		// Elsewhere it comes with metrics-server.
		labelled(clusterRole("system:aggregated-metrics-reader", figures...), aggregateToView),
		clusterRole("system:discovery", paths("/api /api/* /apis /apis/* /healthz /livez /openapi /openapi/* /readyz /version /version/")),
		clusterRole("system:basic-user",
			rule("create", authz, "selfsubjectaccessreviews selfsubjectrulesreviews"),
			rule("create", authn, "selfsubjectreviews")),
		clusterRole("system:public-info-viewer", paths("/healthz /livez /readyz /version /version/")),
		clusterRole("system:monitoring", paths("/healthz /healthz/* /livez /livez/* /metrics /metrics/slis /readyz /readyz/*")),
		clusterRole("system:service-account-issuer-discovery", paths("/.well-known/openid-configuration /.well-known/openid-configuration/ /openid/v1/jwks /openid/v1/jwks/")),
		clusterRole("system:auth-delegator",
			rule("create", authn, "tokenreviews"),
			rule("create", authz, "subjectaccessreviews")),
	}
}

func viewRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule(read, core, "configmaps endpoints persistentvolumeclaims persistentvolumeclaims/status pods replicationcontrollers replicationcontrollers/scale serviceaccounts services services/status"),
		rule(read, core, "bindings events limitranges namespaces/status pods/log pods/status replicationcontrollers/status resourcequotas resourcequotas/status"),
		rule(read, core, "namespaces"),
		rule(read, discovery, "endpointslices"),
		rule(read, apps, "controllerrevisions daemonsets daemonsets/status deployments deployments/scale deployments/status replicasets replicasets/scale replicasets/status statefulsets statefulsets/scale statefulsets/status"),
		rule(read, autoscaling, "horizontalpodautoscalers horizontalpodautoscalers/status"),
		rule(read, batch, "cronjobs cronjobs/status jobs jobs/status"),
		rule(read, policy, "poddisruptionbudgets poddisruptionbudgets/status"),
		rule(read, networking, "ingresses ingresses/status networkpolicies"),
	}
}

func editRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule(read, core, "pods/attach pods/exec pods/portforward pods/proxy secrets services/proxy"),
		rule("impersonate", core, "serviceaccounts"),
		rule(write, core, "pods pods/attach pods/exec pods/portforward pods/proxy"),
		rule("create", core, "pods/eviction"),
		rule(write, core, "configmaps events persistentvolumeclaims replicationcontrollers replicationcontrollers/scale secrets serviceaccounts services services/proxy"),
		rule("create", core, "serviceaccounts/token"),
		rule(write, apps, "daemonsets deployments deployments/rollback deployments/scale replicasets replicasets/scale statefulsets statefulsets/scale"),
		rule(write, autoscaling, "horizontalpodautoscalers"),
		rule(write, batch, "cronjobs jobs"),
		rule(write, policy, "poddisruptionbudgets"),
		rule(write, networking, "ingresses networkpolicies"),
		rule(readWrite, coordination, "leases"),
	}
}

func adminRules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		rule("create", authz, "localsubjectaccessreviews"),
		rule(readWrite, rbacGroup, "rolebindings roles"),
	}
}
