// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kplab/kplab/node/kubelet"
)

const (
	// leaseSeconds is how long the cluster believes in the node without a renewal,
	// leaseEvery how often the node renews.
	leaseSeconds = 40
	leaseEvery   = 10 * time.Second
	// reportEvery is how often the conditions' heartbeats move when nothing else does.
	reportEvery = 5 * time.Minute
	// defaultMaxPods is upstream's.
	defaultMaxPods = 110
)

// register makes the Node object true: it is created when it is missing, and its
// status is written when it is not what the node knows it to be, for example after
// the lifecycle controller marked a silent node.
func (n *Node) register(ctx context.Context) error {
	nodes := n.cfg.Client.CoreV1().Nodes()
	now, err := n.known(ctx)
	if apierrors.IsNotFound(err) {
		node := n.object()
		n.status(node)
		if now, err = nodes.Create(ctx, node, metav1.CreateOptions{}); err == nil {
			n.tell(nil, node.Status.Conditions)
			n.event("NodeAllocatableEnforced", "Updated Node Allocatable limit across pods")
		}
		if apierrors.IsAlreadyExists(err) {
			now, err = nodes.Get(ctx, n.cfg.Name, metav1.GetOptions{})
		}
	}
	if err != nil {
		return fmt.Errorf("register node %s: %w", n.cfg.Name, err)
	}
	if want, changed := n.spec(now); changed {
		if now, err = nodes.Update(ctx, want, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("update node %s: %w", n.cfg.Name, err)
		}
	}
	want := now.DeepCopy()
	n.status(want)
	if apiequality.Semantic.DeepEqual(want.Status, now.Status) {
		return nil
	}
	if _, err := nodes.UpdateStatus(ctx, want, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write the status of node %s: %w", n.cfg.Name, err)
	}
	n.tell(now.Status.Conditions, want.Status.Conditions)
	return nil
}

// conditionEvents are the reasons of the events that a kubelet makes when a condition
// becomes what is right.
var conditionEvents = []struct {
	condition corev1.NodeConditionType
	reason    string
}{
	{corev1.NodeMemoryPressure, "NodeHasSufficientMemory"},
	{corev1.NodeDiskPressure, "NodeHasNoDiskPressure"},
	{corev1.NodePIDPressure, "NodeHasSufficientPID"},
	{corev1.NodeReady, "NodeReady"},
}

// tell makes an event for each condition that has changed.
func (n *Node) tell(before, now []corev1.NodeCondition) {
	status := func(all []corev1.NodeCondition, of corev1.NodeConditionType) corev1.ConditionStatus {
		for _, c := range all {
			if c.Type == of {
				return c.Status
			}
		}
		return ""
	}
	for _, e := range conditionEvents {
		if status(before, e.condition) != status(now, e.condition) {
			n.event(e.reason, "Node %s status is now: %s", n.cfg.Name, e.reason)
		}
	}
}

// event makes an event about the node. As in stock kubelets' events, the node's name
// stands for its UID: a kubelet speaks before it knows that.
func (n *Node) event(reason, format string, args ...any) {
	ref := &corev1.ObjectReference{Kind: "Node", Name: n.cfg.Name, UID: types.UID(n.cfg.Name)}
	n.recorder.Eventf(ref, corev1.EventTypeNormal, reason, format, args...)
}

// known returns the Node object, from the watch where it has it.
func (n *Node) known(ctx context.Context) (*corev1.Node, error) {
	if n.nodesSynced() {
		if obj, ok, err := n.nodes.GetStore().GetByKey(n.cfg.Name); err == nil && ok {
			if node, ok := obj.(*corev1.Node); ok {
				return node, nil
			}
		}
	}
	return n.cfg.Client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
}

