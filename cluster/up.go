// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// UpOptions say which lab to start, and how.
type UpOptions struct {
	Config Config
	// Asked is true when the person chose settings: then a lab that exists with
	// others is an error. When false, a lab that exists is resumed as it is.
	Asked bool
	// Fresh deletes the kept state first.
	Fresh bool
}

// Event is one finished step of a start.
type Event struct {
	Step   string        `json:"step"`
	Detail string        `json:"detail"`
	Took   time.Duration `json:"took"`
	Error  string        `json:"error,omitempty"`
}

// Progress is told of each finished step.
type Progress func(Event)

// Reports of a detached start, one JSON object a line: steps, then one of ready
// and failed.
type report struct {
	Event   *Event `json:"event,omitempty"`
	Ready   bool   `json:"ready,omitempty"`
	Failed  string `json:"failed,omitempty"`
	Running bool   `json:"running,omitempty"`
}

// RunForeground starts the lab and keeps it until ctx ends or somebody asks it
// to stop; ready is called once it is up. ErrRunning means that the lab runs
// already with these settings.
func RunForeground(ctx context.Context, opts UpOptions, progress Progress, ready func()) error {
	return run(ctx, opts, progress, ready, false)
}

// run is the whole life of a lab in this process.
func run(ctx context.Context, opts UpOptions, progress Progress, ready func(), detached bool) (err error) {
	s, err := prepare(ctx, &opts)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.lock.release()) }()
	log, closeLog, err := openLog(s.paths, detached)
	if err != nil {
		return err
	}
	defer closeLog()
	lab, err := Start(ctx, opts.Config, s.paths, log, progress)
	if err != nil {
		return errors.Join(fmt.Errorf("lab %q: %w", opts.Config.Name, err), s.giveUp())
	}
	if ready != nil {
		ready()
	}
	return lab.Wait(ctx)
}

// RunDetached is the daemon's side of StartDetached: it reports on w and lives on.
func RunDetached(ctx context.Context, opts UpOptions, w *os.File) error {
	enc := json.NewEncoder(w)
	err := run(ctx, opts, func(e Event) { _ = enc.Encode(report{Event: &e}) }, func() {
		// The reader may be gone; the lab runs all the same.
		_ = enc.Encode(report{Ready: true})
		w.Close()
	}, true)
	if err != nil {
		_ = enc.Encode(report{Failed: err.Error(), Running: errors.Is(err, ErrRunning)})
	}
	return err
}

// StartDetached starts this program again as a daemon with the same arguments,
// whose paths must be absolute, and returns when the lab is ready, or with the
// reason why it is not. The daemon calls RunDetached.
func StartDetached(ctx context.Context, opts UpOptions, args []string, progress Progress) error {
	if err := check(ctx, &opts); err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd := exec.Command("/proc/self/exe", append(slices.Clone(args), "--report-fd=3")...)
	cmd.Args[0] = "kplab"
	cmd.ExtraFiles = []*os.File{w}
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), absoluteEnv()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	paths := PathsOf(opts.Config.Name)
	log, err := os.OpenFile(paths.Log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		w.Close()
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	err = cmd.Start()
	log.Close()
	w.Close()
	if err != nil {
		return fmt.Errorf("start the lab's daemon: %w", err)
	}
	stopped := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(os.Interrupt) })
	defer stopped()
	return follow(r, cmd, opts.Config.Name, paths, progress)
}

// follow reads a daemon's reports to their end.
func follow(r io.Reader, cmd *exec.Cmd, name string, paths Paths, progress Progress) error {
	scan := bufio.NewScanner(r)
	for scan.Scan() {
		var rep report
		if err := json.Unmarshal(scan.Bytes(), &rep); err != nil {
			return fmt.Errorf("lab %q: its daemon said %q: %w", name, scan.Text(), err)
		}
		switch {
		case rep.Event != nil:
			progress(*rep.Event)
		case rep.Ready:
			return cmd.Process.Release()
		case rep.Running:
			_ = cmd.Wait()
			return ErrRunning
		case rep.Failed != "":
			_ = cmd.Wait() // its exit code says no more than its words
			return errors.New(rep.Failed)
		}
	}
	err := errors.Join(scan.Err(), cmd.Wait())
	said, _ := os.ReadFile(paths.Log())
	return fmt.Errorf("lab %q: its daemon ended before the lab was ready: %w\n%s", name, err, lastLines(string(said), 10))
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// maxLog is the size in bytes beyond which the log begins anew at the next start.
const maxLog = 16 << 20

// openLog opens the daemon's log, which the libraries write to as well. A daemon's
// own standard output goes there too: what the runtime says when it panics.
func openLog(paths Paths, detached bool) (*slog.Logger, func(), error) {
	flags := os.O_CREATE | os.O_WRONLY | os.O_APPEND
	if info, err := os.Stat(paths.Log()); err == nil && info.Size() > maxLog {
		flags |= os.O_TRUNC
	}
	f, err := os.OpenFile(paths.Log(), flags, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("open the daemon's log: %w", err)
	}
	for _, std := range []int{1, 2} {
		if !detached {
			break
		}
		if err := unix.Dup3(int(f.Fd()), std, 0); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("send the daemon's output to its log: %w", err), f.Close())
		}
	}
	redirectKlog(f)
	return slog.New(slog.NewTextHandler(f, nil)), func() { f.Close() }, nil
}

