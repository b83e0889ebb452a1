// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"runtime"
	"runtime/debug"
)

// version is kplab's own, set at link time from the repository's newest tag or
// commit.
var version = "unknown"

// kubernetesModule is the module whose version says which Kubernetes we speak.
const kubernetesModule = "k8s.io/apiserver"

// VersionInfo is the answer of `kplab version`.
type VersionInfo struct {
	Kplab      string `json:"kplab"`
	Kubernetes string `json:"kubernetes"`
	Go         string `json:"go"`
}

// Versions returns what this program was built from.
func Versions() VersionInfo {
	v := VersionInfo{Kplab: version, Go: runtime.Version(), Kubernetes: "unknown"}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == kubernetesModule {
				// v0.37.2 of the libraries belongs to v1.37.2 of Kubernetes.
				v.Kubernetes = "v1" + m.Version[len("v0"):]
			}
		}
	}
	return v
}
