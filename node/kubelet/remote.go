// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	remoteconstants "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"github.com/kplab/kplab/sandbox"
)

// remote is the client's end of an exec or attach, whichever protocol it came by.
// A stream that was not asked for is nil.
type remote struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	tty            bool
	resize         chan sandbox.Size

	status io.Writer
	plain  bool // the status is a text, and nothing for success
	conn   io.Closer
}

// serveRemote opens the streams of a request, runs with them, and tells the client
// how it ended. A client that goes away ends run's context. Version 5 of the
// WebSocket protocol is spoken here and not translated on the way, so that a
// connection that breaks anywhere reaches the client as a broken one: SPDY has no
// such thing, its clients take an end without a status for success.
func serveRemote(w http.ResponseWriter, r *http.Request, run func(ctx context.Context, c *remote) error) {
	opts, err := remotecommand.NewOptions(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r, watched, cancel := watchClient(w, r)
	defer cancel()
	var c *remote
	if wsstream.IsWebSocketRequest(r) {
		c, err = openWebSocket(watched, r, opts)
	} else {
		c, err = openSPDY(watched, r, opts)
	}
	if err != nil {
		return // the client has been told, or is gone
	}
	c.finish(run(r.Context(), c))
	_ = c.conn.Close() // the client may have been faster
}

// finish writes the status. That the client may be gone is no error here.
func (c *remote) finish(err error) {
	status := metav1.Status{Status: metav1.StatusSuccess}
	var exit utilexec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.Exited():
		status = metav1.Status{
			Status: metav1.StatusFailure, Reason: remoteconstants.NonZeroExitCodeReason,
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", exit),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{
				Type: remoteconstants.ExitCodeCauseType, Message: fmt.Sprint(exit.ExitStatus()),
			}}},
		}
	default:
		status = apierrors.NewInternalError(err).ErrStatus
	}
	if c.plain {
		if err != nil {
			_, _ = io.WriteString(c.status, status.Message)
		}
		return
	}
	data, err := json.Marshal(status)
	if err == nil {
		_, _ = c.status.Write(data)
	}
}

// followSizes reads sizes of the client's terminal until the stream or ctx ends.
func (c *remote) followSizes(ctx context.Context, from io.Reader) {
	sizes := make(chan sandbox.Size)
	c.resize = sizes
	go func() {
		defer close(sizes)
		for decoder := json.NewDecoder(from); ; {
			var s sandbox.Size
			if decoder.Decode(&s) != nil {
				return
			}
			select {
			case sizes <- s:
			case <-ctx.Done():
				return
			}
		}
	}()
}

// openWebSocket speaks the protocols with a channel number before each message.
func openWebSocket(w http.ResponseWriter, r *http.Request, opts *remotecommand.Options) (*remote, error) {
	either := func(want bool, kind wsstream.ChannelType) wsstream.ChannelType {
		if want {
			return kind
		}
		return wsstream.IgnoreChannel
	}
	channels := []wsstream.ChannelType{
		remoteconstants.StreamStdIn:  either(opts.Stdin, wsstream.ReadChannel),
		remoteconstants.StreamStdOut: either(opts.Stdout, wsstream.WriteChannel),
		remoteconstants.StreamStdErr: either(opts.Stderr, wsstream.WriteChannel),
		remoteconstants.StreamErr:    wsstream.WriteChannel,
		remoteconstants.StreamResize: wsstream.ReadChannel,
	}
	const binary, text = wsstream.ChannelWebSocketProtocol, wsstream.Base64ChannelWebSocketProtocol
	protocols := map[string]wsstream.ChannelProtocolConfig{}
	for _, name := range []string{"", binary, "v4." + binary, remoteconstants.StreamProtocolV5Name, text, "v4." + text} {
		protocols[name] = wsstream.ChannelProtocolConfig{Binary: name != text && name != "v4."+text, Channels: channels}
	}
	conn := wsstream.NewConn(protocols)
	conn.SetIdleTimeout(streamIdle)
	protocol, streams, err := conn.Open(w, r)
	if err != nil {
		return nil, err
	}
	c := &remote{conn: conn, status: streams[remoteconstants.StreamErr], tty: opts.TTY}
	c.plain = protocol == "" || protocol == binary || protocol == text
	first := c.status
	if opts.Stderr {
		c.stderr = streams[remoteconstants.StreamStdErr]
		first = c.stderr
	}
	if opts.Stdout {
		c.stdout = streams[remoteconstants.StreamStdOut]
		first = c.stdout
	}
	if opts.Stdin {
		c.stdin = streams[remoteconstants.StreamStdIn]
	}
	c.followSizes(r.Context(), streams[remoteconstants.StreamResize])
	// An empty message tells the client that it is connected.
	if _, err := first.Write(nil); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return c, nil
}

