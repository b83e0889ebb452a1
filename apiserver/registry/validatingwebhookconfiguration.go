// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/util/webhook"
)

const (
	webhookPort    = 443
	webhookSeconds = 10
	// maxWebhookSeconds is the longest that a webhook may be waited for.
	maxWebhookSeconds = 30
)

// validatingWebhookConfigurationKind is stored only: no webhook is called.
func validatingWebhookConfigurationKind() Kind {
	return Kind{
		Resource: "validatingwebhookconfigurations", Singular: "validatingwebhookconfiguration", Kind: "ValidatingWebhookConfiguration",
		GroupVersion: admissionv1.SchemeGroupVersion,
		Categories:   []string{"api-extensions"},
		New:          newObject[admissionv1.ValidatingWebhookConfiguration], NewList: newObject[admissionv1.ValidatingWebhookConfigurationList],
		Default: forObject(func(c *admissionv1.ValidatingWebhookConfiguration) {
			for i := range c.Webhooks {
				asWebhook(&c.Webhooks[i]).setDefaults()
			}
		}),
		PrepareForCreate: onCreate(func(_ context.Context, c *admissionv1.ValidatingWebhookConfiguration) { c.Generation = 1 }),
		PrepareForUpdate: onUpdate(func(_ context.Context, c, old *admissionv1.ValidatingWebhookConfiguration) {
			if !equality.Semantic.DeepEqual(c.Webhooks, old.Webhooks) {
				c.Generation = old.Generation + 1
			}
		}),
		Validate: validates(func(c *admissionv1.ValidatingWebhookConfiguration) field.ErrorList {
			var hooks []webhookFields
			for i := range c.Webhooks {
				hooks = append(hooks, asWebhook(&c.Webhooks[i]))
			}
			return validateWebhooks(hooks)
		}),
		Warnings: warns(func(c, old *admissionv1.ValidatingWebhookConfiguration) []string {
			return noEffect(old == nil && len(c.Webhooks) > 0, "webhooks are stored and not called")
		}),
		Columns: webhookColumns(),
		Row: row(func(c *admissionv1.ValidatingWebhookConfiguration) []any {
			return []any{c.Name, int64(len(c.Webhooks)), age(c.CreationTimestamp)}
		}),
	}
}

// noEffect is the warning for an object that a real cluster would act upon.
func noEffect(applies bool, why string) []string {
	if !applies {
		return nil
	}
	return []string{"kplab: " + why}
}

func webhookColumns() []metav1.TableColumnDefinition {
	return []metav1.TableColumnDefinition{
		nameColumn,
		column("Webhooks", "integer", "How many webhooks it has."),
		ageColumn,
	}
}

// webhookFields are the fields that both kinds of webhooks have, by reference.
type webhookFields struct {
	name              string
	client            *admissionv1.WebhookClientConfig
	rules             []admissionv1.RuleWithOperations
	failure           **admissionv1.FailurePolicyType
	match             **admissionv1.MatchPolicyType
	namespace, object **metav1.LabelSelector
	sideEffects       *admissionv1.SideEffectClass
	timeout           **int32
	versions          []string
	conditions        []admissionv1.MatchCondition
}

func asWebhook(h *admissionv1.ValidatingWebhook) webhookFields {
	return webhookFields{
		h.Name, &h.ClientConfig, h.Rules, &h.FailurePolicy, &h.MatchPolicy, &h.NamespaceSelector, &h.ObjectSelector,
		h.SideEffects, &h.TimeoutSeconds, h.AdmissionReviewVersions, h.MatchConditions,
	}
}

func (h webhookFields) setDefaults() {
	setDefault(h.failure, admissionv1.Fail)
	setDefault(h.match, admissionv1.Equivalent)
	setDefault(h.namespace, metav1.LabelSelector{})
	setDefault(h.object, metav1.LabelSelector{})
	setDefault(h.timeout, webhookSeconds)
	if s := h.client.Service; s != nil {
		setDefault(&s.Port, webhookPort)
	}
	for i := range h.rules {
		setDefault(&h.rules[i].Scope, admissionv1.AllScopes)
	}
}

