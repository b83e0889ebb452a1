// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nfnl"
)

// errDiffers says that the kernel holds something else than was written.
var errDiffers = errors.New("the kernel holds something else than was written")

// kernelTable is the table of one family as the kernel lists it.
type kernelTable struct {
	family
	exists     bool
	odd        string // what of the table itself is not as this mode makes it
	generation uint32
	// anonymous is a number that no set of a single rule has, nor any above it.
	anonymous int
	sets      map[string]*kernelSet
	chains    map[string]*kernelChain
	// deep says that the contents of sets of single rules were read as well.
	deep bool
}

type kernelSet struct {
	kind     string // everything about it but its elements, see kindOf
	size     int
	digest   string // of the elements, where it was left there
	elements []element
	odd      bool // it has elements that this mode cannot have written
}

type kernelChain struct {
	kind  string
	rules []kernelRule
}

type kernelRule struct {
	exprs   string // canonical
	comment string
	anon    string // the set that is written out in it
}

// look reads the table. Sets of single rules cannot be changed by anybody while
// their rule is there, and those that this mode made carry a digest; deep reads
// what is in others.
// Of each set about as many elements are expected as expect says.
func look(conn *nfnl.Conn, f family, deep bool, expect func(set) int) (*kernelTable, error) {
	k := &kernelTable{family: f, deep: deep, sets: map[string]*kernelSet{}, chains: map[string]*kernelChain{}}
	var err error
	if k.generation, err = conn.Generation(); err != nil {
		return nil, err
	}
	err = conn.Request(nfnl.NFTables|unix.NFT_MSG_GETTABLE, 0, f.nfproto(), func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_TABLE_NAME, tableName)
	}, func(body []byte) {
		k.exists = true
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			switch {
			case typ == unix.NFTA_TABLE_FLAGS && nfnl.U32(v) != 0:
				k.odd = "table flags " + strconv.Itoa(int(nfnl.U32(v)))
			case typ == attrTableUserData && commentOf(v) != tableComment:
				k.odd = "table comment"
			}
		})
	})
	if errors.Is(err, unix.ENOENT) {
		return k, nil
	}
	if err == nil {
		err = errors.Join(k.readChains(conn), k.readRules(conn), k.readSets(conn, expect))
	}
	if err != nil {
		return nil, fmt.Errorf("read table %s %s: %w", f.ip(), tableName, err)
	}
	return k, nil
}

func (k *kernelTable) readChains(conn *nfnl.Conn) error {
	return conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETCHAIN, k.nfproto(), nil, func() { clear(k.chains) }, func(body []byte) {
		mine, name, hooked, kind, comment, policy := false, "", "", "", "", ""
		nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				mine = nfnl.CString(v) == tableName
			case unix.NFTA_CHAIN_NAME:
				name = nfnl.CString(v)
			case unix.NFTA_CHAIN_HOOK:
				var at, priority uint32
				nfnl.Attrs(v, func(typ uint16, v []byte) {
					switch typ {
					case unix.NFTA_HOOK_HOOKNUM:
						at = nfnl.U32(v)
					case unix.NFTA_HOOK_PRIORITY:
						priority = nfnl.U32(v)
					}
				})
				hooked = hookKind(at, int32(priority))
			case unix.NFTA_CHAIN_TYPE:
				kind = nfnl.CString(v)
			case unix.NFTA_CHAIN_POLICY:
				if nfnl.U32(v) != policyAccept {
					policy = "policy " + strconv.Itoa(int(nfnl.U32(v)))
				}
			case attrChainUserData:
				comment = commentOf(v)
			}
		})
		if mine {
			k.chains[name] = &kernelChain{kind: kind + hooked + policy + "#" + comment}
		}
	})
}

func hookKind(point uint32, priority int32) string {
	return fmt.Sprintf(" at %d, %d", point, priority)
}

// kindOf is the kind of a chain as this mode makes it.
func (c *chain) kindOf() string {
	if c.hook == nil {
		return "#" + c.comment
	}
	return c.hook.kind + hookKind(c.hook.number, c.hook.value) + "#" + c.comment
}

func commentOf(userData []byte) string {
	if len(userData) > 2 && userData[0] == 0 {
		return nfnl.CString(userData[2:])
	}
	return ""
}

