// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kplab/kplab/sandbox/reexec"
)

// outputPatience is how long Exec waits for more output after the process has
// ended: a child that it left in the background may hold the pipe.
const outputPatience = time.Second

// Exec runs a further program in a pod and returns its exit code (128 and the
// signal's number for one that a signal ended). It ends with the program, or when
// ctx does, which kills it. A program that cannot be started is an error that
// wraps ErrProgramNotFound (code 127) or ErrProgramDenied (126); a container whose
// process has ended is ErrNotRunning. The program dies with the daemon.
func (s *Sandbox) Exec(ctx context.Context, spec ExecSpec) (exitCode int, err error) {
	if err := checkName("container", spec.Container); err != nil {
		return -1, err
	}
	code, err := s.exec(ctx, spec)
	if err != nil {
		err = fmt.Errorf("exec in container %s: %w", spec.Container, err)
	}
	return code, err
}

func (s *Sandbox) exec(ctx context.Context, spec ExecSpec) (int, error) {
	if len(spec.Args) == 0 {
		return -1, errors.New("no program is named")
	}
	if err := ctx.Err(); err != nil {
		return -1, err
	}
	// Remove ends what still runs here: a program in a view of its own is no
	// container's child.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	session, err := s.startSession(spec, cancel)
	if err != nil {
		return -1, err
	}
	defer s.endSession(session)
	// The kill is over, or will not be, before the session lets go of its process.
	killed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(killed)
		session.kill()
	})
	defer func() {
		if !stop() {
			<-killed
		}
	}()
	exit, err := session.follow(spec)
	switch {
	case ctx.Err() != nil:
		return -1, context.Cause(ctx)
	case errors.Is(err, ErrProgramNotFound):
		return 127, err
	case errors.Is(err, ErrProgramDenied):
		return 126, err
	case err != nil:
		return -1, err
	}
	return exit.Code, nil
}

// session is a running Exec.
type session struct {
	role   string
	pid    int  // the role's process
	joined bool // by kplab-exec, which reports the end; else pid becomes the program
	report int
	// Our ends of the streams; nil where there is none.
	stdin, stdout, stderr *os.File
	copies                sync.WaitGroup
	kill                  func()
	cgroups               []string // of the container that it is in
}

// startSession starts the role: kplab-exec for a container with a process,
// kplab-init for one without.
func (s *Sandbox) startSession(spec ExecSpec, cancel context.CancelCauseFunc) (*session, error) {
	// Under the pod's lock no process begins to end or be removed unnoticed.
	defer s.runtime.busy.lock(podPrefix + s.spec.ID)()
	if err := s.alive(); err != nil {
		return nil, err
	}
	v := view{
		process: reexec.Process{
			Args: spec.Args, Env: spec.Env, WorkingDir: spec.WorkingDir, TTY: spec.TTY,
			UID: spec.User.UID, GID: spec.User.GID, Groups: spec.User.Groups,
		},
		files: spec.Files, mounts: spec.Mounts, busybox: spec.Busybox, readOnlyRoot: spec.ReadOnlyRoot,
		capabilities: spec.Capabilities, privileged: spec.Privileged, escalation: spec.AllowPrivilegeEscalation,
	}
	if target := s.newest(spec.Container); target != nil {
		if !target.running() {
			return nil, ErrNotRunning
		}
		if err := v.rights(); err != nil {
			return nil, err
		}
		return s.openSession(spec, reexec.RoleExec, reexec.ExecConfig{Target: target.init.ID, Process: v.process}, target.cgroups, cancel)
	}
	cfg, err := s.initConfig(v)
	if err != nil {
		return nil, err
	}
	return s.openSession(spec, reexec.RoleInit, cfg, nil, cancel)
}