func validateWebhooks(hooks []webhookFields) field.ErrorList {
	var errs field.ErrorList
	names := map[string]bool{}
	for i, h := range hooks {
		path := field.NewPath("webhooks").Index(i)
		errs = append(errs, validateWebhook(h, path)...)
		if names[h.name] {
			errs = append(errs, field.Duplicate(path.Child("name"), h.name))
		}
		names[h.name] = h.name != ""
	}
	return errs
}

func validateWebhook(h webhookFields, path *field.Path) field.ErrorList {
	errs := utilvalidation.IsFullyQualifiedName(path.Child("name"), h.name)
	for i, r := range h.rules {
		errs = append(errs, validateAdmissionRule(r, path.Child("rules").Index(i))...)
	}
	if p := *h.failure; p != nil {
		errs = append(errs, oneOf(*p, path.Child("failurePolicy"), admissionv1.Fail, admissionv1.Ignore)...)
	}
	if p := *h.match; p != nil {
		errs = append(errs, oneOf(*p, path.Child("matchPolicy"), admissionv1.Equivalent, admissionv1.Exact)...)
	}
	if h.sideEffects == nil {
		errs = append(errs, field.Required(path.Child("sideEffects"), "must specify one of None, NoneOnDryRun"))
	} else {
		errs = append(errs, oneOf(*h.sideEffects, path.Child("sideEffects"), admissionv1.SideEffectClassNone, admissionv1.SideEffectClassNoneOnDryRun)...)
	}
	if t := *h.timeout; t != nil && (*t < 1 || *t > maxWebhookSeconds) {
		errs = append(errs, field.Invalid(path.Child("timeoutSeconds"), *t, "the timeout value must be between 1 and 30 seconds"))
	}
	if s := *h.namespace; s != nil {
		errs = append(errs, validateSelector(s, path.Child("namespaceSelector"))...)
	}
	if s := *h.object; s != nil {
		errs = append(errs, validateSelector(s, path.Child("objectSelector"))...)
	}
	errs = append(errs, validateWebhookClient(h.client, path.Child("clientConfig"))...)
	errs = append(errs, validateMatchConditions(h.conditions, path.Child("matchConditions"))...)
	return append(errs, validateReviewVersions(h.versions, path.Child("admissionReviewVersions"))...)
}

func validateWebhookClient(c *admissionv1.WebhookClientConfig, path *field.Path) field.ErrorList {
	switch {
	case (c.URL == nil) == (c.Service == nil):
		return field.ErrorList{field.Required(path, "exactly one of url or service is required")}
	case c.URL != nil:
		return webhook.ValidateWebhookURL(path.Child("url"), *c.URL, true)
	}
	port := int32(webhookPort)
	if c.Service.Port != nil {
		port = *c.Service.Port
	}
	return webhook.ValidateWebhookService(path.Child("service"), c.Service.Namespace, c.Service.Name, c.Service.Path, port)
}

func validateReviewVersions(versions []string, path *field.Path) field.ErrorList {
	known := []string{"v1", "v1beta1"}
	if len(versions) == 0 {
		return field.ErrorList{field.Required(path, "must specify one of "+strings.Join(known, ", "))}
	}
	var errs field.ErrorList
	accepted := false
	for i, v := range versions {
		if slices.Contains(versions[:i], v) {
			errs = append(errs, field.Invalid(path.Index(i), v, "duplicate version"))
			continue
		}
		errs = append(errs, invalidIf(path.Index(i), v, utilvalidation.IsDNS1035Label(v))...)
		accepted = accepted || slices.Contains(known, v)
	}
	if !accepted {
		errs = append(errs, field.Invalid(path, versions, "must include at least one of "+strings.Join(known, ", ")))
	}
	return errs
}

