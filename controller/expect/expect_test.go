// SPDX-License-Identifier: Apache-2.0

package expect

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
)

func TestExpectations(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	e := New(clock)
	if !e.Satisfied("a") {
		t.Fatal("nothing was expected")
	}
	e.Creations("a", 2)
	e.Deletions("a", "x", "y")
	e.Created("a", 1)
	e.Deleted("a", "x")
	e.Deleted("a", "x") // seen twice: counts once
	e.Deleted("a", "unknown")
	e.Created("b", 1)
	if e.Satisfied("a") || !e.Satisfied("b") {
		t.Fatal("too early")
	}
	e.Created("a", 1)
	if e.Satisfied("a") {
		t.Fatal("y is still to go")
	}
	e.Deleted("a", "y")
	e.Created("a", 1) // one more than announced
	if !e.Satisfied("a") {
		t.Fatal("all has come")
	}
	e.Creations("a", 1)
	clock.SetTime(clock.Now().Add(lifetime + time.Second))
	if !e.Satisfied("a") {
		t.Fatal("waits for ever")
	}
	e.Creations("a", 1)
	if e.Satisfied("a") {
		t.Fatal("a new announcement counts from now")
	}
	e.Forget("a")
	if !e.Satisfied("a") {
		t.Fatal("forgotten")
	}
}

func TestVersions(t *testing.T) {
	object := func(uid types.UID, version string) *metav1.ObjectMeta {
		return &metav1.ObjectMeta{UID: uid, ResourceVersion: version}
	}
	v := NewVersions()
	if !v.Current(object("a", "1")) {
		t.Fatal("nothing was written")
	}
	v.Wrote(object("a", "10"))
	for version, want := range map[string]bool{"9": false, "10": true, "11": true, "100": true} {
		if got := v.Current(object("a", version)); got != want {
			t.Errorf("version %s after 10 was written: %v", version, got)
		}
	}
	if !v.Current(object("b", "1")) {
		t.Error("another object is held up")
	}
	if v.Forget("a"); !v.Current(object("a", "9")) {
		t.Error("not forgotten")
	}
}
