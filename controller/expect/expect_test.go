// SPDX-License-Identifier: Apache-2.0

package expect

import (
	"testing"
	"time"

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
