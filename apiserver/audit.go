// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"os"
	"strings"
	"time"

	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/audit/policy"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/plugin/pkg/audit/buffered"
	auditlog "k8s.io/apiserver/plugin/pkg/audit/log"
)

// defaultAuditPolicy notes who did what to which object, once for each request when it
// has been answered, but for what tells nothing of people: events, the leases by which
// components show that they live, and looks at the server's health.
const defaultAuditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  resources:
  - {group: "", resources: [events]}
  - {group: events.k8s.io, resources: [events]}
  - {group: coordination.k8s.io, resources: [leases]}
- level: None
  nonResourceURLs: ["/healthz*", "/livez*", "/readyz*", "/version"]
- level: Metadata
`

// The buffer between requests and the file. A request only puts its event into it; when
// it is full, because the disk stands still, events are dropped and counted in the
// metric apiserver_audit_error_total.
const (
	auditBuffer    = 10000
	auditBatch     = 100
	auditBatchWait = 100 * time.Millisecond
)

// Audit says where requests are recorded, and which. The zero value records none.
type Audit struct {
	// Log is the file, one event as JSON a line. It is appended to.
	Log string
	// Policy is a file of kind Policy (audit.k8s.io/v1); "" is for a policy that notes
	// the metadata of all but events, leases and looks at the server's health.
	Policy string
}

// Check says what is wrong with a without opening or making anything but the policy.
func (a Audit) Check() error {
	_, err := a.policy()
	return err
}

// policy reads the policy; nil when nothing is recorded.
func (a Audit) policy() (*auditinternal.Policy, error) {
	switch {
	case a.Log == "" && a.Policy == "":
		return nil, nil
	case a.Log == "":
		return nil, fmt.Errorf("audit policy %s without an audit log: say where to write it", a.Policy)
	case a.Policy == "":
		return policy.LoadPolicyFromBytes([]byte(defaultAuditPolicy))
	}
	text, err := os.ReadFile(a.Policy)
	if err != nil {
		return nil, fmt.Errorf("read the audit policy: %w", err)
	}
	p, err := policy.LoadPolicyFromBytes(text)
	if err != nil {
		// The library's own words end with another "from file".
		return nil, fmt.Errorf("audit policy %s: %s; it must be a Policy of audit.k8s.io/v1", a.Policy, strings.TrimSpace(err.Error()))
	}
	return p, nil
}

// open makes the server record requests, and returns the file to close at the end; nil
// when nothing is recorded.
func (a Audit) open(c *genericapiserver.Config) (*os.File, error) {
	p, err := a.policy()
	if p == nil || err != nil {
		return nil, err
	}
	// Requests hold what is nobody else's business: names, at some levels contents.
	f, err := os.OpenFile(a.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	c.AuditPolicyRuleEvaluator = policy.NewPolicyRuleEvaluator(p)
	c.AuditBackend = buffered.NewBackend(auditlog.NewBackend(f, auditlog.FormatJson, auditv1.SchemeGroupVersion), buffered.BatchConfig{
		BufferSize: auditBuffer, MaxBatchSize: auditBatch, MaxBatchWait: auditBatchWait,
	})
	return f, nil
}
