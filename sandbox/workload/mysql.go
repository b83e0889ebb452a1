// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"
)

const (
	mysqlPort    = 3306
	mysqlVersion = "5.5.68-MariaDB"
	// mysqlPatience is how long a client may take to log in, as the real server
	// gives by default.
	mysqlPatience = 10 * time.Second
	// mysqlMaxLogin bounds the client's answer to the greeting.
	mysqlMaxLogin = 4 << 10
)

// mysql greets as a MariaDB server does and then lets nobody in: enough to see
// that a connection reached a database, and which address it came from.
type mysql struct {
	ctx   Context
	count atomic.Uint32
}

func newMysql(c Context) (Server, error) { return &mysql{ctx: c}, nil }

// Run implements Server.
func (s *mysql) Run(ctx context.Context) error {
	_, _ = fmt.Fprintf(s.ctx.Stderr, "%s (built into kplab): ready for connections on port %d\n", mysqlVersion, mysqlPort)
	return runAll(ctx, tcpService(s.ctx.NetNS, mysqlPort, s.serve))
}

func (s *mysql) serve(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(mysqlPatience)) // fails on a closed connection, as the next call does
	if _, err := c.Write(packet(0, s.greeting())); err != nil {
		return
	}
	var header [4]byte
	if _, err := io.ReadFull(c, header[:]); err != nil {
		return
	}
	length := int(header[0]) | int(header[1])<<8 | int(header[2])<<16
	if length > mysqlMaxLogin {
		return
	}
	login := make([]byte, length)
	if _, err := io.ReadFull(c, login); err != nil {
		return
	}
	user, password := readLogin(login)
	using := "NO"
	if password {
		using = "YES"
	}
	msg := fmt.Sprintf("Access denied for user '%s'@'%s' (using password: %s)", user, addressOf(c.RemoteAddr().String()), using)
	const accessDenied = 1045
	body := append([]byte{0xff}, binary.LittleEndian.AppendUint16(nil, accessDenied)...)
	body = append(body, "#28000"+msg...)
	_, _ = c.Write(packet(header[3]+1, body))
	_, _ = fmt.Fprintf(s.ctx.Stderr, "[Warning] %s\n", msg)
}

// Capability flags of the protocol.
const (
	clientLongPassword     = 1
	clientProtocol41       = 1 << 9
	clientSecureConnection = 1 << 15
	clientPluginAuth       = 1 << 19
)

// greeting is the first packet, protocol version 10.
func (s *mysql) greeting() []byte {
	const (
		flags    = clientLongPassword | clientProtocol41 | clientSecureConnection | clientPluginAuth
		latin1   = 8
		status   = 2 // autocommit
		saltSize = 20
	)
	b := append([]byte{10}, mysqlVersion...)
	b = append(b, 0)
	b = binary.LittleEndian.AppendUint32(b, s.count.Add(1)) // connection
	// Nobody is let in, so the salt may be known.
	salt := []byte("kplabkplabkplabkplab")
	b = append(b, salt[:8]...)
	b = append(b, 0)
	b = binary.LittleEndian.AppendUint16(b, flags&0xffff)
	b = append(b, latin1)
	b = binary.LittleEndian.AppendUint16(b, status)
	b = binary.LittleEndian.AppendUint16(b, flags>>16)
	b = append(b, saltSize+1)
	b = append(b, make([]byte, 10)...)
	b = append(b, salt[8:]...)
	b = append(b, 0)
	return append(b, "mysql_native_password\x00"...)
}

// packet frames a body.
func packet(sequence byte, body []byte) []byte {
	n := len(body)
	return append([]byte{byte(n), byte(n >> 8), byte(n >> 16), sequence}, body...)
}

// readLogin takes the user's name and whether there is a password from a client's
// answer, of either age of the protocol.
func readLogin(b []byte) (user string, password bool) {
	skip := 5 // flags, packet size
	if len(b) >= 4 && binary.LittleEndian.Uint16(b)&clientProtocol41 != 0 {
		skip = 32 // and the character set, and what is reserved
	}
	if len(b) < skip {
		return "", false
	}
	name, rest, _ := bytes.Cut(b[skip:], []byte{0})
	return string(name), len(rest) > 0 && rest[0] != 0
}
