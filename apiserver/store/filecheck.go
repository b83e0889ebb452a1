// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
)

// The file is looked at before bbolt maps it. bbolt trusts its pages: on a
// damaged one it panics (in one place in a goroutine of its own, where nobody
// can recover), follows a loop of pages for ever, or reads behind the end of
// the file, which is a SIGBUS. The check looks at every tree page once, so its
// time is bounded by the size of the file, in a mapping of its own that is gone
// afterwards, so it adds nothing to the memory of the process. Values are not
// looked at; they carry a checksum of their own (record.go).
//
// The layout is bbolt's file format version 2; all numbers little-endian:
//
//	page     id u64, flags u16, count u16, overflow u32, then elements
//	branch   element: pos u32, key size u32, page u64
//	leaf     element: flags u32, pos u32, key size u32, value size u32
//	bucket   value of a leaf element with flag 1: root page u64, sequence u64;
//	         root page 0: a whole leaf page follows in the value
//	meta     magic u32, version u32, page size u32, flags u32, root page u64,
//	         sequence u64, freelist page u64, high water mark u64, txid u64,
//	         FNV-1a checksum u64
//	freelist page ids u64; count 0xFFFF: the first id is the count
const (
	boltMagic        = 0xED0CDAED
	boltVersion      = 2
	boltMetaLen      = 64
	boltPageHeader   = 16
	boltElement      = 16
	boltBucketHeader = 16
	boltNoFreelist   = ^uint64(0)

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagMeta     = 0x04
	flagFreelist = 0x10

	elementBucket = 0x01

	// maxDepth bounds the recursion through pages and nested buckets. A tree
	// of 4 kB pages with two elements a page and 2^60 pages is not deeper.
	maxDepth = 64
)

type boltMeta struct {
	pageSize             uint64
	root, freelist, high uint64
	txid                 uint64
}

func parseMeta(page []byte) (boltMeta, error) {
	var m boltMeta
	if len(page) < boltPageHeader+boltMetaLen {
		return m, io.ErrUnexpectedEOF
	}
	b := page[boltPageHeader : boltPageHeader+boltMetaLen]
	if got := binary.LittleEndian.Uint32(b); got != boltMagic {
		return m, fmt.Errorf("magic number is %#x", got)
	}
	if got := binary.LittleEndian.Uint32(b[4:]); got != boltVersion {
		return m, fmt.Errorf("file version is %d", got)
	}
	sum := fnv.New64a()
	_, _ = sum.Write(b[:boltMetaLen-8]) // a hash never fails
	if sum.Sum64() != binary.LittleEndian.Uint64(b[boltMetaLen-8:]) {
		return m, errors.New("checksum is wrong")
	}
	m.pageSize = uint64(binary.LittleEndian.Uint32(b[8:]))
	m.root = binary.LittleEndian.Uint64(b[16:])
	m.freelist = binary.LittleEndian.Uint64(b[32:])
	m.high = binary.LittleEndian.Uint64(b[40:])
	m.txid = binary.LittleEndian.Uint64(b[48:])
	if m.pageSize < 1024 || m.pageSize > 1<<24 || m.pageSize&(m.pageSize-1) != 0 {
		return m, fmt.Errorf("page size is %d", m.pageSize)
	}
	return m, nil
}

// fileChecker walks one file.
type fileChecker struct {
	file []byte
	meta boltMeta
	used []uint64 // a bit a page: part of the tree or the freelist
	n    int64    // pages in use, the freelist's own among them
}

// checkFile reports what is wrong with a non-empty file, or how many of its
// bytes are in use.
func checkFile(file []byte) (used int64, err error) {
	meta, err := newestMeta(file)
	if err != nil {
		return 0, err
	}
	if meta.high < 4 || meta.high > uint64(len(file))/meta.pageSize {
		return 0, fmt.Errorf("%d pages of %d bytes are in use, but the file has %d bytes", meta.high, meta.pageSize, len(file))
	}
	c := &fileChecker{file: file, meta: meta, used: make([]uint64, meta.high/64+1), n: 2} // two meta pages
	if err := c.page(meta.root, 0); err != nil {
		return 0, err
	}
	if meta.freelist != boltNoFreelist {
		if err := c.freelist(); err != nil {
			return 0, err
		}
	}
	return c.n * int64(meta.pageSize), nil
}

