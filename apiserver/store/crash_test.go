// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// crashChildEnv makes the test binary the process that is to be killed; its
// value is the path of the file.
const crashChildEnv = "KPLAB_STORE_CRASH"

const crashWriters = 16

func crashName(writer int) string { return fmt.Sprintf("writer-%02d", writer) }

// numbered is version n of a pod: its size differs from that of its neighbours,
// so that a half write would show.
func numbered(p *example.Pod, writer, n int) *example.Pod {
	p.Annotations = map[string]string{"n": strconv.Itoa(n), "fat": strings.Repeat(strconv.Itoa(n%10), (n*37+writer*101)%3000)}
	return p
}

// crashChild writes at full speed until it is killed. Every writer has a pod of
// its own with a number that it counts up; every fifth write deletes the pod, the
// next makes it again. What was acknowledged goes to standard output, one line
// each: writer, number, revision. It does not return.
func crashChild(path string) {
	// Not to be left behind when the test is killed.
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	db, err := Open(path, Options{})
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
	s := pods(db)
	var wg sync.WaitGroup
	var out sync.Mutex
	for w := range crashWriters {
		wg.Go(func() {
			p := &example.Pod{}
			err := s.Get(context.Background(), podKey(crashName(w)), storage.GetOptions{IgnoreNotFound: true}, p)
			n := 0
			if p.Name != "" && err == nil {
				n, err = strconv.Atoi(p.Annotations["n"])
			}
			for there := p.Name != ""; err == nil; there = n%5 != 0 {
				n++
				if p, err = crashWrite(s, w, n, there); err != nil {
					break
				}
				out.Lock()
				_, err = fmt.Printf("%d %d %s\n", w, n, p.ResourceVersion)
				out.Unlock()
			}
			fmt.Println("failed:", err)
		})
	}
	wg.Wait()
	os.Exit(1)
}

// crashWrite makes version n of a writer's pod, or deletes it.
func crashWrite(s *Store, writer, n int, there bool) (*example.Pod, error) {
	ctx, key, out := context.Background(), podKey(crashName(writer)), &example.Pod{}
	switch {
	case !there:
		return out, s.Create(ctx, key, numbered(podNamed(crashName(writer)), writer, n), out, 0)
	case n%5 == 0:
		return out, s.Delete(ctx, key, out, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	default:
		return out, s.GuaranteedUpdate(ctx, key, out, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			return numbered(obj.(*example.Pod), writer, n), nil
		}), nil)
	}
}

// acked is a write that the child acknowledged.
type acked struct{ writer, n int }

// A process that is killed at any moment loses nothing that it acknowledged, no
// revision is given out twice, nothing is half there, and a watch that saw the
// last revision before goes on without a gap.
func TestKilledWhileWriting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	before, total := uint64(firstRevision), 0
	for round := range 10 * long(30) {
		writes := crashRound(t, path, r, before)
		total += len(writes)
		before = checkSurvived(t, path, before, writes)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	t.Logf("%d acknowledged writes", total)
	if total < 100 {
		t.Errorf("only %d writes: the test tests nothing", total)
	}
}

// checkSurvived opens the file again and compares it with what was acknowledged
// after revision before. It returns the revision at which the next round begins.
func checkSurvived(t *testing.T, path string, before uint64, writes map[uint64]acked) uint64 {
	t.Helper()
	checkWhole(t, path)
	db, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
		checkWhole(t, path)
	}()
	s := pods(db)
	rev := db.Revision()
	w := mustWatch(t, s, storage.ListOptions{ResourceVersion: strconv.FormatUint(before, 10), Predicate: storage.Everything})
	newest := map[string]*example.Pod{} // nil: deleted
	unknown := 0
	for at := before + 1; at <= rev; at++ {
		p, deleted := crashEvent(t, w, at)
		newest[p.Name] = p
		if deleted {
			newest[p.Name] = nil
		}
		a, known := writes[at]
		delete(writes, at)
		n, err := strconv.Atoi(p.Annotations["n"])
		if deleted {
			n++ // a deletion shows what was there
		}
		switch {
		case err != nil:
			t.Errorf("revision %d: number %q", at, p.Annotations["n"])
		case !known:
			unknown++ // done, and the answer did not get out
		case p.Name != crashName(a.writer) || n != a.n || deleted != (a.n%5 == 0):
			t.Errorf("revision %d is %s number %d (deleted: %t), acknowledged was number %d of writer %d", at, p.Name, n, deleted, a.n, a.writer)
		}
	}
	for at, a := range writes {
		t.Errorf("number %d of writer %d was acknowledged at revision %d and is lost; the newest is %d", a.n, a.writer, at, rev)
	}
	if unknown > crashWriters {
		t.Errorf("%d writes were done and not acknowledged, by %d writers", unknown, crashWriters)
	}
	for name, p := range newest {
		checkNow(t, s, name, p)
	}
	mustCreate(t, s, "after")
	want(t, w, fmt.Sprintf("ADDED after@%d", rev+1))
	mustDelete(t, s, "after")
	want(t, w, fmt.Sprintf("DELETED after@%d", rev+2))
	return db.Revision()
}

