// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apiserver/pkg/apis/example"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// BenchmarkCreate: creates a second with 1, 8 and 64 writers at the same time,
// and how many of them share a commit.
func BenchmarkCreate(b *testing.B) {
	for _, fsync := range []bool{true, false} {
		for _, writers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("fsync=%v/writers=%d", fsync, writers), func(b *testing.B) {
				db := openDB(b, Options{NoFsync: !fsync})
				s := pods(db)
				var n atomic.Int64
				var wg sync.WaitGroup
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
			})
		}
	}
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