// newestMeta finds the valid meta page with the highest transaction. Page 0
// says how large pages are; when it is the damaged one, page 1 is searched.
func newestMeta(file []byte) (boltMeta, error) {
	first, err0 := parseMeta(file)
	if err0 == nil {
		if size := first.pageSize; size < uint64(len(file)) {
			if second, err := parseMeta(file[size:]); err == nil && second.txid > first.txid {
				return second, nil
			}
		}
		return first, nil
	}
	for off := 1024; off < len(file) && off <= 1<<24; off *= 2 {
		if second, err := parseMeta(file[off:]); err == nil && second.pageSize == uint64(off) {
			return second, nil
		}
	}
	return boltMeta{}, fmt.Errorf("no meta page is valid: page 0: %w", err0)
}

// mark notes that n pages from id are in use, and refuses a second use.
func (c *fileChecker) mark(id, n uint64) error {
	if id >= c.meta.high || n > c.meta.high-id {
		return fmt.Errorf("pages %d to %d are outside of the file", id, id+n)
	}
	for ; n > 0; id, n = id+1, n-1 {
		if c.used[id/64]&(1<<(id%64)) != 0 {
			return fmt.Errorf("page %d is used twice", id)
		}
		c.used[id/64] |= 1 << (id % 64)
	}
	return nil
}

// read returns the page with its overflow pages, after a look at its header.
func (c *fileChecker) read(id uint64) (page []byte, flags uint16, count int, err error) {
	if id < 2 || id >= c.meta.high {
		return nil, 0, 0, fmt.Errorf("page %d is used as data", id)
	}
	page = c.file[id*c.meta.pageSize:]
	if got := binary.LittleEndian.Uint64(page); got != id {
		return nil, 0, 0, fmt.Errorf("page %d says that it is page %d", id, got)
	}
	flags = binary.LittleEndian.Uint16(page[8:])
	count = int(binary.LittleEndian.Uint16(page[10:]))
	pages := uint64(binary.LittleEndian.Uint32(page[12:])) + 1
	if err := c.mark(id, pages); err != nil {
		return nil, 0, 0, fmt.Errorf("page %d: %w", id, err)
	}
	c.n += int64(pages)
	return page[:pages*c.meta.pageSize], flags, count, nil
}

// page checks the tree under page id.
func (c *fileChecker) page(id uint64, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("page %d: the tree is deeper than %d", id, maxDepth)
	}
	page, flags, count, err := c.read(id)
	if err != nil {
		return err
	}
	switch flags {
	case flagLeaf:
		if err := c.leaf(page, count, depth); err != nil {
			return fmt.Errorf("page %d: %w", id, err)
		}
	case flagBranch:
		return c.branch(id, page, count, depth)
	default:
		return fmt.Errorf("page %d has the flags %#x where a tree page is expected", id, flags)
	}
	return nil
}

func (c *fileChecker) branch(id uint64, page []byte, count, depth int) error {
	if count == 0 || boltPageHeader+count*boltElement > len(page) {
		return fmt.Errorf("page %d: %d branch elements", id, count)
	}
	var last []byte
	for i := range count {
		at := boltPageHeader + i*boltElement
		pos := uint64(binary.LittleEndian.Uint32(page[at:]))
		ksize := uint64(binary.LittleEndian.Uint32(page[at+4:]))
		key, err := span(page, uint64(at)+pos, ksize)
		if err != nil {
			return fmt.Errorf("page %d: branch element %d: %w", id, i, err)
		}
		if i > 0 && bytes.Compare(last, key) >= 0 {
			return fmt.Errorf("page %d: branch element %d is out of order", id, i)
		}
		last = key
		if err := c.page(binary.LittleEndian.Uint64(page[at+8:]), depth+1); err != nil {
			return err
		}
	}
	return nil
}

