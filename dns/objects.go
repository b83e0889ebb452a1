// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Names that people and tools know by heart.
const (
	Namespace   = metav1.NamespaceSystem
	ServiceName = "kube-dns"
	Deployment  = "coredns"
	ConfigMap   = "coredns"
	corefileKey = "Corefile"
	zoneKey     = "outside.db"
	configDir   = "/etc/coredns"
	// Image names the release that is built in.
	Image = "registry.k8s.io/coredns/coredns:v1.14.3"
)

// appLabel is on everything of the cluster's DNS.
func appLabel() map[string]string { return map[string]string{"k8s-app": ServiceName} }

// Config is what the objects depend on.
type Config struct {
	// Domain is the cluster's, for example "cluster.local".
	Domain string
	// Address is the cluster IP of the Service kube-dns.
	Address netip.Addr
	// Zone holds the records of names outside of the cluster, as ReadZone returns them.
	Zone string
}

// Corefile is the configuration that a new cluster gets.
func Corefile(domain string) string {
	return `.:53 {
    errors
    health {
       lameduck 1s
    }
    ready
    kubernetes ` + domain + ` in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    file ` + configDir + "/" + zoneKey + ` . {
       reload 2s
    }
    prometheus :9153
    cache 30 {
       disable success ` + domain + `
       disable denial ` + domain + `
    }
    reload 2s
    loadbalance
}
`
}

// Ensure creates the objects that are not there. What is there stays as it is: people
// edit the Corefile, and scale the Deployment.
func Ensure(ctx context.Context, client kubernetes.Interface, cfg Config) error {
	create, get := metav1.CreateOptions{}, metav1.GetOptions{}
	objects := []struct {
		what string
		make func(context.Context) error
	}{
		{"serviceaccount", func(ctx context.Context) error {
			_, err := client.CoreV1().ServiceAccounts(Namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: named(Deployment, appLabel())}, create)
			return err
		}},
		{"clusterrolebinding", func(ctx context.Context) error {
			_, err := client.RbacV1().ClusterRoleBindings().Create(ctx, roleBinding(), create)
			return err
		}},
		{"configmap", func(ctx context.Context) error {
			_, err := client.CoreV1().ConfigMaps(Namespace).Create(ctx, &corev1.ConfigMap{
				ObjectMeta: named(ConfigMap, nil), Data: map[string]string{corefileKey: Corefile(cfg.Domain), zoneKey: emptyZone + cfg.Zone},
			}, create)
			return err
		}},
		{"service", func(ctx context.Context) error {
			// Its address would be refused, as that of another one, before its name is.
			services := client.CoreV1().Services(Namespace)
			_, err := services.Get(ctx, ServiceName, get)
			if apierrors.IsNotFound(err) {
				_, err = services.Create(ctx, service(cfg.Address), create)
			}
			return err
		}},
		{"deployment", func(ctx context.Context) error {
			_, err := client.AppsV1().Deployments(Namespace).Create(ctx, deployment(), create)
			return err
		}},
	}
	// In a cluster that starts, its controllers may not have made it yet.
	_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}}, create)
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create the namespace of cluster DNS: %w", err)
	}
	// At once, so that they share the store's transactions.
	all, ctx := errgroup.WithContext(ctx)
	for _, o := range objects {
		all.Go(func() error {
			if err := o.make(ctx); err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("create the %s of cluster DNS: %w", o.what, err)
			}
			return nil
		})
	}
	return all.Wait()
}

func named(name string, labels map[string]string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Namespace: Namespace, Labels: labels}
}

func roleBinding() *rbacv1.ClusterRoleBinding {
	const role = "system:coredns"
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: Deployment, Namespace: Namespace}},
	}
}

// The ports of the pods, and of the Service.
const (
	dnsPort     = 53
	metricsPort = 9153
	healthPort  = 8080
	readyPort   = 8181
)

func service(address netip.Addr) *corev1.Service {
	labels := appLabel()
	labels["kubernetes.io/cluster-service"], labels["kubernetes.io/name"] = "true", "CoreDNS"
	meta := named(ServiceName, labels)
	meta.Annotations = map[string]string{"prometheus.io/port": fmt.Sprint(metricsPort), "prometheus.io/scrape": "true"}
	return &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		Selector: appLabel(), ClusterIP: address.String(),
		Ports: []corev1.ServicePort{
			{Name: "dns", Port: dnsPort, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(dnsPort)},
			{Name: "dns-tcp", Port: dnsPort, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(dnsPort)},
			{Name: "metrics", Port: metricsPort, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(metricsPort)},
		},
	}}
}

func deployment() *appsv1.Deployment {
	return &appsv1.Deployment{ObjectMeta: named(Deployment, appLabel()), Spec: appsv1.DeploymentSpec{
		Replicas: ptr.To[int32](1),
		Strategy: appsv1.DeploymentStrategy{
			Type:          appsv1.RollingUpdateDeploymentStrategyType,
			RollingUpdate: &appsv1.RollingUpdateDeployment{MaxUnavailable: ptr.To(intstr.FromInt32(1))},
		},
		Selector: &metav1.LabelSelector{MatchLabels: appLabel()},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: appLabel()}, Spec: podSpec()},
	}}
}

func podSpec() corev1.PodSpec {
	return corev1.PodSpec{
		ServiceAccountName: Deployment,
		// The pod that answers cannot ask itself.
		DNSPolicy:         corev1.DNSDefault,
		PriorityClassName: "system-cluster-critical",
		NodeSelector:      map[string]string{corev1.LabelOSStable: "linux"},
		Tolerations: []corev1.Toleration{
			{Key: "CriticalAddonsOnly", Operator: corev1.TolerationOpExists},
			{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule},
		},
		Volumes: []corev1.Volume{{Name: "config-volume", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: ConfigMap},
		}}}},
		Containers: []corev1.Container{{
			Name: Program, Image: Image, ImagePullPolicy: corev1.PullIfNotPresent,
			Args: []string{"-conf", configDir + "/" + corefileKey},
			Ports: []corev1.ContainerPort{
				{Name: "dns", ContainerPort: dnsPort, Protocol: corev1.ProtocolUDP},
				{Name: "dns-tcp", ContainerPort: dnsPort, Protocol: corev1.ProtocolTCP},
				{Name: "metrics", ContainerPort: metricsPort, Protocol: corev1.ProtocolTCP},
			},
			Resources: corev1.ResourceRequirements{
				Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("170Mi")},
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("70Mi")},
			},
			VolumeMounts: []corev1.VolumeMount{{Name: "config-volume", MountPath: configDir, ReadOnly: true}},
			SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
				Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_BIND_SERVICE"}, Drop: []corev1.Capability{"ALL"}},
			},
			LivenessProbe: &corev1.Probe{
				ProbeHandler:        httpGet("/health", healthPort),
				InitialDelaySeconds: 60, TimeoutSeconds: 5, FailureThreshold: 5,
			},
			ReadinessProbe: &corev1.Probe{ProbeHandler: httpGet("/ready", readyPort)},
		}},
	}
}

func httpGet(path string, port int32) corev1.ProbeHandler {
	return corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromInt32(port)}}
}
