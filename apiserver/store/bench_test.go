// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apiserver/pkg/apis/example"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// BenchmarkCreate: creates a second with 1, 8 and 64 writers at the same time,
// how many of them share a commit, and the ratio to the fsyncs a second of the same
// disk just before and after. One commit of bbolt is two fsyncs.
func BenchmarkCreate(b *testing.B) {
	for _, fsync := range []bool{true, false} {
		for _, writers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("fsync=%v/writers=%d", fsync, writers), func(b *testing.B) {
				db := openDB(b, Options{NoFsync: !fsync})
				s := pods(db)
				var n atomic.Int64
				var wg sync.WaitGroup
				disk := 0.0
				if fsync {
					disk = fsyncRate(b)
				}
				b.ReportAllocs()
				b.ResetTimer()
				for range writers {
					wg.Go(func() {
						for {
							i := n.Add(1)
							if i > int64(b.N) {
								return
							}
							name := fmt.Sprintf("pod-%08d", i)
							if err := s.Create(context.Background(), podKey(name), fatPod(name, 1000), &example.Pod{}, 0); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
				b.ReportMetric(float64(b.N)/float64(max(1, db.commits.Load())), "creates/commit")
				if fsync {
					disk = (disk + fsyncRate(b)) / 2
					b.ReportMetric(disk, "fsyncs/s")
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds()/disk, "x-fsync")
				}
			})
		}
	}
}

// fsyncRate is how often a second the disk under the database makes one page of a
// file durable.
func fsyncRate(b *testing.B) float64 {
	b.Helper()
	const times = 100
	f, err := os.Create(filepath.Join(b.TempDir(), "page"))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = f.Close() }() // what was synced is not at stake
	page := make([]byte, os.Getpagesize())
	begin := time.Now()
	for i := range times {
		page[0] = byte(i)
		if _, err := f.WriteAt(page, 0); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
	}
	return times / time.Since(begin).Seconds()
}

// BenchmarkOpen: an empty file, and one with a full event log.
func BenchmarkOpen(b *testing.B) {
	b.Run("new", func(b *testing.B) {
		dir := b.TempDir()
		for i := range b.N {
			db, err := Open(filepath.Join(dir, fmt.Sprint(i)), Options{})
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := db.Close(); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
	b.Run("12000 writes", func(b *testing.B) {
		path := filepath.Join(b.TempDir(), "store.db")
		db, err := Open(path, Options{NoFsync: true})
		if err != nil {
			b.Fatal(err)
		}
		s := pods(db)
		for i := range 3000 {
			name := fmt.Sprintf("pod-%05d", i)
			if err := s.Create(b.Context(), podKey(name), fatPod(name, 1500), nil, 0); err != nil {
				b.Fatal(err)
			}
			for n := range 3 {
				mustRelabel(b, s, name, fmt.Sprint(n))
			}
		}
		if err := db.Close(); err != nil {
			b.Fatal(err)
		}
		b.ResetTimer()
		for range b.N {
			db, err := Open(path, Options{})
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			if err := db.Close(); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
		}
	})
}

// BenchmarkSuite is upstream's, with a small cluster.
func BenchmarkSuite(b *testing.B) {
	data := storagetesting.PrepareBenchmarkData(10, 20, 20)
	s := func(b *testing.B) *Store { b.Helper(); return pods(openDB(b, Options{NoFsync: true})) }
	b.Run("WriteThroughput", func(b *testing.B) {
		storagetesting.RunBenchmarkWriteThroughput(context.Background(), b, s(b), data, false, nil)
	})
	b.Run("List", func(b *testing.B) {
		st := s(b)
		if err := storagetesting.PrecreateBenchmarkPods(context.Background(), st, data); err != nil {
			b.Fatal(err)
		}
		storagetesting.RunBenchmarkStoreList(context.Background(), b, st, data, false)
	})
	b.Run("Stats", func(b *testing.B) {
		st := s(b)
		if err := storagetesting.PrecreateBenchmarkPods(context.Background(), st, data); err != nil {
			b.Fatal(err)
		}
		storagetesting.RunBenchmarkStoreStats(context.Background(), b, st)
	})
}
