// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// A commit of bbolt waits for the disk twice, for the pages and then for the meta page
// that makes them count, and each time for blocks all over the file. The journal makes
// it once, for a few hundred bytes in one place: a commit goes into the file without
// waiting, then what it did is added to the journal, and when that is on the disk it is
// answered. When the journal is full, the file is synced and the journal begins anew: a
// checkpoint.
//
// What a power cut leaves of the file after a checkpoint is anybody's guess, so it is
// not looked at. The journal's header has a copy of the two meta pages as they were at
// the checkpoint, and a read transaction, the pin, keeps bbolt from writing over any
// page of that state. Opening the file puts the meta pages back and does the entries
// again. It does so after a mere kill, too, when the kernel has it all: one way, and the
// one that tests can walk.
//
//	0       header, slot 0 and 1: magic, format, generation, page size, closed u8,
//	        the meta pages, CRC
//	begin   entries: length u32, CRC u32, generation u64, payload
//
// Generations count the checkpoints; a header is written into the slot of the older one.
// An entry of another generation is left over, and the end of what counts. A header that
// says closed stands for a file that was synced and closed: the journal does not count.
//
// Between checkpoints bbolt does not write its list of free pages, which holds all that
// the pin keeps, and grows: each checkpoint does, so no opening has to search for them.
const (
	journalSuffix = ".journal"
	journalMagic  = "kplabjnl"
	journalFormat = 1
	journalSlot   = 64 << 10 // room for two pages of up to 16 KiB
	journalBegin  = 2 * journalSlot
	journalSize   = 1 << 20
	entryHeader   = 16
)

// errJournalFull says that an entry does not fit: a checkpoint takes its place.
var errJournalFull = errors.New("the journal is full")

// journal is the file beside the store's. Only the writer uses it.
type journal struct {
	file *os.File
	// generation and next are of the checkpoint that the journal stands on; next is 0
	// before the first one of this process.
	generation uint64
	next       int64
	pin        *bolt.Tx
}

func journalPath(path string) string { return path + journalSuffix }

