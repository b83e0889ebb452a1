// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// runShim starts a container's first process and stays with it until it ends.
func runShim(ch *channel) error {
	var cfg ShimConfig
	if err := readConfig(&cfg); err != nil {
		return err
	}
	if err := unix.Chdir(cfg.Dir); err != nil { // the attach socket's name has to be short
		return fmt.Errorf("enter %s: %w", cfg.Dir, err)
	}
	io, err := newStreams(&cfg)
	if err != nil {
		return err
	}
	pid, master, err := startInit(&cfg, io)
	if err != nil {
		return err
	}
	id, err := Identify(pid)
	if err != nil {
		return fmt.Errorf("identify the container's process: %w", err)
	}
	started := InitRecord{ID: id, StartedAt: time.Now()}
	if err := writeRecord(filepath.Join(cfg.Dir, InitFile), started); err != nil {
		return fmt.Errorf("record the container's process: %w", err)
	}
	pumps := io.start(master)
	ch.send(Report{Started: &started}, -1)
	// Nobody waits for anything here any more; the daemon may come and go.
	if err := unix.Close(ch.fd); err != nil {
		return err
	}
	exit, err := waitFor(pid)
	if err != nil {
		return err
	}
	// The process namespace died with its first process, so nobody writes any
	// more. What was written is in the pipes.
	pumps.Wait()
	return writeRecord(filepath.Join(cfg.Dir, ExitFile), exit)
}

// startInit starts kplab-init and returns when the program runs in its place. For
// a container with a terminal master is its descriptor, else -1.
func startInit(cfg *ShimConfig, io *streams) (pid, master int, err error) {
	cmd, err := Prepare(RoleInit, "/proc/self/exe")
	if err != nil {
		return 0, -1, err
	}
	cmd.Files[0], cmd.Files[1], cmd.Files[2] = io.childStdin, io.childStdout, io.childStderr
	cmd.Attr.Cloneflags = unix.CLONE_NEWPID
	cmd.Attr.Setsid = true
	cmd.Attr.Pdeathsig = syscall.SIGKILL // of this thread, the only one that starts anything
	report, err := cmd.Start(cfg.Init)
	if err != nil {
		return 0, -1, err
	}
	io.closeChild()
	master, err = awaitProgram(report)
	if err != nil {
		_, waitErr := waitFor(cmd.Pid)
		return 0, -1, errors.Join(err, waitErr)
	}
	return cmd.Pid, master, unix.Close(report)
}

// awaitProgram reads reports of a kplab-init until the program has taken its
// place, and returns the terminal's master if there is one.
func awaitProgram(report int) (master int, err error) {
	master = -1
	for {
		r, fd, ok, err := ReceiveReport(report)
		switch {
		case err != nil:
			return master, err
		case !ok:
			return master, nil
		case r.Error != "":
			return master, r.Err()
		case r.Terminal:
			master = fd
		}
	}
}

// Err turns a failure back into an error.
func (r Report) Err() error {
	err := errors.New(r.Error)
	if r.Cause != "" {
		return &causeError{r.Cause, err}
	}
	return err
}

// CauseOf returns the cause of an error that a role reported, or "".
func CauseOf(err error) Cause { return causeOf(err) }

// Command is a role to be started.
type Command struct {
	// Files are the standard descriptors of the role; the caller's, by default
	// /dev/null.
	Files [3]int
	Attr  *syscall.SysProcAttr
	// Pid is the process once Start has returned.
	Pid  int
	role string
	exe  string
	null int
}

// Prepare returns a role to be started from the executable exe.
func Prepare(role, exe string) (*Command, error) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/null: %w", err)
	}
	return &Command{role: role, exe: exe, null: null, Files: [3]int{null, null, null}, Attr: &syscall.SysProcAttr{}}, nil
}

