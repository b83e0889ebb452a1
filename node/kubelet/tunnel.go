// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/gorilla/websocket"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	forwardconstants "k8s.io/apimachinery/pkg/util/portforward"
	clientforward "k8s.io/client-go/tools/portforward"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/klog/v2"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// serveForward joins a client's connections with those that to opens, until the
// client goes away or ctx ends. The protocol is SPDY, by itself or inside of a
// WebSocket.
func serveForward(ctx context.Context, w http.ResponseWriter, r *http.Request, pod, uid string, to portforward.PortForwarder) {
	r, watched, cancel := watchClient(w, r)
	defer cancel()
	out := &forwardWriter{ResponseWriter: watched}
	if wsstream.IsWebSocketRequestWithTunnelingProtocol(r) {
		out.tunnel, r = r, asSPDY(r)
	}
	opts, err := portforward.NewV4Options(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	defer context.AfterFunc(ctx, out.close)()
	portforward.ServePortForward(out, r, to, pod, uid, opts, streamIdle, streamCreation, portforward.SupportedProtocols)
}

// asSPDY is the request that a client of the tunnel would have made without it.
func asSPDY(r *http.Request) *http.Request {
	out := utilnet.CloneRequest(r)
	for _, h := range []string{wsstream.WebSocketProtocolHeader, "Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Extensions"} {
		out.Header.Del(h)
	}
	out.Method, out.Body = http.MethodPost, nil
	out.Header.Set(httpstream.HeaderUpgrade, spdy.HeaderSpdy31)
	out.Header.Del(httpstream.HeaderProtocolVersion)
	for _, p := range websocket.Subprotocols(r) {
		if inner, ok := strings.CutPrefix(p, forwardconstants.WebsocketsSPDYTunnelingPrefix); ok {
			out.Header.Add(httpstream.HeaderProtocolVersion, inner)
		}
	}
	return out
}

// forwardWriter lets the connection be closed from outside, and answers the upgrade
// to SPDY with one to a WebSocket when the client asked for that.
type forwardWriter struct {
	http.ResponseWriter
	tunnel *http.Request // what the client asked; nil without a tunnel
	inner  http.Header   // of the answer inside of the tunnel

	mu     sync.Mutex
	conn   net.Conn
	closed bool
}

// Header implements http.ResponseWriter.
func (w *forwardWriter) Header() http.Header {
	if w.tunnel == nil {
		return w.ResponseWriter.Header()
	}
	if w.inner == nil {
		w.inner = http.Header{}
	}
	return w.inner
}

// WriteHeader implements http.ResponseWriter. The tunnel's own upgrade comes with
// Hijack.
func (w *forwardWriter) WriteHeader(code int) {
	if w.tunnel == nil || code != http.StatusSwitchingProtocols {
		w.ResponseWriter.WriteHeader(code)
	}
}

// Hijack implements http.Hijacker.
func (w *forwardWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := w.take()
	if err != nil {
		return nil, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, nil, errors.Join(net.ErrClosed, conn.Close())
	}
	w.conn = conn
	return conn, buffered, nil
}

func (w *forwardWriter) take() (net.Conn, *bufio.ReadWriter, error) {
	if w.tunnel == nil {
		return http.NewResponseController(w.ResponseWriter).Hijack()
	}
	upgrader := websocket.Upgrader{
		// Who may ask was decided by the API server, of which this is a client.
		CheckOrigin:  func(*http.Request) bool { return true },
		Subprotocols: []string{forwardconstants.WebsocketsSPDYTunnelingPrefix + w.inner.Get(httpstream.HeaderProtocolVersion)},
	}
	ws, err := upgrader.Upgrade(w.ResponseWriter, w.tunnel, nil)
	if err != nil {
		return nil, nil, err
	}
	conn := clientforward.NewTunnelingConnectionWithLogger(klog.FromContext(w.tunnel.Context()), ws)
	return conn, bufio.NewReadWriter(bufio.NewReader(conn), bufio.NewWriter(conn)), nil
}

// close ends the connection, now or as soon as there is one.
func (w *forwardWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.conn != nil {
		_ = w.conn.Close() // the client may have been faster
	}
}
