// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/internal/nettest"
)

// labCPU is the processor time, user and system, that the processes started by this
// one have used, those that have ended included. It counts every lab there is; the
// benchmarks run one at a time.
func labCPU(b *testing.B) time.Duration {
	b.Helper()
	adopter, pids, err := nettest.Started()
	if err != nil {
		b.Fatal(err)
	}
	// Who has ended was waited for by its parent, by us, or by the adopter.
	sum := ended(b, os.Getpid())
	if adopter != os.Getpid() {
		sum += ended(b, adopter)
	}
	for _, pid := range pids {
		sum += processTime(pid) + ended(b, pid)
	}
	return sum
}

// ownCPU is the processor time of this process.
func ownCPU(b *testing.B) time.Duration {
	b.Helper()
	return processTime(os.Getpid())
}

// processTime is the processor time of one process, to the nanosecond: /proc/PID/stat
// counts in hundredths of a second. A process that has gone has none; its parent has
// it then.
func processTime(pid int) time.Duration {
	var t unix.Timespec
	// The number of a process's clock, as clock_getcpuclockid(3) makes it.
	if err := unix.ClockGettime(int32(^pid<<3|2), &t); err != nil {
		return 0
	}
	return time.Duration(t.Nano())
}

// ended is the processor time of the children that pid has waited for.
func ended(b *testing.B, pid int) time.Duration {
	b.Helper()
	const ticks = time.Second / 100 // USER_HZ, the same on every Linux
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0
	}
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var sum time.Duration
	for _, i := range []int{13, 14} { // cutime and cstime, counted from the state
		n, err := strconv.Atoi(f[i])
		if err != nil {
			b.Fatalf("/proc/%d/stat: %v", pid, err)
		}
		sum += time.Duration(n) * ticks
	}
	return sum
}

// memory is what the lab's processes hold, in MB of a million bytes: their share of
// what several map (PSS), all that they map (RSS), and what belongs to no file.
type memory struct {
	pss, rss, anon float64
	processes      int
}

func labMemory(b *testing.B) memory {
	b.Helper()
	_, pids, err := nettest.Started()
	if err != nil {
		b.Fatal(err)
	}
	var m memory
	for _, pid := range pids {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			continue // it ended meanwhile
		}
		m.processes++
		for line := range strings.SplitSeq(string(data), "\n") {
			f := strings.Fields(line)
			if len(f) != 3 {
				continue
			}
			kb, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				continue
			}
			switch f[0] {
			case "Pss:":
				m.pss += kb * 1024 / 1e6
			case "Rss:":
				m.rss += kb * 1024 / 1e6
			case "Pss_Anon:":
				m.anon += kb * 1024 / 1e6
			}
		}
	}
	if m.processes == 0 {
		b.Fatal("no process of the lab is there")
	}
	return m
}
