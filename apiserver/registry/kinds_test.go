// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/yaml"
)

// kindCase is the life of one object of a kind.
type kindCase struct {
	resource string
	manifest string
	// defaults are fields that the stored object has besides the manifest's.
	defaults map[string]string
	// cells are the object's row, all but the age.
	cells []any
	// change is a merge patch that must be taken; the object then has changed.
	change, changed string
	// refused are merge patches of the manifest, by what a client is told.
	refused []refusal
}

type refusal struct {
	patch string
	want  string
	// stored sends the patch to the stored object, not with a new one.
	stored bool
}

func kindCases() []kindCase {
	return slices.Concat(networkingCases(), rbacCases(), storageCases(), admissionCases())
}

func networkingCases() []kindCase {
	return []kindCase{
		{
			resource: "ingresses",
			manifest: `
metadata: {name: web, namespace: default}
spec:
  ingressClassName: nginx
  tls: [{hosts: [a.example]}]
  rules:
  - host: a.example
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}
`,
			defaults: map[string]string{"metadata.generation": "1"},
			cells:    []any{"web", "nginx", "a.example", "", "80, 443"},
			change:   `spec: {rules: [{host: b.example}]}`, changed: "spec.rules.0.host=b.example",
			refused: []refusal{
				{patch: `spec: {rules: null}`, want: "Ingress.networking.k8s.io \"web\" is invalid: spec: Invalid value: null: either `defaultBackend` or `rules` must be specified"},
				{patch: `spec: {rules: [{http: {paths: [{path: /, backend: {service: {name: web, port: {number: 80}}}}]}}]}`, want: `spec.rules[0].http.paths[0].pathType: Required value: pathType must be specified`},
				{patch: `spec: {rules: [{http: {paths: [{path: x, pathType: Exact, backend: {service: {name: web, port: {number: 80}}}}]}}]}`, want: `spec.rules[0].http.paths[0].path: Invalid value: "x": must be an absolute path`},
				{patch: `spec: {rules: [{http: {paths: [{path: /a//b, pathType: Exact, backend: {service: {name: web, port: {number: 80}}}}]}}]}`, want: `Invalid value: "/a//b": must not contain '//'`},
				{patch: `spec: {rules: [{host: 10.0.0.1}]}`, want: `spec.rules[0].host: Invalid value: "10.0.0.1": must be a DNS name, not an IP address`},
				{patch: `spec: {rules: [{http: {paths: [{path: /, pathType: Exact, backend: {service: {name: web}}}]}}]}`, want: `spec.rules[0].http.paths[0].backend: Required value: port name or number is required`},
				{patch: `spec: {rules: [{http: {paths: [{path: /, pathType: Any, backend: {service: {name: web, port: {number: 80}}}}]}}]}`, want: `pathType: Unsupported value: "Any": supported values: "Exact", "ImplementationSpecific", "Prefix"`},
				{patch: `metadata: {annotations: {kubernetes.io/ingress.class: other}}`, want: "annotations.kubernetes.io/ingress.class: Invalid value: \"other\": must match `ingressClassName` when both are specified"},
			},
		},
		{
			resource: "ingressclasses",
			manifest: "metadata: {name: nginx}\nspec: {controller: k8s.io/ingress-nginx, parameters: {apiGroup: k8s.example, kind: Params, name: p}}",
			defaults: map[string]string{"spec.parameters.scope": "Cluster"},
			cells:    []any{"nginx", "k8s.io/ingress-nginx", "Params.k8s.example/p"},
			change:   `metadata: {labels: {a: b}}`, changed: "metadata.labels.a=b",
			refused: []refusal{
				{patch: `spec: {controller: null}`, want: `spec.controller: Required value`},
				{patch: `spec: {controller: x.example/other}`, want: `spec.controller: Invalid value: "x.example/other": field is immutable`, stored: true},
				{patch: `spec: {parameters: {scope: Namespace}}`, want: "spec.parameters.namespace: Required value: `parameters.scope` is set to 'Namespace'"},
			},
		},
		{
			resource: "networkpolicies",
			manifest: "metadata: {name: deny, namespace: default}\nspec: {podSelector: {matchLabels: {app: db}}, egress: [{ports: [{port: 53}]}]}",
			defaults: map[string]string{"spec.policyTypes": "Ingress,Egress", "spec.egress.0.ports.0.protocol": "TCP"},
			cells:    []any{"deny", "app=db"},
			change:   `spec: {egress: [{ports: [{port: 5353, protocol: UDP}]}]}`, changed: "spec.egress.0.ports.0.port=5353",
			refused: []refusal{
				{patch: `spec: {ingress: [{from: [{}]}]}`, want: `spec.ingress[0].from[0]: Required value: must specify a peer`},
				{patch: `spec: {ingress: [{from: [{podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}}]}]}`, want: `spec.ingress[0].from[0]: Forbidden: may not specify both ipBlock and another peer`},
				{patch: `spec: {ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [11.0.0.0/16]}}]}]}`, want: "spec.ingress[0].from[0].ipBlock.except[0]: Invalid value: \"11.0.0.0/16\": must be a strict subset of `cidr`"},
				{patch: `spec: {ingress: [{ports: [{port: 80, endPort: 70}]}]}`, want: "endPort: Invalid value: 70: must be greater than or equal to `port`"},
				{patch: `spec: {policyTypes: [Both]}`, want: `spec.policyTypes[0]: Unsupported value: "Both": supported values: "Ingress", "Egress"`},
			},
		},
		{
			resource: "servicecidrs",
			manifest: "metadata: {name: more}\nspec: {cidrs: [10.200.0.0/24]}",
			cells:    []any{"more", "10.200.0.0/24"},
			change:   `spec: {cidrs: [10.200.0.0/24, "2001:db8::/64"]}`, changed: "spec.cidrs.1=2001:db8::/64",
			refused: []refusal{
				{patch: `spec: {cidrs: []}`, want: `spec.cidrs: Required value: at least one CIDR required`},
				{patch: `spec: {cidrs: [10.200.0.1/24]}`, want: `spec.cidrs[0]: Invalid value: "10.200.0.1/24": must not have bits set beyond the prefix length`},
				{patch: `spec: {cidrs: [10.201.0.0/24]}`, want: `spec.cidrs[0]: Invalid value: "10.201.0.0/24": field is immutable`, stored: true},
			},
		},
	}
}

