// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxDataSize is how many bytes a ConfigMap or a Secret may hold (1 MiB).
const maxDataSize = corev1.MaxSecretSize

func configMapKind() Kind {
	return Kind{
		Resource: "configmaps", Singular: "configmap", Kind: "ConfigMap",
		GroupVersion: corev1.SchemeGroupVersion, Namespaced: true,
		WatchCache:     true,
		ShortNames:     []string{"cm"},
		New:            newObject[corev1.ConfigMap],
		NewList:        newObject[corev1.ConfigMapList],
		Validate:       validates(validateConfigMap),
		ValidateUpdate: validatesUpdate(validateConfigMapUpdate),
		Columns: []metav1.TableColumnDefinition{
			nameColumn,
			column("Data", "string", "Number of keys."),
			ageColumn,
		},
		Row: row(func(c *corev1.ConfigMap) []any {
			return []any{c.Name, int64(len(c.Data) + len(c.BinaryData)), age(c.CreationTimestamp)}
		}),
	}
}

func validateConfigMap(c *corev1.ConfigMap) field.ErrorList {
	var errs field.ErrorList
	size := 0
	for key, value := range c.Data {
		errs = append(errs, validateDataKey(field.NewPath("data").Key(key), key)...)
		if _, twice := c.BinaryData[key]; twice {
			errs = append(errs, field.Invalid(field.NewPath("data").Key(key), key, "duplicate of key present in binaryData"))
		}
		size += len(value)
	}
	for key, value := range c.BinaryData {
		errs = append(errs, validateDataKey(field.NewPath("binaryData").Key(key), key)...)
		size += len(value)
	}
	if size > maxDataSize {
		errs = append(errs, field.TooLong(field.NewPath(""), "", maxDataSize))
	}
	return errs
}

func validateConfigMapUpdate(c, old *corev1.ConfigMap) field.ErrorList {
	if old.Immutable == nil || !*old.Immutable {
		return nil
	}
	var errs field.ErrorList
	const frozen = "field is immutable when `immutable` is set"
	if c.Immutable == nil || !*c.Immutable {
		errs = append(errs, field.Forbidden(field.NewPath("immutable"), frozen))
	}
	if !equality.Semantic.DeepEqual(c.Data, old.Data) {
		errs = append(errs, field.Forbidden(field.NewPath("data"), frozen))
	}
	if !equality.Semantic.DeepEqual(c.BinaryData, old.BinaryData) {
		errs = append(errs, field.Forbidden(field.NewPath("binaryData"), frozen))
	}
	return errs
}

// validateDataKey checks a key of a ConfigMap or a Secret, which becomes a file
// name when it is mounted.
func validateDataKey(path *field.Path, key string) field.ErrorList {
	var errs field.ErrorList
	for _, msg := range validation.IsConfigMapKey(key) {
		errs = append(errs, field.Invalid(path, key, fmt.Sprint(msg)))
	}
	return errs
}
