// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
)

func certificateSigningRequestKind() Kind {
	k := Kind{
		Resource: "certificatesigningrequests", Singular: "certificatesigningrequest", Kind: "CertificateSigningRequest",
		GroupVersion: certificatesv1.SchemeGroupVersion,
		ShortNames:   []string{"csr"},
		New:          newObject[certificatesv1.CertificateSigningRequest], NewList: newObject[certificatesv1.CertificateSigningRequestList],
		Name:             func(string, bool) []string { return nil },
		PrepareForCreate: onCreate(takeRequester),
		PrepareForUpdate: onUpdate(func(_ context.Context, c, old *certificatesv1.CertificateSigningRequest) {
			c.Spec = old.Spec
		}),
		Validate: validates(validateCSR),
		Status: &StatusStrategy{
			Prepare: onUpdate(func(_ context.Context, c, old *certificatesv1.CertificateSigningRequest) { stampConditions(c, old) }),
			Validate: validatesUpdate(func(c, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
				errs := append(validateCSR(c), validateKeptConditions(c, old)...)
				return append(errs, validateNewCertificate(c, old)...)
			}),
		},
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			ageColumn,
			column("SignerName", "string", "Who is asked to sign."),
			column("Requestor", "string", "Who asked."),
			column("RequestedDuration", "string", "How long the certificate shall be good."),
			column("Condition", "string", "Whether the request was approved, and the certificate issued."),
		},
		Row:         row(csrRow),
		FieldLabels: []string{"spec.signerName"},
		Fields: fieldsOf(func(c *certificatesv1.CertificateSigningRequest) fields.Set {
			return fields.Set{"spec.signerName": c.Spec.SignerName}
		}),
	}
	k.Subresources = func(store *Store, deps Deps) map[string]rest.Storage {
		s := *store
		if base, ok := store.UpdateStrategy.(strategy); ok {
			s.UpdateStrategy = approvalStrategy{base, deps.Signer}
		}
		s.ResetFieldsStrategy = nil
		return map[string]rest.Storage{"approval": approvalREST{&s}}
	}
	return k
}

// takeRequester notes who asked, whatever the request says.
func takeRequester(ctx context.Context, c *certificatesv1.CertificateSigningRequest) {
	c.Spec.Username, c.Spec.UID, c.Spec.Groups, c.Spec.Extra = "", "", nil, nil
	u, ok := request.UserFrom(ctx)
	if !ok {
		return
	}
	c.Spec.Username, c.Spec.UID, c.Spec.Groups = u.GetName(), u.GetUID(), u.GetGroups()
	for k, v := range u.GetExtra() {
		if c.Spec.Extra == nil {
			c.Spec.Extra = map[string]certificatesv1.ExtraValue{}
		}
		c.Spec.Extra[k] = v
	}
}

func csrRow(c *certificatesv1.CertificateSigningRequest) []any {
	wanted := "<none>"
	if s := c.Spec.ExpirationSeconds; s != nil {
		wanted = duration.HumanDuration(time.Duration(*s) * time.Second)
	}
	condition := "Pending"
	if hasCondition(c, certificatesv1.CertificateDenied) {
		condition = "Denied"
	} else if hasCondition(c, certificatesv1.CertificateApproved) {
		condition = "Approved"
	}
	if hasCondition(c, certificatesv1.CertificateFailed) {
		condition += ",Failed"
	}
	if len(c.Status.Certificate) > 0 {
		condition += ",Issued"
	}
	return []any{c.Name, age(c.CreationTimestamp), orNone(c.Spec.SignerName), c.Spec.Username, wanted, condition}
}

func csrConditions(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) []certificatesv1.CertificateSigningRequestCondition {
	var out []certificatesv1.CertificateSigningRequestCondition
	for _, have := range c.Status.Conditions {
		if have.Type == t {
			out = append(out, have)
		}
	}
	return out
}

func hasCondition(c *certificatesv1.CertificateSigningRequest, t certificatesv1.RequestConditionType) bool {
	return len(csrConditions(c, t)) > 0
}