// openSession launches a role and adds it to the sessions that release ends.
func (s *Sandbox) openSession(spec ExecSpec, role string, config any, cgroups []string, cancel context.CancelCauseFunc) (*session, error) {
	x, err := s.launch(spec, role, config)
	if err != nil {
		return nil, err
	}
	x.cgroups = cgroups
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone { // closed meanwhile
		x.kill()
		x.close()
		return nil, ErrClosed
	}
	if s.sessions == nil {
		s.sessions = make(map[*session]context.CancelCauseFunc)
	}
	s.sessions[x] = cancel
	s.live.Add(1)
	return x, nil
}

// endSession lets go of a session whose program has ended.
func (s *Sandbox) endSession(x *session) {
	s.mu.Lock()
	delete(s.sessions, x)
	s.mu.Unlock()
	s.runtime.roles.ahead(x.role)
	if x.pid == 0 {
		x.close()
		s.live.Done()
		return
	}
	// kplab-exec is about to end; release waits for this.
	go func() {
		x.close()
		s.live.Done()
	}()
}

// launch starts a role with pipes for its streams.
func (s *Sandbox) launch(spec ExecSpec, role string, config any) (_ *session, err error) {
	x := &session{role: role, joined: role == reexec.RoleExec, report: -1}
	files := [3]int{-1, -1, -1}
	var theirs []*os.File
	pipe := func(fd int, input bool) *os.File {
		if err != nil {
			return nil
		}
		var r, w *os.File
		if r, w, err = os.Pipe(); err != nil {
			return nil
		}
		ours, child := r, w
		if input {
			ours, child = w, r
		}
		theirs = append(theirs, child)
		files[fd] = int(child.Fd()) // which also makes it block, as programs expect
		return ours
	}
	if !spec.TTY {
		if spec.Stdin != nil {
			x.stdin = pipe(0, true)
		}
		if spec.Stdout != nil {
			x.stdout = pipe(1, false)
		}
		switch {
		case spec.Stderr == nil:
		case sameWriter(spec.Stdout, spec.Stderr):
			// One writer gets one stream, in order, and is never called twice at once.
			files[2] = files[1]
		default:
			x.stderr = pipe(2, false)
		}
	}
	var started *reexec.Role
	if err == nil {
		started, err = s.runtime.roles.give(role, config, files, nil)
	}
	for _, f := range theirs {
		err = errors.Join(err, f.Close())
	}
	if started != nil {
		x.pid, x.report = started.Pid, started.Socket
	}
	x.kill = x.killer()
	if err != nil {
		x.kill()
		x.close()
		return nil, err
	}
	return x, nil
}

// sameWriter says whether both are one value; such as cannot be compared are not.
func sameWriter(a, b io.Writer) (same bool) {
	defer func() { _ = recover() }()
	return a == b
}

// killer returns what ends the program. kplab-exec does it when the socket shuts;
// a program that kplab-init has become is this process's own child.
func (x *session) killer() func() {
	if x.joined {
		return func() {
			if x.report >= 0 {
				_ = unix.Shutdown(x.report, unix.SHUT_RDWR)
			}
		}
	}
	id, err := reexec.Identify(x.pid)
	return func() {
		if err == nil {
			_ = id.Signal(unix.SIGKILL)
		}
	}
}

