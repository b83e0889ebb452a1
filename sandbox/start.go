// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// keptAttempts is how many ended processes of a container stay in Processes.
const keptAttempts = 2

// Start starts a container's process and returns when its program runs. The
// process outlives the daemon. Errors wrap ErrProgramNotFound or ErrProgramDenied
// when the program is the reason; then nothing is left of the attempt.
func (s *Sandbox) Start(ctx context.Context, spec ProcessSpec) (*Process, error) {
	if err := checkName("container", spec.Container); err != nil {
		return nil, err
	}
	p, err := s.start(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("start container %s: %w", spec.Container, err)
	}
	return p, nil
}

func (s *Sandbox) start(ctx context.Context, spec ProcessSpec) (*Process, error) {
	if len(spec.Args) == 0 {
		return nil, errors.New("no program is named")
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	defer s.runtime.busy.lock(podPrefix + s.spec.ID)()
	if err := s.alive(); err != nil {
		return nil, err
	}
	cfg, err := s.initConfig(view{
		process: reexec.Process{
			Args: spec.Args, Env: spec.Env, WorkingDir: spec.WorkingDir, TTY: spec.TTY,
			UID: spec.User.UID, GID: spec.User.GID, Groups: spec.User.Groups,
		},
		files: spec.Files, mounts: spec.Mounts, busybox: spec.Busybox, readOnlyRoot: spec.ReadOnlyRoot,
		capabilities: spec.Capabilities, privileged: spec.Privileged, escalation: spec.AllowPrivilegeEscalation,
	})
	if err != nil {
		return nil, err
	}
	if spec.LogPath != "" && !filepath.IsAbs(spec.LogPath) {
		return nil, fmt.Errorf("log path %q is not absolute", spec.LogPath)
	}
	var with reexec.ID
	if spec.ShareWith != "" {
		other := s.newest(spec.ShareWith)
		if other == nil || !other.running() {
			return nil, fmt.Errorf("share processes with container %s: %w", spec.ShareWith, ErrNotRunning)
		}
		with = other.init.ID
	}
	dir := filepath.Join(s.dir, processDirs, processName(spec.Container, spec.Attempt))
	if err := os.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf("attempt %d was started before", spec.Attempt)
		}
		return nil, err
	}
	p := &Process{container: spec.Container, attempt: spec.Attempt, terminal: spec.TTY, dir: dir, done: make(chan struct{})}
	if p.cgroups, p.unlimited = s.runtime.limit(dir, s.spec.ID+"."+filepath.Base(dir), spec.Limits); p.unlimited != nil {
		s.runtime.log.Warn("a container runs without its limits", "container", spec.Container, "err", p.unlimited)
	}
	err = s.startShim(ctx, p, reexec.ShimConfig{
		Cgroups: p.cgroups, Dir: dir, LogPath: spec.LogPath, Stdin: spec.Stdin, StdinOnce: spec.StdinOnce, ShareWith: with, Init: cfg,
	})
	if err == nil {
		err = p.startWatch()
	}
	if err != nil {
		ctx, cancel := killDeadline()
		defer cancel()
		return nil, errors.Join(err, killAll(ctx, processIDs(s.dir, filepath.Base(dir))), reap(p.shim.Pid), removeCgroups(dir), os.RemoveAll(dir))
	}
	s.add(p)
	s.forgetOld(spec.Container)
	return p, nil
}

// alive says whether the sandbox can be used.
func (s *Sandbox) alive() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return fmt.Errorf("sandbox %s was removed: %w", s.spec.ID, os.ErrClosed)
	}
	return nil
}

// startShim starts the shim and waits until it has started the program.
func (s *Sandbox) startShim(ctx context.Context, p *Process, cfg reexec.ShimConfig) error {
	none := [3]int{-1, -1, -1}
	role, err := s.runtime.roles.give(reexec.RoleShim, cfg, none, func(pid int) error {
		id, err := reexec.Identify(pid)
		if err != nil {
			return fmt.Errorf("identify the shim: %w", err)
		}
		p.shim = id
		rec := processRecord{Shim: id, Container: p.container, Attempt: p.attempt, Terminal: p.terminal}
		return writeRecord(filepath.Join(p.dir, processFile), rec)
	})
	if err != nil {
		p.shim = reexec.ID{}
		return err
	}
	report := role.Socket
	defer func() { _ = unix.Close(report) }()
	defer s.runtime.roles.ahead(reexec.RoleShim)
	// Receiving ends when the shim does.
	stop := context.AfterFunc(ctx, func() { _ = p.shim.Signal(unix.SIGKILL) })
	defer stop()
	r, _, ok, err := reexec.ReceiveReport(report)
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case !ok:
		return errors.New("its shim ended without a word (killed?)")
	case r.Error != "":
		return programError(r.Err())
	case r.Started == nil:
		return errors.New("its shim did not say what it started")
	}
	p.init = *r.Started
	return nil
}

