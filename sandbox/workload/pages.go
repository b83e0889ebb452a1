// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bytes"
	"io/fs"
	"time"
)

// pages is a file system of files in memory, all in one directory.
type pages map[string][]byte

// Open implements fs.FS.
func (p pages) Open(name string) (fs.File, error) {
	if name == "." {
		return &page{name: name, mode: fs.ModeDir | 0o755}, nil
	}
	content, ok := p[name]
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return &page{Reader: bytes.NewReader(content), name: name, mode: 0o644, size: int64(len(content))}, nil
}

// page is one open file, and its own description.
type page struct {
	*bytes.Reader
	name string
	mode fs.FileMode
	size int64
}

func (p *page) Stat() (fs.FileInfo, error) { return p, nil }
func (p *page) Close() error               { return nil }
func (p *page) Read(b []byte) (int, error) {
	if p.Reader == nil {
		return 0, &fs.PathError{Op: "read", Path: p.name, Err: fs.ErrInvalid}
	}
	return p.Reader.Read(b)
}

func (p *page) Name() string      { return p.name }
func (p *page) Size() int64       { return p.size }
func (p *page) Mode() fs.FileMode { return p.mode }
func (p *page) IsDir() bool       { return p.mode.IsDir() }
func (p *page) Sys() any          { return nil }

// ModTime is a fixed moment: the pages change with the program only.
func (p *page) ModTime() time.Time { return time.Date(2025, 4, 16, 12, 0, 0, 0, time.UTC) }
