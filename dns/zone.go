// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"fmt"
	"os"
	"strings"

	mdns "github.com/miekg/dns"
)

// emptyZone is the root of a world with nothing in it: what is not of the cluster does
// not exist. Without it CoreDNS would fail (SERVFAIL), which clients take for a passing
// trouble.
const emptyZone = ". 5 IN SOA ns.dns.kplab. hostmaster.kplab. 1 7200 1800 86400 5\n. 5 IN NS ns.dns.kplab.\n"

// ReadZone reads a file of DNS records (RFC 1035, as for any name server) that a lab is to
// have outside of its cluster. Names without a final dot are below the root, unless the
// file has an $ORIGIN. What a zone says of itself, its SOA, is left out: all of it becomes
// part of one zone.
func ReadZone(path string) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the zone of outside names: %w", err)
	}
	var b strings.Builder
	parser := mdns.NewZoneParser(strings.NewReader(string(data)), ".", path)
	parser.SetDefaultTTL(30)
	for rr, ok := parser.Next(); ok; rr, ok = parser.Next() {
		if rr.Header().Rrtype != mdns.TypeSOA {
			b.WriteString(rr.String() + "\n")
		}
	}
	if err := parser.Err(); err != nil {
		return "", fmt.Errorf("the zone of outside names: %w", err)
	}
	if b.Len() == 0 {
		return "", fmt.Errorf("the zone of outside names %s holds no record; a line is for example: api.example.com. 30 IN A 192.0.2.7", path)
	}
	return b.String(), nil
}
