// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	// A server that has just started gets this long before the failure of a first
	// readiness or startup probe counts: without it a probe that comes a
	// millisecond too early would cost the pod a whole period.
	earlyFor   = time.Second
	earlyEvery = 50 * time.Millisecond
)

// startProbes starts the probes of a running attempt.
func (k *Kubelet) startProbes(p *pod, o *corev1.Pod, spec *corev1.Container, c *container) {
	p.mu.Lock()
	if c.stopProbes != nil || !c.running() {
		p.mu.Unlock()
		return
	}
	ctx, stop := context.WithCancel(k.workCtx)
	c.stopProbes = stop
	c.startupDone = spec.StartupProbe == nil
	c.ready = spec.StartupProbe == nil && spec.ReadinessProbe == nil
	run := c.run
	p.mu.Unlock()
	if spec.StartupProbe == nil && spec.ReadinessProbe == nil && spec.LivenessProbe == nil {
		return
	}
	k.background(func(context.Context) {
		defer stop()
		w := &prober{k: k, p: p, o: o, spec: spec, c: c, run: run}
		if spec.StartupProbe != nil && !w.startup(ctx) {
			return
		}
		// Both go on for the life of the attempt.
		done := make(chan struct{})
		go func() {
			defer close(done)
			if spec.LivenessProbe != nil {
				w.liveness(ctx)
			}
		}()
		if spec.ReadinessProbe != nil {
			w.readiness(ctx)
		}
		<-done
	})
}

// prober runs the probes of one attempt of a container.
type prober struct {
	k    *Kubelet
	p    *pod
	o    *corev1.Pod
	spec *corev1.Container
	c    *container
	run  runner
}

// set changes the attempt's state and wakes the pod; an attempt that is over
// changes nothing.
func (w *prober) set(change func(c *container)) {
	w.p.mu.Lock()
	if w.c.run == w.run {
		change(w.c)
	}
	w.p.mu.Unlock()
	w.k.kick(w.p)
}

// startup probes until success (true), or until the attempt is given up.
func (w *prober) startup(ctx context.Context) bool {
	ok := false
	w.loop(ctx, "Startup", w.spec.StartupProbe, func(healthy bool) bool {
		if healthy {
			ok = true
			w.set(func(c *container) { c.startupDone, c.ready = true, w.spec.ReadinessProbe == nil })
		} else {
			w.restart("startup probe")
		}
		return true
	})
	return ok
}

func (w *prober) liveness(ctx context.Context) {
	w.loop(ctx, "Liveness", w.spec.LivenessProbe, func(healthy bool) bool {
		if !healthy {
			w.restart("liveness probe")
		}
		return !healthy
	})
}

func (w *prober) readiness(ctx context.Context) {
	w.loop(ctx, "Readiness", w.spec.ReadinessProbe, func(healthy bool) bool {
		w.set(func(c *container) { c.ready = healthy })
		return false
	})
}

// restart ends an attempt that a probe found dead; the restart policy decides what
// comes after.
func (w *prober) restart(by string) {
	w.k.containerEvent(w.o, w.spec.Name, corev1.EventTypeNormal, "Killing", "Container %s failed %s, will be restarted", w.spec.Name, by)
	w.p.mu.Lock()
	current := w.c.run == w.run && !w.c.killing
	if current {
		w.c.killing, w.c.why = true, by
	}
	w.p.mu.Unlock()
	if !current {
		return
	}
	grace := time.Duration(gracePeriod(w.o)) * time.Second
	w.run.terminate()
	w.k.background(func(ctx context.Context) {
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case <-w.run.done():
		case <-ctx.Done():
		case <-t.C:
			w.run.kill()
		}
	})
}

// loop probes with the probe's timing and calls turned each time that the result,
// after its thresholds, is another one; turned says whether to stop.
func (w *prober) loop(ctx context.Context, kind string, pr *corev1.Probe, turned func(healthy bool) bool) {
	period := orSeconds(pr.PeriodSeconds, 10)
	timeout := orSeconds(pr.TimeoutSeconds, 1)
	success, failure := max(int(pr.SuccessThreshold), 1), int(pr.FailureThreshold)
	if failure <= 0 {
		failure = 3
	}
	// Readiness and startup begin as failed, liveness as fine.
	healthy := kind == "Liveness"
	timer := time.NewTimer(time.Duration(pr.InitialDelaySeconds) * time.Second)
	defer timer.Stop()
	begun := time.Time{}
	run, good := 0, true
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if w.k.cfg.Work.Wait(ctx) != nil {
			return
		}
		if begun.IsZero() {
			begun = time.Now()
		}
		err := w.once(ctx, pr, timeout)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !healthy && run == 0 && time.Since(begun) < earlyFor {
			timer.Reset(earlyEvery)
			continue
		}
		timer.Reset(period)
		if (err == nil) == good {
			run++
		} else {
			good, run = err == nil, 1
		}
		if err != nil {
			w.k.containerEvent(w.o, w.spec.Name, corev1.EventTypeWarning, "Unhealthy", "%s probe failed: %v", kind, err)
		}
		switch {
		case good && !healthy && run >= success, !good && healthy && run >= failure, !good && kind == "Startup" && run >= failure:
			healthy = good
			if turned(healthy) {
				return
			}
		}
	}
}

func orSeconds(n int32, byDefault int) time.Duration {
	if n <= 0 {
		return time.Duration(byDefault) * time.Second
	}
	return time.Duration(n) * time.Second
}

