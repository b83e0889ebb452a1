// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// clusterTrustBundleKind is a set of trusted certificates. No volume projects it yet.
func clusterTrustBundleKind() Kind {
	return Kind{
		Resource: "clustertrustbundles", Singular: "clustertrustbundle", Kind: "ClusterTrustBundle",
		GroupVersion: certificatesv1.SchemeGroupVersion,
		New:          newObject[certificatesv1.ClusterTrustBundle], NewList: newObject[certificatesv1.ClusterTrustBundleList],
		// A name may have its signer before a colon; validation says which.
		Name:     func(name string, prefix bool) []string { return nil },
		Validate: validates(validateTrustBundle),
		ValidateUpdate: validatesUpdate(func(b, old *certificatesv1.ClusterTrustBundle) field.ErrorList {
			return apivalidation.ValidateImmutableField(b.Spec.SignerName, old.Spec.SignerName, field.NewPath("spec", "signerName"))
		}),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("SignerName", "string", "The signer whose certificates these are."),
		},
		Row: row(func(b *certificatesv1.ClusterTrustBundle) []any {
			if b.Spec.SignerName == "" {
				return []any{b.Name, "<none>"}
			}
			return []any{b.Name, b.Spec.SignerName}
		}),
		FieldLabels: []string{"spec.signerName"},
		Fields: func(obj runtime.Object) fields.Set {
			return fields.Set{"spec.signerName": obj.(*certificatesv1.ClusterTrustBundle).Spec.SignerName}
		},
	}
}

func validateTrustBundle(b *certificatesv1.ClusterTrustBundle) field.ErrorList {
	name, signer := field.NewPath("metadata", "name"), b.Spec.SignerName
	var errs field.ErrorList
	rest := b.Name
	if signer == "" {
		if strings.Contains(b.Name, ":") {
			errs = append(errs, field.Invalid(name, b.Name, "ClusterTrustBundle without signer name must not have \":\" in its name"))
		}
	} else {
		prefix := strings.ReplaceAll(signer, "/", ":") + ":"
		var ok bool
		if rest, ok = strings.CutPrefix(b.Name, prefix); !ok {
			errs = append(errs, field.Invalid(name, b.Name, "ClusterTrustBundle for signerName "+signer+" must be named with prefix "+prefix))
		}
	}
	if len(errs) == 0 {
		errs = append(errs, invalidIf(name, b.Name, apivalidation.NameIsDNSSubdomain(rest, false))...)
	}
	return append(errs, validateTrustPEM(b.Spec.TrustBundle, field.NewPath("spec", "trustBundle"))...)
}

// validateTrustPEM checks that text holds certificates and nothing else, each once.
func validateTrustPEM(text string, path *field.Path) field.ErrorList {
	invalid := func(why string) field.ErrorList {
		return field.ErrorList{field.Invalid(path, "<value omitted>", why)}
	}
	rest, seen := []byte(text), map[string]bool{}
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		switch {
		case block.Type != "CERTIFICATE":
			return invalid("PEM blocks must be of type CERTIFICATE, not " + block.Type)
		case len(block.Headers) != 0:
			return invalid("PEM blocks must not have headers")
		case seen[string(block.Bytes)]:
			return invalid("each certificate may be there once")
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return invalid("a block is no certificate: " + err.Error())
		}
		seen[string(block.Bytes)] = true
	}
	switch {
	case len(seen) == 0:
		return invalid("at least one trust anchor must be provided")
	case len(bytes.TrimSpace(rest)) != 0:
		return invalid("non-PEM data at the end")
	}
	return nil
}