// started is what prepare leaves for the start itself.
type started struct {
	paths Paths
	lock  *lock
	// resumed is true when a killed daemon left its namespaces behind.
	resumed bool
}

// check refuses early what needs no lock to be refused.
func check(ctx context.Context, opts *UpOptions) error {
	if err := needRoot("up"); err != nil {
		return err
	}
	paths := PathsOf(opts.Config.Name)
	if err := os.MkdirAll(paths.State, 0o700); err != nil {
		return fmt.Errorf("lab %q: make its state directory: %w", opts.Config.Name, err)
	}
	if err := checkTools(ctx, &opts.Config); err != nil {
		return fmt.Errorf("lab %q: %w", opts.Config.Name, err)
	}
	return compare(opts, paths)
}

// compare holds the settings asked for against those of the lab that exists.
func compare(opts *UpOptions, paths Paths) error {
	running := isRunning(paths)
	if opts.Fresh && !running {
		return nil
	}
	kept, err := readSettings(paths)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("lab %q: %w", opts.Config.Name, err)
	}
	if opts.Fresh {
		return fmt.Errorf("lab %q runs: end it with `kplab down%s` before up --fresh deletes its state", opts.Config.Name, nameFlag(opts.Config.Name))
	}
	if !opts.Asked {
		opts.Config = kept.Config
	} else if d := lasting(kept.Config).Differences(lasting(opts.Config)); len(d) > 0 {
		verb, advice := "exists", fmt.Sprintf("`kplab up%s` resumes it as it is, `kplab up --fresh …` deletes its state", nameFlag(opts.Config.Name))
		if running {
			verb, advice = "runs", fmt.Sprintf("`kplab down%s` ends it", nameFlag(opts.Config.Name))
		}
		return fmt.Errorf("lab %q %s with other settings (%s); %s", opts.Config.Name, verb, strings.Join(d, "; "), advice)
	}
	if running {
		return ErrRunning
	}
	return nil
}

// lasting is cfg without what may be another one at each start.
func lasting(cfg Config) *Config {
	cfg.Audit = AuditConfig{}
	return &cfg
}

func isRunning(paths Paths) bool {
	_, running := readDaemon(paths.Daemon())
	return running
}

// prepare takes the lock and makes the directories. After it the lab is ours.
func prepare(ctx context.Context, opts *UpOptions) (*started, error) {
	if err := check(ctx, opts); err != nil {
		return nil, err
	}
	name := opts.Config.Name
	paths := PathsOf(name)
	held, err := acquireFromDying(ctx, paths.Lock)
	if errors.Is(err, ErrRunning) {
		// Somebody was quicker, and may have written its settings by now.
		if err := check(ctx, opts); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("lab %q: another kplab is starting or ending it right now; try again", name)
	} else if err != nil {
		return nil, err
	}
	s := &started{paths: paths, lock: held}
	if err := s.directories(ctx, opts); err != nil {
		return nil, errors.Join(fmt.Errorf("lab %q: %w", name, err), held.release())
	}
	return s, nil
}

func (s *started) directories(ctx context.Context, opts *UpOptions) error {
	if opts.Fresh {
		if err := Remove(ctx, s.paths); err != nil {
			return err
		}
		if err := os.RemoveAll(s.paths.State); err != nil {
			return fmt.Errorf("delete its state: %w", err)
		}
	}
	_, err := os.Stat(s.paths.HostBefore())
	s.resumed = err == nil
	for _, dir := range []struct {
		path string
		mode os.FileMode
	}{{s.paths.State, 0o700}, {s.paths.Runtime, 0o755}} {
		if err := os.MkdirAll(dir.path, dir.mode); err != nil {
			return fmt.Errorf("make its directories: %w", err)
		}
	}
	if !s.resumed {
		if err := saveHost(s.paths); err != nil {
			return fmt.Errorf("look at the host before the lab begins: %w", err)
		}
	}
	return writeDaemon(s.paths.Daemon())
}

// giveUp removes what a start that failed has made. A lab whose daemon was
// killed keeps what it had: its pods still run, and the next up may succeed.
func (s *started) giveUp() error {
	if s.resumed {
		return os.Remove(s.paths.Daemon())
	}
	// The start may have failed because its context ended; cleaning must not.
	return Remove(context.Background(), s.paths)
}

// settings is what is kept of a lab besides its objects.
type settings struct {
	Config Config `json:"config"`
	// APIPort on 127.0.0.1; kept so that kubeconfigs stay good.
	APIPort int `json:"apiPort"`
}

// KeptConfig returns the settings that the lab called name was made with.
func KeptConfig(name string) (Config, error) {
	s, err := readSettings(PathsOf(name))
	return s.Config, err
}

func readSettings(paths Paths) (settings, error) {
	var s settings
	data, err := os.ReadFile(paths.Settings())
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("settings file %s is damaged: %w; `kplab up --fresh` deletes the lab's state and begins anew", paths.Settings(), err)
	}
	// Settings that this program has and an older one did not know.
	s.Config.SetDefaults(0)
	return s, nil
}
