// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"sync"
	"sync/atomic"
)

// opKind is what an op does.
type opKind int

const (
	opPut     opKind = iota // write value, if the key is at revision expect
	opDelete                // delete the key, if it is at revision expect
	opExpire                // delete the key, if it has ended by the time dueBy
	opCompact               // cut the event log off at compactTo
)

// op is one write on its way through the writer. The caller fills in the first
// part; the second part is the answer, and is the caller's again once done is
// closed.
type op struct {
	kind   opKind
	key    string
	prefix string // resource prefix whose tally the key belongs to, may be empty
	// expect is the revision the key has to be at, 0 = it must not exist.
	expect uint64
	// value is kept (in the ring, for watchers); nobody may change it later.
	value []byte
	// expire is when the object ends, Unix milliseconds, 0 = never.
	// keepExpire: as the object that is overwritten.
	expire     int64
	keepExpire bool
	dueBy      int64
	compactTo  uint64
	// again: this was done before, see DB.redo; what was decided then holds.
	again bool

	// rev is the revision of the write.
	rev uint64
	// conflict: the key is not at expect, nothing was written. current is what
	// is there instead, nil for nothing.
	conflict bool
	current  *record
	err      error

	done  chan struct{}
	stage atomic.Int32 // stageWaiting → stageTaken or stageGivenUp
}

const (
	stageWaiting = iota
	stageTaken
	stageGivenUp
)

// The most that goes into one transaction. Writers wait for their answers, so
// the number of ops is bounded by the number of callers anyway; this bounds the
// memory of one commit.
const (
	batchOps   = 512
	batchBytes = 8 << 20
)

// queue holds the ops that wait for the writer.
type queue struct {
	mu     sync.Mutex
	filled sync.Cond
	ops    []*op
	closed bool
}

func (q *queue) init() { q.filled.L = &q.mu }

// put adds ops in this order, with nothing in between.
func (q *queue) put(ops ...*op) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return ErrClosed
	}
	q.ops = append(q.ops, ops...)
	q.filled.Signal()
	return nil
}

// take waits for ops and takes what is there, up to the bounds of one batch,
// without those whose caller gave up. It returns nil when the queue is shut
// and empty.
func (q *queue) take() []*op {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for len(q.ops) == 0 {
			if q.closed {
				return nil
			}
			q.filled.Wait()
		}
		var batch []*op
		n, bytes := 0, 0
		for n < len(q.ops) && len(batch) < batchOps && bytes < batchBytes {
			o := q.ops[n]
			if o.stage.CompareAndSwap(stageWaiting, stageTaken) {
				batch = append(batch, o)
				bytes += len(o.value)
			}
			q.ops[n] = nil
			n++
		}
		if q.ops = q.ops[n:]; len(q.ops) == 0 {
			q.ops = nil
		}
		if len(batch) > 0 {
			return batch
		}
	}
}

// shut refuses further ops. Those that wait are still taken.
func (q *queue) shut() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Broadcast()
}

// submit hands o to the writer and waits for the answer, which is in o and,
// when the write failed, in the error. A precondition that does not hold is not
// an error. When ctx ends while o still waits for its turn, o is not done; later
// the answer, a few milliseconds away, is waited for, so that the outcome is
// never unknown.
func (db *DB) submit(ctx context.Context, o *op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	o.done = make(chan struct{})
	if err := db.queue.put(o); err != nil {
		return err
	}
	select {
	case <-o.done:
	case <-ctx.Done():
		if o.stage.CompareAndSwap(stageWaiting, stageGivenUp) {
			return ctx.Err()
		}
		<-o.done
	}
	return o.err
}