func (k *kernelTable) readRules(conn *nfnl.Conn) error {
	return conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETRULE, k.nfproto(), func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_RULE_TABLE, tableName)
	}, func() {
		for _, c := range k.chains {
			c.rules = nil
		}
	}, func(body []byte) {
		chain, r := decodeRule(body)
		if c := k.chains[chain]; c != nil {
			c.rules = append(c.rules, r)
		}
	})
}

func decodeRule(body []byte) (chain string, r kernelRule) {
	nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) {
		switch typ {
		case unix.NFTA_RULE_CHAIN:
			chain = nfnl.CString(v)
		case unix.NFTA_RULE_EXPRESSIONS:
			r.exprs, r.anon = canonical(v)
		case unix.NFTA_RULE_USERDATA:
			r.comment = commentOf(v)
		}
	})
	return chain, r
}

// irrelevant attributes differ between what is sent and what is listed: numbers
// in a transaction, and what the kernel fills in.
var irrelevant = map[string][]uint16{
	"lookup": {unix.NFTA_LOOKUP_SET_ID},
	"dynset": {unix.NFTA_DYNSET_SET_ID},
	"nat":    {unix.NFTA_NAT_REG_ADDR_MAX, unix.NFTA_NAT_REG_PROTO_MAX, unix.NFTA_NAT_FLAGS},
}

// optional attributes may as well be absent when they are zero.
var optional = map[string][]uint16{
	"lookup":  {unix.NFTA_LOOKUP_FLAGS},
	"dynset":  {unix.NFTA_DYNSET_TIMEOUT, unix.NFTA_DYNSET_FLAGS},
	"bitwise": {attrBitwiseOp},
	"numgen":  {unix.NFTA_NG_OFFSET},
}

// canonical is a list of expressions in a form that does not depend on who wrote
// it, and the name of the set that is written out in the rule, if one is.
func canonical(exprs []byte) (form, anon string) {
	var b strings.Builder
	nfnl.Attrs(exprs, func(_ uint16, elem []byte) {
		name := ""
		nfnl.Attrs(elem, func(typ uint16, v []byte) {
			switch typ {
			case unix.NFTA_EXPR_NAME:
				name = nfnl.CString(v)
				b.WriteString(name)
			case unix.NFTA_EXPR_DATA:
				attrs := map[uint16][]byte{}
				nfnl.Attrs(v, func(typ uint16, v []byte) { attrs[typ] = v })
				for _, typ := range slices.Sorted(maps.Keys(attrs)) {
					v := attrs[typ]
					if slices.Contains(irrelevant[name], typ) || (slices.Contains(optional[name], typ) && isZero(v)) {
						continue
					}
					if name == "lookup" && typ == unix.NFTA_LOOKUP_SET {
						if set := nfnl.CString(v); strings.HasPrefix(set, "__") {
							anon = set
							v = []byte("__")
						}
					}
					b.WriteString("\x00" + string(rune(typ)) + "=")
					if slices.Contains(values[name], typ) {
						writeValue(&b, v)
					} else {
						b.Write(v)
					}
				}
			}
		})
		b.WriteByte('\n')
	})
	return b.String(), anon
}

// values are the attributes that hold data or a verdict, which are attributes
// themselves.
var values = map[string][]uint16{
	"immediate": {unix.NFTA_IMMEDIATE_DATA},
	"cmp":       {unix.NFTA_CMP_DATA},
	"bitwise":   {unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR},
}

// writeValue writes data or a verdict without the flags of nesting, which not
// everybody sets.
func writeValue(b *strings.Builder, v []byte) {
	nfnl.Attrs(v, func(typ uint16, inner []byte) {
		if typ != unix.NFTA_DATA_VERDICT {
			b.Write(inner)
			return
		}
		nfnl.Attrs(inner, func(typ uint16, leaf []byte) {
			b.WriteString("(" + string(rune(typ)) + ":")
			b.Write(leaf)
			b.WriteByte(')')
		})
	})
}

func isZero(v []byte) bool { return !slices.ContainsFunc(v, func(c byte) bool { return c != 0 }) }

// form is the canonical form of a rule as this mode makes it.
func (r *rule) form() string {
	form, _ := canonical(r.exprs)
	return form
}

