// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// mutatingWebhookConfigurationKind is stored only: no webhook is called.
func mutatingWebhookConfigurationKind() Kind {
	return Kind{
		Resource: "mutatingwebhookconfigurations", Singular: "mutatingwebhookconfiguration", Kind: "MutatingWebhookConfiguration",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.MutatingWebhookConfiguration], NewList: newObject[admissionv1.MutatingWebhookConfigurationList],
		Default: forObject(func(c *admissionv1.MutatingWebhookConfiguration) {
			for i := range c.Webhooks {
				asMutatingWebhook(&c.Webhooks[i]).setDefaults()
				setDefault(&c.Webhooks[i].ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
			}
		}),
		PrepareForCreate: onCreate(func(_ context.Context, c *admissionv1.MutatingWebhookConfiguration) { c.Generation = 1 }),
		PrepareForUpdate: onUpdate(func(_ context.Context, c, old *admissionv1.MutatingWebhookConfiguration) {
			if !equality.Semantic.DeepEqual(c.Webhooks, old.Webhooks) {
				c.Generation = old.Generation + 1
			}
		}),
		Validate: validates(func(c *admissionv1.MutatingWebhookConfiguration) field.ErrorList {
			var hooks []webhookFields
			var errs field.ErrorList
			for i := range c.Webhooks {
				h := &c.Webhooks[i]
				hooks = append(hooks, asMutatingWebhook(h))
				if p := h.ReinvocationPolicy; p != nil {
					errs = append(errs, oneOf(*p, field.NewPath("webhooks").Index(i).Child("reinvocationPolicy"),
						admissionv1.NeverReinvocationPolicy, admissionv1.IfNeededReinvocationPolicy)...)
				}
			}
			return append(validateWebhooks(hooks), errs...)
		}),
		Warnings: warns(func(c, old *admissionv1.MutatingWebhookConfiguration) []string {
			return noEffect(old == nil && len(c.Webhooks) > 0, "webhooks are stored and not called")
		}),
		Columns: webhookColumns(),
		Row: row(func(c *admissionv1.MutatingWebhookConfiguration) []any {
			return []any{c.Name, int64(len(c.Webhooks)), age(c.CreationTimestamp)}
		}),
	}
}

func asMutatingWebhook(h *admissionv1.MutatingWebhook) webhookFields {
	return webhookFields{
		h.Name, &h.ClientConfig, h.Rules, &h.FailurePolicy, &h.MatchPolicy, &h.NamespaceSelector, &h.ObjectSelector,
		h.SideEffects, &h.TimeoutSeconds, h.AdmissionReviewVersions, h.MatchConditions,
	}
}
