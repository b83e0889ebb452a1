// SPDX-License-Identifier: Apache-2.0

package tutorial

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is a program on a terminal of its own, as if a person sat before it.
type terminal struct {
	cmd    *exec.Cmd
	master *os.File

	mu    sync.Mutex
	seen  []byte        // what was written since the last take
	grown chan struct{} // closed and replaced when seen grows, for good at the end
	ended bool
	read  sync.WaitGroup
}

// openTerminal starts cmd on a new terminal wide enough that nothing wraps.
func openTerminal(cmd *exec.Cmd) (*terminal, error) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	slave, err := openSlave(master)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a terminal: %w", err), master.Close())
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	err = cmd.Start()
	err = errors.Join(err, slave.Close())
	if err != nil {
		return nil, errors.Join(err, master.Close())
	}
	t := &terminal{cmd: cmd, master: master, grown: make(chan struct{})}
	t.read.Go(t.copy)
	return t, nil
}

func openSlave(master *os.File) (*os.File, error) {
	fd := int(master.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, err
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 50, Col: 250}); err != nil {
		return nil, err
	}
	return os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
}

// copy reads until the last program on the terminal has closed it.
func (t *terminal) copy() {
	buf := make([]byte, 4096)
	for {
		n, err := t.master.Read(buf)
		t.mu.Lock()
		t.seen = append(t.seen, buf[:n]...)
		close(t.grown)
		t.grown = make(chan struct{})
		if err != nil {
			t.ended = true // EIO, when nobody has it open any more
			close(t.grown)
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
	}
}

// until waits for text at the end of what is on the screen and takes all of it. A
// program that ended, or took too long, is an error; text "" stands for that end.
func (t *terminal) until(text string, timeout time.Duration) (string, error) {
	return t.await(func(seen string) bool { return text != "" && strings.HasSuffix(seen, text) }, text, timeout)
}

// answer waits for the prompt that follows what a line that was typed has printed, and
// returns that. A prompt alone is no answer: shells draw theirs again when they hear
// of the terminal's size.
func (t *terminal) answer(line, prompt string, timeout time.Duration) (string, error) {
	cut := func(seen string) string {
		i := strings.LastIndex(seen, line+"\n")
		if i < 0 {
			return ""
		}
		answer, found := strings.CutSuffix(seen[i+len(line)+1:], prompt)
		if !found {
			return ""
		}
		return answer
	}
	seen, err := t.await(func(seen string) bool { return cut(seen) != "" }, prompt, timeout)
	if err != nil {
		return seen, err
	}
	return cut(seen), nil
}

// await waits until what is on the screen is right, and takes all of it.
func (t *terminal) await(right func(string) bool, text string, timeout time.Duration) (string, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		t.mu.Lock()
		seen, grown, ended := plain(t.seen), t.grown, t.ended
		if right(seen) || text == "" && ended {
			t.seen = nil
			t.mu.Unlock()
			return seen, nil
		}
		t.mu.Unlock()
		if ended {
			return seen, fmt.Errorf("the program ended before %q was seen", text)
		}
		select {
		case <-grown:
		case <-timer.C:
			return seen, fmt.Errorf("%q was not seen within %s", text, timeout)
		}
	}
}

// write types a line.
func (t *terminal) write(line string) error {
	_, err := io.WriteString(t.master, line+"\n")
	return err
}

// wait returns what the program printed until its end, and its exit code.
func (t *terminal) wait(timeout time.Duration) (string, int, error) {
	seen, err := t.until("", timeout)
	if err != nil {
		err = errors.Join(err, t.cmd.Process.Kill())
	}
	code := exitCode(t.cmd.Wait())
	t.read.Wait()
	return seen, code, errors.Join(err, t.master.Close())
}

// plain is a screen's text without what only a terminal understands.
func plain(b []byte) string {
	var out strings.Builder
	for i := 0; i < len(b); i++ {
		switch {
		case b[i] == '\r':
		case b[i] == 0x1b && i+1 < len(b) && b[i+1] == '[':
			for i += 2; i < len(b) && (b[i] < '@' || b[i] > '~'); i++ {
			}
		default:
			out.WriteByte(b[i])
		}
	}
	return out.String()
}
