// SPDX-License-Identifier: Apache-2.0

// Package replicationcontroller keeps the pods of ReplicationControllers, the older
// form of ReplicaSets. It shows each as a ReplicaSet and has package replicaset do the
// work.
package replicationcontroller

import (
	"context"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/controller/replicaset"
)

// New makes the controller and subscribes it to ReplicationControllers and pods.
func New(d loop.Deps) *replicaset.Controller {
	d = d.WithDefaults()
	sets := d.Informers.Core().V1().ReplicationControllers()
	c := replicaset.NewFor(d, "replicationcontroller", kind(), source{d.Client, sets.Lister()})
	loop.Watch(c.Loop(), "replicationcontrollers", sets.Informer(), replicaset.OnSet[*corev1.ReplicationController](c))
	return c
}

func kind() schema.GroupVersionKind {
	return corev1.SchemeGroupVersion.WithKind("ReplicationController")
}

// source implements replicaset.Source.
type source struct {
	client kubernetes.Interface
	lister corelisters.ReplicationControllerLister
}

// Get implements replicaset.Source.
func (s source) Get(key loop.Key) (*appsv1.ReplicaSet, error) {
	rc, err := s.lister.ReplicationControllers(key.Namespace).Get(key.Name)
	if err != nil {
		return nil, err
	}
	return asSet(rc), nil
}

// List implements replicaset.Source.
func (s source) List(namespace string) ([]*appsv1.ReplicaSet, error) {
	all, err := s.lister.ReplicationControllers(namespace).List(labels.Everything())
	sets := make([]*appsv1.ReplicaSet, 0, len(all))
	for _, rc := range all {
		sets = append(sets, asSet(rc))
	}
	return sets, err
}

// Live implements replicaset.Source.
func (s source) Live(ctx context.Context, key loop.Key) (metav1.Object, error) {
	return s.client.CoreV1().ReplicationControllers(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
}

// WriteStatus implements replicaset.Source.
func (s source) WriteStatus(ctx context.Context, set *appsv1.ReplicaSet, status appsv1.ReplicaSetStatus) error {
	cached, err := s.lister.ReplicationControllers(set.Namespace).Get(set.Name)
	if err != nil {
		return err
	}
	update := cached.DeepCopy()
	// What was decided belongs to the state that it was decided from.
	update.UID, update.ResourceVersion = set.UID, set.ResourceVersion
	update.Status = corev1.ReplicationControllerStatus{
		Replicas: status.Replicas, FullyLabeledReplicas: status.FullyLabeledReplicas, ReadyReplicas: status.ReadyReplicas,
		AvailableReplicas: status.AvailableReplicas, ObservedGeneration: status.ObservedGeneration,
	}
	for _, c := range status.Conditions {
		update.Status.Conditions = append(update.Status.Conditions, corev1.ReplicationControllerCondition{
			Type: corev1.ReplicationControllerConditionType(c.Type), Status: c.Status,
			LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	_, err = s.client.CoreV1().ReplicationControllers(set.Namespace).UpdateStatus(ctx, update, metav1.UpdateOptions{})
	return err
}

// asSet shows rc as a ReplicaSet whose kind says what it is.
func asSet(rc *corev1.ReplicationController) *appsv1.ReplicaSet {
	rc = rc.DeepCopy()
	set := &appsv1.ReplicaSet{ObjectMeta: rc.ObjectMeta}
	set.SetGroupVersionKind(kind())
	set.Spec = appsv1.ReplicaSetSpec{
		Replicas: rc.Spec.Replicas, MinReadySeconds: rc.Spec.MinReadySeconds,
		Selector: &metav1.LabelSelector{MatchLabels: rc.Spec.Selector},
	}
	if rc.Spec.Template != nil {
		set.Spec.Template = *rc.Spec.Template
	}
	set.Status = appsv1.ReplicaSetStatus{
		Replicas: rc.Status.Replicas, FullyLabeledReplicas: rc.Status.FullyLabeledReplicas, ReadyReplicas: rc.Status.ReadyReplicas,
		AvailableReplicas: rc.Status.AvailableReplicas, ObservedGeneration: rc.Status.ObservedGeneration,
	}
	for _, c := range rc.Status.Conditions {
		set.Status.Conditions = append(set.Status.Conditions, appsv1.ReplicaSetCondition{
			Type: appsv1.ReplicaSetConditionType(c.Type), Status: c.Status,
			LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return set
}