func rbacCases() []kindCase {
	binding := "roleRef: {kind: %s, name: r}\nsubjects: [{kind: User, name: jane}, {kind: ServiceAccount, name: bot, namespace: x}, {kind: Group, name: devs}]"
	return []kindCase{
		{
			resource: "roles",
			manifest: "metadata: {name: 'a:b', namespace: default}\nrules: [{apiGroups: [''], resources: [pods], verbs: [get]}]",
			cells:    []any{"a:b"},
			change:   `rules: [{apiGroups: [''], resources: [pods], verbs: [list]}]`, changed: "rules.0.verbs.0=list",
			refused: []refusal{
				{patch: `rules: [{apiGroups: [''], resources: [pods]}]`, want: `rules[0].verbs: Required value: verbs must contain at least one value`},
				{patch: `rules: [{resources: [pods], verbs: [get]}]`, want: `rules[0].apiGroups: Required value: resource rules must supply at least one api group`},
				{patch: `rules: [{nonResourceURLs: [/x], verbs: [get]}]`, want: `rules[0].nonResourceURLs: Invalid value: ["/x"]: namespaced rules cannot apply to non-resource URLs`},
			},
		},
		{
			resource: "clusterroles",
			manifest: "metadata: {name: r}\nrules: [{nonResourceURLs: [/metrics], verbs: [get]}]",
			cells:    []any{"r"},
			change:   `aggregationRule: {clusterRoleSelectors: [{matchLabels: {x: z}}]}`, changed: "aggregationRule.clusterRoleSelectors.0.matchLabels.x=z",
			refused: []refusal{
				{patch: `rules: [{nonResourceURLs: [/x], resources: [pods], verbs: [get]}]`, want: `rules cannot apply to both regular resources and non-resource URLs`},
				{patch: `aggregationRule: {clusterRoleSelectors: []}`, want: `aggregationRule.clusterRoleSelectors: Required value: at least one clusterRoleSelector required if aggregationRule is non-nil`},
			},
		},
		{
			resource: "rolebindings",
			manifest: "metadata: {name: b, namespace: default}\n" + fmt.Sprintf(binding, "Role"),
			defaults: map[string]string{"roleRef.apiGroup": "rbac.authorization.k8s.io", "subjects.0.apiGroup": "rbac.authorization.k8s.io", "subjects.1.apiGroup": ""},
			cells:    []any{"b", "Role/r", "jane", "devs", "x/bot"},
			change:   `subjects: [{kind: User, name: joe}]`, changed: "subjects.0.name=joe",
			refused: []refusal{
				{patch: `roleRef: {kind: Other}`, want: `roleRef.kind: Unsupported value: "Other": supported values: "Role", "ClusterRole"`},
				{patch: `roleRef: {name: other}`, want: `roleRef: Invalid value: {"apiGroup":"rbac.authorization.k8s.io","kind":"Role","name":"other"}: cannot change roleRef`, stored: true},
				{patch: `subjects: [{kind: Robot, name: r}]`, want: `subjects[0].kind: Unsupported value: "Robot": supported values: "ServiceAccount", "User", "Group"`},
			},
		},
		{
			resource: "clusterrolebindings",
			manifest: "metadata: {name: b}\n" + fmt.Sprintf(binding, "ClusterRole"),
			defaults: map[string]string{"roleRef.apiGroup": "rbac.authorization.k8s.io"},
			cells:    []any{"b", "ClusterRole/r", "jane", "devs", "x/bot"},
			change:   `subjects: []`, changed: "subjects=",
			refused: []refusal{
				{patch: `roleRef: {kind: Role}`, want: `roleRef.kind: Unsupported value: "Role": supported values: "ClusterRole"`},
				{patch: `subjects: [{kind: ServiceAccount, name: bot}]`, want: `subjects[0].namespace: Required value`},
			},
		},
	}
}

