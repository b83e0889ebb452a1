// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"
)

// nginxPods is the part of a manifest that Deployments and ReplicaSets share.
const nginxPods = `
  selector: {matchLabels: {app: nginx}}
  template:
    metadata: {labels: {app: nginx}}
    spec: {containers: [{name: web, image: "nginx:1.25"}, {name: log, image: busybox}]}
`

func workloadManifest(spec string) string {
	return "metadata: {name: x, namespace: default}\nspec:" + spec
}

func TestDeploymentDefaults(t *testing.T) {
	b := newBench(t, Deps{}, deploymentKind(), replicaSetKind())
	out, err := b.create("deployments", b.parse("deployments", workloadManifest(nginxPods)), false)
	if err != nil {
		t.Fatal(err)
	}
	d := out.(*appsv1.Deployment)
	r := d.Spec.Strategy.RollingUpdate
	got := fmt.Sprint(*d.Spec.Replicas, " ", d.Spec.Strategy.Type, " ", r.MaxUnavailable, " ", r.MaxSurge, " ",
		*d.Spec.RevisionHistoryLimit, " ", *d.Spec.ProgressDeadlineSeconds, " ", d.Generation, " ", d.Spec.Template.Spec.RestartPolicy)
	if want := "1 RollingUpdate 25% 25% 10 600 1 Always"; got != want {
		t.Errorf("defaults %q, want %q", got, want)
	}
	out, err = b.create("replicasets", b.parse("replicasets", workloadManifest(nginxPods)), false)
	if err != nil {
		t.Fatal(err)
	}
	if r := out.(*appsv1.ReplicaSet); *r.Spec.Replicas != 1 || r.Generation != 1 || r.Spec.Template.Spec.DNSPolicy == "" {
		t.Errorf("%+v", r)
	}
}

func TestWorkloadRefused(t *testing.T) {
	b := newBench(t, Deps{}, deploymentKind(), replicaSetKind())
	const pods = "\n  template: {metadata: {labels: {app: nginx}}, spec: {containers: [{name: web, image: nginx}]}}"
	const selected = "\n  selector: {matchLabels: {app: nginx}}" + pods
	for _, tc := range []struct{ id, resource, spec, want string }{
		{"selector matches template", "deployments", "\n  selector: {matchLabels: {app: other}}" + pods, "spec.template.metadata.labels: Invalid value: {\"app\":\"nginx\"}: `selector` does not match template `labels`"},
		{"no selector", "deployments", pods, "spec.selector: Required value"},
		{"empty selector", "deployments", "\n  selector: {}" + pods, "spec.selector: Invalid value: {}: empty selector is invalid for deployment"},
		{"bad selector", "deployments", "\n  selector: {matchExpressions: [{key: a, operator: Near}]}" + pods, `spec.selector.matchExpressions[0].operator: Invalid value: "Near": not a valid selector operator`},
		{"replicas", "deployments", "\n  replicas: -1" + selected, "spec.replicas: Invalid value: -1: must be greater than or equal to 0"},
		{"minReadySeconds", "deployments", "\n  minReadySeconds: -1" + selected, "spec.minReadySeconds: Invalid value: -1: must be greater than or equal to 0"},
		{"history", "deployments", "\n  revisionHistoryLimit: -1" + selected, "spec.revisionHistoryLimit: Invalid value: -1"},
		{"deadline", "deployments", "\n  minReadySeconds: 30\n  progressDeadlineSeconds: 30" + selected, "spec.progressDeadlineSeconds: Invalid value: 30: must be greater than minReadySeconds"},
		{"strategy type", "deployments", "\n  strategy: {type: Ramp}" + selected, `spec.strategy.type: Unsupported value: "Ramp": supported values: "Recreate", "RollingUpdate"`},
		{"strategy fields", "deployments", "\n  strategy: {type: Recreate, rollingUpdate: {maxSurge: 1}}" + selected, "spec.strategy.rollingUpdate: Forbidden: may not be specified when strategy `type` is 'Recreate'"},
		{"no progress", "deployments", "\n  strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0%}}" + selected, "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: \"0%\": may not be 0 when `maxSurge` is 0"},
		{"more than all", "deployments", "\n  strategy: {rollingUpdate: {maxUnavailable: 101%}}" + selected, `spec.strategy.rollingUpdate.maxUnavailable: Invalid value: "101%": must not be greater than 100%`},
		{"no percentage", "deployments", "\n  strategy: {rollingUpdate: {maxSurge: some}}" + selected, `spec.strategy.rollingUpdate.maxSurge: Invalid value: "some": a valid percent string must be`},
		{"negative surge", "deployments", "\n  strategy: {rollingUpdate: {maxSurge: -1}}" + selected, `spec.strategy.rollingUpdate.maxSurge: Invalid value: -1: must be greater than or equal to 0`},
		{"restart policy", "deployments", "\n  selector: {matchLabels: {app: nginx}}\n  template: {metadata: {labels: {app: nginx}}, spec: {restartPolicy: Never, containers: [{name: web, image: nginx}]}}", `spec.template.spec.restartPolicy: Unsupported value: "Never": supported values: "Always"`},
		{"no containers", "deployments", "\n  selector: {matchLabels: {app: nginx}}\n  template: {metadata: {labels: {app: nginx}}}", "spec.template.spec.containers: Required value"},
		{"replicas", "replicasets", "\n  replicas: -1" + selected, "spec.replicas: Invalid value: -1: must be greater than or equal to 0"},
		{"selector matches template", "replicasets", "\n  selector: {matchLabels: {app: other}}" + pods, "`selector` does not match template `labels`"},
		{"empty selector", "replicasets", "\n  selector: {}" + pods, "spec.selector: Invalid value: {}: empty selector is invalid for replicaset"},
	} {
		t.Run(tc.resource+" "+tc.id, func(t *testing.T) {
			_, err := b.create(tc.resource, b.parse(tc.resource, workloadManifest(tc.spec)), false)
			wantError(t, err, `"x" is invalid`, tc.want)
		})
	}
}

