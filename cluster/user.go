// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"

	"k8s.io/klog/v2"
)

// sudoUser returns who called sudo, when somebody did: files that are made for
// the person belong to that user.
func sudoUser() (uid, gid int, ok bool) {
	uid, errUID := strconv.Atoi(os.Getenv("SUDO_UID"))
	gid, errGID := strconv.Atoi(os.Getenv("SUDO_GID"))
	return uid, gid, errUID == nil && errGID == nil && uid != 0
}

// redirectKlog sends what the Kubernetes libraries say to the lab's log.
func redirectKlog(w io.Writer) {
	klog.SetSlogLogger(slog.New(slog.NewTextHandler(w, nil)))
}

// needRoot says what a person without root can do.
func needRoot(command string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("making and entering network namespaces needs root: run `sudo kplab %s`", command)
}

// nameFlag returns the flag that a suggested command needs for this lab.
func nameFlag(name string) string {
	if name == DefaultName {
		return ""
	}
	return " --name " + name
}
