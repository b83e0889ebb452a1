// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// cpu is the processor time that this process has used.
func cpu(tb testing.TB) time.Duration {
	tb.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkStart measures New until ready and the first write, on an empty
// state, with the processor time of the whole process.
func BenchmarkStart(b *testing.B) {
	used := cpu(b)
	for b.Loop() {
		s := startServer(b, "")
		if _, err := s.client.CoreV1().Namespaces().Create(b.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		s.stop()
		b.StartTimer()
	}
	b.ReportMetric(float64((cpu(b)-used).Milliseconds())/float64(b.N), "cpu-ms/op")
}

// BenchmarkOpenAPI measures the first request for the OpenAPI documents of a
// server, which builds them.
func BenchmarkOpenAPI(b *testing.B) {
	used := cpu(b)
	n := 0
	for b.Loop() {
		b.StopTimer()
		s := startServer(b, "")
		b.StartTimer()
		for _, path := range []string{"/openapi/v3", "/openapi/v3/api/v1"} {
			body, err := s.client.CoreV1().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").DoRaw(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			n = len(body)
		}
		b.StopTimer()
		s.stop()
		b.StartTimer()
	}
	b.ReportMetric(float64(n), "bytes")
	b.ReportMetric(float64((cpu(b)-used).Milliseconds())/float64(b.N), "cpu-ms/op")
}

// BenchmarkPods measures creating a pod and binding it.
func BenchmarkPods(b *testing.B) {
	s := startServer(b, "")
	makeNamespace(b, s, "default")
	pods := s.client.CoreV1().Pods("default")
	for b.Loop() {
		p := testPod("")
		p.GenerateName = "p-"
		p, err := pods.Create(b.Context(), p, metav1.CreateOptions{})
		if err != nil {
			b.Fatal(err)
		}
		if err := pods.Bind(b.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name, UID: p.UID}, Target: corev1.ObjectReference{Name: "node1"}}, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}
