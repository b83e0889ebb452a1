// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// crashChildEnv makes the test binary the process that is to be killed; its
// value is the path of the file.
const crashChildEnv = "KPLAB_STORE_CRASH"

const crashWriters = 8

func crashKey(writer int) string { return fmt.Sprintf("/things/%d", writer) }

// crashChild writes at full speed until it is killed. Every writer has a key of
// its own with a number that it counts up; now and then it deletes the key and
// makes it again. What was acknowledged goes to standard output, one line each:
// writer, number, revision. It does not return.
func crashChild(path string) {
	// Not to be left behind when the test is killed.
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	db, err := Open(path, Options{})
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	var wg sync.WaitGroup
	var out sync.Mutex
	for w := range crashWriters {
		wg.Go(func() {
			key := crashKey(w)
			rec, _, err := db.get(key)
			n := 0
			for err == nil {
				o := &op{key: key, prefix: "/things/"}
				if rec != nil {
					o.expect = rec.rev
					if n, err = strconv.Atoi(strings.TrimLeft(string(rec.value), " ")); err != nil {
						break
					}
				}
				n++
				if rec != nil && n%5 == 0 {
					o.kind = opDelete
				} else {
					o.value = fmt.Appendf(nil, "%*d", 10+(n*37+w*101)%3000, n)
				}
				if err = db.submit(context.Background(), o); err != nil {
					break
				}
				if o.conflict {
					err = fmt.Errorf("conflict at %q", key)
					break
				}
				out.Lock()
				_, err = fmt.Printf("%d %d %d\n", w, n, o.rev)
				out.Unlock()
				rec = &record{rev: o.rev, value: o.value}
				if o.kind == opDelete {
					rec = nil
				}
			}
			fmt.Println("failed:", err)
		})
	}
	wg.Wait()
	os.Exit(1)
}

// acked is the last acknowledged write of one writer.
type acked struct {
	n   int
	rev uint64
}

// A process that is killed at any moment loses nothing that it acknowledged, and
// no revision is given out twice.
func TestKilledWhileWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	last := make([]acked, crashWriters)
	before, total := uint64(firstRevision), 0
	for round := range 10 * long(30) {
		n := crashRound(t, path, round, before, last)
		total += n
		db, err := Open(path, Options{})
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		for w, a := range last {
			checkSurvived(t, db, round, w, a)
		}
		if got := db.Revision(); got < before {
			t.Errorf("round %d: revision %d after %d", round, got, before)
		}
		before = db.Revision()
		for w := range last { // where the next process goes on
			rec, _, err := db.get(crashKey(w))
			if err != nil {
				t.Fatal(err)
			}
			last[w] = acked{}
			if rec != nil {
				n, err := strconv.Atoi(strings.TrimLeft(string(rec.value), " "))
				if err != nil {
					t.Fatal(err)
				}
				last[w] = acked{n, rec.rev}
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
		checkWhole(t, path)
		if t.Failed() {
			return
		}
	}
	t.Logf("%d acknowledged writes", total)
	if total < 100 {
		t.Errorf("only %d writes: the test tests nothing", total)
	}
}

// checkSurvived: the key is as the last acknowledged write left it, or as
// the one after it, which may have been on disk already.
func checkSurvived(t *testing.T, db *DB, round, writer int, a acked) {
	t.Helper()
	rec, _, err := db.get(crashKey(writer))
	if err != nil {
		t.Fatal(err)
	}
	gone := func(n int) bool { return n == 0 || n%5 == 0 }
	if rec == nil {
		if !gone(a.n) && !gone(a.n+1) {
			t.Errorf("round %d: writer %d acknowledged %d, but nothing is there", round, writer, a.n)
		}
		return
	}
	n, err := strconv.Atoi(strings.TrimLeft(string(rec.value), " "))
	if err != nil {
		t.Fatal(err)
	}
	// Where there is nothing the next process begins to count at 1.
	if n != a.n && n != a.n+1 && !(gone(a.n) && n == 1) {
		t.Errorf("round %d: writer %d acknowledged %d, but %d is there", round, writer, a.n, n)
	}
	if rec.rev < a.rev {
		t.Errorf("round %d: writer %d acknowledged revision %d, but %d is there", round, writer, a.rev, rec.rev)
	}
}

// crashRound runs the child, kills it after a while and takes what it
// acknowledged into last. It returns the number of writes.
func crashRound(t *testing.T, path string, round int, before uint64, last []acked) int {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	child, err := os.StartProcess("/proc/self/exe", []string{"store.test"}, &os.ProcAttr{
		Env:   append(os.Environ(), crashChildEnv+"="+path),
		Files: []*os.File{nil, w, os.Stderr},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	// The moment of the kill is counted in acknowledged writes and a bit of
	// time, so it falls anywhere in a commit.
	limit, n := 20+round*7, 0
	lines := bufio.NewScanner(r)
	seen := map[uint64]bool{}
	for lines.Scan() {
		var writer int
		var a acked
		if _, err := fmt.Sscanf(lines.Text(), "%d %d %d", &writer, &a.n, &a.rev); err != nil {
			t.Errorf("the child says %q", lines.Text())
			break
		}
		if a.rev <= before || seen[a.rev] {
			t.Errorf("round %d: revision %d was given out before", round, a.rev)
		}
		seen[a.rev] = true
		last[writer] = a
		if n++; n == limit {
			time.AfterFunc(time.Duration(round%10)*777*time.Microsecond, func() {
				_ = child.Kill()
			})
		}
	}
	_ = child.Kill() // when it ended by itself
	if _, err := child.Wait(); err != nil {
		t.Error(err)
	}
	return n
}
