// SPDX-License-Identifier: Apache-2.0

package nettest

// LeakCheckWithin is LeakCheck with less patience, to test it.
var LeakCheckWithin = leakCheck
