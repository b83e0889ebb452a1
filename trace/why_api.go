// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// What the API says of a Service: the first half of the way.

func stop(c Cause) []Cause {
	c.stops = true
	return []Cause{c}
}

func serviceExists(p *patient) []Cause {
	if p.svc = p.x.Service(p.key); p.svc != nil {
		return nil
	}
	c := Cause{Reason: "no-service", Text: "there is no Service " + p.key, Fix: p.kubectl("get services")}
	var elsewhere, near []string
	for key := range p.x.services {
		ns, name, _ := strings.Cut(key, "/")
		switch {
		case name == p.name():
			elsewhere = append(elsewhere, ns)
		case ns == p.namespace() && distance(name, p.name()) <= 1+len(p.name())/4:
			near = append(near, name)
		}
	}
	slices.Sort(elsewhere)
	slices.Sort(near)
	switch {
	case len(elsewhere) > 0:
		c.Reason = "other-namespace"
		c.Text += fmt.Sprintf("; there is one of that name in namespace %s", strings.Join(elsewhere, ", "))
		c.Fix = fmt.Sprintf("kplab why svc/%s/%s, and from other namespaces use the name %s.%s", elsewhere[0], p.name(), p.name(), elsewhere[0])
	case len(near) > 0:
		c.Text += "; did you mean " + strings.Join(near, " or ") + "?"
		c.Fix = "use the name " + near[0]
	}
	return stop(c)
}

// distance is how many letters differ (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		left := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := left
			if a[i] != b[j] {
				d++
			}
			left = row[j+1]
			row[j+1] = min(d, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

func serviceStays(p *patient) []Cause {
	if p.svc.DeletionTimestamp == nil {
		return nil
	}
	return []Cause{{
		Reason: "service-terminating", Text: fmt.Sprintf("Service %s is being deleted since %s and waits for its finalizers", p.key, p.svc.DeletionTimestamp.UTC().Format("15:04:05")),
		Fix:      p.kubectl("get service %s -o jsonpath='{.metadata.finalizers}'", p.name()),
		Evidence: []string{"finalizers: " + strings.Join(p.svc.Finalizers, ", ")},
	}}
}

func portExists(p *patient) []Cause {
	var have []string
	var other *corev1.ServicePort
	for i := range p.svc.Spec.Ports {
		s := &p.svc.Spec.Ports[i]
		number := strconv.Itoa(int(s.Port))
		have = append(have, strings.TrimPrefix(fmt.Sprintf("%s %s/%s", s.Name, number, protoName(s.Protocol)), " "))
		switch {
		case p.spec == nil && (p.port == "" || p.port == s.Name || p.port == number):
			p.spec = s
		case p.port == strconv.Itoa(int(s.NodePort)) || p.port == s.TargetPort.String():
			other = s
		}
	}
	if p.spec != nil || p.svc.Spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	c := Cause{Reason: "no-port", Text: fmt.Sprintf("Service %s has no port %s; it has %s", p.key, p.port, strings.Join(have, ", ")), Fix: "use one of these ports, or add it to spec.ports"}
	if len(have) == 0 {
		c.Text, c.Fix = fmt.Sprintf("Service %s has no ports", p.key), "add spec.ports"
	} else if other != nil {
		c.Text += fmt.Sprintf("; %s is a target or node port, clients of the Service use %d", p.port, other.Port)
		c.Fix = fmt.Sprintf("use port %d", other.Port)
	}
	return stop(c)
}

// externalName: such a Service is a name in DNS and nothing else.
func externalName(p *patient) []Cause {
	if p.svc.Spec.Type != corev1.ServiceTypeExternalName {
		return nil
	}
	name := p.svc.Spec.ExternalName
	if _, err := netip.ParseAddr(name); err == nil {
		return stop(Cause{
			Reason: "external-name-is-address", Text: fmt.Sprintf("the externalName of Service %s is the address %s: it is taken for a name, and no name server knows it", p.key, name),
			Fix: "use a Service without a selector and an EndpointSlice with the address",
		})
	}
	from := p.resolver()
	if from == nil {
		p.notes = append(p.notes, fmt.Sprintf("Service %s is an alias for %s; no running pod is there to look it up from", p.key, name))
		return stopHealthy
	}
	_, steps, dead := p.lab.lookup(p.ctx, from, p.name()+"."+p.namespace(), p.x)
	if dead == nil {
		p.notes = append(p.notes, fmt.Sprintf("Service %s is an alias for %s; it resolves from %s", p.key, name, from.Name))
		return stopHealthy
	}
	c := Cause{Reason: "external-name-unresolved", Text: fmt.Sprintf("Service %s is an alias for %s, which does not resolve: %s", p.key, name, dead.Text), Fix: "correct spec.externalName, or give the lab the name: kplab up --dns-zone FILE"}
	if dead.Reason == "dns-failed" {
		c = p.dnsDead(from, dead)
	}
	for _, s := range steps {
		c.Evidence = append(c.Evidence, from.Name+": "+s.Text)
	}
	return stop(c)
}

// stopHealthy ends the examination without a cause.
var stopHealthy = []Cause{{stops: true}}

// resolver is a place whose resolver is the cluster's: where the request comes from,
// else any running pod, those of the namespace first.
func (p *patient) resolver() *Place {
	if p.from.ResolvConf != "" {
		return p.from
	}
	var pods []*corev1.Pod
	for _, pod := range p.x.pods {
		if pod.Status.Phase == corev1.PodRunning && !pod.Spec.HostNetwork && pod.Spec.DNSPolicy == corev1.DNSClusterFirst {
			pods = append(pods, pod)
		}
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		if other := cmp.Compare(len(a.Namespace), len(b.Namespace)); a.Namespace == p.namespace() != (b.Namespace == p.namespace()) {
			if a.Namespace == p.namespace() {
				return -1
			}
			return 1
		} else if other != 0 {
			return other
		}
		return strings.Compare(a.Namespace+a.Name, b.Namespace+b.Name)
	})
	for _, pod := range pods {
		if place, err := p.lab.Place("pod/"+pod.Namespace+"/"+pod.Name, ""); err == nil && place.ResolvConf != "" {
			return place
		}
	}
	return nil
}

