// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/json"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func secretKind() Kind {
	return Kind{
		Resource: "secrets", Singular: "secret", Kind: "Secret",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache: true,
		New:        newObject[corev1.Secret], NewList: newObject[corev1.SecretList],
		Default:        forObject(defaultSecret),
		Validate:       validates(validateSecret),
		ValidateUpdate: validatesUpdate(validateSecretUpdate),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Type", "string", "What the secret is for."),
			column("Data", "string", "Number of keys."),
			ageColumn,
		},
		Row: row(func(s *corev1.Secret) []any {
			return []any{s.Name, string(s.Type), int64(len(s.Data)), age(s.CreationTimestamp)}
		}),
		FieldLabels: []string{"type"},
		Fields:      fieldsOf(func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} }),
	}
}

// defaultSecret turns stringData, which can only be written, into data.
func defaultSecret(s *corev1.Secret) {
	setIfZero(&s.Type, corev1.SecretTypeOpaque)
	if len(s.StringData) == 0 {
		return
	}
	if s.Data == nil {
		s.Data = map[string][]byte{}
	}
	for key, value := range s.StringData {
		s.Data[key] = []byte(value)
	}
	s.StringData = nil
}

func validateSecret(s *corev1.Secret) field.ErrorList {
	data := field.NewPath("data")
	var errs field.ErrorList
	size := 0
	for key, value := range s.Data {
		errs = append(errs, validateDataKey(data.Key(key), key)...)
		size += len(value)
	}
	if size > maxDataSize {
		errs = append(errs, field.TooLong(data, "", maxDataSize))
	}
	need := func(keys ...string) {
		for _, key := range keys {
			if _, ok := s.Data[key]; !ok {
				errs = append(errs, field.Required(data.Key(key), ""))
			}
		}
	}
	switch s.Type {
	case corev1.SecretTypeServiceAccountToken:
		if s.Annotations[corev1.ServiceAccountNameKey] == "" {
			errs = append(errs, field.Required(field.NewPath("metadata", "annotations").Key(corev1.ServiceAccountNameKey), ""))
		}
	case corev1.SecretTypeDockercfg:
		errs = append(errs, needJSON(s, corev1.DockerConfigKey)...)
	case corev1.SecretTypeDockerConfigJson:
		errs = append(errs, needJSON(s, corev1.DockerConfigJsonKey)...)
	case corev1.SecretTypeBasicAuth:
		if s.Data[corev1.BasicAuthUsernameKey] == nil && s.Data[corev1.BasicAuthPasswordKey] == nil {
			need(corev1.BasicAuthUsernameKey, corev1.BasicAuthPasswordKey)
		}
	case corev1.SecretTypeSSHAuth:
		if len(s.Data[corev1.SSHAuthPrivateKey]) == 0 {
			errs = append(errs, field.Required(data.Key(corev1.SSHAuthPrivateKey), ""))
		}
	case corev1.SecretTypeTLS:
		need(corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	return errs
}

func needJSON(s *corev1.Secret, key string) field.ErrorList {
	p := field.NewPath("data").Key(key)
	value, ok := s.Data[key]
	switch {
	case !ok:
		return field.ErrorList{field.Required(p, "")}
	case !json.Valid(value):
		return field.ErrorList{field.Invalid(p, "<secret contents redacted>", "invalid character in JSON")}
	}
	return nil
}

func validateSecretUpdate(s, old *corev1.Secret) field.ErrorList {
	var errs field.ErrorList
	if s.Type != old.Type {
		errs = append(errs, field.Invalid(field.NewPath("type"), s.Type, "field is immutable"))
	}
	if old.Immutable == nil || !*old.Immutable {
		return errs
	}
	const frozen = "field is immutable when `immutable` is set"
	if s.Immutable == nil || !*s.Immutable {
		errs = append(errs, field.Forbidden(field.NewPath("immutable"), frozen))
	}
	if !equality.Semantic.DeepEqual(s.Data, old.Data) {
		errs = append(errs, field.Forbidden(field.NewPath("data"), frozen))
	}
	return errs
}
