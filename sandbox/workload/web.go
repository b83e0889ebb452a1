// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Headers that say who answered and what the pod saw.
const (
	HeaderPod    = "X-Kplab-Pod"
	HeaderNode   = "X-Kplab-Node"
	HeaderClient = "X-Kplab-Client"
)

// site is a web server for files: what nginx and httpd have in common.
type site struct {
	ctx Context
	// server is the Server header.
	server string
	// root is the directory in the container; a volume there is served in place of
	// the pages.
	root string
	// pages are the image's own, by path below root.
	pages map[string][]byte
	// errorPage writes the body for a status.
	errorPage func(status int) string
	// logLine formats an access log line.
	logLine func(r *http.Request, status int, bytes int64, at time.Time) string
}

// ServeHTTP implements http.Handler.
func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Server", s.server)
	h.Set(HeaderPod, s.ctx.Pod.Name)
	h.Set(HeaderNode, s.ctx.Pod.Node)
	h.Set(HeaderClient, addressOf(r.RemoteAddr))
	c := &counted{ResponseWriter: w, status: http.StatusOK}
	s.answer(c, r)
	_, _ = io.WriteString(s.ctx.Stdout, s.logLine(r, c.status, c.bytes, time.Now())+"\n")
}

// answer serves the file that the request names.
func (s *site) answer(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		s.fail(w, http.StatusMethodNotAllowed)
		return
	}
	files, done, err := s.files()
	if err != nil {
		_, _ = fmt.Fprintf(s.ctx.Stderr, "open %s: %v\n", s.root, err)
		s.fail(w, http.StatusForbidden)
		return
	}
	defer done()
	name := strings.TrimPrefix(path.Clean("/"+r.URL.Path), "/")
	if name == "" {
		name = "."
	}
	if single, below, done, ok := s.mountedFile(name); ok {
		defer done()
		files, name = single, below
	}
	fi, err := fs.Stat(files, name)
	if err == nil && fi.IsDir() {
		if name != "." && !strings.HasSuffix(r.URL.Path, "/") {
			w.Header().Set("Location", "http://"+r.Host+r.URL.Path+"/")
			s.fail(w, http.StatusMovedPermanently)
			return
		}
		name = path.Join(name, "index.html")
		if fi, err = fs.Stat(files, name); errors.Is(err, fs.ErrNotExist) {
			s.fail(w, http.StatusForbidden)
			return
		}
	}
	if err == nil && !fi.Mode().IsRegular() {
		err = fs.ErrPermission // opening a device can do things
	}
	var f fs.File
	if err == nil {
		if f, err = files.Open(name); err == nil {
			defer func() { _ = f.Close() }() // it was only read
			// Of what was opened, whatever the name means by now.
			if fi, err = f.Stat(); err == nil && !fi.Mode().IsRegular() {
				err = fs.ErrPermission
			}
		}
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.fail(w, http.StatusNotFound)
		return
	case err != nil:
		s.fail(w, http.StatusForbidden)
		return
	}
	seeker, ok := f.(io.ReadSeeker)
	if !ok {
		s.fail(w, http.StatusInternalServerError)
		return
	}
	at := fi.ModTime()
	w.Header().Set("Accept-Ranges", "bytes")
	w.Header().Set("ETag", fmt.Sprintf("\"%x-%x\"", at.Unix(), fi.Size()))
	if strings.HasSuffix(name, ".html") {
		w.Header().Set("Content-Type", "text/html")
	}
	http.ServeContent(w, r, name, at, seeker)
}

// files returns what is served: a volume at root, or the image's pages. A volume
// belongs to the pod, which may put links into it; os.Root follows none that leads
// out of it.
func (s *site) files() (fs.FS, func(), error) {
	dir, ok := s.ctx.Volumes[s.root]
	if !ok {
		return pages(s.pages), func() {}, nil
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, err
	}
	return volume{root}, func() { _ = root.Close() }, nil // only read
}

// volume is a directory of the pod as a file system. Opening a pipe that the pod
// puts there does not wait for a writer.
type volume struct{ root *os.Root }

// Open implements fs.FS.
func (v volume) Open(name string) (fs.File, error) {
	return v.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
}

// Stat implements fs.StatFS.
func (v volume) Stat(name string) (fs.FileInfo, error) { return v.root.Stat(name) }

// mountedFile finds a volume that is mounted on the one file that is asked for.
func (s *site) mountedFile(name string) (files fs.FS, below string, done func(), ok bool) {
	for _, candidate := range []string{name, path.Join(name, "index.html")} {
		file, ok := s.ctx.Volumes[path.Join(s.root, candidate)]
		if !ok || candidate == "." {
			continue
		}
		root, err := os.OpenRoot(filepath.Dir(file))
		if err != nil {
			continue
		}
		if fi, err := root.Stat(filepath.Base(file)); err != nil || !fi.Mode().IsRegular() {
			_ = root.Close() // only looked at
			continue
		}
		return volume{root}, filepath.Base(file), func() { _ = root.Close() }, true
	}
	return nil, "", nil, false
}

// fail answers with an error page.
func (s *site) fail(w http.ResponseWriter, status int) {
	body := s.errorPage(status)
	w.Header().Set("Content-Type", "text/html")
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// counted notes what a response was.
type counted struct {
	http.ResponseWriter
	status int
	bytes  int64
	wrote  bool
}

func (c *counted) WriteHeader(status int) {
	if !c.wrote {
		c.status, c.wrote = status, true
	}
	c.ResponseWriter.WriteHeader(status)
}

func (c *counted) Write(p []byte) (int, error) {
	c.wrote = true
	n, err := c.ResponseWriter.Write(p)
	c.bytes += int64(n)
	return n, err
}

// addressOf returns the IP of an address with a port, as IPv4 where it is one.
func addressOf(remote string) string {
	host, _, err := net.SplitHostPort(remote)
	if err != nil {
		return remote
	}
	return host
}

// orDash stands for an empty field of a log line.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return strings.ReplaceAll(s, `"`, `\x22`)
}

// commonLog formats a line of the common log format, which both servers begin
// with.
func commonLog(r *http.Request, status int, bytes int64, at time.Time) string {
	user, _, _ := r.BasicAuth()
	return fmt.Sprintf("%s - %s [%s] \"%s %s %s\" %d %d", addressOf(r.RemoteAddr), orDash(user),
		at.Format("02/Jan/2006:15:04:05 -0700"), r.Method, orDash(r.RequestURI), r.Proto, status, bytes)
}