func storageCases() []kindCase {
	return []kindCase{
		{
			resource: "storageclasses",
			manifest: "metadata: {name: fast, annotations: {storageclass.kubernetes.io/is-default-class: 'true'}}\nprovisioner: x.example/disk",
			defaults: map[string]string{"reclaimPolicy": "Delete", "volumeBindingMode": "Immediate"},
			cells:    []any{"fast (default)", "x.example/disk", "Delete", "Immediate", false},
			change:   `allowVolumeExpansion: true`, changed: "allowVolumeExpansion=true",
			refused: []refusal{
				{patch: `provisioner: null`, want: `StorageClass.storage.k8s.io "fast" is invalid: provisioner: Required value`},
				{patch: `reclaimPolicy: Recycle`, want: `reclaimPolicy: Unsupported value: "Recycle": supported values: "Delete", "Retain"`},
				{patch: `parameters: {a: b}`, want: `parameters: Forbidden: updates to parameters are forbidden.`, stored: true},
				{patch: `volumeBindingMode: WaitForFirstConsumer`, want: `volumeBindingMode: Invalid value: "WaitForFirstConsumer": field is immutable`, stored: true},
			},
		},
		{
			resource: "csidrivers",
			manifest: "metadata: {name: d.example}\nspec: {podInfoOnMount: true}",
			defaults: map[string]string{"spec.attachRequired": "true", "spec.fsGroupPolicy": "ReadWriteOnceWithFSType", "spec.volumeLifecycleModes": "Persistent"},
			cells:    []any{"d.example", true, true, false, "<unset>", false, "Persistent"},
			change:   `spec: {requiresRepublish: true}`, changed: "spec.requiresRepublish=true",
			refused: []refusal{
				{patch: `spec: {volumeLifecycleModes: [Never]}`, want: `spec.volumeLifecycleModes[0]: Unsupported value: "Never"`},
				{patch: `spec: {attachRequired: false}`, want: `spec.attachRequired: Invalid value: false: field is immutable`, stored: true},
			},
		},
		{
			resource: "csinodes",
			manifest: "metadata: {name: node1}\nspec: {drivers: [{name: d.example, nodeID: n, topologyKeys: [zone]}]}",
			cells:    []any{"node1", int64(1)},
			change:   `spec: {drivers: []}`, changed: "spec.drivers=",
			refused: []refusal{
				{patch: `spec: {drivers: [{name: d.example, nodeID: '', topologyKeys: []}]}`, want: `spec.drivers[0].nodeID: Required value`},
				{patch: `spec: {drivers: [{name: d.example, nodeID: other, topologyKeys: [zone]}]}`, want: `field is immutable`, stored: true},
			},
		},
		{
			resource: "volumeattachments",
			manifest: "metadata: {name: a}\nspec: {attacher: d.example, nodeName: node1, source: {persistentVolumeName: pv}}",
			cells:    []any{"a", "d.example", "pv", "node1", false},
			change:   `metadata: {labels: {a: b}}`, changed: "metadata.labels.a=b",
			refused: []refusal{
				{patch: `spec: {source: {persistentVolumeName: null}}`, want: `spec.source: Required value: must specify exactly one of inlineVolumeSpec and persistentVolumeName`},
				{patch: `spec: {nodeName: node2}`, want: `field is immutable`, stored: true},
			},
		},
		{
			resource: "csistoragecapacities",
			manifest: "metadata: {name: c, namespace: default}\nstorageClassName: fast\ncapacity: 5Gi",
			cells:    []any{"c", "fast", "5Gi"},
			change:   `capacity: 6Gi`, changed: "capacity=6Gi",
			refused: []refusal{
				{patch: `capacity: "-1"`, want: `capacity: Invalid value: "-1": must be greater than or equal to 0`},
				{patch: `storageClassName: other`, want: `storageClassName: Invalid value: "other": field is immutable`, stored: true},
			},
		},
		{
			resource: "runtimeclasses",
			manifest: "metadata: {name: gvisor}\nhandler: runsc",
			cells:    []any{"gvisor", "runsc"},
			change:   `scheduling: {nodeSelector: {a: b}}`, changed: "scheduling.nodeSelector.a=b",
			refused: []refusal{
				{patch: `handler: Run_SC`, want: `handler: Invalid value: "Run_SC": a lowercase RFC 1123 label must consist of`},
				{patch: `handler: kata`, want: `handler: Invalid value: "kata": field is immutable`, stored: true},
			},
		},
	}
}

