// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/kplab/kplab/apiserver/rbac"
)

// bindClusterRole gives the rights of a ClusterRole in the namespace default.
func bindClusterRole(t *testing.T, s *testServer, role string, to rbacv1.Subject) {
	t.Helper()
	_, err := s.client.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "b-"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{to},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// asJane is a client of a user who has no rights of her own.
func asJane(t *testing.T, s *testServer, groups ...string) *kubernetes.Clientset {
	t.Helper()
	client, err := kubernetes.NewForConfig(s.ClientConfig("jane", groups...))
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func jane() rbacv1.Subject { return rbacv1.Subject{Kind: "User", Name: "jane"} }

func listPods(ctx context.Context, client *kubernetes.Clientset, namespace string) error {
	_, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	return err
}

// TestRBAC: a right is there with the answer to the write that gives it, in its
// namespace only, and gone with the binding.
func TestRBAC(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	makeNamespace(t, s, "other")
	client := asJane(t, s)
	const refusal = `pods is forbidden: User "jane" cannot list resource "pods" in API group "" in the namespace "default"`
	wantError(t, "before", listPods(ctx, client, "default"), apierrors.IsForbidden, refusal)
	wantError(t, "everywhere", listPods(ctx, client, ""), apierrors.IsForbidden, `User "jane" cannot list resource "pods" in API group "" at the cluster scope`)

	bindClusterRole(t, s, "view", jane())
	if err := listPods(ctx, client, "default"); err != nil {
		t.Errorf("with view: %v", err)
	}
	wantError(t, "another namespace", listPods(ctx, client, "other"), apierrors.IsForbidden, `in the namespace "other"`)
	_, err := client.CoreV1().Secrets("default").List(ctx, metav1.ListOptions{})
	wantError(t, "view reads no secrets", err, apierrors.IsForbidden, `cannot list resource "secrets"`)
	_, err = client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}}, metav1.CreateOptions{})
	wantError(t, "view writes nothing", err, apierrors.IsForbidden, `User "jane" cannot create resource "configmaps"`)

	if err := s.client.RbacV1().RoleBindings("default").DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	wantError(t, "without the binding", listPods(ctx, client, "default"), apierrors.IsForbidden, refusal)

	bindClusterRole(t, s, "nothing", jane())
	wantError(t, "a role that is missing", listPods(ctx, client, "default"), apierrors.IsForbidden, refusal+`: RBAC: clusterrole.rbac.authorization.k8s.io "nothing" not found`)
}

// TestRBACNames: a rule with resource names, and subresources.
func TestRBACNames(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "one"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{"mine"}},
		{Verbs: []string{"patch"}, APIGroups: []string{"apps"}, Resources: []string{"*/scale"}},
	}}
	if _, err := s.client.RbacV1().Roles("default").Create(ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "one"}, RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "one"},
		Subjects: []rbacv1.Subject{{Kind: "Group", Name: "devs"}}}
	if _, err := s.client.RbacV1().RoleBindings("default").Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		a    authorizationv1.ResourceAttributes
		want bool
	}{
		{authorizationv1.ResourceAttributes{Verb: "get", Resource: "configmaps", Name: "mine"}, true},
		{authorizationv1.ResourceAttributes{Verb: "get", Resource: "configmaps", Name: "yours"}, false},
		{authorizationv1.ResourceAttributes{Verb: "list", Resource: "configmaps"}, false},
		{authorizationv1.ResourceAttributes{Verb: "patch", Group: "apps", Resource: "deployments", Subresource: "scale", Name: "web"}, true},
		{authorizationv1.ResourceAttributes{Verb: "patch", Group: "apps", Resource: "deployments", Name: "web"}, false},
		{authorizationv1.ResourceAttributes{Verb: "patch", Resource: "replicationcontrollers", Subresource: "scale"}, false},
	} {
		tc.a.Namespace = "default"
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "joe", Groups: []string{"devs"}, ResourceAttributes: &tc.a}}
		got, err := s.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Status.Allowed != tc.want {
			t.Errorf("%+v: %+v", tc.a, got.Status)
		}
		if why := `RBAC: allowed by RoleBinding "one/default" of Role "one" to Group "devs"`; tc.want && got.Status.Reason != why {
			t.Errorf("reason %q", got.Status.Reason)
		}
	}
}

