// SPDX-License-Identifier: Apache-2.0

// Command bench is `make bench`: it runs the Go benchmarks of the packages and
// those of a whole lab (lab_test.go), and prints what they measured as one table,
// each line against the bar that the project set for it. Figures are ratios to what
// the kernel or the disk does without kplab, measured in the same run by turns,
// wherever there is such a thing; the absolute figures stand beside them.
//
// It fails when a measurement fails. A bar that is missed is said, and is no failure:
// on a busy machine the clock says more about the machine than about kplab.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"time"
)

func main() {
	out := flag.String("out", "", "write the table to this file as well")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run measures everything, prints the table and writes it to the file out, if any.
func run(ctx context.Context, out string) error {
	m := describe(ctx)
	measured := results{}
	for _, s := range suites {
		began := time.Now()
		fmt.Fprintf(os.Stderr, "bench: %s %s …", s.pkg, s.pattern)
		text, err := s.measure(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", s.pkg, err, text)
		}
		if err := measured.parse(text); err != nil {
			return fmt.Errorf("%s: %w", s.pkg, err)
		}
		fmt.Fprintf(os.Stderr, " %s\n", time.Since(began).Round(100*time.Millisecond))
	}
	m.loadAfter = loadAverage()
	var page bytes.Buffer
	if err := report(&page, m, measured); err != nil {
		return err
	}
	if out != "" {
		if err := os.WriteFile(out, page.Bytes(), 0o644); err != nil {
			return fmt.Errorf("write the table: %w", err)
		}
	}
	_, err := io.Copy(os.Stdout, &page)
	return err
}

// measure runs the suite's benchmarks and returns what go test printed.
func (s suite) measure(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", s.pattern, "-benchtime", s.times, "-count", "1", "-timeout", "5m", s.pkg)
	cmd.Env = append(os.Environ(), s.env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// machine is where and when the figures were taken.
type machine struct {
	cpu, kernel, commit, goVersion string
	cpus                           int
	memory                         string
	date                           time.Time
	loadBefore, loadAfter          string
}

// report writes the page: the machine, then the table.
func report(w io.Writer, m machine, measured results) error {
	table, err := newTable(measured)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, `# What it costs

One run of `+"`make bench`"+`. Ratios are to the kernel, the disk or the plain tool in the
same run; CPU time is that of all processes of the lab, user and system, the daemon
included. "over" means that the bar was missed in this run.

- machine: %s, %d CPUs, %s
- kernel %s, %s, kplab %s
- %s; load average %s before, %s after

`, m.cpu, m.cpus, m.memory, m.kernel, m.goVersion, m.commit, m.date.UTC().Format("2006-01-02 15:04 MST"), m.loadBefore, m.loadAfter)
	return table.write(w)
}

// describe finds out where this runs. What cannot be told is "unknown".
func describe(ctx context.Context) machine {
	m := machine{date: time.Now(), loadBefore: loadAverage(), cpus: numCPU()}
	m.cpu = field("/proc/cpuinfo", "model name")
	m.memory = field("/proc/meminfo", "MemTotal") + " of memory"
	m.kernel = output(ctx, "uname", "-r")
	m.commit = output(ctx, "git", "describe", "--tags", "--always", "--dirty")
	m.goVersion = output(ctx, "go", "env", "GOVERSION")
	return m
}

const unknown = "unknown"

// field returns what stands after "name:" in a file of /proc, the first time.
func field(path, name string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return unknown
	}
	for line := range strings.SplitSeq(string(data), "\n") {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return unknown
}

func output(ctx context.Context, path string, args ...string) string {
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return unknown
	}
	return strings.TrimSpace(string(out))
}

// loadAverage is the number of processes that ran or waited to run, over the last
// one, five and fifteen minutes.
func loadAverage() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return unknown
	}
	f := strings.Fields(string(data))
	return strings.Join(f[:min(3, len(f))], " ")
}

// numCPU counts the processors of the machine, not those left to this process.
func numCPU() int {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return 0
	}
	return strings.Count("\n"+string(data), "\nprocessor")
}

// errMissing says that a benchmark ran and did not say what the table needs.
var errMissing = errors.New("not measured")
