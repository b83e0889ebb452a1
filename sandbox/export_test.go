// SPDX-License-Identifier: Apache-2.0

package sandbox

// PreparePod writes a pod's settings in the current namespace.
var PreparePod = preparePod

// Waiting returns the pid of the role that was started ahead, or 0.
func (r *Runtime) Waiting(role string) int {
	r.roles.mu.Lock()
	defer r.roles.mu.Unlock()
	if p := r.roles.ready[role]; p != nil {
		return p.Pid
	}
	return 0
}

// Cgroups returns the cgroups that keep a process to its limits.
func (p *Process) Cgroups() []string { return p.cgroups }