func selectorMatches(p *patient) []Cause {
	selector := p.svc.Spec.Selector
	if len(selector) == 0 {
		if len(p.x.slices[p.key]) > 0 {
			return nil
		}
		return stop(Cause{
			Reason: "no-endpoints-object", Text: fmt.Sprintf("Service %s has no selector, and nobody has written an EndpointSlice or Endpoints for it", p.key),
			Fix: fmt.Sprintf("write an EndpointSlice with the label kubernetes.io/service-name=%s, or give the Service a selector", p.name()),
		})
	}
	want := labels.SelectorFromSet(selector)
	var elsewhere []string
	var near *corev1.Pod
	most := 0
	for _, pod := range sortedPods(p.x) {
		if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		matches := want.Matches(labels.Set(pod.Labels))
		if pod.Namespace != p.namespace() {
			if matches && !slices.Contains(elsewhere, pod.Namespace) {
				elsewhere = append(elsewhere, pod.Namespace)
			}
			continue
		}
		if matches {
			p.selected = append(p.selected, pod)
			continue
		}
		if n := resembles(selector, pod); n > most {
			near, most = pod, n
		}
	}
	if len(p.selected) > 0 {
		return nil
	}
	c := Cause{
		Reason: "selector-matches-nothing", Text: fmt.Sprintf("the selector %s of Service %s matches no pod in namespace %s", want, p.key, p.namespace()),
		Fix: p.kubectl("get pods --show-labels") + ", and set the Service's selector to labels that the pods have", Evidence: []string{fmt.Sprintf("spec.selector: %s", want)},
	}
	switch {
	case near != nil:
		c.Text += fmt.Sprintf("; the nearest is pod %s with %s", near.Name, labels.Set(near.Labels))
		c.Evidence = append(c.Evidence, fmt.Sprintf("pod %s: labels %s", near.Name, labels.Set(near.Labels)))
		if fix := p.selectorFix(near); fix != "" {
			c.Fix = fix
		}
	case len(elsewhere) > 0:
		c.Text += "; pods with these labels are in namespace " + strings.Join(elsewhere, ", ") + ", and a Service selects in its own only"
		c.Fix = "make the Service in namespace " + elsewhere[0]
	}
	return stop(c)
}

