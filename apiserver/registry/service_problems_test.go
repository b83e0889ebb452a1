// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/registry/rest"
)

// forge writes a Service past everything that checks it, created at a time.
func (b serviceBench) forge(s *corev1.Service, created time.Time) {
	b.t.Helper()
	s.UID, s.CreationTimestamp = types.UID("uid-"+s.Name), metav1.NewTime(created)
	store := b.storages["services"].(*serviceREST).Store
	key, err := store.KeyFunc(b.ctx(), s.Name)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := store.Storage.Create(b.ctx(), key, s, &corev1.Service{}, 0, false); err != nil {
		b.t.Fatal(err)
	}
}

// TestServiceProblems starts on a database in which two Services have the same
// values, and others what the ranges do not hold.
func TestServiceProblems(t *testing.T) {
	deps := serviceDeps("10.96.0.0/12", 2768)
	b := serviceBench{newBench(t, deps, serviceKind(), eventKind())}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	forge := func(name, spec string, minute int) {
		s := b.service(name, spec)
		alignClusterIPs(s, nil)
		b.forge(s, at.Add(time.Duration(minute)*time.Minute))
	}
	// The names are not in the order of age.
	forge("twin", "type: NodePort\nclusterIP: 10.96.0.50\nports: [{port: 80, nodePort: 30050}]", 2)
	forge("x-old", "type: NodePort\nclusterIP: 10.96.0.50\nports: [{port: 80, nodePort: 30050}]", 1)
	forge("stray", "type: NodePort\nclusterIP: 172.30.0.1\nports: [{port: 80, nodePort: 1080}]", 3)
	forge("broken", "clusterIP: 10.96.0.x\nports: [{port: 80}]", 4)
	b.mustCreateBetween(t)

	report := func() string {
		t.Helper()
		var log bytes.Buffer
		storages := Storages{corev1.SchemeGroupVersion: b.storages}
		if err := ReportServiceProblems(b.ctx(), storages, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Fatal(err)
		}
		return log.String()
	}
	log := report()
	for _, want := range []string{
		`Cluster IP 10.96.0.x is not a valid IP; please recreate Service" service=default/broken`,
		`Cluster IP [IPv4]:10.96.0.50 was assigned to multiple services; please recreate service" service=default/twin`,
		`reason=ClusterIPAlreadyAllocated done="it belongs to default/x-old; default/twin gets it when that is gone"`,
		`Port 30050 was assigned to multiple services; please recreate service" service=default/twin`,
		`Cluster IP [IPv4]: 172.30.0.1 is not within any configured Service CIDR; please recreate service" service=default/stray`,
		`Port 1080 is not within the port range 30000-32767; please recreate service" service=default/stray`,
	} {
		if strings.Count(log, want) != 1 {
			t.Errorf("the log lacks %q, or has it twice:\n%s", want, log)
		}
	}
	report() // a second start says nothing new
	events, err := b.storages["events"].(rest.Lister).List(b.ctx(), &internalversion.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events.(*corev1.EventList).Items {
		got = append(got, e.InvolvedObject.Name+" "+e.Reason+" "+e.Source.Component)
	}
	slices.Sort(got)
	want := []string{
		"broken ClusterIPNotValid ipallocator-repair-controller",
		"stray ClusterIPOutOfRange ipallocator-repair-controller",
		"stray PortOutOfRange portallocator-repair-controller",
		"twin ClusterIPAlreadyAllocated ipallocator-repair-controller",
		"twin PortAlreadyAllocated portallocator-repair-controller",
	}
	if !slices.Equal(got, want) {
		t.Errorf("events %q\nwant %q", got, want)
	}

	// Nobody else gets what the two share, as long as one of them has it.
	refused := func() {
		t.Helper()
		_, err := b.tryCreate("new", web+"\nclusterIP: 10.96.0.50")
		wantError(t, err, "provided IP is already allocated")
		_, err = b.tryCreate("new", "type: NodePort\nports: [{port: 80, nodePort: 30050}]")
		wantError(t, err, "provided port is already allocated")
	}
	refused()
	b.remove("services", "x-old")
	refused()
	b.mustPatch("twin", func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} })
	refused()
	// Services with values from elsewhere can be changed and removed.
	b.mustPatch("stray", func(s *corev1.Service) { s.Labels = map[string]string{"a": "b"} })
	b.remove("services", "stray")
	b.remove("services", "twin")
	b.mustCreate("new", "type: NodePort\nclusterIP: 10.96.0.50\nports: [{port: 80, nodePort: 30050}]")
}

// mustCreateBetween asks for a hundred addresses and ports while the file is as it
// is: none of them may be one that a stored Service has.
func (b serviceBench) mustCreateBetween(t *testing.T) {
	t.Helper()
	var names []string
	for range 100 {
		s := b.service("", "type: NodePort\n"+web)
		s.GenerateName = "fresh-"
		out, err := b.create("services", s, false)
		if err != nil {
			t.Fatal(err)
		}
		fresh := out.(*corev1.Service)
		if fresh.Spec.ClusterIP == "10.96.0.50" || fresh.Spec.Ports[0].NodePort == 30050 {
			t.Errorf("%s got what stored Services have: %+v", fresh.Name, fresh.Spec)
		}
		names = append(names, fresh.Name)
	}
	for _, name := range names {
		b.remove("services", name)
	}
}

// TestServiceProblemsNone: a lab's own database has none, and a server without
// events can still start.
func TestServiceProblemsNone(t *testing.T) {
	b := newServiceBench(t)
	b.mustCreate("x", "type: NodePort\n"+web)
	again := serviceBench{openAgain(t, b)}
	var log bytes.Buffer
	err := ReportServiceProblems(context.WithoutCancel(again.ctx()), Storages{corev1.SchemeGroupVersion: again.storages}, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil || log.Len() > 0 {
		t.Errorf("%v, log %s", err, log.String())
	}
}

// openAgain closes b's database and opens it with a new allocator.
func openAgain(t *testing.T, b serviceBench) *bench {
	t.Helper()
	if err := b.db.Close(); err != nil {
		t.Fatal(err)
	}
	return openBench(t, b.path, b.deps, serviceKind())
}