// programError gives a role's failure the error that callers look for.
func programError(err error) error {
	switch reexec.CauseOf(err) {
	case reexec.CauseNotFound:
		return fmt.Errorf("%w: %w", ErrProgramNotFound, err)
	case reexec.CausePermission:
		return fmt.Errorf("%w: %w", ErrProgramDenied, err)
	case reexec.CauseNotRunning:
		return fmt.Errorf("%w: %w", ErrNotRunning, err)
	}
	return err
}

// reap collects a child that has ended. 0 is no child.
func reap(pid int) error {
	if pid <= 0 {
		return nil
	}
	for {
		_, err := unix.Wait4(pid, nil, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ECHILD):
			return nil
		default:
			return err
		}
	}
}

// forgetOld removes the records of a container's ended processes but the last two.
func (s *Sandbox) forgetOld(container string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := 0
	for i := len(s.procs) - 1; i >= 0; i-- {
		p := s.procs[i]
		if p.container != container || p.running() {
			continue
		}
		if ended++; ended <= keptAttempts {
			continue
		}
		p.release()
		if err := errors.Join(removeCgroups(p.dir), os.RemoveAll(p.dir)); err != nil {
			s.runtime.log.Warn("cannot remove an old record", "container", container, "attempt", p.attempt, "err", err)
			continue
		}
		s.procs = append(s.procs[:i], s.procs[i+1:]...)
	}
}

// Program returns the file that roles are started from: this program, which stays
// what it was when its file is replaced.
func (r *Runtime) Program() string { return filepath.Join(r.dir, pinsName, exeName) }

// view is what makes up a container, however its process is started.
type view struct {
	process      reexec.Process // without the rights
	files        map[string][]byte
	mounts       []Mount
	busybox      bool
	readOnlyRoot bool
	capabilities Capabilities
	privileged   bool
	escalation   bool
}

// rights fills in what the process may do.
func (v *view) rights() error {
	set, err := reexec.CapabilitySet(v.capabilities.Add, v.capabilities.Drop)
	if err != nil {
		return err
	}
	if v.privileged {
		set = reexec.AllCapabilities()
	}
	v.process.Capabilities = set
	v.process.NoNewPrivs = !v.escalation && !v.privileged
	// With CAP_SYS_ADMIN what the filter refuses is what was asked for.
	v.process.Filtered = !v.privileged && set&(1<<unix.CAP_SYS_ADMIN) == 0
	return nil
}

// initConfig turns a view into the configuration of a container's first process.
func (s *Sandbox) initConfig(v view) (reexec.InitConfig, error) {
	if err := v.rights(); err != nil {
		return reexec.InitConfig{}, err
	}
	cfg := reexec.InitConfig{
		Scaffold: filepath.Join(s.runtime.dir, pinsName, rootName),
		Root:     reexec.Root{Files: v.files, ReadOnly: v.readOnlyRoot, Unmasked: v.privileged},
		Process:  v.process,
	}
	for path := range v.files {
		if !filepath.IsAbs(path) {
			return cfg, fmt.Errorf("file %q: the path is not absolute", path)
		}
	}
	for _, m := range v.mounts {
		if !filepath.IsAbs(m.Source) || !filepath.IsAbs(m.Target) || filepath.Clean(m.Target) == "/" {
			return cfg, fmt.Errorf("mount of %q at %q: want absolute paths, and a target below the root", m.Source, m.Target)
		}
		cfg.Root.Mounts = append(cfg.Root.Mounts, reexec.Mount(m))
	}
	var err error
	if v.busybox {
		if cfg.Root.Programs, err = s.runtime.busyboxDir(); err != nil {
			return cfg, err
		}
	}
	cfg.Namespaces.Net = s.pins()[0]
	if s.spec.Network != "" {
		cfg.Namespaces.Net = NetNSPath(s.runtime.dir, s.spec.Network)
	}
	cfg.Namespaces.UTS, cfg.Namespaces.IPC, err = s.sharedNamespaces()
	return cfg, err
}