// openSPDY waits for the streams that the client makes, version 4 of the protocol.
func openSPDY(w http.ResponseWriter, r *http.Request, opts *remotecommand.Options) (*remote, error) {
	if _, err := httpstream.Handshake(r, w, []string{remoteconstants.StreamProtocolV4Name}); err != nil {
		return nil, err
	}
	type arrival struct {
		httpstream.Stream
		replied <-chan struct{}
	}
	arrivals := make(chan arrival)
	ctx := r.Context()
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, replied <-chan struct{}) error {
		select {
		case arrivals <- arrival{s, replied}:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	if conn == nil {
		return nil, errors.New("no upgrade to SPDY")
	}
	conn.SetIdleTimeout(streamIdle)
	c := &remote{conn: conn, tty: opts.TTY}
	waiting := map[string]bool{
		remotecommand.StreamTypeError: true, remotecommand.StreamTypeStdin: opts.Stdin, remotecommand.StreamTypeStdout: opts.Stdout,
		remotecommand.StreamTypeStderr: opts.Stderr, remotecommand.StreamTypeResize: opts.TTY,
	}
	patience := time.NewTimer(streamCreation)
	defer patience.Stop()
	for pending(waiting) {
		var s arrival
		select {
		case s = <-arrivals:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), conn.Close())
		case <-patience.C:
			return nil, errors.Join(errors.New("the client makes no streams"), conn.Close())
		}
		kind := s.Headers().Get(remotecommand.StreamType)
		waiting[kind] = false
		switch kind {
		case remotecommand.StreamTypeError:
			c.status = s
		case remotecommand.StreamTypeStdin:
			c.stdin = s
		case remotecommand.StreamTypeStdout:
			c.stdout = s
		case remotecommand.StreamTypeStderr:
			c.stderr = s
		case remotecommand.StreamTypeResize:
			c.followSizes(ctx, s)
		}
		// The client has to know of its stream before the connection may end.
		select {
		case <-s.replied:
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), conn.Close())
		}
	}
	return c, nil
}

func pending(waiting map[string]bool) bool {
	for _, still := range waiting {
		if still {
			return true
		}
	}
	return false
}

// watchClient returns the request and its answer with a context that ends when the
// client's connection does: the server itself does not look at a connection that
// was taken over. What the streaming libraries log is that clients end their
// connections, which is no news.
func watchClient(w http.ResponseWriter, r *http.Request) (*http.Request, *watchedWriter, context.CancelFunc) {
	ctx, cancel := context.WithCancel(klog.NewContext(r.Context(), logr.Discard()))
	return r.WithContext(ctx), &watchedWriter{ResponseWriter: w, gone: cancel}, cancel
}

type watchedWriter struct {
	http.ResponseWriter
	gone context.CancelFunc
}

// Hijack implements http.Hijacker.
func (w *watchedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	// What was read ahead comes first.
	early, err := buffered.Peek(buffered.Reader.Buffered())
	if err != nil {
		return nil, nil, errors.Join(err, conn.Close())
	}
	watched := &watchedConn{Conn: conn, early: append([]byte{}, early...), gone: w.gone}
	return watched, bufio.NewReadWriter(bufio.NewReader(watched), bufio.NewWriter(watched)), nil
}

// watchedConn tells when its other end has gone.
type watchedConn struct {
	net.Conn
	early []byte
	gone  context.CancelFunc
}

// Read implements net.Conn.
func (c *watchedConn) Read(b []byte) (int, error) {
	if len(c.early) > 0 {
		n := copy(b, c.early)
		c.early = c.early[n:]
		return n, nil
	}
	n, err := c.Conn.Read(b)
	if err != nil {
		c.gone()
	}
	return n, err
}
