// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
)

// logFile writes the output of a built-in server in the format of the container
// runtime interface: "TIME STREAM F LINE". It is safe for concurrent use.
type logFile struct {
	mu   sync.Mutex
	file *os.File
}

// openLog opens a log for appending.
func openLog(path string) (*logFile, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the container's log: %w", err)
	}
	return &logFile{file: f}, nil
}

// Close closes the file.
func (l *logFile) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.file.Close()
}

// stream returns a writer whose lines are marked with the stream's name.
func (l *logFile) stream(name string) io.Writer { return &logStream{log: l, name: name} }

type logStream struct {
	log  *logFile
	name string
	part []byte
}

// Write writes whole lines and keeps the rest for the next call.
func (s *logStream) Write(b []byte) (int, error) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.part = append(s.part, b...)
	var out []byte
	for {
		i := bytes.IndexByte(s.part, '\n')
		if i < 0 {
			break
		}
		out = time.Now().UTC().AppendFormat(out, time.RFC3339Nano)
		out = append(out, ' ')
		out = append(out, s.name...)
		out = append(out, " F "...)
		out = append(out, s.part[:i+1]...)
		s.part = s.part[i+1:]
	}
	if len(out) == 0 {
		return len(b), nil
	}
	if _, err := s.log.file.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// logLine is one parsed line of a log file.
type logLine struct {
	at     time.Time
	stamp  []byte
	stderr bool
	text   []byte // with its line feed unless it is a part of a line
}

func parseLogLine(raw []byte) (logLine, bool) {
	parts := bytes.SplitN(raw, []byte(" "), 4)
	if len(parts) < 4 {
		return logLine{}, false
	}
	at, err := time.Parse(time.RFC3339Nano, string(parts[0]))
	if err != nil {
		return logLine{}, false
	}
	text := parts[3]
	if bytes.Equal(parts[2], []byte("P")) {
		text = bytes.TrimSuffix(text, []byte("\n"))
	}
	return logLine{at: at, stamp: parts[0], stderr: bytes.Equal(parts[1], []byte("stderr")), text: text}, true
}

// logLocation finds the log of a container: of what runs, or else of what ran last,
// or with previous of what ran before. done is closed when it gets no more lines;
// nil when that is so already. The errors are upstream's texts.
func (k *Kubelet) logLocation(p *pod, o *corev1.Pod, name string, previous bool) (path string, done <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.want
	if before == nil {
		before = &o.Status
	}
	st := containerStatusIn(k.statusOf(p, o, before), name)
	c := p.containers[name]
	if st == nil || c == nil && st.State.Waiting == nil {
		return "", nil, fmt.Errorf("container %q in pod %q is not available", name, o.Name)
	}
	last := st.LastTerminationState.Terminated
	id := ""
	switch {
	case previous && last == nil:
		return "", nil, fmt.Errorf("previous terminated container %q in pod %q not found", name, o.Name)
	case previous:
		id = last.ContainerID
	case st.State.Running != nil:
		id, done = st.ContainerID, c.run.done()
		c.read = c.run
	case st.State.Terminated != nil:
		id = st.State.Terminated.ContainerID
	case last != nil:
		id = last.ContainerID
	default:
		return "", nil, fmt.Errorf("container %q in pod %q is waiting to start: %s", name, o.Name, waitingFor(st.State.Waiting))
	}
	// Of older attempts the logs are gone.
	for attempt := c.attempt; attempt >= max(0, c.attempt-2); attempt-- {
		if containerID(o.UID, name, attempt) == id {
			return k.logFileOf(o.UID, name, attempt), done, nil
		}
	}
	return "", nil, fmt.Errorf("container %q in pod %q is terminated", name, o.Name)
}

// containerStatusIn finds the status of a container of any kind.
func containerStatusIn(s *corev1.PodStatus, name string) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{s.ContainerStatuses, s.InitContainerStatuses, s.EphemeralContainerStatuses} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// waitingFor is the reason in the words that kubectl logs shows.
func waitingFor(w *corev1.ContainerStateWaiting) string {
	switch w.Reason {
	case "ErrImagePull":
		return "image can't be pulled"
	case "ImagePullBackOff":
		return "trying and failing to pull image"
	}
	return w.Reason
}

