// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// hostBusybox is where Debian's packages have it.
const hostBusybox = "/bin/busybox"

// busyboxDir returns a directory with busybox and a link for each of its applets,
// made at the first use: it is a container's /bin and the three like it.
func (r *Runtime) busyboxDir() (string, error) {
	r.tools.Lock()
	defer r.tools.Unlock()
	dir := filepath.Join(r.dir, pinsName, toolsName)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	program, err := os.ReadFile(hostBusybox)
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("busybox containers need %s of the host: install the package busybox-static (apt-get install busybox-static): %w", hostBusybox, err)
	}
	if err != nil {
		return "", err
	}
	var list bytes.Buffer
	cmd := exec.CommandContext(context.Background(), hostBusybox, "--list")
	cmd.Env = []string{}
	cmd.Stdout = &list
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("list the applets of %s: %w", hostBusybox, err)
	}
	// Under another name until it is whole.
	making := dir + ".new"
	if err := os.RemoveAll(making); err != nil {
		return "", err
	}
	if err := os.Mkdir(making, 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(making, "busybox"), program, 0o755); err != nil {
		return "", err
	}
	for applet := range strings.FieldsSeq(list.String()) {
		if applet == "busybox" || strings.Contains(applet, "/") {
			continue
		}
		if err := os.Symlink("busybox", filepath.Join(making, applet)); err != nil {
			return "", err
		}
	}
	return dir, os.Rename(making, dir)
}
