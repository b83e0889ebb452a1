// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestFullDisk: when the database cannot grow, writes fail with a text that
// says what to do, reads go on, and with space again writes do.
func TestFullDisk(t *testing.T) {
	s := startServer(t, "")
	ctx := t.Context()
	makeNamespace(t, s, "default")
	info, err := os.Stat(filepath.Join(s.dir, DatabaseFile))
	if err != nil {
		t.Fatal(err)
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	limited := before
	limited.Cur = uint64(info.Size()) + 1<<16
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limited); err != nil {
		t.Fatal(err)
	}
	free := func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
			t.Error(err)
		}
	}
	defer free()
	maps := s.client.CoreV1().ConfigMaps("default")
	big := func(name string) error {
		_, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"k": strings.Repeat("x", 900_000)}}, metav1.CreateOptions{})
		return err
	}
	for i := 0; err == nil && i < 20; i++ {
		err = big(strings.Repeat("a", i+1))
	}
	wantError(t, "write to a full disk", err, apierrors.IsInternalError, "no space left", "free some space")
	if _, err := s.client.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
		t.Errorf("read while the disk is full: %v", err)
	}
	free()
	if err := big("after"); err != nil {
		t.Errorf("write with space again: %v", err)
	}
}
