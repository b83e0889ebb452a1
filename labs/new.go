// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

//go:embed all:template
var skeleton embed.FS

// New writes the folder of a small lab that passes verify, to begin one's own with.
// It returns the files that it wrote.
func New(dir string) (files []string, err error) {
	if _, err := os.Stat(dir); err == nil {
		return nil, fmt.Errorf("%s exists already; choose another name", dir)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	root, err := fs.Sub(skeleton, "template")
	if err != nil {
		return nil, err
	}
	if err := os.CopyFS(dir, root); err != nil {
		return nil, fmt.Errorf("write the lab's folder: %w", err)
	}
	err = fs.WalkDir(root, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, filepath.Join(dir, path))
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	_, err = load(os.DirFS(dir), filepath.Base(dir), dir)
	return files, err
}