func admissionCases() []kindCase {
	hooks := "metadata: {name: w}\nwebhooks: [{name: a.b.example, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {service: {name: s, namespace: default}}, rules: [{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}]}]"
	refused := []refusal{
		{patch: `webhooks: [{name: short, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {url: https://x.example}}]`, want: `webhooks[0].name: Invalid value: "short": should be a domain with at least three segments separated by dots`},
		{patch: `webhooks: [{name: a.b.example, admissionReviewVersions: [v1], clientConfig: {url: https://x.example}}]`, want: `webhooks[0].sideEffects: Required value: must specify one of None, NoneOnDryRun`},
		{patch: `webhooks: [{name: a.b.example, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {}}]`, want: `webhooks[0].clientConfig: Required value: exactly one of url or service is required`},
		{patch: `webhooks: [{name: a.b.example, sideEffects: None, clientConfig: {url: https://x.example}}]`, want: `webhooks[0].admissionReviewVersions: Required value: must specify one of v1, v1beta1`},
		{patch: `webhooks: [{name: a.b.example, sideEffects: None, timeoutSeconds: 60, admissionReviewVersions: [v1], clientConfig: {url: https://x.example}}]`, want: `webhooks[0].timeoutSeconds: Invalid value: 60: the timeout value must be between 1 and 30 seconds`},
	}
	defaults := map[string]string{"webhooks.0.failurePolicy": "Fail", "webhooks.0.timeoutSeconds": "10", "webhooks.0.matchPolicy": "Equivalent", "webhooks.0.clientConfig.service.port": "443", "webhooks.0.rules.0.scope": "*", "metadata.generation": "1"}
	return []kindCase{
		{
			resource: "validatingwebhookconfigurations", manifest: hooks, defaults: defaults, cells: []any{"w", int64(1)},
			change: `webhooks: []`, changed: "metadata.generation=2", refused: refused,
		},
		{
			resource: "mutatingwebhookconfigurations", manifest: hooks, defaults: defaults, cells: []any{"w", int64(1)},
			change: `webhooks: []`, changed: "metadata.generation=2", refused: refused,
		},
		{
			resource: "validatingadmissionpolicies",
			manifest: "metadata: {name: p}\nspec: {matchConstraints: {resourceRules: [{apiGroups: [apps], apiVersions: [v1], operations: [CREATE], resources: [deployments]}]}, validations: [{expression: 'object.spec.replicas <= 5'}]}",
			defaults: map[string]string{"spec.failurePolicy": "Fail", "spec.matchConstraints.matchPolicy": "Equivalent"},
			cells:    []any{"p", int64(1), "<unset>"},
			change:   `spec: {failurePolicy: Ignore}`, changed: "spec.failurePolicy=Ignore",
			refused: []refusal{
				{patch: `spec: {validations: []}`, want: `spec.validations: Required value: validations or auditAnnotations must contain at least one item`},
				{patch: `spec: {validations: [{expression: ''}]}`, want: `spec.validations[0].expression: Required value: expression is not specified`},
			},
		},
		{
			resource: "validatingadmissionpolicybindings",
			manifest: "metadata: {name: b}\nspec: {policyName: p, validationActions: [Deny], paramRef: {name: x, namespace: ns, parameterNotFoundAction: Deny}}",
			cells:    []any{"b", "p", "ns/x"},
			change:   `spec: {validationActions: [Audit]}`, changed: "spec.validationActions.0=Audit",
			refused: []refusal{
				{patch: `spec: {validationActions: []}`, want: `spec.validationActions: Required value: at least one validation action is required`},
				{patch: `spec: {validationActions: [Deny, Warn]}`, want: `must not contain both Deny and Warn`},
			},
		},
		{
			resource: "mutatingadmissionpolicies",
			manifest: "metadata: {name: m}\nspec: {reinvocationPolicy: Never, matchConstraints: {resourceRules: [{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}]}, mutations: [{patchType: JSONPatch, jsonPatch: {expression: '[]'}}]}",
			defaults: map[string]string{"spec.failurePolicy": "Fail", "spec.matchConstraints.matchPolicy": "Equivalent"},
			cells:    []any{"m", int64(1), "<unset>"},
			change:   `spec: {reinvocationPolicy: IfNeeded}`, changed: "spec.reinvocationPolicy=IfNeeded",
			refused: []refusal{
				{patch: `spec: {mutations: []}`, want: `spec.mutations: Required value: mutations must contain at least one item`},
				{patch: `spec: {mutations: [{patchType: JSONPatch}]}`, want: `spec.mutations[0].jsonPatch.expression: Required value: expression is not specified`},
				{patch: `spec: {mutations: [{patchType: Other}]}`, want: `spec.mutations[0].patchType: Unsupported value: "Other": supported values: "ApplyConfiguration", "JSONPatch"`},
				{patch: `spec: {reinvocationPolicy: Often}`, want: `spec.reinvocationPolicy: Unsupported value: "Often"`},
				{patch: `spec: {matchConstraints: null}`, want: `spec.matchConstraints: Required value`},
			},
		},
		{
			resource: "mutatingadmissionpolicybindings",
			manifest: "metadata: {name: b}\nspec: {policyName: m, matchResources: {namespaceSelector: {matchLabels: {a: b}}}}",
			defaults: map[string]string{"spec.matchResources.matchPolicy": "Equivalent"},
			cells:    []any{"b", "m", "<unset>"},
			change:   `spec: {policyName: other}`, changed: "spec.policyName=other",
			refused: []refusal{
				{patch: `spec: {policyName: null}`, want: `spec.policyName: Required value`},
				{patch: `spec: {paramRef: {parameterNotFoundAction: Deny}}`, want: `spec.paramRef: Required value: one of name or selector must be specified`},
			},
		},
		{
			resource: "volumeattributesclasses",
			manifest: "metadata: {name: gold}\ndriverName: disk.example\nparameters: {iops: '100'}",
			cells:    []any{"gold", "disk.example"},
			change:   `metadata: {labels: {a: b}}`, changed: "metadata.labels.a=b",
			refused: []refusal{
				{patch: `driverName: null`, want: `driverName: Required value`},
				{patch: `parameters: null`, want: `parameters: Required value: must contain at least one key/value pair`},
				{patch: `parameters: {iops: '200'}`, want: `parameters: Invalid value: {"iops":"200"}: field is immutable`, stored: true},
			},
		},
		{
			resource: "clustertrustbundles",
			manifest: "metadata: {name: 'ca.example:root:one'}\nspec: {signerName: ca.example/root, trustBundle: " + strconv.Quote(trustedPEM()) + "}",
			cells:    []any{"ca.example:root:one", "ca.example/root"},
			change:   `metadata: {labels: {a: b}}`, changed: "metadata.labels.a=b",
			refused: []refusal{
				{patch: `metadata: {name: other}`, want: `metadata.name: Invalid value: "other": ClusterTrustBundle for signerName ca.example/root must be named with prefix ca.example:root:`},
				{patch: `spec: {signerName: null}`, want: `ClusterTrustBundle without signer name must not have ":" in its name`},
				{patch: `spec: {trustBundle: none}`, want: `spec.trustBundle: Invalid value: "<value omitted>": at least one trust anchor must be provided`},
				{patch: `spec: {signerName: ca.example/other}`, want: `spec.signerName: Invalid value: "ca.example/other": field is immutable`, stored: true},
			},
		},
	}
}