func (k *kernelTable) readSets(conn *nfnl.Conn, expect func(set) int) error {
	err := conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETSET, k.nfproto(), func(b []byte) []byte {
		return nfnl.String(b, unix.NFTA_SET_TABLE, tableName)
	}, func() { clear(k.sets) }, func(body []byte) {
		name, s := decodeSet(body)
		k.sets[name] = s
		if _, digits, ok := strings.Cut(name, "__"); ok {
			if n, err := strconv.Atoi(strings.TrimLeft(digits, "mapset")); err == nil {
				k.anonymous = max(k.anonymous, n+1)
			}
		}
	})
	if err != nil {
		return err
	}
	containers := k.containers()
	for i, c := range containers {
		if s := k.sets[c.name]; s != nil {
			if err := s.read(conn, c, c.name, expect(set(i))); err != nil {
				return err
			}
		}
	}
	if !k.deep {
		return nil
	}
	for _, c := range k.chains {
		for _, r := range c.rules {
			s := k.sets[r.anon]
			if s == nil || s.digest != "" {
				continue
			}
			for _, like := range []*container{k.endpointMap(), k.verdictMap(), k.rangeSet(source), k.rangeSet(destination)} {
				if kindOf(like) != s.kind {
					continue
				}
				if err := s.read(conn, like, r.anon, s.size); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// decodeSet reads a set's name and what else there is to it.
func decodeSet(body []byte) (name string, s *kernelSet) {
	s = &kernelSet{}
	attrs := map[uint16][]byte{}
	nfnl.Attrs(nfnl.Body(body), func(typ uint16, v []byte) { attrs[typ] = v })
	nfnl.Attrs(attrs[unix.NFTA_SET_DESC], func(typ uint16, v []byte) {
		if typ == unix.NFTA_SET_DESC_SIZE {
			s.size = int(nfnl.U32(v))
		}
	})
	timeout := nfnl.U64(attrs[unix.NFTA_SET_TIMEOUT])
	userData, digest := splitDigest(attrs[unix.NFTA_SET_USERDATA])
	s.digest = digest
	u32 := func(typ uint16) uint32 { return nfnl.U32(attrs[typ]) }
	s.kind = setKind(u32(unix.NFTA_SET_FLAGS), u32(unix.NFTA_SET_KEY_TYPE), u32(unix.NFTA_SET_KEY_LEN),
		u32(unix.NFTA_SET_DATA_TYPE), u32(unix.NFTA_SET_DATA_LEN), timeout, userData)
	return nfnl.CString(attrs[unix.NFTA_SET_NAME]), s
}

// splitDigest takes our own piece off a set's user data.
func splitDigest(userData []byte) (rest []byte, digest string) {
	for b := userData; len(b) >= 2 && len(b) >= 2+int(b[1]); b = b[2+int(b[1]):] {
		if b[0] == udDigest {
			return userData[:len(userData)-len(b)], string(b[2 : 2+int(b[1])])
		}
	}
	return userData, ""
}

func setKind(flags, keyType, keyLen, dataType, dataLen uint32, timeout uint64, userData []byte) string {
	if dataType == unix.NFT_DATA_VERDICT {
		dataLen = 0 // the kernel fills in its own
	}
	return fmt.Sprint(flags, keyType, keyLen, dataType, dataLen, timeout, " ", string(userData))
}

// kindOf is the kind of a set as this mode makes it.
func kindOf(c *container) string {
	keyType, keyLen := c.keyType()
	var dataType, dataLen uint32
	if c.worth != worthNothing {
		dataType, dataLen = c.dataType()
	}
	return setKind(c.flags, keyType, keyLen, dataType, dataLen, uint64(c.timeout.Milliseconds()), c.userData())
}

// read lists the elements of a set.
func (s *kernelSet) read(conn *nfnl.Conn, c *container, name string, expect int) error {
	return conn.Dump(nfnl.NFTables|unix.NFT_MSG_GETSETELEM, c.nfproto(), func(b []byte) []byte {
		b = nfnl.String(b, unix.NFTA_SET_ELEM_LIST_TABLE, tableName)
		return nfnl.String(b, unix.NFTA_SET_ELEM_LIST_SET, name)
	}, func() { s.elements, s.odd = make([]element, 0, expect), false }, func(body []byte) {
		s.odd = !decodeElements(c, body, func(e element) { s.elements = append(s.elements, e) }) || s.odd
	})
}

func decodeElements(c *container, body []byte, fn func(element)) (ok bool) {
	ok = true
	nfnl.Attrs(nfnl.Body(body), func(typ uint16, list []byte) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			return
		}
		nfnl.Attrs(list, func(_ uint16, item []byte) {
			var e element
			ok = c.decode(item, &e) && ok
			fn(e)
		})
	})
	return ok
}