// TestEscalation: nobody gives away what he has not.
func TestEscalation(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	bindClusterRole(t, s, "admin", jane())
	client := asJane(t, s)
	role := func(name string, rules ...rbacv1.PolicyRule) error {
		_, err := client.RbacV1().Roles("default").Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}, metav1.CreateOptions{})
		return err
	}
	if err := role("pods", rbacv1.PolicyRule{Verbs: []string{"get", "list"}, APIGroups: []string{""}, Resources: []string{"pods"}}); err != nil {
		t.Errorf("a role with less than jane has: %v", err)
	}
	wantError(t, "more than she has", role("nodes", rbacv1.PolicyRule{Verbs: []string{"get", "delete"}, APIGroups: []string{""}, Resources: []string{"nodes"}}), apierrors.IsForbidden,
		`roles.rbac.authorization.k8s.io "nodes" is forbidden: user "jane" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:`+"\n"+
			`{APIGroups:[""], Resources:["nodes"], Verbs:["get" "delete"]}`)
	bind := func(kind, name string) error {
		_, err := client.RbacV1().RoleBindings("default").Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{Kind: kind, Name: name}, Subjects: []rbacv1.Subject{{Kind: "User", Name: "joe"}},
		}, metav1.CreateOptions{})
		return err
	}
	if err := bind("ClusterRole", "view"); err != nil {
		t.Errorf("bind view: %v", err)
	}
	wantError(t, "bind cluster-admin", bind("ClusterRole", "cluster-admin"), apierrors.IsForbidden,
		`rolebindings.rbac.authorization.k8s.io "cluster-admin" is forbidden: user "jane"`, `{APIGroups:["*"], Resources:["*"], Verbs:["*"]}`)
	wantError(t, "bind what is not there", bind("Role", "missing"), apierrors.IsNotFound, `"missing" not found`)

	// The verbs escalate and bind are for those who shall.
	extra := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "may"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"escalate"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"roles"}},
		{Verbs: []string{"bind"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"}, ResourceNames: []string{"cluster-admin"}},
	}}
	if _, err := s.client.RbacV1().Roles("default").Create(ctx, extra, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.client.RbacV1().RoleBindings("default").Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "may"},
		RoleRef: rbacv1.RoleRef{Kind: "Role", Name: "may"}, Subjects: []rbacv1.Subject{jane()}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := role("nodes", rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"nodes"}}); err != nil {
		t.Errorf("with escalate: %v", err)
	}
	if err := bind("ClusterRole", "cluster-admin"); err != nil {
		t.Errorf("with bind: %v", err)
	}
}

// TestAggregation: a role with the right label is in the role that selects it,
// through the chain view, edit, admin.
func TestAggregation(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	roles := s.client.RbacV1().ClusterRoles()
	crontabs := rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"stable.example.com"}, Resources: []string{"crontabs"}}
	has := func(name string) bool {
		r, err := roles.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(r.Rules, func(r rbacv1.PolicyRule) bool { return slices.Equal(r.Resources, crontabs.Resources) })
	}
	_, err := roles.Create(ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "crontabs", Labels: map[string]string{"rbac.authorization.k8s.io/aggregate-to-view": "true"}},
		Rules:      []rbacv1.PolicyRule{crontabs},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"view", "edit", "admin"} {
		if !has(name) {
			t.Errorf("%s lacks the rule", name)
		}
	}
	if err := roles.Delete(ctx, "crontabs", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"view", "edit", "admin"} {
		if has(name) {
			t.Errorf("%s still has the rule", name)
		}
	}
}

