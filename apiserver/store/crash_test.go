// SPDX-License-Identifier: Apache-2.0

package store

import "testing"

const crashChildEnv = "KPLAB_STORE_CRASH"

func crashChild(string) {}

func checkWhole(t testing.TB, path string) {}