// object is a new Node object.
func (n *Node) object() *corev1.Node {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name, Labels: n.labels()}}
	node.Spec.PodCIDR, node.Spec.PodCIDRs = n.cfg.PodCIDR.String(), n.podCIDRs()
	node.Spec.ProviderID = "kplab://" + n.cfg.Name
	if n.cfg.ControlPlane {
		node.Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
	}
	return node
}

// podCIDRs are the ranges of the node's pods, one a family.
func (n *Node) podCIDRs() []string {
	all := []string{n.cfg.PodCIDR.String()}
	if n.cfg.SecondaryPodCIDR.IsValid() {
		all = append(all, n.cfg.SecondaryPodCIDR.String())
	}
	return all
}

func (n *Node) labels() map[string]string {
	l := map[string]string{
		corev1.LabelHostname: n.cfg.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
		"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": runtime.GOARCH,
	}
	if n.cfg.ControlPlane {
		l["node-role.kubernetes.io/control-plane"] = ""
	}
	for k, v := range n.cfg.Labels {
		l[k] = v
	}
	return l
}

// spec adds what an existing object lacks. Taints are left alone: a person may have
// removed the control plane's on purpose.
func (n *Node) spec(now *corev1.Node) (*corev1.Node, bool) {
	want, changed := now.DeepCopy(), false
	if want.Labels == nil {
		want.Labels = map[string]string{}
	}
	for k, v := range n.labels() {
		if had, ok := want.Labels[k]; !ok || had != v {
			want.Labels[k], changed = v, true
		}
	}
	if want.Spec.PodCIDR == "" {
		want.Spec.PodCIDR, changed = n.cfg.PodCIDR.String(), true
		want.Spec.PodCIDRs = n.podCIDRs()
	}
	return want, changed
}

// status fills in what only the node knows. The Lease is the heartbeat that counts;
// those of the conditions move now and then, so that people see that they do.
func (n *Node) status(node *corev1.Node) {
	s := &node.Status
	s.Addresses = nil
	for _, ip := range n.cfg.peer().ips() {
		s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: ip.String()})
	}
	s.Addresses = append(s.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: n.cfg.Name})
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:              *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		corev1.ResourceMemory:           *resource.NewQuantity(memory(), resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(int64(n.cfg.MaxPods), resource.DecimalSI),
		corev1.ResourceEphemeralStorage: *resource.NewQuantity(diskSize(n.cfg.StateDir), resource.BinarySI),
	}
	maps.Copy(capacity, hugePages())
	s.Capacity, s.Allocatable = capacity, capacity.DeepCopy()
	s.DaemonEndpoints.KubeletEndpoint.Port = kubelet.Port
	s.NodeInfo = corev1.NodeSystemInfo{
		MachineID: n.cfg.Name, SystemUUID: n.cfg.Name, BootID: bootID(),
		KernelVersion: kernelVersion(), OSImage: osImage(), OperatingSystem: "linux", Architecture: runtime.GOARCH,
		ContainerRuntimeVersion: "kplab://" + n.cfg.Version, KubeletVersion: n.cfg.KubernetesVersion + "-kplab",
	}
	for _, c := range []corev1.NodeCondition{
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientMemory", Message: "kubelet has sufficient memory available"},
		{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasNoDiskPressure", Message: "kubelet has no disk pressure"},
		{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientPID", Message: "kubelet has sufficient PID available"},
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "kubelet is posting ready status"},
	} {
		setNodeCondition(s, c)
	}
}

func setNodeCondition(s *corev1.NodeStatus, c corev1.NodeCondition) {
	now := metav1.NewTime(time.Now().Truncate(time.Second))
	for i := range s.Conditions {
		old := &s.Conditions[i]
		if old.Type != c.Type {
			continue
		}
		c.LastTransitionTime, c.LastHeartbeatTime = old.LastTransitionTime, old.LastHeartbeatTime
		// A report that comes early for another reason is not one of the heartbeats.
		if now.Sub(old.LastHeartbeatTime.Time) > reportEvery/2 {
			c.LastHeartbeatTime = now
		}
		if old.Status != c.Status {
			c.LastTransitionTime, c.LastHeartbeatTime = now, now
		}
		*old = c
		return
	}
	c.LastTransitionTime, c.LastHeartbeatTime = now, now
	s.Conditions = append(s.Conditions, c)
}