// readLog copies a log to w by the options. With Follow it goes on until ctx ends
// or done is closed and everything was copied.
func readLog(ctx context.Context, path string, opts *corev1.PodLogOptions, done <-chan struct{}, w io.Writer) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open the container's log: %w", err)
	}
	defer func() { _ = f.Close() }()
	if opts.TailLines != nil {
		if err := seekTail(f, *opts.TailLines); err != nil {
			return err
		}
	}
	since := time.Time{}
	if opts.SinceSeconds != nil {
		since = time.Now().Add(-time.Duration(*opts.SinceSeconds) * time.Second)
	}
	if opts.SinceTime != nil {
		since = opts.SinceTime.Time
	}
	out := &logWriter{w: w, opts: opts, since: since, left: -1}
	if opts.LimitBytes != nil {
		out.left = *opts.LimitBytes
	}
	var events *fsnotify.Watcher
	if opts.Follow {
		if events, err = fsnotify.NewWatcher(); err != nil {
			return fmt.Errorf("watch the container's log: %w", err)
		}
		defer func() { _ = events.Close() }()
		if err := events.Add(path); err != nil {
			return fmt.Errorf("watch the container's log: %w", err)
		}
	}
	r := bufio.NewReader(f)
	var part []byte
	ended := false
	for {
		chunk, err := r.ReadBytes('\n')
		part = append(part, chunk...)
		if err == nil {
			if out.line(part) {
				return nil
			}
			part = part[:0]
			continue
		}
		if !errors.Is(err, io.EOF) {
			return fmt.Errorf("read the container's log: %w", err)
		}
		if !opts.Follow || ended {
			return nil
		}
		if err := out.flush(); err != nil {
			return nil // the reader has gone
		}
		select {
		case <-ctx.Done():
			return nil
		case <-done:
			ended = true // once more round for what came last
		case <-events.Events:
		case err := <-events.Errors:
			return fmt.Errorf("watch the container's log: %w", err)
		}
	}
}

// logWriter writes the lines that the options ask for.
type logWriter struct {
	w     io.Writer
	opts  *corev1.PodLogOptions
	since time.Time
	left  int64 // bytes that may still be written; below 0 for no limit
}

// line writes one raw line and reports whether that was all: the limit is reached
// or the reader has gone.
func (o *logWriter) line(raw []byte) bool {
	l, ok := parseLogLine(raw)
	if !ok || l.at.Before(o.since) {
		return false
	}
	if s := o.opts.Stream; s != nil && *s != corev1.LogStreamAll && (*s == corev1.LogStreamStderr) != l.stderr {
		return false
	}
	text := l.text
	if o.opts.Timestamps {
		text = append(append(append([]byte{}, l.stamp...), ' '), text...)
	}
	if o.left >= 0 && int64(len(text)) > o.left {
		text = text[:o.left]
	}
	if _, err := o.w.Write(text); err != nil {
		return true
	}
	if o.left >= 0 {
		o.left -= int64(len(text))
	}
	return o.left == 0
}

func (o *logWriter) flush() error {
	if f, ok := o.w.(interface{ FlushError() error }); ok {
		return f.FlushError()
	}
	return nil
}

// seekTail moves to the beginning of the nth line from the end.
func seekTail(f *os.File, lines int64) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if lines <= 0 {
		return nil
	}
	buf := make([]byte, 4096)
	found := int64(0)
	for at := end; at > 0; {
		n := min(int64(len(buf)), at)
		at -= n
		if _, err := f.ReadAt(buf[:n], at); err != nil {
			return err
		}
		for i := n - 1; i >= 0; i-- {
			// The line feed that ends the file ends the last line.
			if buf[i] != '\n' || at+i == end-1 {
				continue
			}
			if found++; found == lines {
				_, err := f.Seek(at+i+1, io.SeekStart)
				return err
			}
		}
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// logTail returns the end of a log as text.
func logTail(path string, lines int64, most int) string {
	var b bytes.Buffer
	if err := readLog(context.Background(), path, &corev1.PodLogOptions{TailLines: &lines}, nil, &b); err != nil {
		return ""
	}
	text := b.Bytes()
	return string(text[max(0, len(text)-most):])
}
