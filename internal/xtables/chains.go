// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// RemoveChains empties and deletes chains of the nft-backed variant over netlink,
// since the tool's own -X walks every chain of the table. First all are emptied, so that none
// is used by another any more, then all are deleted; as many as the socket takes
// are one transaction, so a handful of chains goes in one.
func RemoveChains(c *nfnl.Conn, family uint8, table string, chains []string) error {
	batch := c.BeginBatch(nil, nfnl.NFTables)
	message := func(typ uint16, build func(b []byte) []byte) {
		b, start, _ := c.Begin(batch, typ, 0, family, 0)
		batch = nfnl.End(build(b), start)
	}
	for pass := range 2 {
		for _, name := range chains {
			if pass == 0 {
				message(nfnl.NFTables|unix.NFT_MSG_DELRULE, func(b []byte) []byte {
					return nfnl.String(nfnl.String(b, unix.NFTA_RULE_TABLE, table), unix.NFTA_RULE_CHAIN, name)
				})
			} else {
				message(nfnl.NFTables|unix.NFT_MSG_DELCHAIN, func(b []byte) []byte {
					return nfnl.String(nfnl.String(b, unix.NFTA_CHAIN_TABLE, table), unix.NFTA_CHAIN_NAME, name)
				})
			}
			if len(batch) > c.Limit()-4096 {
				if _, err := c.Commit(batch, nfnl.NFTables); err != nil {
					return fmt.Errorf("remove chains of table %s: %w", table, err)
				}
				batch = c.BeginBatch(batch[:0], nfnl.NFTables)
			}
		}
	}
	if _, err := c.Commit(batch, nfnl.NFTables); err != nil {
		return fmt.Errorf("remove chains of table %s: %w", table, err)
	}
	return nil
}