// trustedPEM is a certificate.
func trustedPEM() string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotAfter: time.Now().Add(time.Hour), IsCA: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// TestKinds sends one object of each kind through its life.
func TestKinds(t *testing.T) {
	b := newBench(t, Deps{}, kindsOf(kindCases())...)
	for _, tc := range kindCases() {
		t.Run(tc.resource, func(t *testing.T) {
			stored, err := b.create(tc.resource, b.parse(tc.resource, tc.manifest), false)
			if err != nil {
				t.Fatal(err)
			}
			for path, want := range tc.defaults {
				if got := fieldText(t, stored, path); got != want {
					t.Errorf("%s is %q, want %q", path, got, want)
				}
			}
			checkRow(t, b, tc, stored)
			name := nameOf(t, stored)
			for _, r := range tc.refused {
				if r.stored {
					_, err = b.patch(tc.resource, name, func(obj runtime.Object) { mergeInto(t, obj, r.patch) })
				} else {
					fresh := b.parse(tc.resource, tc.manifest)
					mergeInto(t, fresh, r.patch)
					b.scheme.Default(fresh)
					_, err = b.create(tc.resource, fresh, true)
				}
				wantError(t, err, r.want)
			}
			changed, err := b.patch(tc.resource, name, func(obj runtime.Object) { mergeInto(t, obj, tc.change) })
			if err != nil {
				t.Fatal(err)
			}
			if path, want, _ := strings.Cut(tc.changed, "="); fieldText(t, changed, path) != want {
				t.Errorf("%s is %q, want %q", path, fieldText(t, changed, path), want)
			}
			b.remove(tc.resource, name)
		})
	}
}

