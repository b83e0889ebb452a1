// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"github.com/kplab/kplab/sandbox"
)

const (
	// Port is where the API server reaches the kubelet on the node's IP.
	Port = 10250

	streamIdle     = 4 * time.Hour
	streamCreation = remotecommand.DefaultStreamCreationTimeout
)

// Serve answers the API server on port 10250 of the node until ctx ends: logs,
// exec, attach and port-forward. cfg holds the certificate and the authority that
// clients must come from.
func (k *Kubelet) Serve(ctx context.Context, cfg *tls.Config) error {
	l, err := k.cfg.NodeNS.Listen(ctx, "tcp", net.JoinHostPort(k.cfg.NodeIP.String(), strconv.Itoa(Port)))
	if err != nil {
		return fmt.Errorf("open the kubelet's port %d: %w", Port, err)
	}
	srv := &http.Server{
		Handler: k.Handler(), TLSConfig: cfg, ReadHeaderTimeout: 30 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    log.New(io.Discard, "", 0), // a client that breaks off is no news
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	// HTTP/1.1 only: SPDY and WebSocket take over the connection.
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	err = srv.Serve(tls.NewListener(l, cfg))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Handler returns the kubelet's HTTP interface.
func (k *Kubelet) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /containerLogs/{ns}/{pod}/{container}", k.serveLogs)
	for _, method := range []string{"GET", "POST"} {
		mux.HandleFunc(method+" /exec/{ns}/{pod}/{container}", k.serveExec)
		mux.HandleFunc(method+" /attach/{ns}/{pod}/{container}", k.serveAttach)
		mux.HandleFunc(method+" /portForward/{ns}/{pod}", k.servePortForward)
	}
	return mux
}

// target finds the pod and container of a request; it answers the request itself
// when there is none.
func (k *Kubelet) target(w http.ResponseWriter, r *http.Request) (*pod, *corev1.Pod, *corev1.Container) {
	p := k.find(r.PathValue("ns"), r.PathValue("pod"))
	if p == nil {
		http.Error(w, fmt.Sprintf("pod %q does not run on node %s", r.PathValue("pod"), k.cfg.NodeName), http.StatusNotFound)
		return nil, nil, nil
	}
	o := p.object()
	name := r.PathValue("container")
	if name == "" {
		return p, o, nil
	}
	spec := containerSpec(o, name)
	if spec == nil {
		http.Error(w, fmt.Sprintf("container %s is not valid for pod %s", name, o.Name), http.StatusNotFound)
		return nil, nil, nil
	}
	return p, o, spec
}

func (k *Kubelet) serveLogs(w http.ResponseWriter, r *http.Request) {
	p, o, spec := k.target(w, r)
	if spec == nil {
		return
	}
	opts, err := logOptions(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	path, err := k.logLocation(p, o, spec.Name, opts.Previous)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var done <-chan struct{}
	if opts.Follow {
		p.mu.Lock()
		if c := p.containers[spec.Name]; c != nil && c.running() && !opts.Previous {
			done = c.run.done()
		}
		p.mu.Unlock()
		if done == nil {
			opts.Follow = false // it has ended: all there will be is there
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if opts.Follow {
		_ = http.NewResponseController(w).Flush()
	}
	if err := readLog(r.Context(), path, opts, done, flushing{w, http.NewResponseController(w)}); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// flushing lets the log reader push out what it has when it waits for more.
type flushing struct {
	http.ResponseWriter
	c *http.ResponseController
}

func (f flushing) FlushError() error { return f.c.Flush() }

// logOptions reads the query that the API server makes of PodLogOptions.
func logOptions(q url.Values) (*corev1.PodLogOptions, error) {
	o := &corev1.PodLogOptions{
		Follow: q.Get("follow") == "true", Previous: q.Get("previous") == "true", Timestamps: q.Get("timestamps") == "true",
	}
	for name, into := range map[string]**int64{"tailLines": &o.TailLines, "sinceSeconds": &o.SinceSeconds, "limitBytes": &o.LimitBytes} {
		text := q.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("%s=%q: want a number from 0", name, text)
		}
		*into = &n
	}
	if text := q.Get("sinceTime"); text != "" {
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			return nil, fmt.Errorf("sinceTime=%q: %w", text, err)
		}
		since := metav1.NewTime(at)
		o.SinceTime = &since
	}
	if s := q.Get("stream"); s != "" {
		o.Stream = &s
	}
	return o, nil
}

func (k *Kubelet) serveExec(w http.ResponseWriter, r *http.Request) {
	p, o, spec := k.target(w, r)
	if spec == nil {
		return
	}
	opts, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	cmd := r.URL.Query()["command"]
	if len(cmd) == 0 {
		http.Error(w, "no command to execute", http.StatusBadRequest)
		return
	}
	remotecommand.ServeExec(w, r, session{k, p, o, spec}, o.Name, string(o.UID), spec.Name, cmd, opts,
		streamIdle, streamCreation, remotecommand.SupportedStreamingProtocols)
}

func (k *Kubelet) serveAttach(w http.ResponseWriter, r *http.Request) {
	p, o, spec := k.target(w, r)
	if spec == nil {
		return
	}
	opts, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remotecommand.ServeAttach(w, r, session{k, p, o, spec}, o.Name, string(o.UID), spec.Name, opts,
		streamIdle, streamCreation, remotecommand.SupportedStreamingProtocols)
}

func (k *Kubelet) servePortForward(w http.ResponseWriter, r *http.Request) {
	p, o, _ := k.target(w, r)
	if p == nil {
		return
	}
	opts, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	portforward.ServePortForward(w, r, session{k, p, o, nil}, o.Name, string(o.UID), opts, streamIdle, streamCreation, portforward.SupportedProtocols)
}

// session serves one stream request.
type session struct {
	k    *Kubelet
	p    *pod
	o    *corev1.Pod
	spec *corev1.Container
}

// ExecInContainer runs a command; its exit code travels as an error.
func (s session) ExecInContainer(ctx context.Context, _, _, _ string, cmd []string, in io.Reader, out, errOut io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := execArgs{args: cmd, stdin: in, tty: tty, resize: sizes(ctx, resize)}
	// A nil *pipe in an interface is not a nil interface.
	if out != nil {
		a.stdout = out
	}
	if errOut != nil {
		a.stderr = errOut
	}
	code, err := s.k.exec(ctx, s.p, s.o, s.spec, a)
	if err != nil {
		return err
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return nil
}

// AttachContainer joins the streams of a running container. A built-in server has
// only an output, which is its log.
func (s session) AttachContainer(ctx context.Context, _, _, _ string, in io.Reader, out, errOut io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.p.mu.Lock()
	var run runner
	if c := s.p.containers[s.spec.Name]; c != nil && c.running() {
		run = c.run
	}
	s.p.mu.Unlock()
	if run == nil {
		return fmt.Errorf("container %s is not running", s.spec.Name)
	}
	if proc, ok := run.(process); ok {
		a := sandbox.AttachSpec{Stdin: in, Resize: sizes(ctx, resize)}
		if out != nil {
			a.Stdout = out
		}
		if errOut != nil {
			a.Stderr = errOut
		}
		return proc.Attach(ctx, a)
	}
	path, err := s.k.logLocation(s.p, s.o, s.spec.Name, false)
	if err != nil || out == nil {
		return err
	}
	none := int64(0)
	return readLog(ctx, path, &corev1.PodLogOptions{Follow: true, TailLines: &none}, run.done(), out)
}

// PortForward joins a stream to a port of the pod, as seen from inside the pod.
func (s session) PortForward(ctx context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	sb := s.p.box()
	if sb == nil {
		return errors.New("the pod is not running")
	}
	dialCtx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := s.k.netNS(s.p, s.o).Dial(dialCtx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return fmt.Errorf("connect to port %d of pod %s: %w", port, s.o.Name, err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	fromPod := make(chan error, 1)
	go func() {
		_, err := io.Copy(stream, conn)
		_ = stream.Close() // ends the other direction
		fromPod <- err
	}()
	_, toErr := io.Copy(conn, stream)
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
	return errors.Join(unlessOver(<-fromPod), unlessOver(toErr))
}

// unlessOver drops the errors that are only one end or the other having closed.
func unlessOver(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, io.ErrClosedPipe) ||
		err != nil && strings.Contains(err.Error(), "stream closed") { // spdystream has no error value for it
		return nil
	}
	return err
}

// sizes passes terminal sizes on until ctx ends.
func sizes(ctx context.Context, from <-chan remotecommand.TerminalSize) <-chan sandbox.Size {
	if from == nil {
		return nil
	}
	to := make(chan sandbox.Size)
	go func() {
		defer close(to)
		for {
			select {
			case <-ctx.Done():
				return
			case s, ok := <-from:
				if !ok {
					return
				}
				select {
				case to <- sandbox.Size{Width: s.Width, Height: s.Height}:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return to
}