// openJournal opens the journal of the store at path, or makes it. Its blocks are
// written, so that an entry is written over them and the file system has nothing of its
// own to write.
func openJournal(path string) (j *journal, err error) {
	f, err := os.OpenFile(journalPath(path), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() == 0 {
		// The name has to last as long as what is in it.
		if err := syncDir(filepath.Dir(path)); err != nil {
			return nil, err
		}
	}
	if info.Size() != journalSize {
		if _, err := f.WriteAt(make([]byte, journalSize), 0); err != nil {
			return nil, err
		}
		if err := f.Truncate(journalSize); err != nil {
			return nil, err
		}
	}
	j = &journal{file: f}
	h, err := readJournalHeader(f)
	if err != nil {
		return nil, err
	}
	j.generation = h.generation
	return j, nil
}

func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

// journalHeader is the state of the file at a checkpoint.
type journalHeader struct {
	generation uint64
	pageSize   int
	closed     bool
	metas      []byte // both pages
}

// readJournalHeader returns the newest whole header; generation 0 is none.
func readJournalHeader(f io.ReaderAt) (newest journalHeader, err error) {
	for slot := range int64(2) {
		buf := make([]byte, journalSlot)
		if _, err := f.ReadAt(buf, slot*journalSlot); err != nil && !errors.Is(err, io.EOF) {
			return newest, err
		}
		if h, ok := decodeJournalHeader(buf); ok && h.generation > newest.generation {
			newest = h
		}
	}
	return newest, nil
}

const journalFixed = len(journalMagic) + 4 + 8 + 4 + 1

func decodeJournalHeader(buf []byte) (h journalHeader, ok bool) {
	if string(buf[:len(journalMagic)]) != journalMagic || binary.LittleEndian.Uint32(buf[len(journalMagic):]) != journalFormat {
		return h, false
	}
	at := len(journalMagic) + 4
	h.generation = binary.LittleEndian.Uint64(buf[at:])
	h.pageSize = int(binary.LittleEndian.Uint32(buf[at+8:]))
	h.closed = buf[at+12] != 0
	if h.pageSize <= 0 || h.pageSize > journalSlot/4 {
		return h, false
	}
	end := journalFixed + 2*h.pageSize
	h.metas = buf[journalFixed:end]
	return h, crc32.Checksum(buf[:end], castagnoli()) == binary.LittleEndian.Uint32(buf[end:])
}

func (h journalHeader) encode() []byte {
	buf := append([]byte(nil), journalMagic...)
	buf = binary.LittleEndian.AppendUint32(buf, journalFormat)
	buf = binary.LittleEndian.AppendUint64(buf, h.generation)
	buf = binary.LittleEndian.AppendUint32(buf, uint32(h.pageSize))
	closed := byte(0)
	if h.closed {
		closed = 1
	}
	buf = append(append(buf, closed), h.metas...)
	return binary.LittleEndian.AppendUint32(buf, crc32.Checksum(buf, castagnoli()))
}

// entriesOf reads the entries that follow a checkpoint.
func entriesOf(f io.ReaderAt, generation uint64) (payloads [][]byte, err error) {
	buf := make([]byte, journalSize-journalBegin)
	n, err := f.ReadAt(buf, journalBegin)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	buf = buf[:n]
	for len(buf) >= entryHeader {
		size := int(binary.LittleEndian.Uint32(buf))
		if size == 0 || size > len(buf)-entryHeader {
			break
		}
		body := buf[8 : entryHeader+size]
		if binary.LittleEndian.Uint64(body) != generation || crc32.Checksum(body, castagnoli()) != binary.LittleEndian.Uint32(buf[4:]) {
			break
		}
		payloads = append(payloads, body[8:])
		buf = buf[entryHeader+size:]
	}
	return payloads, nil
}

// add writes one entry and waits until it is on the disk. The error is
// errJournalFull when it does not fit.
func (j *journal) add(payload []byte) error {
	if j.next+entryHeader+int64(len(payload)) > journalSize {
		return errJournalFull
	}
	buf := make([]byte, 8, entryHeader+len(payload))
	buf = binary.LittleEndian.AppendUint64(buf, j.generation)
	buf = append(buf, payload...)
	binary.LittleEndian.PutUint32(buf, uint32(len(payload)))
	binary.LittleEndian.PutUint32(buf[4:], crc32.Checksum(buf[8:], castagnoli()))
	if _, err := j.file.WriteAt(buf, j.next); err != nil {
		return err
	}
	if err := unix.Fdatasync(int(j.file.Fd())); err != nil {
		return err
	}
	j.next += int64(len(buf))
	return nil
}

// checkpoint syncs the store's file and has the journal begin anew behind it.
func (j *journal) checkpoint(b *bolt.DB) error {
	if err := j.sync(b, false); err != nil {
		return err
	}
	j.next = journalBegin
	return j.repin(b)
}

// finish is the checkpoint of a file that is about to be closed.
func (j *journal) finish(b *bolt.DB) error { return j.sync(b, true) }

// sync syncs the store's file, free pages included, and writes a header for it.
func (j *journal) sync(b *bolt.DB, closed bool) error {
	b.NoFreelistSync = false
	err := b.Update(func(*bolt.Tx) error { return nil })
	b.NoFreelistSync = true
	if err != nil {
		return err
	}
	if err := b.Sync(); err != nil {
		return err
	}
	h, err := stateNow(b)
	if err != nil {
		return err
	}
	h.generation, h.closed = j.generation+1, closed
	if _, err := j.file.WriteAt(h.encode(), int64(h.generation%2)*journalSlot); err != nil {
		return err
	}
	if err := unix.Fdatasync(int(j.file.Fd())); err != nil {
		return err
	}
	j.generation = h.generation
	return nil
}

// stateNow copies the meta pages.
func stateNow(b *bolt.DB) (h journalHeader, err error) {
	h.pageSize = b.Info().PageSize
	f, err := os.Open(b.Path())
	if err != nil {
		return h, err
	}
	h.metas = make([]byte, 2*h.pageSize)
	_, err = f.ReadAt(h.metas, 0)
	return h, errors.Join(err, f.Close())
}

// repin keeps the pages of the present state from being written over, and lets go of
// those of the one before.
func (j *journal) repin(b *bolt.DB) error {
	tx, err := b.Begin(false)
	if err != nil {
		return err
	}
	err = j.unpin()
	j.pin = tx
	return err
}

// unpin lets go of the pages. Closing the file waits for it.
func (j *journal) unpin() error {
	if j.pin == nil {
		return nil
	}
	err := j.pin.Rollback()
	j.pin = nil
	return err
}

func (j *journal) close() error { return errors.Join(j.unpin(), j.file.Close()) }

// lastHeader returns the newest header of the journal of the file at path; open tells
// whether the file was not closed since.
func lastHeader(path string) (h journalHeader, open bool, err error) {
	f, err := os.Open(journalPath(path))
	if errors.Is(err, fs.ErrNotExist) {
		return h, false, nil
	}
	if err != nil {
		return h, false, err
	}
	h, err = readJournalHeader(f)
	return h, err == nil && h.generation > 0 && !h.closed, errors.Join(err, f.Close())
}

// rewind puts a file that was not closed back to its last checkpoint; what followed
// is in the journal, see [DB.redo]. f is the file, locked.
func rewind(f *os.File) error {
	h, open, err := lastHeader(f.Name())
	if err != nil || !open {
		return err
	}
	if err := succeeds(f, h); err != nil {
		return corrupt(f.Name(), "%w", err)
	}
	if _, err := f.WriteAt(h.metas, 0); err != nil {
		return err
	}
	return f.Sync()
}

// succeeds checks that f is the file that the header was written for, or what became of
// it: somebody may have put an older one in its place.
func succeeds(f *os.File, h journalHeader) error {
	now := make([]byte, len(h.metas))
	if _, err := f.ReadAt(now, 0); err != nil {
		return fmt.Errorf("the file is shorter than what its journal %s belongs to: %w", journalPath(f.Name()), err)
	}
	newest := func(pages []byte) (txid uint64) {
		for _, p := range [][]byte{pages[:h.pageSize], pages[h.pageSize:]} {
			if m, err := parseMeta(p); err == nil {
				txid = max(txid, m.txid)
			}
		}
		return txid
	}
	// 0: both are torn, as by a power cut; that is what the copies are for.
	if at := newest(now); at != 0 && at < newest(h.metas) {
		return fmt.Errorf("the file is older than its journal %s; if it was put there on purpose, move the journal away", journalPath(f.Name()))
	}
	return nil
}

// The operations of a batch, as an entry has them: what was done, not what was asked
// for. Numbers are varints; texts have their length before them.

// encodeBatch returns the payload for a batch that was committed; first is the revision
// before it.
func encodeBatch(batch []*op, first uint64) []byte {
	buf := binary.AppendUvarint(nil, first)
	for _, o := range batch {
		if o.conflict || o.err != nil {
			continue
		}
		kind := o.kind
		if kind == opExpire {
			kind = opDelete // it was due, that is decided
		}
		buf = append(buf, byte(kind))
		for _, text := range [][]byte{[]byte(o.key), []byte(o.prefix), o.value} {
			buf = binary.AppendUvarint(buf, uint64(len(text)))
			buf = append(buf, text...)
		}
		buf = binary.AppendVarint(buf, o.expire)
		keep := uint64(0)
		if o.keepExpire {
			keep = 1
		}
		buf = binary.AppendUvarint(buf, keep)
		buf = binary.AppendUvarint(buf, o.compactTo)
	}
	return buf
}

var errEntry = errors.New("an entry of the journal cannot be read")

// decodeBatch is the reverse. The ops are done whatever revision their key is at.
func decodeBatch(buf []byte) (batch []*op, first uint64, err error) {
	bad := false
	number := func() uint64 {
		v, n := binary.Uvarint(buf)
		if n <= 0 {
			bad = true
			return 0
		}
		buf = buf[n:]
		return v
	}
	text := func() []byte {
		n := number()
		if bad || n > uint64(len(buf)) {
			bad = true
			return nil
		}
		t := buf[:n]
		buf = buf[n:]
		return t
	}
	first = number()
	for len(buf) > 0 && !bad {
		o := &op{kind: opKind(buf[0]), again: true}
		buf = buf[1:]
		o.key, o.prefix, o.value = string(text()), string(text()), text()
		v, n := binary.Varint(buf)
		if n <= 0 {
			return nil, 0, errEntry
		}
		buf = buf[n:]
		o.expire, o.keepExpire, o.compactTo = v, number() == 1, number()
		batch = append(batch, o)
	}
	if bad {
		return nil, 0, errEntry
	}
	return batch, first, nil
}

// startJournal opens the journal of b; nil is none. Where there is no room on the disk for
// one, bbolt syncs by itself. Without fsync, only one that an earlier process left counts.
func (db *DB) startJournal(b *bolt.DB, roomy bool) (*journal, error) {
	if db.opts.NoFsync || !roomy {
		if _, err := os.Stat(journalPath(db.path)); errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
	}
	j, err := openJournal(db.path)
	if errors.Is(err, unix.ENOSPC) {
		db.opts.Log.Warn("no room for a journal; each write waits for the disk twice", "path", db.path)
		return nil, os.Remove(journalPath(db.path))
	}
	if err != nil {
		return nil, fmt.Errorf("open the journal: %w", err)
	}
	b.NoSync, b.NoFreelistSync = true, true
	return j, nil
}

// retire has bbolt sync by itself from now on, or nobody.
func (j *journal) retire(b *bolt.DB, noFsync bool) error {
	err := j.finish(b)
	b.NoSync, b.NoFreelistSync = noFsync, false
	return errors.Join(err, j.close(), os.Remove(j.file.Name()))
}

// beginJournal makes the first checkpoint of this process: what is written from here on
// may be torn by a power cut.
func (db *DB) beginJournal() error {
	if db.journal == nil || db.journal.next != 0 {
		return nil
	}
	return db.journal.checkpoint(db.bolt)
}

// makeDurable puts a batch that is in the file onto the disk; size is how much of the
// file is used.
func (db *DB) makeDurable(batch []*op, size int64) error {
	j := db.journal
	if j == nil {
		return nil // bbolt has done it, or nobody wants it
	}
	if size > mapSize/2 {
		// bbolt would wait for the pin for ever when it had to map the file anew.
		db.journal = nil
		return j.retire(db.bolt, false)
	}
	err := j.add(encodeBatch(batch, db.state.rev))
	if errors.Is(err, errJournalFull) {
		err = j.checkpoint(db.bolt)
	}
	return err
}

// redo does the entries of the journal again, which a file that was not closed lacks: it
// was put back to the checkpoint when it was opened. It ends with a checkpoint. Nobody
// watches yet, and nothing is published. done tells whether there was anything.
func (db *DB) redo(j *journal, b *bolt.DB, st state, tallies map[string]tally) (done bool, err error) {
	entries, err := entriesOf(j.file, j.generation)
	if err != nil || len(entries) == 0 || j.generation == 0 {
		return false, err
	}
	if err := j.repin(b); err != nil {
		return false, err
	}
	at := &DB{path: db.path, opts: db.opts, bolt: b, state: st, tallies: tallies}
	for _, payload := range entries {
		batch, first, err := decodeBatch(payload)
		if err != nil {
			return false, corrupt(db.path, "%w", err)
		}
		if first != at.state.rev {
			return false, corrupt(db.path, "its journal goes on from revision %d, it is at %d", first, at.state.rev)
		}
		t := &transaction{db: at, state: at.state, tallies: map[string]tally{}}
		if _, err := guard(func() error { return t.run(batch) }); err != nil {
			return false, err
		}
		at.state = t.state
		maps.Copy(at.tallies, t.tallies)
	}
	db.opts.Log.Info("store file was brought up to date with its journal", "path", db.path, "batches", len(entries), "revision", at.state.rev)
	return true, j.checkpoint(b)
}

// catchUp brings a file that was not closed up to date with its journal, for those who
// read it offline.
func catchUp(path string) error {
	if _, open, err := lastHeader(path); err != nil || !open {
		return err
	}
	db, err := Open(path, Options{LockTimeout: offlineLockTimeout})
	if err != nil {
		return err
	}
	return db.Close()
}
