// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	utilexec "k8s.io/utils/exec"

	"github.com/kplab/kplab/sandbox"
)

// running returns what runs the container, or nil.
func (t target) running() runner {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	if c := t.p.containers[t.spec.Name]; c != nil && c.running() {
		return c.run
	}
	return nil
}

// exec runs a command in the container; its exit code travels as an error.
func (t target) exec(ctx context.Context, c *remote, cmd []string) error {
	code, err := t.k.exec(ctx, t.p, t.o, t.spec, execArgs{
		args: cmd, stdin: c.stdin, stdout: c.stdout, stderr: c.stderr, tty: c.tty, resize: c.resize,
	})
	if err != nil {
		return fmt.Errorf("error executing command in container: %w", err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", code), Code: code}
	}
	return nil
}

// attach joins the streams of the container's process. A built-in server has only
// an output, which is its log.
func (t target) attach(ctx context.Context, c *remote) error {
	run := t.running()
	if run == nil {
		return fmt.Errorf("error attaching to container: container %s is not running", t.spec.Name)
	}
	if proc, ok := run.(process); ok {
		err := proc.Attach(ctx, sandbox.AttachSpec{Stdin: c.stdin, Stdout: c.stdout, Stderr: c.stderr, Resize: c.resize, Early: t.unread(run)})
		if err != nil {
			return fmt.Errorf("error attaching to container: %w", err)
		}
		return nil
	}
	path, done, err := t.k.logLocation(t.p, t.o, t.spec.Name, false)
	if err != nil {
		return fmt.Errorf("error attaching to container: %w", err)
	}
	note, out := c.stderr, c.stdout
	if note == nil {
		note = out
	}
	if out == nil {
		out = io.Discard
	}
	lineEnd := "\n"
	if c.tty {
		lineEnd = "\r\n" // the client's terminal is raw
		out = carriageReturns{out}
	}
	if note != nil {
		_, err = fmt.Fprintf(note, "kplab: container %s (image %s) is a server inside of the lab's daemon: it has no terminal and reads no input. Its log follows; for a shell use kubectl exec.%s",
			t.spec.Name, t.spec.Image, lineEnd)
	}
	if err != nil {
		return nil // the client has gone
	}
	none := int64(0)
	return readLog(ctx, path, &corev1.PodLogOptions{Follow: done != nil, TailLines: &none}, done, out)
}

// unread reports whether nobody has read the log of what runs: kubectl run of 1.37
// shows it before it attaches, and kubectl debug does not.
func (t target) unread(run runner) bool {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	c := t.p.containers[t.spec.Name]
	return c != nil && c.read != run
}

// carriageReturns ends lines as a raw terminal wants them.
type carriageReturns struct{ to io.Writer }

// Write implements io.Writer.
func (w carriageReturns) Write(b []byte) (int, error) {
	if _, err := io.WriteString(w.to, strings.ReplaceAll(string(b), "\n", "\r\n")); err != nil {
		return 0, err
	}
	return len(b), nil
}

// forwarder serves the connections of one port-forward; ctx is the request's, which
// ends with the client.
type forwarder struct {
	target
	ctx context.Context
}

// PortForward joins a stream to a port of the pod, as seen from inside the pod. The
// context that the library gives never ends.
func (f forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	conn, err := f.dial(strconv.Itoa(int(port)))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // what is left unread is the client's loss
	stop := context.AfterFunc(f.ctx, func() { _ = conn.Close() })
	defer stop()
	fromPod := make(chan error, 1)
	go func() {
		_, err := io.Copy(stream, conn)
		_ = stream.Close() // ends the other direction
		fromPod <- err
	}()
	_, toErr := io.Copy(conn, stream)
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // it may be closed already
	}
	return errors.Join(unlessOver(<-fromPod), unlessOver(toErr))
}

// dial connects to localhost in the pod's namespace, IPv4 first, as runtimes do.
func (f forwarder) dial(port string) (net.Conn, error) {
	if f.p.box() == nil {
		return nil, errors.New("the pod is not running")
	}
	ctx, cancel := context.WithTimeout(f.ctx, 10*time.Second)
	defer cancel()
	ns := f.k.netNS(f.p, f.o)
	conn, err4 := ns.Dial(ctx, "tcp4", net.JoinHostPort("127.0.0.1", port))
	if err4 == nil {
		return conn, nil
	}
	conn, err6 := ns.Dial(ctx, "tcp6", net.JoinHostPort("::1", port))
	if err6 == nil {
		return conn, nil
	}
	return nil, fmt.Errorf("failed to execute portforward in network namespace %q: failed to connect to localhost:%s inside namespace %q, IPv4: %w IPv6 %w",
		ns.Path(), port, f.o.UID, err4, err6)
}

// unlessOver drops the errors that are only one end or the other having closed.
func unlessOver(err error) error {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) || errors.Is(err, io.ErrClosedPipe) ||
		err != nil && strings.Contains(err.Error(), "stream closed") { // spdystream has no error value for it
		return nil
	}
	return err
}