// stampConditions fills in the times that a client left out.
func stampConditions(c, old *certificatesv1.CertificateSigningRequest) {
	now := metav1.Now()
	for i := range c.Status.Conditions {
		have := &c.Status.Conditions[i]
		if have.LastUpdateTime.IsZero() {
			have.LastUpdateTime = now
		}
		if !have.LastTransitionTime.IsZero() {
			continue
		}
		have.LastTransitionTime = now
		for _, was := range csrConditions(old, have.Type) {
			if was.Status == have.Status && !was.LastTransitionTime.IsZero() {
				have.LastTransitionTime = was.LastTransitionTime
			}
		}
	}
}

// ParseCSR reads the PKCS#10 request in an object and checks its signature.
func ParseCSR(data []byte) (*x509.CertificateRequest, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("PEM block type must be CERTIFICATE REQUEST")
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return csr, csr.CheckSignature()
}

// keyUsages are the values that spec.usages may have.
func keyUsages() []certificatesv1.KeyUsage {
	return []certificatesv1.KeyUsage{
		certificatesv1.UsageSigning, certificatesv1.UsageDigitalSignature, certificatesv1.UsageContentCommitment,
		certificatesv1.UsageKeyEncipherment, certificatesv1.UsageKeyAgreement, certificatesv1.UsageDataEncipherment,
		certificatesv1.UsageCertSign, certificatesv1.UsageCRLSign, certificatesv1.UsageEncipherOnly, certificatesv1.UsageDecipherOnly,
		certificatesv1.UsageAny, certificatesv1.UsageServerAuth, certificatesv1.UsageClientAuth, certificatesv1.UsageCodeSigning,
		certificatesv1.UsageEmailProtection, certificatesv1.UsageSMIME, certificatesv1.UsageIPsecEndSystem, certificatesv1.UsageIPsecTunnel,
		certificatesv1.UsageIPsecUser, certificatesv1.UsageTimestamping, certificatesv1.UsageOCSPSigning,
		certificatesv1.UsageMicrosoftSGC, certificatesv1.UsageNetscapeSGC,
	}
}

func validateCSR(c *certificatesv1.CertificateSigningRequest) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if _, err := ParseCSR(c.Spec.Request); err != nil {
		errs = append(errs, field.Invalid(spec.Child("request"), c.Spec.Request, err.Error()))
	}
	usages := spec.Child("usages")
	if len(c.Spec.Usages) == 0 {
		errs = append(errs, field.Required(usages, ""))
	}
	for i, u := range c.Spec.Usages {
		errs = append(errs, oneOf(u, usages.Index(i), keyUsages()...)...)
		if slices.Contains(c.Spec.Usages[:i], u) {
			errs = append(errs, field.Duplicate(usages.Index(i), u))
		}
	}
	if signer := spec.Child("signerName"); c.Spec.SignerName == "kubernetes.io/legacy-unknown" {
		errs = append(errs, field.Invalid(signer, c.Spec.SignerName, "the legacy signerName is not allowed via this API version"))
	} else {
		errs = append(errs, validateSignerName(signer, c.Spec.SignerName)...)
	}
	if s := c.Spec.ExpirationSeconds; s != nil && *s < minTokenSeconds {
		errs = append(errs, field.Invalid(spec.Child("expirationSeconds"), *s, "may not specify a duration less than 600 seconds (10 minutes)"))
	}
	return append(errs, validateCSRConditions(c.Status.Conditions, field.NewPath("status", "conditions"))...)
}

func validateCSRConditions(conditions []certificatesv1.CertificateSigningRequestCondition, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[certificatesv1.RequestConditionType]bool{}
	for i, c := range conditions {
		path := path.Index(i)
		if c.Type == "" {
			errs = append(errs, field.Required(path.Child("type"), ""))
		}
		states := []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown}
		switch c.Type {
		case certificatesv1.CertificateApproved, certificatesv1.CertificateDenied, certificatesv1.CertificateFailed:
			states = []corev1.ConditionStatus{corev1.ConditionTrue}
		}
		if c.Status == "" {
			errs = append(errs, field.Required(path.Child("status"), ""))
		} else {
			errs = append(errs, oneOf(c.Status, path.Child("status"), states...)...)
		}
		if (c.Type == certificatesv1.CertificateApproved && seen[certificatesv1.CertificateDenied]) ||
			(c.Type == certificatesv1.CertificateDenied && seen[certificatesv1.CertificateApproved]) {
			errs = append(errs, field.Invalid(path.Child("type"), c.Type, "Approved and Denied conditions are mutually exclusive"))
		}
		if seen[c.Type] {
			errs = append(errs, field.Duplicate(path.Child("type"), c.Type))
		}
		seen[c.Type] = true
	}
	return errs
}