// Start starts the role on the current thread, hands it its configuration and
// returns the socket of its reports, which the caller closes. before, if any, run
// between the two: a role does nothing before it has its configuration, so that
// is the time to record it.
func (c *Command) Start(config any, before ...func(pid int) error) (report int, err error) {
	defer func() { err = errors.Join(err, unix.Close(c.null)) }()
	data, err := json.Marshal(config)
	if err != nil {
		return -1, err
	}
	var pipe, socket [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return -1, fmt.Errorf("make a pipe: %w", err)
	}
	if socket, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, errors.Join(fmt.Errorf("make a socket pair: %w", err), unix.Close(pipe[0]), unix.Close(pipe[1]))
	}
	c.Pid, err = syscall.ForkExec(c.exe, []string{c.role}, &syscall.ProcAttr{
		Dir: "/",
		Env: Environment(),
		Files: []uintptr{
			uintptr(c.Files[0]), uintptr(c.Files[1]), uintptr(c.Files[2]), uintptr(pipe[0]), uintptr(socket[1]),
		},
		Sys: c.Attr,
	})
	closed := errors.Join(unix.Close(pipe[0]), unix.Close(socket[1]))
	if err != nil {
		return -1, errors.Join(fmt.Errorf("start %s: %w", c.role, err), closed, unix.Close(pipe[1]), unix.Close(socket[0]))
	}
	w := os.NewFile(uintptr(pipe[1]), "configuration")
	for _, f := range before {
		if err := f(c.Pid); err != nil {
			return -1, errors.Join(err, closed, w.Close(), unix.Close(socket[0]))
		}
	}
	_, err = w.Write(data)
	if err := errors.Join(err, closed, w.Close()); err != nil {
		return -1, errors.Join(fmt.Errorf("configure %s: %w", c.role, err), unix.Close(socket[0]))
	}
	return socket[0], nil
}

// streams are the three streams of a container: what the child has of them, and
// what the shim does with its ends.
type streams struct {
	childStdin, childStdout, childStderr int

	stdin          *os.File // write end; nil without
	stdout, stderr *os.File // read ends; nil with a terminal
	log            *logFile
	clients        *clients
	once           bool
	tty            bool
}

// newStreams opens the log and makes the pipes.
func newStreams(cfg *ShimConfig) (*streams, error) {
	log, err := openLog(cfg.LogPath)
	if err != nil {
		return nil, err
	}
	s := &streams{log: log, once: cfg.StdinOnce, tty: cfg.Init.Process.TTY, childStdin: -1, childStdout: -1, childStderr: -1}
	if s.clients, err = listenClients(AttachSocket); err != nil {
		return nil, err
	}
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/null: %w", err)
	}
	s.childStdin, s.childStdout, s.childStderr = null, null, null
	if s.tty {
		return s, nil
	}
	pipe := func() (read, write int, err error) {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			return -1, -1, fmt.Errorf("make a pipe: %w", err)
		}
		return p[0], p[1], nil
	}
	if cfg.Stdin {
		r, w, err := pipe()
		if err != nil {
			return nil, err
		}
		s.childStdin, s.stdin = r, os.NewFile(uintptr(w), "stdin")
	}
	r, w, err := pipe()
	if err != nil {
		return nil, err
	}
	s.childStdout, s.stdout = w, os.NewFile(uintptr(r), "stdout")
	if r, w, err = pipe(); err != nil {
		return nil, err
	}
	s.childStderr, s.stderr = w, os.NewFile(uintptr(r), "stderr")
	return s, nil
}

// closeChild closes the child's ends, so that the shim sees the end of output.
func (s *streams) closeChild() {
	// Two of them may be the same descriptor; a second close only fails.
	for _, fd := range []int{s.childStdin, s.childStdout, s.childStderr} {
		_ = unix.Close(fd)
	}
}

// start begins to pump. The returned group is done when all output has been
// written.
func (s *streams) start(master int) *sync.WaitGroup {
	var pumps sync.WaitGroup
	terminal := (*os.File)(nil)
	if master >= 0 {
		terminal = os.NewFile(uintptr(master), "terminal")
		pumps.Go(func() { s.pump(terminal, "stdout", frameStdout) })
		s.clients.accept(terminal, terminal, false)
		return &pumps
	}
	pumps.Go(func() { s.pump(s.stdout, "stdout", frameStdout) })
	pumps.Go(func() { s.pump(s.stderr, "stderr", frameStderr) })
	s.clients.accept(s.stdin, nil, s.once)
	return &pumps
}

// pump copies one stream to the log and to the attached clients.
func (s *streams) pump(from *os.File, stream string, kind frameKind) {
	lines := s.log.stream(stream)
	buf := make([]byte, maxFrame)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			lines.write(buf[:n])
			s.clients.send(kind, buf[:n])
		}
		if err != nil { // io.EOF; EIO from a terminal that nobody holds any more
			lines.end()
			return
		}
	}
}