// follow moves the streams and waits for the program's end.
func (x *session) follow(spec ExecSpec) (reexec.ExitRecord, error) {
	resizing, stopResizing := context.WithCancel(context.Background())
	defer stopResizing()
	if !spec.TTY {
		x.copyOut(spec.Stdout, x.stdout)
		x.copyOut(spec.Stderr, x.stderr)
		x.copyIn(spec.Stdin, x.stdin)
	}
	var exit *reexec.ExitRecord
	var failed error
	// Once the end is known, nobody needs to wait until kplab-exec has ended too.
	for exit == nil {
		r, fd, ok, err := reexec.ReceiveReport(x.report)
		if err != nil || !ok {
			failed = errors.Join(failed, err)
			break
		}
		switch {
		case r.Error != "":
			failed = programError(r.Err())
		case r.Exit != nil:
			exit = r.Exit
		case r.Started != nil:
			// Ended already is no failure; anything else is one of the limits only.
			if err := enterCgroups(x.cgroups, r.Started.Pid); err != nil && !errors.Is(err, unix.ESRCH) {
				x.kill()
				failed = err
			}
		case r.Terminal:
			if err := x.openTerminal(resizing, fd, spec); err != nil {
				failed = err
				x.kill()
			}
		}
	}
	var waitErr error
	if exit == nil {
		ended, err := x.wait()
		if !x.joined {
			exit = &ended
		}
		waitErr = err
	}
	stopResizing()
	x.finishCopies()
	switch {
	case failed != nil:
		return reexec.ExitRecord{}, failed
	case waitErr != nil:
		return reexec.ExitRecord{}, waitErr
	case exit == nil:
		return reexec.ExitRecord{}, errors.New("its helper ended without a word (killed?)")
	}
	return *exit, nil
}

// openTerminal takes the master of the program's terminal and moves its stream;
// sizes are followed until ctx ends.
func (x *session) openTerminal(ctx context.Context, fd int, spec ExecSpec) error {
	if err := unix.SetNonblock(fd, true); err != nil {
		return errors.Join(fmt.Errorf("terminal: %w", err), unix.Close(fd))
	}
	master := os.NewFile(uintptr(fd), "terminal")
	x.stdout = master
	x.copyOut(spec.Stdout, master)
	if spec.Stdin != nil {
		go func() { _, _ = io.Copy(master, spec.Stdin) }() // ends with its source, as ExecSpec says
	}
	if spec.Resize != nil {
		x.copies.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case size, ok := <-spec.Resize:
					if !ok {
						return
					}
					setSize(master, size)
				}
			}
		})
	}
	return nil
}

// setSize sets a terminal's size; one that has closed is left alone.
func setSize(terminal *os.File, size Size) {
	raw, err := terminal.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
	})
}

// copyOut moves a stream of the program to w until its end.
func (x *session) copyOut(w io.Writer, from *os.File) {
	if from == nil {
		return
	}
	if w == nil {
		w = io.Discard
	}
	x.copies.Go(func() {
		if _, err := io.Copy(w, from); err != nil {
			// The reader is gone or the terminal is: the program must not block.
			_, _ = io.Copy(io.Discard, from)
		}
	})
}

// copyIn moves r to the program's input. Nobody can interrupt a Read of the
// caller's, so this goroutine ends when the caller closes the source.
func (x *session) copyIn(r io.Reader, to *os.File) {
	if to == nil {
		return
	}
	go func() {
		_, _ = io.Copy(to, r) // the program may have closed its end
		_ = to.Close()
	}()
}

// wait waits for the role's process.
func (x *session) wait() (reexec.ExitRecord, error) {
	for {
		var ws unix.WaitStatus
		_, err := unix.Wait4(x.pid, &ws, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return reexec.ExitRecord{}, fmt.Errorf("wait for process %d: %w", x.pid, err)
		default:
			x.pid = 0
			return reexec.ExitOf(ws), nil
		}
	}
}

// finishCopies waits for the rest of the output, within reason.
func (x *session) finishCopies() {
	done := make(chan struct{})
	go func() { defer close(done); x.copies.Wait() }()
	patience := time.NewTimer(outputPatience)
	defer patience.Stop()
	select {
	case <-done:
		return
	case <-patience.C:
	}
	x.closeStreams() // wakes the copies
	<-done
}

func (x *session) closeStreams() {
	for _, f := range []*os.File{x.stdin, x.stdout, x.stderr} {
		if f != nil {
			_ = f.Close() // a second close only fails
		}
	}
}

// close lets go of everything and waits for the role to have ended.
func (x *session) close() {
	x.closeStreams()
	if x.pid > 0 {
		_ = reap(x.pid)
	}
	if x.report >= 0 {
		_ = unix.Close(x.report)
	}
}