// kindsOf returns the kinds of cases, out of the list of all.
func kindsOf(cases []kindCase) []Kind {
	return slices.DeleteFunc(Kinds(), func(k Kind) bool {
		return !slices.ContainsFunc(cases, func(c kindCase) bool { return c.resource == k.Resource })
	})
}

func nameOf(t *testing.T, obj runtime.Object) string {
	t.Helper()
	m, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(err)
	}
	return m.GetName()
}

// checkRow compares the row of an object, without its age or creation time.
func checkRow(t *testing.T, b *bench, tc kindCase, obj runtime.Object) {
	t.Helper()
	table, err := b.storages[tc.resource].(rest.TableConvertor).ConvertToTable(b.ctx(), obj, nil)
	if err != nil {
		t.Fatal(err)
	}
	var cells []any
	for i, c := range table.ColumnDefinitions {
		if c.Name != "Age" && c.Name != "Created At" {
			cells = append(cells, table.Rows[0].Cells[i])
		}
	}
	if !slices.Equal(cells, tc.cells) {
		t.Errorf("row %v, want %v", cells, tc.cells)
	}
}

// asMap is an object as JSON has it.
func asMap(t *testing.T, obj runtime.Object) map[string]any {
	t.Helper()
	data, err := json.Marshal(obj)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// fieldText is the text of a field by its path; a list's items are joined.
func fieldText(t *testing.T, obj runtime.Object, path string) string {
	t.Helper()
	var at any = asMap(t, obj)
	for part := range strings.SplitSeq(path, ".") {
		switch v := at.(type) {
		case map[string]any:
			at = v[part]
		case []any:
			i := int(part[0] - '0')
			if i >= len(v) {
				t.Fatalf("no %s in %v", path, obj)
			}
			at = v[i]
		}
	}
	if list, ok := at.([]any); ok {
		var parts []string
		for _, v := range list {
			parts = append(parts, fmt.Sprint(v))
		}
		return strings.Join(parts, ",")
	}
	if at == nil {
		return ""
	}
	return fmt.Sprint(at)
}

// mergeInto applies a JSON merge patch, written in YAML, to obj.
func mergeInto(t *testing.T, obj runtime.Object, patch string) {
	t.Helper()
	whole := asMap(t, obj)
	var changes map[string]any
	if err := yaml.Unmarshal([]byte(patch), &changes); err != nil {
		t.Fatal(err)
	}
	merge(whole, changes)
	data, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(obj).Elem()
	v.SetZero()
	if err := json.Unmarshal(data, obj); err != nil {
		t.Fatal(err)
	}
}

func merge(into, patch map[string]any) {
	for k, v := range patch {
		sub, isMap := v.(map[string]any)
		have, hasMap := into[k].(map[string]any)
		switch {
		case v == nil:
			delete(into, k)
		case isMap && hasMap:
			merge(have, sub)
		default:
			into[k] = v
		}
	}
}

// TestCSR asks for a certificate, has it approved and issued.
func TestCSR(t *testing.T) {
	const resource = "certificatesigningrequests"
	var life time.Duration
	signer := func(csr *x509.CertificateRequest, d time.Duration) ([]byte, error) {
		life = d
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: csr.Raw}), nil
	}
	b := newBench(t, Deps{Signer: signer}, certificateSigningRequestKind())
	manifest := func(signer, usage string) string {
		return "metadata: {name: jane}\nspec: {request: " + base64.StdEncoding.EncodeToString(newCSR(t)) + ", signerName: " + signer + ", usages: [" + usage + "], expirationSeconds: 7200}"
	}
	for usage, want := range map[string]string{
		`""`:                         `spec.usages[0]: Unsupported value: ""`,
		"client auth, client auth":   `spec.usages[1]: Duplicate value: "client auth"`,
		"client auth, something new": `spec.usages[1]: Unsupported value: "something new"`,
	} {
		_, err := b.create(resource, b.parse(resource, manifest("kubernetes.io/kube-apiserver-client", usage)), false)
		wantError(t, err, want)
	}
	_, err := b.create(resource, b.parse(resource, manifest("nobody", "client auth")), false)
	wantError(t, err, `spec.signerName: Invalid value: "nobody": must be a fully qualified domain and path of the form 'example.com/signer-name'`)

	obj, err := b.create(resource, b.parse(resource, manifest("kubernetes.io/kube-apiserver-client", "client auth")), false)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.table(resource, obj); got["Condition"] != "Pending" || got["RequestedDuration"] != "120m" {
		t.Errorf("a new request: %v", got)
	}
	approve := func(path string, types ...certificatesv1.RequestConditionType) (*certificatesv1.CertificateSigningRequest, error) {
		c := b.get(resource, "jane").DeepCopyObject().(*certificatesv1.CertificateSigningRequest)
		for _, typ := range types {
			c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: typ, Status: "True", Reason: "Test"})
		}
		out, err := b.put(path, c)
		if err != nil {
			return nil, err
		}
		return out.(*certificatesv1.CertificateSigningRequest), nil
	}
	_, err = approve(resource+"/status", certificatesv1.CertificateApproved)
	wantError(t, err, `status.conditions: Forbidden: updates may not add a condition of type "Approved"`)
	_, err = approve(resource+"/approval", certificatesv1.CertificateApproved, certificatesv1.CertificateDenied)
	wantError(t, err, `status.conditions[1].type: Invalid value: "Denied": Approved and Denied conditions are mutually exclusive`)
	if c, err := approve(resource, certificatesv1.CertificateApproved); err != nil || len(c.Status.Conditions) > 0 {
		t.Errorf("the main resource approves: %v %v", c, err)
	}
	c, err := approve(resource+"/approval", certificatesv1.CertificateApproved)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.table(resource, c)["Condition"]; got != "Approved,Issued" || life != 2*time.Hour {
		t.Errorf("after the approval: %v, for %v", got, life)
	}
	if c.Status.Conditions[0].LastUpdateTime.IsZero() || c.Status.Conditions[0].LastTransitionTime.IsZero() {
		t.Errorf("conditions without times: %v", c.Status.Conditions)
	}
	c.Status.Conditions = nil
	_, err = b.put(resource+"/approval", c)
	wantError(t, err, `status.conditions: Forbidden: updates may not remove a condition of type "Approved"`)
}

func newCSR(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "jane"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}
