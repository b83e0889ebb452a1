// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kplab/kplab/internal/nettest"
)

func TestMain(m *testing.M) { nettest.Main(m) }

// reports keeps what a forwarder says.
type reports chan error

func (r reports) add(err error) {
	select {
	case r <- err:
	default:
	}
}

// start runs a forwarder and returns what it reports.
func start(t *testing.T, run func(ctx context.Context, report Report) error) reports {
	t.Helper()
	nettest.LeakCheck(t)
	ctx, cancel := context.WithCancel(t.Context())
	said, done := make(reports, 16), make(chan error, 1)
	go func() { done <- run(ctx, said.add) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return said
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func to(network, address string) Dial {
	return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, network, address) }
}

// A client that ends its request still gets the answer: the half-close goes through,
// and only that half.
func TestTCPHalfClose(t *testing.T) {
	server, front := listen(t), listen(t)
	go func() {
		c, err := server.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		all, _ := io.ReadAll(c) // until the client has said all
		_, _ = c.Write([]byte(strings.ToUpper(string(all))))
	}()
	start(t, func(ctx context.Context, report Report) error {
		return TCP(ctx, front, to("tcp", server.Addr().String()), report)
	})
	c, err := net.Dial("tcp", front.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); string(got) != "HELLO" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func TestTCPSaysWhyNot(t *testing.T) {
	front := listen(t)
	wrong := errors.New("nobody there")
	said := start(t, func(ctx context.Context, report Report) error {
		return TCP(ctx, front, func(context.Context) (net.Conn, error) { return nil, wrong }, report)
	})
	c, err := net.Dial("tcp", front.Addr().String())
	if err == nil {
		// Else the reset was there first.
		defer c.Close()
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v, want a reset", err)
	}
	if err := <-said; !errors.Is(err, wrong) {
		t.Errorf("reported %v", err)
	}
}

// An open connection does not outlive the forwarder.
func TestTCPEndsWithItsContext(t *testing.T) {
	server, front := listen(t), listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- TCP(ctx, front, to("tcp", server.Addr().String()), func(error) {})
	}()
	c, err := net.Dial("tcp", front.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := server.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the client's connection is still open")
	}
}

func TestUDP(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	front, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = server.WriteTo([]byte(from.String()+" "+string(buf[:n])), from)
		}
	}()
	start(t, func(ctx context.Context, report Report) error {
		return UDP(ctx, front, to("udp", server.LocalAddr().String()), 200*time.Millisecond, report)
	})
	talk := func(c net.Conn, text string) (source string) {
		t.Helper()
		buf := make([]byte, 2048)
		nettest.Eventually(t, 20*time.Second, "an answer", func() error {
			if _, err := c.Write([]byte(text)); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			n, err := c.Read(buf)
			if err != nil {
				return err
			}
			var said string
			source, said, _ = strings.Cut(string(buf[:n]), " ")
			if said != text {
				return errors.New("answer to another question: " + said)
			}
			return nil
		})
		return source
	}
	one, err := net.Dial("udp", front.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	two, err := net.Dial("udp", front.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	first := talk(one, "a")
	if other := talk(two, "b"); other == first {
		t.Error("two clients come from one port")
	}
	// After a silence the client is a new one.
	nettest.Until(t, 20*time.Second, "the client is forgotten", func() bool {
		return talk(one, "c") != first || func() bool { <-time.After(250 * time.Millisecond); return false }()
	})
}