// heartbeat renews the node's Lease until ctx ends. A renewal that fails is tried
// again soon: the namespace of the leases may not be there yet.
func (n *Node) heartbeat(ctx context.Context) error {
	var lease *coordinationv1.Lease
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		next, err := n.renew(ctx, lease)
		lease = next
		wait, level := leaseEvery, slog.LevelWarn
		if err != nil {
			if apierrors.IsNotFound(err) {
				level = slog.LevelDebug // the namespace of the leases is made by a controller, a moment later
			}
			err = fmt.Errorf("renew the lease of node %s: %w", n.cfg.Name, err)
			wait = time.Second
		}
		n.note(ctx, level, "Lease", err)
		timer.Reset(wait)
	}
}

// renew writes the lease once. It returns the newest lease, nil when it has to be
// read again.
func (n *Node) renew(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	leases := n.cfg.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NowMicro()
	if lease == nil {
		found, err := leases.Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			seconds := int32(leaseSeconds)
			made := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name}}
			n.own(ctx, made)
			made.Spec = coordinationv1.LeaseSpec{HolderIdentity: &n.cfg.Name, LeaseDurationSeconds: &seconds, RenewTime: &now}
			made, err := leases.Create(ctx, made, metav1.CreateOptions{})
			if err != nil {
				return nil, err // made is an empty one then
			}
			return made, nil
		}
		if err != nil {
			return nil, err
		}
		lease = found
	}
	next := lease.DeepCopy()
	n.own(ctx, next)
	seconds := int32(leaseSeconds)
	next.Spec.HolderIdentity, next.Spec.LeaseDurationSeconds, next.Spec.RenewTime = &n.cfg.Name, &seconds, &now
	done, err := leases.Update(ctx, next, metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	return done, nil
}

// own makes a lease go with the Node object, once that is there.
func (n *Node) own(ctx context.Context, lease *coordinationv1.Lease) {
	if len(lease.OwnerReferences) > 0 {
		return
	}
	if node, err := n.known(ctx); err == nil { // else the next renewal does it
		lease.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	}
}

// memory is the machine's, which the nodes share.
func memory() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(uint64(info.Totalram) * uint64(info.Unit)) //nolint:unconvert // the fields' types differ between architectures
}

// diskSize is the size in bytes of the file system that holds dir, which the nodes
// share.
func diskSize(dir string) int64 {
	// The directory may come later than the node.
	for {
		var info unix.Statfs_t
		if unix.Statfs(dir, &info) == nil {
			return int64(info.Blocks) * int64(info.Bsize) //nolint:unconvert // the fields' types differ between architectures
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return 0
		}
		dir = parent
	}
}

// hugePages is what the kernel has set aside, by size: hugepages-2Mi and the like.
func hugePages() corev1.ResourceList {
	list := corev1.ResourceList{}
	const pool = "/sys/kernel/mm/hugepages"
	entries, err := os.ReadDir(pool)
	if err != nil {
		return list // a kernel without them
	}
	for _, e := range entries {
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimPrefix(e.Name(), "hugepages-"), "kB"), 10, 64)
		if err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(pool, e.Name(), "nr_hugepages"))
		if err != nil {
			continue
		}
		count, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil {
			continue
		}
		size := resource.NewQuantity(kib<<10, resource.BinarySI)
		list[corev1.ResourceName(corev1.ResourceHugePagesPrefix+size.String())] = *resource.NewQuantity(count*kib<<10, resource.BinarySI)
	}
	return list
}

func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// osImage is the name of the host's system, whose programs the pods use.
func osImage() string {
	text, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "Linux"
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(v, `"`)
		}
	}
	return "Linux"
}
