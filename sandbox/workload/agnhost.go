// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// newAgnhost is the test image of Kubernetes: many small programs, chosen by the
// first argument. Without one it pauses, as the image does.
func newAgnhost(c Context) (Server, error) {
	if len(c.Args) == 0 {
		return pause{}, nil
	}
	name, args := c.Args[0], c.Args[1:]
	switch name {
	case "pause":
		return pause{}, nil
	case "netexec":
		return newNetexec(c, args)
	case "serve-hostname":
		return newServeHostname(c, args)
	case "porter":
		return newPorter(c, args)
	case "connect":
		return newConnect(c, args)
	}
	return nil, fmt.Errorf("agnhost %s is not built in; there are pause, netexec, serve-hostname, porter and connect (any other program works as a command)", name)
}

// parse reads flags with one or two dashes, wherever they stand, and returns the
// other arguments.
func parse(c *Context, flags *flag.FlagSet, args []string) ([]string, error) {
	flags.SetOutput(io.Discard)
	var plain []string
	for {
		if err := flags.Parse(args); err != nil {
			return nil, fmt.Errorf("agnhost %s %s: %w", flags.Name(), strings.Join(c.Args[1:], " "), err)
		}
		if flags.NArg() == 0 {
			return plain, nil
		}
		plain = append(plain, flags.Arg(0))
		args = flags.Args()[1:]
	}
}

// connect tries one connection, says why it failed in one word, and ends.
type connect struct {
	ctx      Context
	protocol string
	address  string
	timeout  time.Duration
}

func newConnect(c Context, args []string) (Server, error) {
	flags := flag.NewFlagSet("connect", flag.ContinueOnError)
	protocol := flags.String("protocol", "tcp", "tcp or udp")
	timeout := flags.Duration("timeout", 0, "0 means none")
	plain, err := parse(&c, flags, args)
	if err != nil {
		return nil, err
	}
	if len(plain) != 1 || *protocol != "tcp" && *protocol != "udp" {
		return nil, errors.New("agnhost connect: want connect [--timeout 5s] [--protocol tcp|udp] ADDRESS:PORT")
	}
	return &connect{ctx: c, protocol: *protocol, address: plain[0], timeout: *timeout}, nil
}

// Run implements Server. The exit code is 1 when there was no connection.
func (s *connect) Run(ctx context.Context) error {
	dialCtx, cancel := ctx, context.CancelFunc(func() {})
	if s.timeout > 0 {
		dialCtx, cancel = context.WithTimeout(ctx, s.timeout)
	}
	defer cancel()
	conn, err := s.ctx.NetNS.Dial(dialCtx, s.protocol, s.address)
	if err == nil && s.protocol == "udp" {
		err = askUDP(dialCtx, conn)
	}
	if conn != nil {
		_ = conn.Close()
	}
	if err == nil || ctx.Err() != nil {
		return nil
	}
	_, _ = io.WriteString(s.ctx.Stderr, verdict(err)+"\n")
	return &ExitError{Code: 1}
}

// askUDP sends a packet and waits for any answer: without one nothing is known.
func askUDP(ctx context.Context, conn net.Conn) error {
	if d, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(d); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if _, err := conn.Write([]byte("hostname")); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 1024))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// verdict is the word that scripts look for.
func verdict(err error) string {
	var timeout net.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "TIMEOUT"
	case isRefused(err):
		return "REFUSED"
	case strings.Contains(err.Error(), "literal"):
		return "DNS: " + err.Error()
	}
	return "OTHER: " + err.Error()
}
