// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// Recorders writes the events of all components of a process to the API.
type Recorders struct{ broadcaster record.EventBroadcaster }

// NewRecorders starts writing events through client. It ends with Close, or when
// ctx does.
func NewRecorders(ctx context.Context, client kubernetes.Interface) *Recorders {
	b := record.NewBroadcaster(record.WithContext(ctx))
	b.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	return &Recorders{broadcaster: b}
}

// For returns a recorder whose events are from component. It fits Deps.Recorder.
func (r *Recorders) For(component string) record.EventRecorder {
	return r.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component})
}

// Close stops writing. Events that were not written yet are dropped.
func (r *Recorders) Close() { r.broadcaster.Shutdown() }
