// SPDX-License-Identifier: Apache-2.0

package reexec

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"time"
)

// maxLine is the longest piece of a line that the log holds in one record; longer
// lines are cut, as by container runtimes.
const maxLine = 16 << 10

// logFile writes a container's output in the format of the Kubernetes container
// runtime interface: one record a line, "<RFC3339Nano> <stream> <F|P> <text>",
// where P says that the line goes on in the next record of the stream.
type logFile struct {
	mu   sync.Mutex
	file *os.File
}

// openLog opens a log for appending; an empty path drops all output.
func openLog(path string) (*logFile, error) {
	if path == "" {
		return &logFile{}, nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("open the log: %w", err)
	}
	return &logFile{file: f}, nil
}

// stream returns the writer of one stream, for one goroutine.
func (l *logFile) stream(name string) *logStream { return &logStream{log: l, name: name} }

// logStream collects the lines of one stream.
type logStream struct {
	log  *logFile
	name string
	part []byte // of a line that has not ended
}

// write takes output; a whole batch of lines costs one write to the file.
func (s *logStream) write(p []byte) {
	now := time.Now()
	var out []byte
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			s.part = append(s.part, p...)
			p = nil
		} else {
			s.part = append(s.part, p[:i]...)
			p = p[i+1:]
		}
		for len(s.part) > maxLine {
			out = s.record(out, now, 'P', s.part[:maxLine])
			s.part = append(s.part[:0], s.part[maxLine:]...)
		}
		if i >= 0 {
			out = s.record(out, now, 'F', s.part)
			s.part = s.part[:0]
		}
	}
	s.flush(out)
}

// end writes what is left of a line that never ended.
func (s *logStream) end() {
	if len(s.part) > 0 {
		s.flush(s.record(nil, time.Now(), 'P', s.part))
	}
}

// record appends one record to out.
func (s *logStream) record(out []byte, at time.Time, tag byte, text []byte) []byte {
	out = at.AppendFormat(out, time.RFC3339Nano)
	out = append(out, ' ')
	out = append(out, s.name...)
	out = append(out, ' ', tag, ' ')
	out = append(out, text...)
	return append(out, '\n')
}

// flush writes records. On a full disk they are lost: a container must not stop
// for that.
func (s *logStream) flush(out []byte) {
	if len(out) == 0 || s.log.file == nil {
		return
	}
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	_, _ = s.log.file.Write(out)
}