func TestDeploymentUpdate(t *testing.T) {
	b := newBench(t, Deps{}, deploymentKind())
	if _, err := b.create("deployments", b.parse("deployments", workloadManifest(nginxPods)), false); err != nil {
		t.Fatal(err)
	}
	status := b.get("deployments", "x").(*appsv1.Deployment)
	status.Status = appsv1.DeploymentStatus{ObservedGeneration: 1, Replicas: 2, UpdatedReplicas: 2, ReadyReplicas: 2, AvailableReplicas: 1, CollisionCount: ptr.To[int32](2)}
	status.Spec.Replicas = ptr.To[int32](9)
	if _, err := b.put("deployments/status", status); err != nil {
		t.Fatal(err)
	}
	generation := int64(1)
	for _, tc := range []struct {
		id     string
		bumps  bool
		change func(d *appsv1.Deployment)
	}{
		{"nothing", false, func(*appsv1.Deployment) {}},
		{"status", false, func(d *appsv1.Deployment) { d.Status.Replicas = 7 }},
		{"label", false, func(d *appsv1.Deployment) { d.Labels = map[string]string{"a": "b"} }},
		{"annotation", true, func(d *appsv1.Deployment) { d.Annotations = map[string]string{"a": "b"} }},
		{"spec", true, func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "nginx:2" }},
		{"both", true, func(d *appsv1.Deployment) { d.Annotations, d.Spec.Paused = nil, true }},
	} {
		out, err := b.patch("deployments", "x", func(obj runtime.Object) { tc.change(obj.(*appsv1.Deployment)) })
		if err != nil {
			t.Fatalf("%s: %v", tc.id, err)
		}
		if tc.bumps {
			generation++
		}
		d := out.(*appsv1.Deployment)
		if d.Generation != generation || d.Status.ObservedGeneration != 1 || d.Status.Replicas != 2 || *d.Spec.Replicas != 1 {
			t.Errorf("%s: generation %d, want %d; status %+v, replicas %d", tc.id, d.Generation, generation, d.Status, *d.Spec.Replicas)
		}
	}
	_, err := b.patch("deployments", "x", func(obj runtime.Object) {
		d := obj.(*appsv1.Deployment)
		d.Spec.Selector.MatchLabels["app"], d.Spec.Template.Labels["app"] = "b", "b"
	})
	wantError(t, err, `Deployment.apps "x" is invalid: spec.selector: Invalid value: {"matchLabels":{"app":"b"}}: field is immutable`)

	for want, change := range map[string]func(s *appsv1.DeploymentStatus){
		"status.readyReplicas: Invalid value: 3: cannot be greater than status.replicas": func(s *appsv1.DeploymentStatus) { s.ReadyReplicas = 3 },
		"status.availableReplicas: Invalid value: 2: cannot be greater than readyReplicas": func(s *appsv1.DeploymentStatus) {
			s.ReadyReplicas, s.AvailableReplicas = 1, 2
		},
		"status.collisionCount: Invalid value: 1: cannot be decremented":                    func(s *appsv1.DeploymentStatus) { s.CollisionCount = ptr.To[int32](1) },
		"status.unavailableReplicas: Invalid value: -1: must be greater than or equal to 0": func(s *appsv1.DeploymentStatus) { s.UnavailableReplicas = -1 },
		"status.observedGeneration: Invalid value: -1: must be greater than or equal to 0":  func(s *appsv1.DeploymentStatus) { s.ObservedGeneration = -1 },
		"status.updatedReplicas: Invalid value: 3: cannot be greater than status.replicas":  func(s *appsv1.DeploymentStatus) { s.UpdatedReplicas = 3 },
	} {
		d := b.get("deployments", "x").(*appsv1.Deployment)
		change(&d.Status)
		_, err := b.put("deployments/status", d)
		wantError(t, err, want)
	}
}

