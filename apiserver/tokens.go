// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/kplab/kplab/apiserver/registry"
)

// issuer is who signs service account tokens, and their audience unless
// another was asked for: the name by which pods know the API.
const issuer = "https://kubernetes.default.svc.cluster.local"

// clockSkew is how far a token's times may be ahead of our clock.
const clockSkew = time.Minute

// claims is the payload of a service account token (RFC 7519, and the private
// claim kubernetes.io of KEP-1205).
type claims struct {
	Issuer     string        `json:"iss"`
	Subject    string        `json:"sub"`
	Audience   []string      `json:"aud"`
	Expires    int64         `json:"exp"`
	NotBefore  int64         `json:"nbf"`
	IssuedAt   int64         `json:"iat"`
	ID         string        `json:"jti"`
	Kubernetes privateClaims `json:"kubernetes.io"`
}

type privateClaims struct {
	Namespace      string    `json:"namespace"`
	ServiceAccount objectID  `json:"serviceaccount"`
	Pod            *objectID `json:"pod,omitempty"`
	Secret         *objectID `json:"secret,omitempty"`
	Node           *objectID `json:"node,omitempty"`
}

type objectID struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// tokens issues and checks service account tokens: JSON web tokens signed with
// ES256. A token is good while it has not expired and the objects that it is
// bound to exist with the same UID.
type tokens struct {
	key    *ecdsa.PrivateKey
	keyID  string
	lookup func(resource string) *registry.Store
}

func newTokens(key *ecdsa.PrivateKey) (*tokens, error) {
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("encode the token key: %w", err)
	}
	sum := sha256.Sum256(der)
	return &tokens{key: key, keyID: base64.RawURLEncoding.EncodeToString(sum[:])}, nil
}

// DefaultAudience implements registry.TokenIssuer.
func (t *tokens) DefaultAudience() string { return issuer }

// Issue implements registry.TokenIssuer.
func (t *tokens) Issue(_ context.Context, c registry.TokenClaims, ttl time.Duration) (string, time.Time, error) {
	now := time.Now()
	expires := now.Add(ttl)
	payload := claims{
		Issuer: issuer, Subject: serviceaccount.MakeUsername(c.Namespace, c.Name), Audience: c.Audiences,
		Expires: expires.Unix(), NotBefore: now.Unix(), IssuedAt: now.Unix(), ID: uuid.NewString(),
		Kubernetes: privateClaims{Namespace: c.Namespace, ServiceAccount: objectID{c.Name, c.UID}},
	}
	bind := func(name, uid string) *objectID {
		if name == "" {
			return nil
		}
		return &objectID{name, uid}
	}
	payload.Kubernetes.Pod = bind(c.PodName, c.PodUID)
	payload.Kubernetes.Secret = bind(c.SecretName, c.SecretUID)
	payload.Kubernetes.Node = bind(c.NodeName, c.NodeUID)

	head, err := json.Marshal(map[string]string{"alg": "ES256", "typ": "JWT", "kid": t.keyID})
	if err != nil {
		return "", time.Time{}, fmt.Errorf("encode a token's header: %w", err)
	}
	body, err := json.Marshal(payload)
	if err != nil {
		return "", time.Time{}, fmt.Errorf("encode a token: %w", err)
	}
	signed := base64.RawURLEncoding.EncodeToString(head) + "." + base64.RawURLEncoding.EncodeToString(body)
	sum := sha256.Sum256([]byte(signed))
	r, s, err := ecdsa.Sign(rand.Reader, t.key, sum[:])
	if err != nil {
		return "", time.Time{}, fmt.Errorf("sign a token: %w", err)
	}
	signature := make([]byte, 64)
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return signed + "." + base64.RawURLEncoding.EncodeToString(signature), expires, nil
}

// AuthenticateToken implements authenticator.Token.
func (t *tokens) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return nil, false, nil
	}
	c, err := t.verify(parts)
	if err != nil {
		return nil, false, err
	}
	audiences := authenticator.Audiences(c.Audience)
	want, ok := authenticator.AudiencesFrom(ctx)
	if !ok {
		want = authenticator.Audiences{issuer}
	}
	common := audiences.Intersect(want)
	if len(common) == 0 {
		return nil, false, fmt.Errorf("token audiences %q is invalid for the target audiences %q", c.Audience, want)
	}
	k := c.Kubernetes
	if err := t.bound(ctx, "serviceaccounts", k.Namespace, &k.ServiceAccount); err != nil {
		return nil, false, err
	}
	if err := t.bound(ctx, "pods", k.Namespace, k.Pod); err != nil {
		return nil, false, err
	}
	if err := t.bound(ctx, "secrets", k.Namespace, k.Secret); err != nil {
		return nil, false, err
	}
	info := serviceaccount.ServiceAccountInfo{
		Namespace: k.Namespace, Name: k.ServiceAccount.Name, UID: k.ServiceAccount.UID,
		CredentialID: "JTI=" + c.ID,
	}
	if k.Pod != nil {
		info.PodName, info.PodUID = k.Pod.Name, k.Pod.UID
	}
	if k.Node != nil {
		info.NodeName, info.NodeUID = k.Node.Name, k.Node.UID
	}
	return &authenticator.Response{User: info.UserInfo(), Audiences: common}, true, nil
}