// crashEvent is the next event, which has to be that of revision at, with a
// whole pod.
func crashEvent(t *testing.T, w watch.Interface, at uint64) (p *example.Pod, deleted bool) {
	t.Helper()
	for {
		select {
		case e, ok := <-w.ResultChan():
			if e.Type == watch.Bookmark {
				continue
			}
			p, isPod := e.Object.(*example.Pod)
			if !ok || !isPod || p.ResourceVersion != strconv.FormatUint(at, 10) {
				t.Fatalf("event %s where revision %d is expected", describe(e, ok), at)
			}
			checkWholePod(t, p)
			return p, e.Type == watch.Deleted
		case <-time.After(patience):
			t.Fatalf("no event of revision %d", at)
		}
	}
}

// checkWholePod: a version is all there.
func checkWholePod(t *testing.T, p *example.Pod) {
	t.Helper()
	var writer int
	_, err := fmt.Sscanf(p.Name, "writer-%d", &writer)
	n, err2 := strconv.Atoi(p.Annotations["n"])
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	if wanted := numbered(&example.Pod{}, writer, n); p.Annotations["fat"] != wanted.Annotations["fat"] {
		t.Errorf("number %d of %s is half there", n, p.Name)
	}
}

// checkNow: what is there is what the last event said.
func checkNow(t *testing.T, s *Store, name string, last *example.Pod) {
	t.Helper()
	got := &example.Pod{}
	if err := s.Get(t.Context(), podKey(name), storage.GetOptions{IgnoreNotFound: true}, got); err != nil {
		t.Fatal(err)
	}
	switch {
	case last == nil && got.Name != "":
		t.Errorf("%s was deleted and is there", name)
	case last != nil && got.ResourceVersion != last.ResourceVersion:
		t.Errorf("%s is at revision %q, its last event at %s", name, got.ResourceVersion, last.ResourceVersion)
	}
}

// startCrashChild starts the child; what it says is read from the scanner.
func startCrashChild(t *testing.T, path string) (*os.Process, *bufio.Scanner) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	child, err := os.StartProcess("/proc/self/exe", []string{"store.test"}, &os.ProcAttr{
		Env:   append(os.Environ(), crashChildEnv+"="+path),
		Files: []*os.File{nil, w, os.Stderr},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	return child, bufio.NewScanner(r)
}

// crashRound runs the child, kills it at a random moment and returns what it
// acknowledged, by revision.
func crashRound(t *testing.T, path string, r *rand.Rand, before uint64) map[uint64]acked {
	t.Helper()
	child, lines := startCrashChild(t, path)
	// Counted in acknowledged writes and then in time, so that the moment falls
	// anywhere in a commit however slow the disk is.
	limit, delay := 1+r.Intn(400), time.Duration(r.Intn(8_000))*time.Microsecond
	writes := map[uint64]acked{}
	for lines.Scan() {
		var a acked
		var rev uint64
		if _, err := fmt.Sscanf(lines.Text(), "%d %d %d", &a.writer, &a.n, &rev); err != nil {
			t.Errorf("the child says %q", lines.Text())
			break
		}
		if _, twice := writes[rev]; twice || rev <= before {
			t.Errorf("revision %d was given out before", rev)
		}
		writes[rev] = a
		if len(writes) == limit {
			time.AfterFunc(delay, func() { _ = child.Kill() })
		}
	}
	_ = child.Kill() // when it ended by itself
	if _, err := child.Wait(); err != nil {
		t.Error(err)
	}
	return writes
}

// A file that another process has open is ErrLocked, for everybody, at once and
// with advice; when that process was killed the file is free.
func TestLockedByAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	child, lines := startCrashChild(t, path)
	if !lines.Scan() {
		t.Fatal("the child says nothing")
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() { // so that it does not wait for a reader
		}
	}()
	open := func() error {
		_, err := Open(path, Options{LockTimeout: 50 * time.Millisecond})
		return err
	}
	inspect := func() error {
		_, err := Inspect(path, nil)
		return err
	}
	rewrite := func() error {
		_, _, err := Rewrite(path)
		return err
	}
	for name, use := range map[string]func() error{"open": open, "inspect": inspect, "rewrite": rewrite} {
		err := within(t, name, use)
		if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "stop the other process first") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := child.Kill(); err != nil {
		t.Error(err)
	}
	if _, err := child.Wait(); err != nil {
		t.Error(err)
	}
	<-drained
	mustCreate(t, pods(openAt(t, path, Options{})), "a")
}
