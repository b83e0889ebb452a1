// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// Cleanup implements proxy.Mode. All that this mode ever writes is in its two
// tables, and all that is in them is taken for its own, as kube-proxy does: they
// are deleted as a whole, and that they are gone is read back. No other table is
// touched. Connection tracking loses its hooks with the last rule that needs them
// in the namespace, so flows that go on are the affair of whoever keeps one.
func (m *Mode) Cleanup(context.Context) error {
	clear(m.applied)
	conn, err := m.dial()
	if err != nil {
		return err
	}
	defer m.Close()
	var errs []error
	for _, f := range []family{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		errs = append(errs, cleanFamily(conn, f))
	}
	err = errors.Join(errs...)
	if err != nil {
		m.cleanupFailures++
	}
	return err
}

func cleanFamily(conn *nfnl.Conn, f family) error {
	there, err := hasTable(conn, f)
	if err != nil || !there {
		return err
	}
	b := &batch{family: f, conn: conn}
	b.deleteTable()
	b.commit()
	if b.err != nil && !errors.Is(b.err, unix.ENOENT) {
		return fmt.Errorf("clean up nftables rules: %w", b.err)
	}
	there, err = hasTable(conn, f)
	if there {
		return fmt.Errorf("clean up nftables rules: table %s %s is still there", f.ip(), tableName)
	}
	return err
}

// hasTable asks for the table. A kernel without nf_tables has none.
func hasTable(conn *nfnl.Conn, f family) (bool, error) {
	err := conn.Request(nfnl.NFTables|unix.NFT_MSG_GETTABLE, 0, f.nfproto(), func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_TABLE_NAME, tableName)
	}, nil)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EAFNOSUPPORT):
		return false, nil
	}
	return false, fmt.Errorf("look for table %s %s: %w", f.ip(), tableName, err)
}
