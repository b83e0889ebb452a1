// SPDX-License-Identifier: Apache-2.0

package disruption

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/controller/loop"
)

// scales tells how many pods the controllers of pods want.
type scales struct {
	discovery    discovery.DiscoveryInterface
	controllers  corelisters.ReplicationControllerLister
	sets         appslisters.ReplicaSetLister
	deployments  appslisters.DeploymentLister
	statefulSets appslisters.StatefulSetLister
}

// newScales subscribes l to the workloads. changed is called with the namespace of
// one that was scaled.
func newScales(d loop.Deps, l *loop.Loop[task], changed func(namespace string)) scales {
	apps := d.Informers.Apps().V1()
	controllers := d.Informers.Core().V1().ReplicationControllers()
	s := scales{
		discovery: d.Client.Discovery(), controllers: controllers.Lister(), sets: apps.ReplicaSets().Lister(),
		deployments: apps.Deployments().Lister(), statefulSets: apps.StatefulSets().Lister(),
	}
	loop.Watch(l, "replicationcontrollers", controllers.Informer(), onScaled(changed, func(o *corev1.ReplicationController) *int32 { return o.Spec.Replicas }))
	loop.Watch(l, "replicasets", apps.ReplicaSets().Informer(), onScaled(changed, func(o *appsv1.ReplicaSet) *int32 { return o.Spec.Replicas }))
	loop.Watch(l, "deployments", apps.Deployments().Informer(), onScaled(changed, func(o *appsv1.Deployment) *int32 { return o.Spec.Replicas }))
	loop.Watch(l, "statefulsets", apps.StatefulSets().Informer(), onScaled(changed, func(o *appsv1.StatefulSet) *int32 { return o.Spec.Replicas }))
	return s
}

func onScaled[T interface {
	comparable
	metav1.Object
}](changed func(namespace string), replicas func(T) *int32) func(old, cur T) {
	var none T
	return func(old, cur T) {
		if old != none && cur != none && ptr.Equal(replicas(old), replicas(cur)) && old.GetUID() == cur.GetUID() {
			return
		}
		if cur == none {
			cur = old
		}
		changed(cur.GetNamespace())
	}
}

// sum adds up what the controllers of pods want, each once. unmanaged says that there
// are pods without one.
func (s scales) sum(ctx context.Context, pods []*corev1.Pod) (sum int32, unmanaged bool, err error) {
	asked, counted := map[types.UID]bool{}, map[types.UID]bool{}
	for _, pod := range pods {
		ref := metav1.GetControllerOf(pod)
		if ref == nil {
			unmanaged = true
			continue
		}
		if asked[ref.UID] {
			continue
		}
		asked[ref.UID] = true
		found, err := s.of(ctx, pod.Namespace, ref)
		if err != nil {
			return 0, false, err
		}
		if found == nil {
			return 0, false, fmt.Errorf("found no controllers for pod %q", pod.Name)
		}
		if !counted[found.uid] {
			counted[found.uid] = true
			sum += found.replicas
		}
	}
	return sum, unmanaged, nil
}

// scale is how many pods an object wants.
type scale struct {
	uid      types.UID
	replicas int32
}

// of returns the scale of a pod's controller, or of the Deployment above its
// ReplicaSet; nil when the controller is gone. What is not in the caches is asked for
// its scale subresource.
func (s scales) of(ctx context.Context, namespace string, ref *metav1.OwnerReference) (*scale, error) {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, err
	}
	switch (schema.GroupKind{Group: gv.Group, Kind: ref.Kind}) {
	case schema.GroupKind{Kind: "ReplicationController"}:
		if rc, err := s.controllers.ReplicationControllers(namespace).Get(ref.Name); err == nil && rc.UID == ref.UID {
			return &scale{rc.UID, ptr.Deref(rc.Spec.Replicas, 1)}, nil
		}
	case schema.GroupKind{Group: appsv1.GroupName, Kind: "ReplicaSet"}:
		if rs, err := s.sets.ReplicaSets(namespace).Get(ref.Name); err == nil && rs.UID == ref.UID {
			return s.above(rs), nil
		}
	case schema.GroupKind{Group: appsv1.GroupName, Kind: "StatefulSet"}:
		if set, err := s.statefulSets.StatefulSets(namespace).Get(ref.Name); err == nil && set.UID == ref.UID {
			return &scale{set.UID, ptr.Deref(set.Spec.Replicas, 1)}, nil
		}
	}
	return s.ask(ctx, gv, namespace, ref)
}

// above returns the scale of the Deployment that owns rs, or its own.
func (s scales) above(rs *appsv1.ReplicaSet) *scale {
	ref := metav1.GetControllerOf(rs)
	if ref != nil && ref.Kind == "Deployment" && strings.HasPrefix(ref.APIVersion, appsv1.GroupName+"/") {
		if d, err := s.deployments.Deployments(rs.Namespace).Get(ref.Name); err == nil && d.UID == ref.UID {
			return &scale{d.UID, ptr.Deref(d.Spec.Replicas, 1)}
		}
	}
	return &scale{rs.UID, ptr.Deref(rs.Spec.Replicas, 1)}
}

// ask reads the scale subresource of any kind.
func (s scales) ask(ctx context.Context, gv schema.GroupVersion, namespace string, ref *metav1.OwnerReference) (*scale, error) {
	served, err := s.discovery.ServerResourcesForGroupVersion(gv.String())
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("find what %s serves: %w", gv, err)
	}
	plural, scalable := "", false
	if served != nil {
		for _, r := range served.APIResources {
			if r.Kind == ref.Kind && !strings.Contains(r.Name, "/") {
				plural = r.Name
			}
		}
		for _, r := range served.APIResources {
			scalable = scalable || r.Name == plural+"/scale"
		}
	}
	switch {
	case plural == "":
		return nil, fmt.Errorf("no matches for kind %q in version %q", ref.Kind, gv)
	case !scalable:
		return nil, fmt.Errorf("%s does not implement the scale subresource", schema.GroupResource{Group: gv.Group, Resource: plural})
	}
	root := "/apis/" + gv.String()
	if gv.Group == "" {
		root = "/api/" + gv.Version
	}
	data, err := s.discovery.RESTClient().Get().AbsPath(root, "namespaces", namespace, plural, ref.Name, "scale").
		SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the scale of %s %s: %w", ref.Kind, ref.Name, err)
	}
	var found autoscalingv1.Scale
	if err := json.Unmarshal(data, &found); err != nil {
		return nil, fmt.Errorf("decode the scale of %s %s: %w", ref.Kind, ref.Name, err)
	}
	if found.UID != ref.UID {
		return nil, nil
	}
	return &scale{found.UID, found.Spec.Replicas}, nil
}