// resembles counts what of a selector a pod has, keys less than keys with their value.
func resembles(selector map[string]string, pod *corev1.Pod) int {
	n := 0
	for k, v := range selector {
		have, ok := pod.Labels[k]
		switch {
		case have == v && ok:
			n += 4
		case ok:
			n += 2
		}
		for _, other := range pod.Labels {
			if other == v || ok && distance(have, v) <= 2 {
				n++
				break
			}
		}
	}
	return n
}

// selectorFix is the command that makes the selector match a pod's labels.
func (p *patient) selectorFix(pod *corev1.Pod) string {
	var pairs []string
	for _, k := range slices.Sorted(maps.Keys(p.svc.Spec.Selector)) {
		v, ok := pod.Labels[k]
		if !ok {
			return ""
		}
		pairs = append(pairs, fmt.Sprintf("%s=%s", k, v))
	}
	return p.kubectl("set selector service %s %s", p.name(), strings.Join(pairs, ","))
}

func sortedPods(x *Index) []*corev1.Pod {
	out := make([]*corev1.Pod, 0, len(x.pods))
	for _, p := range x.pods {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int { return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	return out
}

// podsRun is about pods that have not started: none of the selected runs.
func podsRun(p *patient) []Cause {
	if len(p.selected) == 0 {
		return nil
	}
	var waiting []*corev1.Pod
	for _, pod := range p.selected {
		if pod.Status.Phase == corev1.PodRunning {
			return nil
		}
		waiting = append(waiting, pod)
	}
	pod := waiting[0]
	c := Cause{Reason: "pods-pending", Fix: p.kubectl("describe pod %s", pod.Name)}
	for _, cond := range pod.Status.Conditions {
		if cond.Type == corev1.PodScheduled && cond.Status == corev1.ConditionFalse {
			c.Reason, c.Text = "pods-unschedulable", fmt.Sprintf("no node takes the pods of Service %s: %s", p.key, cond.Message)
			return stop(c)
		}
	}
	c.Text = fmt.Sprintf("the pods of Service %s have not started: pod %s is %s", p.key, pod.Name, orWord(string(pod.Status.Phase), "not looked at yet"))
	if w := waitingOf(pod); w != nil {
		c.Text += fmt.Sprintf(": %s: %s", w.Reason, w.Message)
		if strings.Contains(w.Reason, "Image") {
			c.Reason = "image"
		}
	}
	c.Evidence = p.podEvents(pod)
	return stop(c)
}

func waitingOf(pod *corev1.Pod) *corev1.ContainerStateWaiting {
	for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range list {
			if w := list[i].State.Waiting; w != nil && w.Reason != "PodInitializing" {
				return w
			}
		}
	}
	return nil
}

// podsReady: a Service sends only to pods that are ready.
func podsReady(p *patient) []Cause {
	if len(p.selected) == 0 || p.svc.Spec.PublishNotReadyAddresses {
		return nil
	}
	var unready []*corev1.Pod
	var ready int
	for _, pod := range p.selected {
		if podReady(pod) && pod.DeletionTimestamp == nil {
			ready++
		} else {
			unready = append(unready, pod)
		}
	}
	if len(unready) == 0 {
		return nil
	}
	c := p.unready(unready[0])
	if ready > 0 {
		p.notes = append(p.notes, fmt.Sprintf("%d of %d pods are not ready: %s", len(unready), len(p.selected), c.Text))
		return nil
	}
	c.Text = fmt.Sprintf("none of the %d pods of Service %s is ready: %s", len(p.selected), p.key, c.Text)
	return stop(c)
}

func podReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// unready says why one pod is not ready.
func (p *patient) unready(pod *corev1.Pod) Cause {
	c := Cause{Reason: "pods-not-ready", Fix: p.kubectl("describe pod %s", pod.Name), Evidence: p.podEvents(pod)}
	if pod.DeletionTimestamp != nil {
		c.Reason, c.Text = "pods-terminating", fmt.Sprintf("pod %s is being deleted", pod.Name)
		return c
	}
	if n := p.x.nodeNamed(pod.Spec.NodeName); n != nil && !nodeReady(n) {
		c.Reason, c.Text, c.Fix = "node-not-ready", fmt.Sprintf("node %s, where pod %s runs, is not ready", n.Name, pod.Name), "kubectl describe node "+n.Name
		p.known(n.Name, "node-stopped", "node-killed", "node-paused").blame(&c)
		return c
	}
	if w := waitingOf(pod); w != nil {
		c.Text = fmt.Sprintf("pod %s: %s: %s", pod.Name, w.Reason, w.Message)
		switch {
		case w.Reason == "CrashLoopBackOff" || w.Reason == "RunContainerError":
			c.Reason, c.Fix = "pods-crash", p.kubectl("logs %s --previous", pod.Name)
		case strings.Contains(w.Reason, "Image"):
			c.Reason = "image"
		}
		return c
	}
	for i := range pod.Status.ContainerStatuses {
		if t := pod.Status.ContainerStatuses[i].State.Terminated; t != nil {
			c.Reason, c.Text, c.Fix = "pods-crash", fmt.Sprintf("pod %s: container %s ended with code %d", pod.Name, pod.Status.ContainerStatuses[i].Name, t.ExitCode), p.kubectl("logs %s", pod.Name)
			return c
		}
	}
	for _, gate := range pod.Spec.ReadinessGates {
		if !slices.ContainsFunc(pod.Status.Conditions, func(k corev1.PodCondition) bool {
			return k.Type == gate.ConditionType && k.Status == corev1.ConditionTrue
		}) {
			c.Reason, c.Text = "readiness-gate", fmt.Sprintf("pod %s waits for its readiness gate %s", pod.Name, gate.ConditionType)
			return c
		}
	}
	for _, e := range p.eventsOf(pod) {
		if e.Reason == "Unhealthy" && strings.Contains(e.Message, "eadiness probe") || e.Reason == "Unhealthy" && strings.Contains(e.Message, "tartup probe") {
			c.Reason, c.Text = "probe-fails", fmt.Sprintf("pod %s: %s", pod.Name, e.Message)
			c.Fix = "mend the program or its probe: " + p.kubectl("describe pod %s", pod.Name)
			return c
		}
	}
	c.Text = fmt.Sprintf("pod %s is %s and not ready", pod.Name, pod.Status.Phase)
	return c
}

func (x *Index) nodeNamed(name string) *corev1.Node {
	for _, n := range x.nodeOf {
		if n.Name == name {
			return n
		}
	}
	return nil
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// eventsOf reads a pod's events, the newest first.
func (p *patient) eventsOf(pod *corev1.Pod) []corev1.Event {
	key := pod.Namespace + "/" + pod.Name
	if all, known := p.events[key]; known {
		return all
	}
	list, err := p.lab.client.CoreV1().Events(pod.Namespace).List(p.ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
	if err != nil {
		return nil // they only make the words better
	}
	slices.SortFunc(list.Items, func(a, b corev1.Event) int { return b.LastTimestamp.Compare(a.LastTimestamp.Time) })
	p.events[key] = list.Items
	return list.Items
}

// podEvents are the last warnings of a pod, as evidence.
func (p *patient) podEvents(pod *corev1.Pod) (out []string) {
	for _, e := range p.eventsOf(pod) {
		if e.Type == corev1.EventTypeWarning && len(out) < 3 {
			out = append(out, fmt.Sprintf("event of pod %s: %s: %s", pod.Name, e.Reason, e.Message))
		}
	}
	return out
}

// namedPort: a target port with a name is looked up in each pod.
func namedPort(p *patient) []Cause {
	name := p.spec.TargetPort.StrVal
	if name == "" || len(p.selected) == 0 {
		return nil
	}
	var have []string
	for _, pod := range p.selected {
		for _, c := range pod.Spec.Containers {
			for _, cp := range c.Ports {
				if cp.Name == name && protoName(cp.Protocol) == p.proto() {
					return nil
				}
				if text := fmt.Sprintf("%s %d/%s", orWord(cp.Name, "(no name)"), cp.ContainerPort, protoName(cp.Protocol)); !slices.Contains(have, text) {
					have = append(have, text)
				}
			}
		}
	}
	c := Cause{
		Reason: "named-port-missing", Text: fmt.Sprintf("the target port of Service %s is called %q, and no container of its pods has a %s port of that name; they have %s", p.key, name, p.proto(), orWord(strings.Join(have, ", "), "none")),
		Fix: "give a container port that name, or set targetPort to a number", Evidence: []string{"spec.ports[].targetPort: " + name},
	}
	return stop(c)
}

// slicesComplete compares the slices with the pods that are ready.
func slicesComplete(p *patient) []Cause {
	if len(p.selected) == 0 {
		if len(p.ready()) > 0 {
			return nil
		}
		return stop(Cause{
			Reason: "no-ready-endpoints", Text: fmt.Sprintf("the EndpointSlices of Service %s name no endpoint that is ready for port %s", p.key, portText(p.spec)),
			Fix: "write addresses, and a port with the Service's port name, into its EndpointSlice", Evidence: p.sliceEvidence(),
		})
	}
	var missing []string
	for _, pod := range p.selected {
		if !podReady(pod) || pod.DeletionTimestamp != nil || pod.Status.PodIP == "" {
			continue
		}
		if !slices.ContainsFunc(p.endpoints(), func(e EndpointRef) bool { return e.Addr.Addr().String() == pod.Status.PodIP }) {
			missing = append(missing, fmt.Sprintf("%s (%s)", pod.Name, pod.Status.PodIP))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	c := Cause{
		Reason: "slice-behind", Text: fmt.Sprintf("pods that are ready are in no EndpointSlice of Service %s: %s", p.key, strings.Join(missing, ", ")),
		Fix: "kplab settle; if it stays so: kubectl -n " + p.namespace() + " delete endpointslices -l kubernetes.io/service-name=" + p.name() + ", they are written anew", Evidence: p.sliceEvidence(),
	}
	c.stops = len(p.ready()) == 0
	return []Cause{c}
}

func (p *patient) sliceEvidence() (out []string) {
	for _, s := range p.x.slices[p.key] {
		var ends []string
		for _, e := range s.Endpoints {
			ends = append(ends, fmt.Sprintf("%s ready=%t", strings.Join(e.Addresses, ","), deref(e.Conditions.Ready, true)))
		}
		var ports []string
		for _, port := range s.Ports {
			ports = append(ports, fmt.Sprintf("%s %d", deref(port.Name, ""), deref(port.Port, 0)))
		}
		out = append(out, fmt.Sprintf("EndpointSlice %s: ports [%s], endpoints [%s]", s.Name, strings.Join(ports, "; "), strings.Join(ends, "; ")))
	}
	return out
}

func portText(s *corev1.ServicePort) string {
	return strings.TrimPrefix(fmt.Sprintf("%s %d/%s", s.Name, s.Port, protoName(s.Protocol)), " ")
}
