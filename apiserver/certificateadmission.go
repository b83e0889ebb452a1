// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/kplab/kplab/apiserver/registry"
)

// certificateAdmission does what the plugins CertificateApproval, CertificateSigning
// and CertificateSubjectRestriction do upstream: a signer's requests are approved and
// signed only by who may do so for this signer, and nobody gets a certificate of the
// group that may do everything.
type certificateAdmission struct{ authorizer authorizer.Authorizer }

var _ admission.ValidationInterface = certificateAdmission{}

// Handles implements admission.Interface.
func (certificateAdmission) Handles(op admission.Operation) bool {
	return op == admission.Create || op == admission.Update
}

// Validate implements admission.ValidationInterface.
func (c certificateAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	csr, ok := a.GetObject().(*certificatesv1.CertificateSigningRequest)
	if !ok {
		return nil
	}
	signer := csr.Spec.SignerName
	switch {
	case a.GetOperation() == admission.Create && a.GetSubresource() == "":
		return restrictSubject(a, csr)
	case a.GetSubresource() == "approval" && !c.may(ctx, a.GetUserInfo(), "approve", signer):
		return admission.NewForbidden(a, fmt.Errorf("user not permitted to approve requests with signerName %q", signer))
	case a.GetSubresource() == "status" && !c.may(ctx, a.GetUserInfo(), "sign", signer):
		return admission.NewForbidden(a, fmt.Errorf("user not permitted to sign requests with signerName %q", signer))
	}
	return nil
}

func restrictSubject(a admission.Attributes, csr *certificatesv1.CertificateSigningRequest) error {
	if csr.Spec.SignerName != certificatesv1.KubeAPIServerClientSignerName {
		return nil
	}
	request, err := registry.ParseCSR(csr.Spec.Request)
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("failed to parse CSR: %w", err))
	}
	if slices.Contains(request.Subject.Organization, user.SystemPrivilegedGroup) {
		return admission.NewForbidden(a, fmt.Errorf("use of %s signer with %s group is not allowed", certificatesv1.KubeAPIServerClientSignerName, user.SystemPrivilegedGroup))
	}
	return nil
}

// may asks for a verb on a signer, or on all signers of its domain.
func (c certificateAdmission) may(ctx context.Context, u user.Info, verb, signer string) bool {
	domain, _, _ := strings.Cut(signer, "/")
	return slices.ContainsFunc([]string{signer, domain + "/*"}, func(name string) bool {
		decision, _, err := c.authorizer.Authorize(ctx, authorizer.AttributesRecord{
			User: u, Verb: verb, APIGroup: certificatesv1.GroupName, APIVersion: "*", Resource: "signers", Name: name, ResourceRequest: true,
		})
		return err == nil && decision == authorizer.DecisionAllow
	})
}
