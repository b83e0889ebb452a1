// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"github.com/kplab/kplab/dns"
)

// dnsPatience is how long a start waits for cluster DNS. A lab without is of use, too:
// somebody may have broken its Corefile on purpose.
const dnsPatience = 10 * time.Second

// startDNS makes the objects of cluster DNS. Its pods run when the nodes do.
func (l *Lab) startDNS(ctx context.Context) (string, error) {
	if l.cfg.DNS.Provider == dnsNone {
		return "none", nil
	}
	address := l.cfg.dnsAddress()
	zone := ""
	// A resumed lab has its records already, and the file may be gone.
	if path := l.cfg.DNS.Zone; path != "" && !l.hasDNS(ctx) {
		var err error
		if zone, err = dns.ReadZone(path); err != nil {
			return "", err
		}
	}
	if err := dns.Ensure(ctx, l.client, dns.Config{Domain: l.cfg.Networking.DNSDomain, Address: address, Zone: zone}); err != nil {
		return "", err
	}
	return fmt.Sprintf("coredns behind %s", address), nil
}

// hasDNS tells whether the lab has the configuration of a cluster DNS.
func (l *Lab) hasDNS(ctx context.Context) bool {
	_, err := l.client.CoreV1().ConfigMaps(dns.Namespace).Get(ctx, dns.ConfigMap, metav1.GetOptions{})
	return err == nil
}

// awaitDNS waits until a pod of cluster DNS answers, and says why none does. Where
// nobody wants one (scaled to none, deleted) there is nothing to wait for.
func (l *Lab) awaitDNS(ctx context.Context) error {
	if l.cfg.DNS.Provider == dnsNone {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, dnsPatience)
	defer cancel()
	tick := time.NewTicker(settleInterval)
	defer tick.Stop()
	for !l.dnsAnswers() {
		d, err := l.informers.Apps().V1().Deployments().Lister().Deployments(dns.Namespace).Get(dns.Deployment)
		if err == nil && ptr.Deref(d.Spec.Replicas, 1) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("cluster DNS is not ready after %s: see `kplab kubectl -n %s describe pods -l k8s-app=%s`", dnsPatience, dns.Namespace, dns.ServiceName)
		case <-tick.C:
		}
	}
	return nil
}

// dnsAnswers tells whether the Service of cluster DNS has an endpoint that is ready.
func (l *Lab) dnsAnswers() bool {
	ofService := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: dns.ServiceName})
	slices, err := l.informers.Discovery().V1().EndpointSlices().Lister().EndpointSlices(dns.Namespace).List(ofService)
	if err != nil {
		return false // a lister of a cache does not fail
	}
	for _, s := range slices {
		for _, e := range s.Endpoints {
			if ptr.Deref(e.Conditions.Ready, false) {
				return true
			}
		}
	}
	return false
}
