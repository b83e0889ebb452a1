// SPDX-License-Identifier: Apache-2.0

// Package svcindex finds the Services that select a pod without looking at every
// Service: a lab may hold ten thousand of them, and pods change often.
package svcindex

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/tools/cache"

	"github.com/kplab/kplab/controller/loop"
)

// name of the index: every Service with a selector stands under one pair of it.
const name = "kplab-selector"

// Add puts the index on the Services' informer, unless it is there. Call it before
// the informer starts.
func Add(informer cache.SharedIndexInformer) error {
	if _, there := informer.GetIndexer().GetIndexers()[name]; there {
		return nil
	}
	return informer.AddIndexers(cache.Indexers{name: func(obj any) ([]string, error) {
		svc, ok := obj.(*corev1.Service)
		if !ok || len(svc.Spec.Selector) == 0 {
			return nil, nil
		}
		// One pair is enough: a pod without it is not selected.
		first := ""
		for key := range svc.Spec.Selector {
			if first == "" || key < first {
				first = key
			}
		}
		return []string{entry(svc.Namespace, first, svc.Spec.Selector[first])}, nil
	}})
}

func entry(namespace, key, value string) string { return namespace + "/" + key + "=" + value }

// ForPod returns the keys of the Services in namespace whose selector matches.
func ForPod(indexer cache.Indexer, namespace string, podLabels map[string]string) ([]loop.Key, error) {
	var keys []loop.Key
	for key, value := range podLabels {
		found, err := indexer.ByIndex(name, entry(namespace, key, value))
		if err != nil {
			return nil, err
		}
		for _, obj := range found {
			if svc, ok := obj.(*corev1.Service); ok && matches(svc.Spec.Selector, podLabels) {
				keys = append(keys, loop.KeyOf(svc))
			}
		}
	}
	return keys, nil
}

func matches(selector, podLabels map[string]string) bool {
	for key, value := range selector {
		if got, ok := podLabels[key]; !ok || got != value {
			return false
		}
	}
	return true
}

// Concerned returns the Services whose endpoints an event about a pod may change;
// old or cur is nil as in loop.Watch. Changes of a pod that no endpoint shows (an
// annotation, a container's restart count) concern none.
func Concerned(indexer cache.Indexer, old, cur *corev1.Pod) []loop.Key {
	var keys []loop.Key
	if old != nil && cur != nil && !shows(old, cur) {
		return nil
	}
	for _, pod := range []*corev1.Pod{old, cur} {
		if pod == nil || (pod == cur && old != nil && equality.Semantic.DeepEqual(old.Labels, cur.Labels)) {
			continue
		}
		// The index exists: New of each user added it.
		found, err := ForPod(indexer, pod.Namespace, pod.Labels)
		if err != nil {
			continue
		}
		for _, key := range found {
			if !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// shows reports whether the two states of a pod may differ in any endpoint.
func shows(old, cur *corev1.Pod) bool {
	return ready(old) != ready(cur) ||
		finished(old) != finished(cur) ||
		(old.DeletionTimestamp == nil) != (cur.DeletionTimestamp == nil) ||
		old.Spec.NodeName != cur.Spec.NodeName ||
		old.Status.PodIP != cur.Status.PodIP ||
		!slices.Equal(old.Status.PodIPs, cur.Status.PodIPs) ||
		old.UID != cur.UID ||
		!equality.Semantic.DeepEqual(old.Labels, cur.Labels)
}

func ready(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if pod.Status.Conditions[i].Type == corev1.PodReady {
			return pod.Status.Conditions[i].Status == corev1.ConditionTrue
		}
	}
	return false
}

func finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
