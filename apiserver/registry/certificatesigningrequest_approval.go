// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// CertificateSigner signs the request of a client for a certificate that is good
// for life, or for less. It returns PEM.
type CertificateSigner func(csr *x509.CertificateRequest, life time.Duration) ([]byte, error)

// approvalStrategy changes nothing but the conditions. An approved request to
// the signer of client certificates is answered in the same write; upstream's
// signer does it a moment later. Other signers are nobody here.
type approvalStrategy struct {
	strategy
	sign CertificateSigner
}

func (s approvalStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	c, o := obj.(*certificatesv1.CertificateSigningRequest), old.(*certificatesv1.CertificateSigningRequest)
	conditions := c.Status.Conditions
	c.Spec = o.Spec
	c.Status = o.Status
	c.Status.Conditions = conditions
	stampConditions(c, o)
	if s.sign != nil && c.Spec.SignerName == certificatesv1.KubeAPIServerClientSignerName && len(c.Status.Certificate) == 0 &&
		hasCondition(c, certificatesv1.CertificateApproved) && !hasCondition(c, certificatesv1.CertificateFailed) {
		s.issue(c)
		stampConditions(c, o)
	}
}

// issue writes the certificate, or the condition that says why there is none.
func (s approvalStrategy) issue(c *certificatesv1.CertificateSigningRequest) {
	fail := func(reason string, err error) {
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue, Reason: reason, Message: err.Error(),
		})
	}
	csr, err := ParseCSR(c.Spec.Request)
	if err == nil {
		err = clientUsages(c.Spec.Usages)
	}
	if err != nil {
		fail("SignerValidationFailure", err)
		return
	}
	life := maxClientCertificate
	if v := c.Spec.ExpirationSeconds; v != nil {
		life = min(life, time.Duration(*v)*time.Second)
	}
	if c.Status.Certificate, err = s.sign(csr, life); err != nil {
		fail("SigningFailure", err)
	}
}

// maxClientCertificate is how long a certificate is good when nothing shorter
// was asked for.
const maxClientCertificate = 365 * 24 * time.Hour

// clientUsages wants the usages of a client certificate and no others.
func clientUsages(usages []certificatesv1.KeyUsage) error {
	allowed := []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth, certificatesv1.UsageDigitalSignature, certificatesv1.UsageKeyEncipherment}
	for _, u := range usages {
		if !slices.Contains(allowed, u) {
			return fmt.Errorf("usage %q is not allowed; the signer gives %q", u, allowed)
		}
	}
	if !slices.Contains(usages, certificatesv1.UsageClientAuth) {
		return fmt.Errorf("usage %q is required", certificatesv1.UsageClientAuth)
	}
	return nil
}

func (s approvalStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	c, o := obj.(*certificatesv1.CertificateSigningRequest), old.(*certificatesv1.CertificateSigningRequest)
	errs := append(s.validateMetaUpdate(obj, old), validateCSR(c)...)
	return append(errs, validateNoneRemoved(c, o)...)
}

func (s approvalStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}
