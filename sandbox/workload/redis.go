// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
)

const (
	redisPort    = 6379
	redisVersion = "7.4.2"
	// Bounds of what a client may make the server hold.
	redisMaxArgs = 64
	redisMaxBulk = 64 << 10
	redisMaxKeys = 10000
)

// redis answers the commands with which people look whether it is there, and
// keeps keys while it runs.
type redis struct {
	ctx  Context
	mu   sync.Mutex
	keys map[string]string
}

func newRedis(c Context) (Server, error) { return &redis{ctx: c, keys: make(map[string]string)}, nil }

// Run implements Server.
func (s *redis) Run(ctx context.Context) error {
	_, _ = fmt.Fprintf(s.ctx.Stdout, "Redis version=%s (built into kplab), port=%d\n", version(s.ctx.Image, redisVersion), redisPort)
	return runAll(ctx, tcpService(s.ctx.NetNS, redisPort, s.serve))
}

func (s *redis) serve(c net.Conn) {
	in, out := bufio.NewReaderSize(c, redisMaxBulk), bufio.NewWriter(c)
	for {
		args, err := readCommand(in)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				_, _ = fmt.Fprintf(out, "-ERR Protocol error: %v\r\n", err)
				_ = out.Flush()
			}
			return
		}
		if len(args) == 0 {
			continue
		}
		quit := s.answer(out, args)
		if in.Buffered() == 0 || quit {
			if out.Flush() != nil || quit {
				return
			}
		}
	}
}

// readCommand reads one command: an array of bulk strings, or a line of words.
func readCommand(in *bufio.Reader) ([]string, error) {
	line, err := readLine(in)
	if err != nil {
		return nil, err
	}
	count, isArray := strings.CutPrefix(line, "*")
	if !isArray {
		return strings.Fields(line), nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > redisMaxArgs {
		return nil, errors.New("invalid multibulk length")
	}
	args := make([]string, 0, n)
	for range n {
		if line, err = readLine(in); err != nil {
			return nil, err
		}
		size, ok := strings.CutPrefix(line, "$")
		length, err := strconv.Atoi(size)
		if !ok || err != nil || length < 0 || length > redisMaxBulk {
			return nil, errors.New("invalid bulk length")
		}
		data := make([]byte, length+2)
		if _, err := io.ReadFull(in, data); err != nil {
			return nil, err
		}
		args = append(args, string(data[:length]))
	}
	return args, nil
}

func readLine(in *bufio.Reader) (string, error) {
	line, err := in.ReadSlice('\n') // bounded by the reader's buffer
	if err != nil {
		return "", err
	}
	return strings.TrimRight(string(line), "\r\n"), nil
}

// answer writes the reply to one command; true ends the connection.
func (s *redis) answer(out *bufio.Writer, args []string) (quit bool) {
	simple := func(v string) { _, _ = out.WriteString("+" + v + "\r\n") }
	fail := func(v string) { _, _ = out.WriteString("-" + v + "\r\n") }
	number := func(v int) { _, _ = fmt.Fprintf(out, ":%d\r\n", v) }
	bulk := func(v string) { _, _ = fmt.Fprintf(out, "$%d\r\n%s\r\n", len(v), v) }
	name := strings.ToUpper(args[0])
	args = args[1:]
	if want, ok := map[string]int{"ECHO": 1, "GET": 1, "SET": 2, "INCR": 1, "DEL": 1, "EXISTS": 1, "AUTH": 1, "SELECT": 1}[name]; ok && len(args) < want {
		fail("ERR wrong number of arguments for '" + strings.ToLower(name) + "' command")
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch name {
	case "PING":
		if len(args) > 0 {
			bulk(args[0])
		} else {
			simple("PONG")
		}
	case "ECHO":
		bulk(args[0])
	case "SET":
		if _, there := s.keys[args[0]]; !there && len(s.keys) >= redisMaxKeys {
			fail("OOM command not allowed when used memory > 'maxmemory'.")
			return false
		}
		s.keys[args[0]] = args[1]
		simple("OK")
	case "GET":
		if v, ok := s.keys[args[0]]; ok {
			bulk(v)
		} else {
			_, _ = out.WriteString("$-1\r\n")
		}
	case "INCR":
		n, err := strconv.Atoi(s.keys[args[0]])
		if err != nil && s.keys[args[0]] != "" {
			fail("ERR value is not an integer or out of range")
			return false
		}
		s.keys[args[0]] = strconv.Itoa(n + 1)
		number(n + 1)
	case "DEL", "EXISTS":
		n := 0
		for _, k := range args {
			if _, ok := s.keys[k]; ok {
				n++
				if name == "DEL" {
					delete(s.keys, k)
				}
			}
		}
		number(n)
	case "DBSIZE":
		number(len(s.keys))
	case "FLUSHALL", "FLUSHDB":
		clear(s.keys)
		simple("OK")
	case "SELECT", "CLIENT", "AUTH":
		simple("OK")
	case "COMMAND", "CONFIG":
		_, _ = out.WriteString("*0\r\n")
	case "INFO":
		bulk(fmt.Sprintf("# Server\r\nredis_version:%s\r\nredis_mode:standalone\r\ntcp_port:%d\r\n# Replication\r\nrole:master\r\n# Keyspace\r\ndb0:keys=%d\r\n",
			version(s.ctx.Image, redisVersion), redisPort, len(s.keys)))
	case "QUIT":
		simple("OK")
		return true
	default:
		fail("ERR unknown command '" + strings.ToLower(name) + "'; kplab's redis knows PING ECHO SET GET INCR DEL EXISTS DBSIZE FLUSHALL INFO")
	}
	return false
}
