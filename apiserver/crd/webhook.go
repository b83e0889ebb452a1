// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"context"
	"net"

	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
)

// Dial opens a connection from where the API server is in the cluster.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// wrap has webhooks called through d: this process is in the host's network, where
// neither a Service nor a pod can be reached.
func (d Dial) wrap(next webhook.AuthenticationInfoResolver) webhook.AuthenticationInfoResolver {
	return dialing{next, d}
}

type dialing struct {
	next webhook.AuthenticationInfoResolver
	dial Dial
}

// ClientConfigFor implements webhook.AuthenticationInfoResolver.
func (d dialing) ClientConfigFor(hostPort string) (*rest.Config, error) {
	return d.through(d.next.ClientConfigFor(hostPort))
}

// ClientConfigForService implements webhook.AuthenticationInfoResolver.
func (d dialing) ClientConfigForService(name, namespace string, port int) (*rest.Config, error) {
	return d.through(d.next.ClientConfigForService(name, namespace, port))
}

func (d dialing) through(cfg *rest.Config, err error) (*rest.Config, error) {
	if err != nil {
		return nil, err
	}
	cfg = rest.CopyConfig(cfg)
	cfg.Dial = d.dial
	return cfg, nil
}
