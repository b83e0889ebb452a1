// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/kplab/kplab/internal/netns"
	"github.com/kplab/kplab/sandbox"
	"github.com/kplab/kplab/sandbox/workload"
)

// drain is how long a built-in server serves on after it was asked to end. The pod
// has left the slices by then; the rules on the nodes follow within this time.
const drain = time.Second

// served is a container whose image is built in: a server in this process.
type served struct {
	cancel context.CancelFunc
	fin    chan struct{}

	mu    sync.Mutex
	timer *time.Timer
	exit  sandbox.Exit
}

func (s *served) done() <-chan struct{} { return s.fin }

func (s *served) result() sandbox.Exit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exit
}

// terminate lets the server end after the drain.
func (s *served) terminate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timer == nil {
		s.timer = time.AfterFunc(drain, s.cancel)
	}
}

// kill lets it end now.
func (s *served) kill() { s.cancel() }

// serve starts the server of a built-in image.
func (k *Kubelet) serve(p *pod, o *corev1.Pod, spec *corev1.Container, image workload.Image, env []string, attempt int, logPath string) (*served, error) {
	logs, err := openLog(logPath)
	if err != nil {
		return nil, err
	}
	c := k.workloadContext(p, o, spec, env, logs)
	content, err := k.contentOf(o, spec, image, attempt)
	if err != nil {
		return nil, errors.Join(err, logs.Close())
	}
	for dir, host := range content {
		c.Volumes[dir] = host
	}
	srv, err := image.New(c)
	if err != nil {
		return nil, errors.Join(err, logs.Close())
	}
	s := &served{fin: make(chan struct{})}
	ctx, cancel := context.WithCancel(k.workCtx)
	s.cancel = cancel
	k.background(func(context.Context) {
		defer cancel()
		err := srv.Run(ctx)
		exit := sandbox.Exit{At: time.Now()}
		var code *workload.ExitError
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.As(err, &code):
			exit.Code = code.Code
		default:
			// As a real server does: say why on stderr and exit with 1.
			exit.Code = 1
			_, _ = fmt.Fprintf(logs.stream("stderr"), "%v\n", err)
		}
		_ = logs.Close()
		s.mu.Lock()
		s.exit = exit
		if s.timer != nil {
			s.timer.Stop()
		}
		s.mu.Unlock()
		close(s.fin)
		k.kick(p)
	})
	return s, nil
}

// workloadContext is what a server gets to know.
func (k *Kubelet) workloadContext(p *pod, o *corev1.Pod, spec *corev1.Container, env []string, logs *logFile) workload.Context {
	c := workload.Context{
		Container: spec.Name, Image: spec.Image, Args: expandAll(spec.Args, envMap(env)), Env: env,
		NetNS: k.netNS(p, o), Stdout: logs.stream("stdout"), Stderr: logs.stream("stderr"),
		Volumes: map[string]string{}, PartLog: k.cfg.PartLog,
	}
	c.Pod.Namespace, c.Pod.Name, c.Pod.UID, c.Pod.Node = o.Namespace, o.Name, string(o.UID), k.cfg.NodeName
	c.Pod.Hostname = hostname(o)
	for _, port := range spec.Ports {
		c.Ports = append(c.Ports, workload.Port{Name: port.Name, Protocol: string(port.Protocol), Number: int(port.ContainerPort)})
	}
	if ips := p.addresses(); len(ips) > 0 {
		c.Pod.IP = ips[0].String()
	}
	for _, m := range spec.VolumeMounts {
		c.Volumes[m.MountPath] = k.volumePath(o, m)
	}
	return c
}

// netNS is the network namespace that the pod's sockets live in.
func (k *Kubelet) netNS(p *pod, o *corev1.Pod) *netns.NS {
	if o.Spec.HostNetwork {
		return k.cfg.NodeNS
	}
	return p.box().NetNS()
}
