// SPDX-License-Identifier: Apache-2.0

package sandbox

// PreparePod writes a pod's settings in the current namespace.
var PreparePod = preparePod