// leaf checks the elements of a leaf page, or of a bucket inside a value.
func (c *fileChecker) leaf(page []byte, count, depth int) error {
	if boltPageHeader+count*boltElement > len(page) {
		return fmt.Errorf("%d leaf elements", count)
	}
	var last []byte
	for i := range count {
		at := boltPageHeader + i*boltElement
		flags := binary.LittleEndian.Uint32(page[at:])
		pos := uint64(binary.LittleEndian.Uint32(page[at+4:]))
		ksize := uint64(binary.LittleEndian.Uint32(page[at+8:]))
		vsize := uint64(binary.LittleEndian.Uint32(page[at+12:]))
		both, err := span(page, uint64(at)+pos, ksize+vsize)
		if err != nil {
			return fmt.Errorf("leaf element %d: %w", i, err)
		}
		key, value := both[:ksize], both[ksize:]
		if i > 0 && bytes.Compare(last, key) >= 0 {
			return fmt.Errorf("leaf element %d is out of order", i)
		}
		last = key
		switch flags {
		case 0:
		case elementBucket:
			if err := c.bucket(value, depth); err != nil {
				return fmt.Errorf("bucket %q: %w", key, err)
			}
		default:
			return fmt.Errorf("leaf element %d has the flags %#x", i, flags)
		}
	}
	return nil
}

func (c *fileChecker) bucket(value []byte, depth int) error {
	if len(value) < boltBucketHeader {
		return fmt.Errorf("header has %d bytes", len(value))
	}
	if root := binary.LittleEndian.Uint64(value); root != 0 {
		return c.page(root, depth+1)
	}
	inline := value[boltBucketHeader:]
	if len(inline) < boltPageHeader || depth > maxDepth {
		return fmt.Errorf("inline page has %d bytes", len(inline))
	}
	if flags := binary.LittleEndian.Uint16(inline[8:]); flags != flagLeaf {
		return fmt.Errorf("inline page has the flags %#x", flags)
	}
	return c.leaf(inline, int(binary.LittleEndian.Uint16(inline[10:])), depth+1)
}

// freelist checks that no page is both free and in use.
func (c *fileChecker) freelist() error {
	page, flags, n, err := c.read(c.meta.freelist)
	if err != nil {
		return fmt.Errorf("freelist: %w", err)
	}
	if flags != flagFreelist {
		return fmt.Errorf("freelist: page %d has the flags %#x", c.meta.freelist, flags)
	}
	ids, count := page[boltPageHeader:], uint64(n)
	if count == 0xFFFF {
		count, ids = binary.LittleEndian.Uint64(ids), ids[8:]
	}
	if count > uint64(len(ids)/8) {
		return fmt.Errorf("freelist: %d entries do not fit", count)
	}
	for i := range count {
		id := binary.LittleEndian.Uint64(ids[8*i:])
		if id < 2 {
			return fmt.Errorf("freelist: page %d is called free", id)
		}
		if err := c.mark(id, 1); err != nil {
			return fmt.Errorf("freelist: %w", err)
		}
	}
	return nil
}

// span is page[from:from+n], or an error when it leaves the page.
func span(page []byte, from, n uint64) ([]byte, error) {
	if from > uint64(len(page)) || n > uint64(len(page))-from {
		return nil, fmt.Errorf("%d bytes at %d leave the page", n, from)
	}
	return page[from : from+n], nil
}

// onlyZeros reports whether a file that has no valid meta page is one whose
// first write never reached the disk: short, and nothing in it. bbolt writes
// the first four pages at once and then syncs; a power cut in between leaves
// this, and there is nothing in it to lose.
func onlyZeros(file []byte) bool {
	if len(file) > 1<<18 {
		return false
	}
	for _, b := range file {
		if b != 0 {
			return false
		}
	}
	return true
}
