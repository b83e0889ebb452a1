// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
)

// serveHostname answers every request with the pod's host name.
type serveHostname struct {
	ctx  Context
	port int
	// What it speaks; HTTP unless another is asked for.
	http, tcp, udp bool
}

func newServeHostname(c Context, args []string) (Server, error) {
	flags := flag.NewFlagSet("serve-hostname", flag.ContinueOnError)
	s := &serveHostname{ctx: c}
	flags.IntVar(&s.port, "port", 9376, "")
	flags.BoolVar(&s.http, "http", true, "")
	flags.BoolVar(&s.tcp, "tcp", false, "")
	flags.BoolVar(&s.udp, "udp", false, "")
	flags.Bool("close", false, "connections are closed in any case")
	if _, err := parse(&c, flags, args); err != nil {
		return nil, err
	}
	if s.tcp {
		s.http = false
	}
	if !s.http && !s.tcp && !s.udp {
		return nil, errors.New("agnhost serve-hostname: neither --http nor --tcp nor --udp")
	}
	return s, nil
}

// Run implements Server.
func (s *serveHostname) Run(ctx context.Context) error {
	var open []func(context.Context) (service, error)
	name := s.ctx.hostname()
	if s.http {
		open = append(open, httpService(s.ctx.NetNS, s.port, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(HeaderPod, s.ctx.Pod.Name)
			w.Header().Set(HeaderNode, s.ctx.Pod.Node)
			_, _ = io.WriteString(w, name)
		}), s.ctx.Stderr))
	}
	if s.tcp {
		open = append(open, tcpService(s.ctx.NetNS, s.port, func(c net.Conn) { _, _ = io.WriteString(c, name) }))
	}
	if s.udp {
		open = append(open, udpService(s.ctx.NetNS, s.port, func([]byte, netip.AddrPort) []byte { return []byte(name) }))
	}
	return runAll(ctx, open...)
}

// porter serves on each port that the environment names (SERVE_PORT_N=text) the
// text given there.
type porter struct {
	ctx   Context
	ports map[int]string
	json  bool
}

func newPorter(c Context, args []string) (Server, error) {
	flags := flag.NewFlagSet("porter", flag.ContinueOnError)
	p := &porter{ctx: c, ports: make(map[int]string)}
	flags.BoolVar(&p.json, "json-response", false, "")
	if _, err := parse(&c, flags, args); err != nil {
		return nil, err
	}
	for _, kv := range c.Env {
		key, text, _ := strings.Cut(kv, "=")
		number, ok := strings.CutPrefix(key, "SERVE_PORT_")
		if !ok {
			continue
		}
		port, err := strconv.Atoi(number)
		if err != nil {
			return nil, fmt.Errorf("agnhost porter: %s: %w", key, err)
		}
		p.ports[port] = text
	}
	if len(p.ports) == 0 {
		return nil, errors.New("agnhost porter: no SERVE_PORT_N in the environment")
	}
	return p, nil
}

// Run implements Server.
func (p *porter) Run(ctx context.Context) error {
	var open []func(context.Context) (service, error)
	for port, text := range p.ports {
		open = append(open, httpService(p.ctx.NetNS, port, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(HeaderPod, p.ctx.Pod.Name)
			if !p.json {
				_, _ = io.WriteString(w, text)
				return
			}
			data, err := json.Marshal(map[string]any{"method": r.Method, "body": text})
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(data)
		}), p.ctx.Stderr))
	}
	return runAll(ctx, open...)
}
