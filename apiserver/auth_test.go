// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kplab/kplab/internal/nettest"
)

func tokenRequest(seconds int64) *authenticationv1.TokenRequest {
	return &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
}

// withToken is a client that has only a bearer token.
func withToken(t *testing.T, s *testServer, token string) *kubernetes.Clientset {
	t.Helper()
	c := rest.AnonymousClientConfig(s.ClientConfig("x"))
	c.BearerToken = token
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// TestAnonymous: four paths answer, everything else is forbidden to system:anonymous,
// and a token that is wrong is no way to be anonymous.
func TestAnonymous(t *testing.T) {
	s := startServer(t, "")
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.ServingAuthority())
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	defer transport.CloseIdleConnections()
	get := func(path, token string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.listener.Addr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	for _, path := range []string{"/healthz", "/livez", "/readyz", "/version"} {
		if code, body := get(path, ""); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	for _, path := range []string{"/api", "/apis", "/api/v1/pods", "/openapi/v3", "/metrics", "/"} {
		code, body := get(path, "")
		var status metav1.Status
		if err := json.Unmarshal([]byte(body), &status); err != nil || code != http.StatusForbidden || status.Kind != "Status" || status.Reason != metav1.StatusReasonForbidden || !strings.Contains(status.Message, `User "system:anonymous" cannot`) {
			t.Errorf("%s: %d %s", path, code, body)
		}
		code, body = get(path, "wrong")
		if err := json.Unmarshal([]byte(body), &status); err != nil || code != http.StatusUnauthorized || status.Reason != metav1.StatusReasonUnauthorized {
			t.Errorf("%s with a wrong token: %d %s", path, code, body)
		}
	}
	if _, body := get("/version", ""); !strings.Contains(body, `"gitVersion": "v1.37.2+kplab.0.0.1-test"`) || !strings.Contains(body, `"minor": "37"`) {
		t.Errorf("version: %s", body)
	}
	if _, body := get("/readyz?verbose", ""); !strings.Contains(body, "[+]ping ok") {
		t.Errorf("readyz: %s", body)
	}
}

func TestServiceAccountTokens(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	bindClusterRole(t, s, "view", rbacv1.Subject{Kind: "ServiceAccount", Name: "default"})
	accounts := s.client.CoreV1().ServiceAccounts("default")
	issued, err := accounts.CreateToken(ctx, "default", tokenRequest(600), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	token := issued.Status.Token
	if _, err := withToken(t, s, token).CoreV1().Pods("default").List(ctx, metav1.ListOptions{}); err != nil {
		t.Errorf("list with a token: %v", err)
	}
	_, err = accounts.CreateToken(ctx, "default", tokenRequest(60), metav1.CreateOptions{})
	wantError(t, "a minute", err, apierrors.IsInvalid, "may not specify a duration less than 10 minutes")
	_, err = accounts.CreateToken(ctx, "nobody", tokenRequest(600), metav1.CreateOptions{})
	wantError(t, "unknown account", err, apierrors.IsNotFound, `serviceaccounts "nobody" not found`)

	list := func(token string) error {
		_, err := withToken(t, s, token).CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		return err
	}
	other := tokenRequest(600)
	other.Spec.Audiences = []string{"vault"}
	foreign, err := accounts.CreateToken(ctx, "default", other, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantError(t, "another audience", list(foreign.Status.Token), apierrors.IsUnauthorized)
	wantError(t, "a changed signature", list(token[:len(token)-4]+"AAAA"), apierrors.IsUnauthorized)
	wantError(t, "no token at all", list("nonsense"), apierrors.IsUnauthorized)

	// A token bound to a pod ends with the pod.
	pod, err := s.client.CoreV1().Pods("default").Create(ctx, testPod("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	bound := tokenRequest(600)
	bound.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "a", UID: pod.UID}
	podToken, err := accounts.CreateToken(ctx, "default", bound, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := list(podToken.Status.Token); err != nil {
		t.Errorf("a pod's token: %v", err)
	}
	if err := s.client.CoreV1().Pods("default").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, waitTime, "the token of a deleted pod to be refused", func() error { return refused(list(podToken.Status.Token)) })

	// One of an account ends with the account, also when it is made anew.
	if err := accounts.Delete(ctx, "default", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := accounts.Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	nettest.Eventually(t, waitTime, "the token of an earlier account to be refused", func() error { return refused(list(token)) })
}

// TestRestart stops a server and starts another on the same state: objects,
// certificates, kubeconfig and tokens live on.
func TestRestart(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	pod, err := s.client.CoreV1().Pods("default").Create(ctx, testPod("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	bindClusterRole(t, s, "view", rbacv1.Subject{Kind: "ServiceAccount", Name: "default"})
	issued, err := s.client.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", tokenRequest(600), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	newest := s.NewestRevisions()
	if newest["pods"] == 0 || newest["nodes"] != 0 {
		t.Errorf("newest revisions: %v", newest)
	}
	before := s.ServingAuthority()
	s.stop()

	again := startServer(t, s.dir)
	if string(again.ServingAuthority()) != string(before) {
		t.Error("the authority has changed")
	}
	got, err := again.client.CoreV1().Pods("default").Get(ctx, "a", metav1.GetOptions{})
	if err != nil || got.UID != pod.UID || got.ResourceVersion != pod.ResourceVersion {
		t.Errorf("the pod after a restart: %v %+v", err, got)
	}
	if got := again.NewestRevisions()["pods"]; got != newest["pods"] {
		t.Errorf("newest revision of pods: %d, was %d", got, newest["pods"])
	}
	if _, err := withToken(t, again, issued.Status.Token).CoreV1().Pods("default").List(ctx, metav1.ListOptions{}); err != nil {
		t.Errorf("a token from before: %v", err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", s.kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Host = "https://" + again.listener.Addr().String()
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
		t.Errorf("the kubeconfig from before: %v", err)
	}
}

func TestCertificateFilesArePrivateAndFollowTheNames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	first, err := openPKI(dir, []string{"localhost"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %o", f.Name(), info.Mode().Perm())
		}
	}
	same, err := openPKI(dir, []string{"localhost"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if string(same.server.cert) != string(first.server.cert) {
		t.Error("the serving certificate was made anew for the same names")
	}
	other, err := openPKI(dir, []string{"localhost", "api.lab"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if string(other.server.cert) == string(first.server.cert) || string(other.serving.pem) != string(first.serving.pem) {
		t.Error("new names want a new certificate from the same authority")
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openPKI(dir, []string{"localhost"}, nil); err == nil || !strings.Contains(err.Error(), "delete "+dir) {
		t.Errorf("a broken authority: %v", err)
	}
}