func validateAdmissionRule(r admissionv1.RuleWithOperations, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	operations := path.Child("operations")
	if len(r.Operations) == 0 {
		errs = append(errs, field.Required(operations, ""))
	}
	if len(r.Operations) > 1 && slices.Contains(r.Operations, admissionv1.OperationAll) {
		errs = append(errs, field.Invalid(operations, r.Operations, "if '*' is present, must not specify other operations"))
	}
	for i, o := range r.Operations {
		errs = append(errs, oneOf(o, operations.Index(i), admissionv1.OperationAll, admissionv1.Create, admissionv1.Update, admissionv1.Delete, admissionv1.Connect)...)
	}
	errs = append(errs, validateRulePart(r.APIGroups, path.Child("apiGroups"), "API groups", true)...)
	errs = append(errs, validateRulePart(r.APIVersions, path.Child("apiVersions"), "API versions", false)...)
	errs = append(errs, validateRuleResources(r.Resources, path.Child("resources"))...)
	if r.Scope != nil {
		errs = append(errs, oneOf(*r.Scope, path.Child("scope"), admissionv1.ClusterScope, admissionv1.NamespacedScope, admissionv1.AllScopes)...)
	}
	return errs
}

// validateRulePart checks a list whose star stands for everything.
func validateRulePart(values []string, path *field.Path, what string, mayBeEmpty bool) field.ErrorList {
	if len(values) == 0 {
		return field.ErrorList{field.Required(path, "")}
	}
	var errs field.ErrorList
	if len(values) > 1 && slices.Contains(values, "*") {
		errs = append(errs, field.Invalid(path, values, "if '*' is present, must not specify other "+what))
	}
	for i, v := range values {
		if v == "" && !mayBeEmpty {
			errs = append(errs, field.Required(path.Index(i), ""))
		}
	}
	return errs
}

func validateRuleResources(resources []string, path *field.Path) field.ErrorList {
	if len(resources) == 0 {
		return field.ErrorList{field.Required(path, "")}
	}
	var errs field.ErrorList
	plain := false
	for i, r := range resources {
		if r == "" {
			errs = append(errs, field.Required(path.Index(i), ""))
		}
		base, sub, isSub := strings.Cut(r, "/")
		plain = plain || (!isSub && r != "*")
		if isSub && sub != "*" && slices.Contains(resources[:i], base+"/*") {
			errs = append(errs, field.Invalid(path.Index(i), r, "if '"+base+"/*' is present, must not specify "+r))
		}
		if isSub && base != "*" && slices.Contains(resources[:i], "*/"+sub) {
			errs = append(errs, field.Invalid(path.Index(i), r, "if '*/"+sub+"' is present, must not specify "+r))
		}
	}
	if len(resources) > 1 && slices.Contains(resources, "*/*") {
		errs = append(errs, field.Invalid(path, resources, "if '*/*' is present, must not specify other resources"))
	}
	if plain && slices.Contains(resources, "*") {
		errs = append(errs, field.Invalid(path, resources, "if '*' is present, must not specify other resources without subresources"))
	}
	return errs
}

// maxMatchConditions is how many conditions one webhook or policy may have.
const maxMatchConditions = 64

// validateMatchConditions checks all but the expressions, which nothing here
// evaluates.
func validateMatchConditions(conditions []admissionv1.MatchCondition, path *field.Path) field.ErrorList {
	if n := len(conditions); n > maxMatchConditions {
		return field.ErrorList{field.TooMany(path, n, maxMatchConditions)}
	}
	var errs field.ErrorList
	names := map[string]bool{}
	for i, c := range conditions {
		path := path.Index(i)
		if strings.TrimSpace(c.Expression) == "" {
			errs = append(errs, field.Required(path.Child("expression"), ""))
		}
		if c.Name == "" {
			errs = append(errs, field.Required(path.Child("name"), ""))
			continue
		}
		errs = append(errs, invalidIf(path.Child("name"), c.Name, utilvalidation.IsQualifiedName(c.Name))...)
		if names[c.Name] {
			errs = append(errs, field.Duplicate(path.Child("name"), c.Name))
		}
		names[c.Name] = true
	}
	return errs
}
