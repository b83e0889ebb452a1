// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"runtime"
	"sync"
	"time"
)

// partLogLines is how many lines of each part's log are kept for the pods that show
// it; all of them are in the daemon's log.
const partLogLines = 500

// partLogs keeps what parts of the lab say, in klog's format, for the pods of
// kube-system that stand for them. The zero value is ready.
type partLogs struct {
	mu   sync.Mutex
	logs map[string]*partLog
}

// of returns the log of a part, made on first use.
func (p *partLogs) of(part string) *partLog {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.logs == nil {
		p.logs = map[string]*partLog{}
	}
	l := p.logs[part]
	if l == nil {
		l = &partLog{grown: make(chan struct{})}
		p.logs[part] = l
	}
	return l
}

// tee returns a logger that writes to log as before, and for the part's pod.
func (p *partLogs) tee(log *slog.Logger, part string) *slog.Logger {
	return slog.New(&teeHandler{Handler: log.Handler(), part: p.of(part)})
}

// partLog is the end of one part's log.
type partLog struct {
	mu    sync.Mutex
	lines [][]byte
	// dropped counts the lines before the first of lines.
	dropped int
	// grown is closed when a line comes.
	grown chan struct{}
}

func (l *partLog) add(line []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, line)
	if more := len(l.lines) - partLogLines; more > 0 {
		l.lines, l.dropped = l.lines[more:], l.dropped+more
	}
	close(l.grown)
	l.grown = make(chan struct{})
}

// follow writes the log to w, from what is kept of it, until ctx ends.
func (l *partLog) follow(ctx context.Context, w io.Writer) error {
	for next := 0; ; {
		l.mu.Lock()
		next = max(next, l.dropped)
		fresh, grown := l.lines[next-l.dropped:], l.grown
		next = l.dropped + len(l.lines)
		l.mu.Unlock()
		if _, err := w.Write(bytes.Join(fresh, nil)); err != nil {
			return fmt.Errorf("write the log of a part of the lab: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-grown:
		}
	}
}

// teeHandler hands each record to the handler that it embeds, and as a line of klog
// to a part's log.
type teeHandler struct {
	slog.Handler
	part  *partLog
	attrs []slog.Attr
}

// Enabled implements slog.Handler.
func (h *teeHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

// Handle implements slog.Handler.
func (h *teeHandler) Handle(ctx context.Context, r slog.Record) error {
	h.part.add(klogLine(r, h.attrs))
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h *teeHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &teeHandler{Handler: h.Handler.WithAttrs(attrs), part: h.part, attrs: append(h.attrs[:len(h.attrs):len(h.attrs)], attrs...)}
}

// WithGroup implements slog.Handler. The lines for people have no groups.
func (h *teeHandler) WithGroup(name string) slog.Handler {
	return &teeHandler{Handler: h.Handler.WithGroup(name), part: h.part, attrs: h.attrs}
}

// klogLine is a record as Kubernetes' components print it:
// Lmmdd hh:mm:ss.uuuuuu pid file:line] "message" key="value".
func klogLine(r slog.Record, attrs []slog.Attr) []byte {
	level := 'I'
	switch {
	case r.Level >= slog.LevelError:
		level = 'E'
	case r.Level >= slog.LevelWarn:
		level = 'W'
	}
	at := r.Time
	if at.IsZero() {
		at = time.Now()
	}
	frame, _ := runtime.CallersFrames([]uintptr{r.PC}).Next()
	// In its container the component would be process 1.
	line := fmt.Appendf(nil, "%c%s %7d %s:%d] %q", level, at.Format("0102 15:04:05.000000"), 1, filepath.Base(frame.File), frame.Line, r.Message)
	add := func(a slog.Attr) bool {
		line = fmt.Appendf(line, " %s=%q", a.Key, a.Value.String())
		return true
	}
	for _, a := range attrs {
		add(a)
	}
	r.Attrs(add)
	return append(line, '\n')
}