// TestPolicyIsComplete: nothing of the stored policy would be aggregated
// otherwise, and a role that was deleted is back after a restart.
func TestPolicyIsComplete(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	before := s.Revision()
	roles := s.client.RbacV1().ClusterRoles()
	if err := roles.Delete(ctx, "system:monitoring", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := s.Revision(); got != before+1 {
		t.Errorf("a write of a role wrote others, too: %d, was %d", got, before)
	}
	s.stop()
	again := startServer(t, s.dir)
	if _, err := again.client.RbacV1().ClusterRoles().Get(ctx, "system:monitoring", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}
	wantRoles, wantBindings := rbac.Policy()
	list, err := again.client.RbacV1().ClusterRoleBindings().List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != len(wantBindings) || len(wantRoles) < len(wantBindings) {
		t.Errorf("%d bindings of %d: %v", len(list.Items), len(wantBindings), err)
	}
}

// TestImpersonation: who has the verb impersonate acts as another, and has then
// the other's rights and no others.
func TestImpersonation(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	bindClusterRole(t, s, "view", rbacv1.Subject{Kind: "Group", Name: "devs"})
	impersonate := func(user string, groups []string, to rest.ImpersonationConfig) *kubernetes.Clientset {
		c := s.ClientConfig(user, groups...)
		c.Impersonate = to
		client, err := kubernetes.NewForConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	masters := []string{"system:masters"}
	if err := listPods(ctx, impersonate("admin", masters, rest.ImpersonationConfig{UserName: "jane", Groups: []string{"devs"}}), "default"); err != nil {
		t.Errorf("admin as a developer: %v", err)
	}
	wantError(t, "admin as jane", listPods(ctx, impersonate("admin", masters, rest.ImpersonationConfig{UserName: "jane"}), "default"), apierrors.IsForbidden, `User "jane" cannot list`)
	wantError(t, "jane as admin", listPods(ctx, impersonate("jane", nil, rest.ImpersonationConfig{UserName: "admin"}), "default"), apierrors.IsForbidden,
		`User "jane" cannot impersonate`)
}

func TestReviews(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	client := asJane(t, s, "devs")
	who, err := client.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := who.Status.UserInfo; got.Username != "jane" || !slices.Equal(got.Groups, []string{"devs", "system:authenticated"}) {
		t.Errorf("who am I: %+v", got)
	}
	_, err = client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{}, metav1.CreateOptions{})
	wantError(t, "ask about others", err, apierrors.IsForbidden, `cannot create resource "subjectaccessreviews" in API group "authorization.k8s.io" at the cluster scope`)
	_, err = s.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{}, metav1.CreateOptions{})
	wantError(t, "an empty question", err, apierrors.IsInvalid, "exactly one of nonResourceAttributes or resourceAttributes must be specified", "at least one of user or group must be specified")
	local := &authorizationv1.LocalSubjectAccessReview{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}, Spec: authorizationv1.SubjectAccessReviewSpec{
		User: "jane", ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Resource: "pods", Namespace: "other"},
	}}
	_, err = s.client.AuthorizationV1().LocalSubjectAccessReviews("default").Create(ctx, local, metav1.CreateOptions{})
	wantError(t, "another namespace", err, apierrors.IsInvalid, "spec.resourceAttributes.namespace: Invalid value: \"other\": must match metadata.namespace")

	rules, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(ctx, &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"}}, metav1.CreateOptions{})
	if err != nil || len(rules.Status.ResourceRules) == 0 || len(rules.Status.NonResourceRules) == 0 || rules.Status.Incomplete {
		t.Errorf("rules of everybody: %v %+v", err, rules)
	}

	issued, err := s.client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", tokenRequest(600), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	review := func(spec authenticationv1.TokenReviewSpec) authenticationv1.TokenReviewStatus {
		out, err := s.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{Spec: spec}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return out.Status
	}
	if got := review(authenticationv1.TokenReviewSpec{Token: issued.Status.Token}); !got.Authenticated || got.User.Username != "system:serviceaccount:default:default" || !slices.Equal(got.Audiences, []string{issuer}) {
		t.Errorf("a good token: %+v", got)
	}
	if got := review(authenticationv1.TokenReviewSpec{Token: issued.Status.Token, Audiences: []string{"vault"}}); got.Authenticated || got.Error == "" {
		t.Errorf("a token for another audience: %+v", got)
	}
	if got := review(authenticationv1.TokenReviewSpec{Token: "nonsense"}); got.Authenticated {
		t.Errorf("nonsense: %+v", got)
	}
}

