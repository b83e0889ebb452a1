// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	authunion "k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/x509"
	tokenunion "k8s.io/apiserver/pkg/authentication/token/union"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"github.com/kplab/kplab/apiserver/rbac"
	"github.com/kplab/kplab/apiserver/registry"
)

// auth is who a request is from, and whether it is allowed.
type auth struct {
	clientCA      dynamiccertificates.CAContentProvider
	authenticator authenticator.Request
	authorizer    *rbac.Authorizer
	// clusterRoleWritten fills in the roles that are made of others.
	clusterRoleWritten func(ctx context.Context)
	// lookup is set when the kinds are built.
	lookup func(resource string) *registry.Store
}

func (s *Server) newAuth(clientCA dynamiccertificates.CAContentProvider, signer *tokens) *auth {
	a := &auth{clientCA: clientCA, authenticator: authenticatorFor(clientCA, s.local, signer)}
	a.authorizer = rbac.New(rbac.Source{
		Lookup: func(resource string) *registry.Store { return a.lookup(resource) },
		Newest: func(resource string) uint64 { return s.newestRevision(rbacv1.GroupName, resource) },
	})
	a.clusterRoleWritten = func(ctx context.Context) {
		// The next write of a role, or the next start, tries again.
		if err := a.authorizer.Aggregate(ctx); err != nil {
			s.cfg.Log.Error("aggregated cluster roles are not up to date", "err", err)
		}
	}
	return a
}

// authenticatorFor tries the client certificate, then the bearer token. Who shows
// neither is system:anonymous, whom the bootstrap roles let see how the server is, and
// nothing else (403); a certificate or token that is wrong is refused at once (401).
func authenticatorFor(clientCA dynamiccertificates.CAContentProvider, local *localTokens, signer *tokens) authenticator.Request {
	known := group.NewAuthenticatedGroupAdder(authunion.New(
		x509.NewDynamic(clientCA.VerifyOptions, x509.CommonNameUserConversion),
		bearertoken.New(tokenunion.New(local, signer)),
	))
	return authunion.NewFailOnError(known, anonymous.NewAuthenticator(nil))
}
