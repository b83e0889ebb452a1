// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// runShim starts a container's first process and stays with it until it ends.
func runShim(ch *channel) error {
	// Ahead of time too, with the shim.
	init, initErr := Spawn(RoleInit, "/proc/self/exe")
	var cfg ShimConfig
	err := ch.receive(&cfg)
	if err := errors.Join(err, initErr); err != nil {
		return errors.Join(err, init.Drop())
	}
	if err := unix.Chdir(cfg.Dir); err != nil { // the attach socket's name has to be short
		return fmt.Errorf("enter %s: %w", cfg.Dir, err)
	}
	if cfg.ShareWith.Pid != 0 {
		if err := init.Drop(); err != nil {
			return err
		}
		if init, err = spawnInside(cfg.ShareWith); err != nil {
			return err
		}
	}
	io, err := newStreams(&cfg)
	if err != nil {
		return err
	}
	master, err := startProgram(init, &cfg, io)
	if err != nil {
		return err
	}
	pid := init.Pid
	inside := ""
	if cfg.ShareWith.Pid != 0 {
		if inside, err = place(pid); err != nil {
			return fmt.Errorf("look at the container's process: %w", err)
		}
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
	if inside != "" {
		if err := killInside(inside); err != nil {
			return err
		}
	}
	// The process namespace died with its first process, or what the container had
	// in somebody else's was killed: nobody writes any more. What was written is in
	// the pipes.
	pumps.Wait()
	return writeRecord(filepath.Join(cfg.Dir, ExitFile), exit)
}

// startProgram gives kplab-init its work and returns when the program runs in its
// place. For a container with a terminal master is its descriptor, else -1.
func startProgram(init *Role, cfg *ShimConfig, io *streams) (master int, err error) {
	for _, group := range cfg.Cgroups {
		if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(init.Pid)), 0); err != nil {
			return -1, errors.Join(fmt.Errorf("enter the container's cgroup: %w", err), init.Drop())
		}
	}
	if err := init.Give(cfg.Init, [3]int{io.childStdin, io.childStdout, io.childStderr}); err != nil {
		return -1, errors.Join(err, init.Drop())
	}
	io.closeChild()
	master, err = awaitProgram(init.Socket)
	if err != nil {
		_, waitErr := waitFor(init.Pid)
		return -1, errors.Join(err, waitErr)
	}
	return master, unix.Close(init.Socket)
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
	if s.clients, err = listenClients(AttachSocket, cfg.Stdin || cfg.Init.Process.TTY); err != nil {
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