// TestClientCertificateRequest: jane gets a certificate as in the tutorial, and
// it logs her in.
func TestClientCertificateRequest(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	request := func(name, group string) (*certificatesv1.CertificateSigningRequest, error) {
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: []string{group}}}, key)
		if err != nil {
			t.Fatal(err)
		}
		return s.client.CertificatesV1().CertificateSigningRequests().Create(ctx, &certificatesv1.CertificateSigningRequest{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
				SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
			},
		}, metav1.CreateOptions{})
	}
	_, err = request("root", "system:masters")
	wantError(t, "a certificate of an administrator", err, apierrors.IsForbidden, "use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed")
	csr, err := request("jane", "devs")
	if err != nil {
		t.Fatal(err)
	}
	if csr.Spec.Username == "" {
		t.Errorf("the requester is not noted: %+v", csr.Spec)
	}
	csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: "True", Reason: "Test"}}
	csr, err = s.client.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, "jane", csr, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		t.Fatal(err)
	}
	c := rest.AnonymousClientConfig(s.ClientConfig("x"))
	c.CertData, c.KeyData = csr.Status.Certificate, keyPEM
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	bindClusterRole(t, s, "view", rbacv1.Subject{Kind: "Group", Name: "devs"})
	if err := listPods(ctx, client, "default"); err != nil {
		t.Errorf("with the certificate: %v", err)
	}
}

// TestIPAddresses: the cluster IPs of the Services, listed and watched.
func TestIPAddresses(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	addresses := s.client.NetworkingV1().IPAddresses()
	w, err := addresses.Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	web, err := s.client.CoreV1().Services("default").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := addresses.Get(ctx, web.Spec.ClusterIP, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if p := got.Spec.ParentRef; p.Resource != "services" || p.Namespace != "default" || p.Name != "web" {
		t.Errorf("parent %+v", p)
	}
	if err := s.client.CoreV1().Services("default").Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	list, err := addresses.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("after the Service: %v %+v", err, list)
	}
	var events []string
	for range 2 {
		events = append(events, string((<-w.ResultChan()).Type))
	}
	if text := strings.Join(events, " "); text != "ADDED DELETED" {
		t.Errorf("events %s", text)
	}
	cidr, err := s.client.NetworkingV1().ServiceCIDRs().Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil || len(cidr.Spec.CIDRs) != 1 || len(cidr.Status.Conditions) != 1 {
		t.Errorf("the default range: %v %+v", err, cidr)
	}
}

const reconciled = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader, namespace: default}
rules: [{apiGroups: [""], resources: [pods], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: default, namespace: default}]
`

func TestKubectlAuth(t *testing.T) {
	for _, path := range kubectls(t) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			s := startServer(t, "")
			makeNamespace(t, s, "default")
			k := newKubectl(t, s, path)
			const account = "--as=system:serviceaccount:default:default"
			k.want(true, `Username +kubernetes-admin\n.*system:masters`, "", "auth", "whoami")
			k.want(true, `^yes`, "", "auth", "can-i", "create", "nodes")
			k.want(false, `^no\n`, "", "auth", "can-i", "list", "pods", account)
			k.want(true, `role.rbac.authorization.k8s.io/reader reconciled\n.*rolebinding.rbac.authorization.k8s.io/reader reconciled`, reconciled, "auth", "reconcile", "-f", "-")
			k.want(true, `^yes`, "", "auth", "can-i", "list", "pods", account)
			k.want(true, `pods +\[\] +\[\] +\[get list\]`, "", "auth", "can-i", "--list", account)
			k.want(false, `Error from server \(Forbidden\): secrets is forbidden: User "system:serviceaccount:default:default" cannot list resource "secrets" in API group "" in the namespace "default"`, "", "get", "secrets", account)
			k.want(true, `cluster-admin +\S+Z\n`, "", "get", "clusterroles")
			k.want(true, `reader +Role/reader +\S+ +default/default`, "", "get", "rolebindings", "-o", "wide")
			k.want(true, `^kubernetes +10\.96\.0\.0/12`, "", "get", "servicecidrs", "--no-headers")
			k.want(true, `^role.rbac.authorization.k8s.io/r created`, "", "create", "role", "r", "--verb=get", "--resource=pods")
			k.want(true, `Name: +reader\n.*Role:\n +Kind: +Role\n`, "", "describe", "rolebinding", "reader")
			k.want(true, `KIND: +NetworkPolicy`, "", "explain", "networkpolicy.spec")
		})
	}
}