// once runs a probe from the node's namespace.
func (w *prober) once(ctx context.Context, pr *corev1.Probe, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case pr.Exec != nil:
		var out bytes.Buffer
		code, err := w.k.exec(ctx, w.p, w.o, w.spec, execArgs{args: pr.Exec.Command, stdout: &out, stderr: &out})
		if err != nil {
			return err
		}
		if code != 0 {
			return errors.New(strings.TrimSpace(out.String()))
		}
		return nil
	case pr.HTTPGet != nil:
		return w.k.httpGet(ctx, w.p, w.spec, pr.HTTPGet, "kube-probe/1.37")
	case pr.TCPSocket != nil:
		conn, err := w.k.dialPod(ctx, w.p, w.spec, pr.TCPSocket.Host, pr.TCPSocket.Port)
		if err != nil {
			return err
		}
		return conn.Close()
	case pr.GRPC != nil:
		return w.k.grpcHealth(ctx, w.p, pr.GRPC)
	}
	return errors.New("the probe names no action")
}

// dialPod connects from the node to a port of the pod, given by number or name.
func (k *Kubelet) dialPod(ctx context.Context, p *pod, spec *corev1.Container, host string, port intstr.IntOrString) (net.Conn, error) {
	n, err := portNumber(spec, port)
	if err != nil {
		return nil, err
	}
	if host == "" {
		ips := p.addresses()
		if len(ips) == 0 {
			return nil, errors.New("the pod has no address")
		}
		host = ips[0].String()
	}
	return k.cfg.NodeNS.Dial(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(n)))
}

func portNumber(spec *corev1.Container, port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, p := range spec.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort), nil
		}
	}
	if n, err := strconv.Atoi(port.StrVal); err == nil {
		return n, nil
	}
	return 0, fmt.Errorf("container %s has no port called %q", spec.Name, port.StrVal)
}

// httpGet asks a URL of the pod; any status from 200 to 399 is success.
func (k *Kubelet) httpGet(ctx context.Context, p *pod, spec *corev1.Container, get *corev1.HTTPGetAction, agent string) error {
	n, err := portNumber(spec, get.Port)
	if err != nil {
		return err
	}
	host := get.Host
	if ips := p.addresses(); host == "" && len(ips) > 0 {
		host = ips[0].String()
	}
	scheme := strings.ToLower(string(get.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	u, err := url.Parse(get.Path)
	if err != nil {
		u = &url.URL{Path: get.Path}
	}
	u.Scheme, u.Host = scheme, net.JoinHostPort(host, strconv.Itoa(n))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", agent)
	req.Header.Set("Accept", "*/*")
	for _, h := range get.HTTPHeaders {
		if strings.EqualFold(h.Name, "Host") {
			req.Host = h.Value
			continue
		}
		req.Header.Set(h.Name, h.Value)
	}
	client := &http.Client{
		Transport: &http.Transport{
			DialContext:       k.cfg.NodeNS.Dial,
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a probe asks whether there is an answer, as upstream's does
		},
		CheckRedirect: func(next *http.Request, via []*http.Request) error {
			if next.URL.Hostname() != via[0].URL.Hostname() || len(via) >= 10 {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 10<<10))
	if res.StatusCode < 200 || res.StatusCode >= 400 {
		return fmt.Errorf("HTTP probe failed with statuscode: %d", res.StatusCode)
	}
	return nil
}

// runHook runs a postStart or preStop hook to its end.
func (k *Kubelet) runHook(ctx context.Context, p *pod, o *corev1.Pod, spec *corev1.Container, h *corev1.LifecycleHandler) error {
	switch {
	case h.Exec != nil:
		var out bytes.Buffer
		code, err := k.exec(ctx, p, o, spec, execArgs{args: h.Exec.Command, stdout: &out, stderr: &out})
		if err == nil && code != 0 {
			err = fmt.Errorf("command exited with %d: %s", code, strings.TrimSpace(out.String()))
		}
		return err
	case h.HTTPGet != nil:
		return k.httpGet(ctx, p, spec, h.HTTPGet, "kube-lifecycle/1.37")
	case h.Sleep != nil:
		t := time.NewTimer(time.Duration(h.Sleep.Seconds) * time.Second)
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		return nil
	}
	return nil
}

// postStart runs a container's hook beside it; when the hook fails the container
// is killed, and its restart policy decides.
func (k *Kubelet) postStart(p *pod, o *corev1.Pod, spec *corev1.Container, c *container) {
	if spec.Lifecycle == nil || spec.Lifecycle.PostStart == nil {
		return
	}
	p.mu.Lock()
	run := c.run
	p.mu.Unlock()
	k.background(func(ctx context.Context) {
		err := k.runHook(ctx, p, o, spec, spec.Lifecycle.PostStart)
		p.mu.Lock()
		if c.run == run {
			c.hooked = true
		}
		p.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			// The event leaves out what the hook printed, which may be a secret.
			k.log.Warn("a postStart hook failed", "pod", o.Namespace+"/"+o.Name, "container", spec.Name, "error", err)
			k.containerEvent(o, spec.Name, corev1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed")
			k.containerEvent(o, spec.Name, corev1.EventTypeNormal, "Killing", "FailedPostStartHook")
			run.kill()
		}
		k.kick(p)
	})
}
