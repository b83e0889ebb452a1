// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/apiserver"
)

// The names of the pods that stand for the lab's own parts, and of the images that
// show their logs (package sandbox/workload).
const (
	partProxy      = "kube-proxy"
	partCNI        = "routed"
	partAPI        = "kube-apiserver"
	partStore      = "etcd"
	partController = "kube-controller-manager"
	partScheduler  = "kube-scheduler"
	// calicoNode is what the CNI's DaemonSet is called in the tutorials; its image says
	// what it really is.
	calicoNode = "calico-node"
)

// partLog writes what a part of the lab says to a pod on a node, until ctx ends.
func (l *Lab) partLog(nodeName string) func(ctx context.Context, part string, w io.Writer) error {
	return func(ctx context.Context, part string, w io.Writer) error {
		if part == partProxy || part == partCNI {
			part += "/" + nodeName
		}
		return l.partLogs.of(part).follow(ctx, w)
	}
}

// describeParts begins the logs of the parts that are otherwise silent with what they
// are here.
func (l *Lab) describeParts() {
	say := func(part, message string, args ...any) {
		l.partLogs.tee(l.log.With("part", part), part).Info(message, args...)
	}
	say(partAPI, "Serving securely", "address", fmt.Sprintf("%s:%d", l.cfg.APINode().Address, apiPortInside), "version", apiserver.KubernetesVersion)
	say(partStore, "the store of this lab is a bbolt file inside its daemon; no etcd runs", "file", l.paths.State)
	say(partController, "Started controllers", "count", len(l.witnesses))
	say(partScheduler, "Started scheduler")
	for _, n := range l.cfg.Nodes {
		say(partCNI+"/"+n.Name, "the CNI plugin routed stands in for Calico: a /32 route for each pod, 169.254.1.1 as its gateway", "node", n.Name, "podCIDR", n.PodCIDR)
	}
}

// ensureSystemPods makes the objects that show the lab's parts as a stock cluster
// has them: DaemonSets for what every node has, a mirror pod on the control-plane node
// for each of its components. What is there stays as it is.
func (l *Lab) ensureSystemPods(ctx context.Context) error {
	if !l.cfg.SystemPods {
		return nil
	}
	l.describeParts()
	master, err := l.client.CoreV1().Nodes().Get(ctx, l.cfg.APINode().Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("find the control-plane node: %w", err)
	}
	all, ctx := errgroup.WithContext(ctx)
	for _, d := range []*appsv1.DaemonSet{
		systemDaemonSet(partProxy, partProxy, "registry.k8s.io/kube-proxy:"+apiserver.KubernetesVersion),
		systemDaemonSet(calicoNode, calicoNode, "kplab/"+partCNI),
	} {
		all.Go(func() error {
			_, err := l.client.AppsV1().DaemonSets(metav1.NamespaceSystem).Create(ctx, d, metav1.CreateOptions{})
			return created("DaemonSet "+d.Name, err)
		})
	}
	for _, component := range []string{partStore, partAPI, partController, partScheduler} {
		all.Go(func() error {
			p := mirrorPod(component, master)
			_, err := l.client.CoreV1().Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{})
			return created("Pod "+p.Name, err)
		})
	}
	return all.Wait()
}

func created(what string, err error) error {
	if err == nil || apierrors.IsAlreadyExists(err) {
		return nil
	}
	return fmt.Errorf("create %s: %w", what, err)
}

// systemSpec is what the pods of the lab's parts have in common.
func systemSpec(container, image string) corev1.PodSpec {
	return corev1.PodSpec{
		HostNetwork:       true,
		PriorityClassName: "system-node-critical",
		Tolerations:       []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		Containers:        []corev1.Container{{Name: container, Image: image, ImagePullPolicy: corev1.PullIfNotPresent}},
	}
}

func systemDaemonSet(name, container, image string) *appsv1.DaemonSet {
	labels := map[string]string{"k8s-app": name}
	spec := systemSpec(container, image)
	spec.NodeSelector = map[string]string{corev1.LabelOSStable: "linux"}
	return &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceSystem, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			UpdateStrategy: appsv1.DaemonSetUpdateStrategy{
				Type:          appsv1.RollingUpdateDaemonSetStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDaemonSet{MaxUnavailable: ptr.To(intstr.FromInt32(1))},
			},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}
}

// mirrorPod is the pod by which a kubelet shows a static pod.
func mirrorPod(component string, on *corev1.Node) *corev1.Pod {
	spec := systemSpec(component, "registry.k8s.io/"+component+":"+apiserver.KubernetesVersion)
	spec.NodeName = on.Name
	spec.Tolerations[0].Effect = corev1.TaintEffectNoExecute
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: component + "-" + on.Name, Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{"component": component, "tier": "control-plane"},
			Annotations: map[string]string{
				corev1.MirrorPodAnnotationKey: string(on.UID),
				"kubernetes.io/config.hash":   string(on.UID),
				"kubernetes.io/config.source": "file",
			},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "v1", Kind: "Node", Name: on.Name, UID: on.UID, Controller: ptr.To(true),
			}},
		},
		Spec: spec,
	}
}