func TestWorkloadColumns(t *testing.T) {
	b := newBench(t, Deps{}, deploymentKind(), replicaSetKind())
	d := b.parse("deployments", workloadManifest("\n  replicas: 3"+nginxPods)).(*appsv1.Deployment)
	d.Status = appsv1.DeploymentStatus{ReadyReplicas: 2, UpdatedReplicas: 3, AvailableReplicas: 1}
	got := fmt.Sprint(b.table("deployments", d))
	if want := "map[Age:<unknown> Available:1 Containers:web,log Images:nginx:1.25,busybox Name:x Ready:2/3 Selector:app=nginx Up-to-date:3]"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	r := b.parse("replicasets", workloadManifest("\n  replicas: 3"+nginxPods)).(*appsv1.ReplicaSet)
	r.Status = appsv1.ReplicaSetStatus{Replicas: 2, ReadyReplicas: 1}
	got = fmt.Sprint(b.table("replicasets", r))
	if want := "map[Age:<unknown> Containers:web,log Current:2 Desired:3 Images:nginx:1.25,busybox Name:x Ready:1 Selector:app=nginx]"; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	table, err := b.storages["deployments"].(rest.TableConvertor).ConvertToTable(b.ctx(), d, nil)
	if err != nil {
		t.Fatal(err)
	}
	var wide []string
	for _, c := range table.ColumnDefinitions {
		if c.Priority > 0 {
			wide = append(wide, c.Name)
		}
	}
	if !slices.Equal(wide, []string{"Containers", "Images", "Selector"}) {
		t.Errorf("wide columns %q", wide)
	}
}

// TestScale uses /scale of both kinds as kubectl does.
func TestScale(t *testing.T) {
	b := newBench(t, Deps{}, deploymentKind(), replicaSetKind())
	for _, resource := range []string{"deployments", "replicasets"} {
		t.Run(resource, func(t *testing.T) {
			if _, err := b.create(resource, b.parse(resource, workloadManifest(nginxPods)), false); err != nil {
				t.Fatal(err)
			}
			path := resource + "/scale"
			s := b.get(path, "x").(*autoscalingv1.Scale)
			if s.Spec.Replicas != 1 || s.Status.Selector != "app=nginx" || s.UID == "" || s.ResourceVersion == "" || s.CreationTimestamp.IsZero() {
				t.Errorf("%+v", s)
			}
			if c := b.table(path, s); c["Desired"] != int64(1) || c["Available"] != int64(0) || c["Name"] != "x" {
				t.Errorf("%v", c)
			}
			stale := s.DeepCopy()
			s.Spec.Replicas = 4
			out, err := b.put(path, s)
			if err != nil {
				t.Fatal(err)
			}
			if got := out.(*autoscalingv1.Scale); got.Spec.Replicas != 4 || got.ResourceVersion == stale.ResourceVersion {
				t.Errorf("%+v", got)
			}
			stored := b.get(resource, "x").(metav1.Object)
			if stored.GetGeneration() != 2 {
				t.Errorf("generation %d", stored.GetGeneration())
			}
			_, err = b.put(path, stale)
			wantError(t, err, "the object has been modified")
			_, err = b.put(path, &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: autoscalingv1.ScaleSpec{Replicas: -1}})
			wantError(t, err, `Scale.autoscaling "x" is invalid: spec.replicas: Invalid value: -1: must be greater than or equal to 0`)
			_, err = b.put(path, &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "absent"}})
			wantError(t, err, `"absent" not found`)
			// Without a version it is unconditional, and zero replicas are a number.
			if _, err := b.put(path, &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "x"}}); err != nil {
				t.Fatal(err)
			}
			if got := b.get(path, "x").(*autoscalingv1.Scale); got.Spec.Replicas != 0 {
				t.Errorf("%+v", got.Spec)
			}
		})
	}
}
