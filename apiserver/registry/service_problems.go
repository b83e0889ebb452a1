// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"

	"github.com/kplab/kplab/apiserver/allocator"
)

// serviceProblem is a stored cluster IP or node port that should not be as it is,
// in upstream's words.
type serviceProblem struct {
	owner           allocator.Owner
	reason, message string
	// source is who says so upstream.
	source string
	// done is what becomes of the value here.
	done string
}

const (
	ipRepair   = "ipallocator-repair-controller"
	portRepair = "portallocator-repair-controller"
)

func (a *serviceAllocator) problemOf(p allocator.Problem) serviceProblem {
	out := serviceProblem{owner: p.Owner, source: ipRepair}
	taken := p.Holder != allocator.Owner{}
	out.done = "it is left as it is; nobody else gets it"
	if taken {
		out.done = fmt.Sprintf("it belongs to %s; %s gets it when that is gone", p.Holder, p.Owner)
	}
	switch {
	case p.Port != 0 && taken:
		out.source, out.reason = portRepair, "PortAlreadyAllocated"
		out.message = fmt.Sprintf("Port %d was assigned to multiple services; please recreate service", p.Port)
	case p.Port != 0:
		out.source, out.reason = portRepair, "PortOutOfRange"
		out.message = fmt.Sprintf("Port %d is not within the port range %s; please recreate service", p.Port, a.book.Ports())
	case taken:
		out.reason = "ClusterIPAlreadyAllocated"
		out.message = fmt.Sprintf("Cluster IP [%s]:%s was assigned to multiple services; please recreate service", familyOf(p.IP.String()), p.IP)
	default:
		out.reason = "ClusterIPOutOfRange"
		out.message = fmt.Sprintf("Cluster IP [%s]: %s is not within any configured Service CIDR; please recreate service", familyOf(p.IP.String()), p.IP)
	}
	return out
}

// unreadableIPs finds the cluster IPs that are no addresses.
func unreadableIPs(s *corev1.Service) []serviceProblem {
	var all []serviceProblem
	for _, ip := range s.Spec.ClusterIPs {
		if _, err := netip.ParseAddr(ip); err != nil && ip != corev1.ClusterIPNone {
			all = append(all, serviceProblem{
				owner: ownerOf(s), source: ipRepair, reason: "ClusterIPNotValid",
				message: fmt.Sprintf("Cluster IP %s is not a valid IP; please recreate Service", ip),
				done:    "it is left as it is",
			})
		}
	}
	return all
}

// ReportServiceProblems derives the account of cluster IPs and node ports from
// the stored Services, and reports what is wrong with them, as a database may be
// that was written with other ranges or by hand: to log, and in an Event about
// each Service. The Services keep their values. The error is that of reading or
// writing the database.
func ReportServiceProblems(ctx context.Context, storages Storages, log *slog.Logger) error {
	core := storages[corev1.SchemeGroupVersion]
	services, ok := core["services"].(*serviceREST)
	if !ok {
		return nil
	}
	if _, err := services.alloc.open(ctx); err != nil {
		return fmt.Errorf("derive what the Services have: %w", err)
	}
	events, ok := core["events"].(rest.Creater)
	for _, p := range services.alloc.problems {
		log.Warn(p.message, "service", p.owner.String(), "reason", p.reason, "done", p.done)
		if !ok {
			continue
		}
		ctx := genericapirequest.WithNamespace(ctx, p.owner.Namespace)
		_, err := events.Create(ctx, p.event(), nil, &metav1.CreateOptions{})
		// The same was said at a start not long ago.
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("write an event about service %s: %w", p.owner, err)
		}
	}
	return nil
}

// event is named by what it says, so that a server that starts often does not
// repeat itself.
func (p serviceProblem) event() *corev1.Event {
	h := fnv.New64a()
	_, _ = h.Write([]byte(p.owner.UID + p.reason + p.message)) // never fails
	now := metav1.Now()
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%x", p.owner.Name, h.Sum64()), Namespace: p.owner.Namespace},
		InvolvedObject: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Service", Namespace: p.owner.Namespace, Name: p.owner.Name, UID: types.UID(p.owner.UID),
		},
		Type: corev1.EventTypeWarning, Reason: p.reason, Message: p.message,
		Source: corev1.EventSource{Component: p.source}, ReportingController: p.source,
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
}