// verify checks signature, issuer and times.
func (t *tokens) verify(parts []string) (claims, error) {
	var c claims
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	if err != nil || len(signature) != 64 {
		return c, errors.New("invalid bearer token: malformed signature")
	}
	sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
	r, s := new(big.Int).SetBytes(signature[:32]), new(big.Int).SetBytes(signature[32:])
	// The algorithm in the header is not asked: there is one key of one kind.
	if t.key.Curve != elliptic.P256() || !ecdsa.Verify(&t.key.PublicKey, sum[:], r, s) {
		return c, errors.New("invalid bearer token: wrong signature")
	}
	body, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return c, errors.New("invalid bearer token: malformed payload")
	}
	if err := json.Unmarshal(body, &c); err != nil {
		return c, fmt.Errorf("invalid bearer token: %w", err)
	}
	now := time.Now()
	switch {
	case c.Issuer != issuer:
		return c, fmt.Errorf("invalid bearer token: unknown issuer %q", c.Issuer)
	case now.After(time.Unix(c.Expires, 0)):
		return c, errors.New("service account token has expired")
	case now.Add(clockSkew).Before(time.Unix(c.NotBefore, 0)):
		return c, errors.New("service account token is not valid yet")
	}
	return c, nil
}

// bound checks that an object that a token is bound to is still the same one.
func (t *tokens) bound(ctx context.Context, resource, namespace string, id *objectID) error {
	if id == nil {
		return nil
	}
	obj, err := registry.Read[runtime.Object](ctx, t.lookup, resource, namespace, id.Name)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("service account token has been invalidated: %s %s/%s is gone", resource, namespace, id.Name)
	}
	if err != nil {
		return fmt.Errorf("check what a service account token is bound to: %w", err)
	}
	m, ok := obj.(metav1.Object)
	if !ok || string(m.GetUID()) != id.UID {
		return fmt.Errorf("service account token has been invalidated: %s %s/%s was made anew", resource, namespace, id.Name)
	}
	if pod, ok := obj.(*corev1.Pod); ok && pod.DeletionTimestamp != nil {
		// A terminating pod keeps its token until its grace period is over.
		if time.Since(pod.DeletionTimestamp.Time) > time.Minute {
			return fmt.Errorf("service account token has been invalidated: pod %s/%s was deleted", namespace, id.Name)
		}
	}
	return nil
}

// localTokens are the tokens of components in this process. They are random,
// live only in memory, and end with the process.
type localTokens struct {
	mu    sync.RWMutex
	users map[[sha256.Size]byte]user.Info
	// made gives the same token to the same user again.
	made map[string]string
}

func newLocalTokens() *localTokens {
	return &localTokens{users: map[[sha256.Size]byte]user.Info{}, made: map[string]string{}}
}

func (l *localTokens) tokenFor(name string, groups []string) string {
	key := name + "\x00" + strings.Join(slices.Sorted(slices.Values(groups)), "\x00")
	l.mu.Lock()
	defer l.mu.Unlock()
	if token, ok := l.made[key]; ok {
		return token
	}
	var secret [32]byte
	// crypto/rand.Read never fails.
	_, _ = rand.Read(secret[:])
	token := "local-" + hex.EncodeToString(secret[:])
	l.users[sha256.Sum256([]byte(token))] = &user.DefaultInfo{Name: name, Groups: groups}
	l.made[key] = token
	return token
}

// AuthenticateToken implements authenticator.Token. Looking up a hash gives
// nothing away by the time it takes.
func (l *localTokens) AuthenticateToken(_ context.Context, token string) (*authenticator.Response, bool, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	u, ok := l.users[sha256.Sum256([]byte(token))]
	if !ok {
		return nil, false, nil
	}
	return &authenticator.Response{User: u}, true, nil
}
