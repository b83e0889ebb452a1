// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
)

// grpcHealth asks the standard gRPC health service of a pod.
func (k *Kubelet) grpcHealth(ctx context.Context, p *pod, action *corev1.GRPCAction) error {
	ips := p.addresses()
	if len(ips) == 0 {
		return errors.New("the pod has no address")
	}
	target := net.JoinHostPort(ips[0].String(), strconv.Itoa(int(action.Port)))
	conn, err := grpc.NewClient("passthrough:///"+target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithUserAgent("kube-probe/1.37"),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return k.cfg.NodeNS.Dial(ctx, "tcp", addr)
		}))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	service := ""
	if action.Service != nil {
		service = *action.Service
	}
	res, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		return err
	}
	if res.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("service unhealthy (responded with %q)", res.GetStatus())
	}
	return nil
}