// validateSignerName wants DOMAIN/NAME.
func validateSignerName(path *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	domain, rest, ok := strings.Cut(name, "/")
	if !ok || strings.Contains(rest, "/") {
		return field.ErrorList{field.Invalid(path, name, "must be a fully qualified domain and path of the form 'example.com/signer-name'")}
	}
	var errs field.ErrorList
	if strings.Count(domain, ".") == 0 {
		errs = append(errs, field.Invalid(path, domain, "should be a domain with at least two segments separated by dots"))
	}
	errs = append(errs, invalidIf(path, domain, utilvalidation.IsDNS1123Subdomain(domain))...)
	return append(errs, invalidIf(path, rest, utilvalidation.IsDNS1123Subdomain(rest))...)
}

// decided are the conditions that stay, and that only /approval sets.
func decided() []certificatesv1.RequestConditionType {
	return []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved, certificatesv1.CertificateDenied}
}

// validateKeptConditions refuses that an update of the status decides.
func validateKeptConditions(c, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
	path := field.NewPath("status", "conditions")
	errs := validateNoneRemoved(c, old)
	for _, t := range decided() {
		now, was := csrConditions(c, t), csrConditions(old, t)
		switch {
		case len(now) > len(was):
			errs = append(errs, field.Forbidden(path, `updates may not add a condition of type "`+string(t)+`"`))
		case len(now) == len(was) && !equality.Semantic.DeepEqual(now, was):
			errs = append(errs, field.Forbidden(path, `updates may not modify a condition of type "`+string(t)+`"`))
		}
	}
	return errs
}

func validateNoneRemoved(c, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
	var errs field.ErrorList
	for _, t := range append(decided(), certificatesv1.CertificateFailed) {
		if len(csrConditions(c, t)) < len(csrConditions(old, t)) {
			errs = append(errs, field.Forbidden(field.NewPath("status", "conditions"), `updates may not remove a condition of type "`+string(t)+`"`))
		}
	}
	return errs
}

// validateNewCertificate lets a signer write the certificate once.
func validateNewCertificate(c, old *certificatesv1.CertificateSigningRequest) field.ErrorList {
	path := field.NewPath("status", "certificate")
	if string(c.Status.Certificate) == string(old.Status.Certificate) {
		return nil
	}
	if len(old.Status.Certificate) > 0 {
		return field.ErrorList{field.Forbidden(path, "updates may not modify existing certificate content")}
	}
	if err := validatePEMCertificates(c.Status.Certificate); err != nil {
		return field.ErrorList{field.Invalid(path, "<certificate data>", err.Error())}
	}
	return nil
}

func validatePEMCertificates(data []byte) error {
	for found := false; ; found = true {
		block, rest := pem.Decode(data)
		switch {
		case block == nil && !found:
			return errors.New("must contain at least one CERTIFICATE PEM block")
		case block == nil:
			return nil
		case block.Type != "CERTIFICATE":
			return errors.New(`only CERTIFICATE PEM blocks are allowed, found "` + block.Type + `"`)
		case len(block.Headers) > 0:
			return errors.New("no PEM block headers are permitted")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return err
		}
		data = rest
	}
}

// approvalREST serves the subresource that approves and denies.
type approvalREST struct{ store *Store }

var _ rest.Patcher = approvalREST{}

func (approvalREST) New() runtime.Object { return &certificatesv1.CertificateSigningRequest{} }
func (approvalREST) Destroy()            {}

func (r approvalREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

func (r approvalREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, info, create, update, false, options)
}
