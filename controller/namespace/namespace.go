// SPDX-License-Identifier: Apache-2.0

// Package namespace makes the namespaces that every cluster has, puts into each
// namespace what clients count on (the ServiceAccount "default" and the ConfigMap
// with the API's certificate authority), and empties a namespace that is being
// deleted before it lets it go.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"

	"github.com/kplab/kplab/controller/loop"
	"github.com/kplab/kplab/internal/settle"
)

const (
	workers = 4
	// accountName is the ServiceAccount of pods that name none.
	accountName = "default"
	// caName is the ConfigMap that pods mount to trust the API; caKey its one entry.
	caName = "kube-root-ca.crt"
	caKey  = "ca.crt"
	// recheck is when a namespace that could not be emptied is looked at again even
	// if no event says that something went. Only kinds that no informer watches need
	// it.
	recheck = 5 * time.Second
)

// system are the namespaces that always exist.
func system() []string {
	return []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease}
}

// Controller is the namespace controller.
type Controller struct {
	loop       *loop.Loop[loop.Key]
	client     kubernetes.Interface
	metadata   metadata.Interface
	clock      clock.PassiveClock
	caCert     string
	namespaces corelisters.NamespaceLister
	accounts   corelisters.ServiceAccountLister
	configMaps corelisters.ConfigMapLister
	setupErr   error
}

// New makes the controller and subscribes it to namespaces and to all that may live
// in one.
func New(d loop.Deps) *Controller {
	d = d.WithDefaults()
	core := d.Informers.Core().V1()
	c := &Controller{
		client:     d.Client,
		metadata:   d.Metadata,
		clock:      d.Clock,
		caCert:     string(d.Config.CACert),
		namespaces: core.Namespaces().Lister(),
		accounts:   core.ServiceAccounts().Lister(),
		configMaps: core.ConfigMaps().Lister(),
	}
	c.loop = loop.New(loop.Options[loop.Key]{Name: "namespace", Workers: workers, Sync: c.sync, Deps: d})
	loop.Watch(c.loop, "namespaces", core.Namespaces().Informer(), func(old, cur *corev1.Namespace) {
		if cur == nil {
			cur = old
		}
		c.loop.Add(loop.KeyOf(cur))
	})
	for _, kind := range loop.Kinds() {
		if !kind.Namespaced {
			continue
		}
		informer, err := d.Informers.ForResource(kind.GroupVersionResource)
		if err != nil {
			c.setupErr = errors.Join(c.setupErr, fmt.Errorf("watch %s: %w", kind.Resource, err))
			continue
		}
		loop.Watch(c.loop, kind.Resource, informer.Informer(), func(old, cur metav1.Object) { c.onContent(kind, old, cur) })
	}
	return c
}

// Name returns the controller's name.
func (c *Controller) Name() string { return c.loop.Name() }

// Witness tells how far the controller has come.
func (c *Controller) Witness() *settle.Witness { return c.loop.Witness() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	if c.setupErr != nil {
		return c.setupErr
	}
	for _, name := range system() {
		c.loop.Add(loop.Key{Name: name})
	}
	return c.loop.Run(ctx)
}

// onContent looks at a namespace when one of the objects kept in it changed or went,
// or when something went from a namespace that is being emptied.
func (c *Controller) onContent(kind loop.Kind, old, cur metav1.Object) {
	obj := cur
	if obj == nil {
		obj = old
	}
	kept := (kind.Kind == "ServiceAccount" && obj.GetName() == accountName) || (kind.Kind == "ConfigMap" && obj.GetName() == caName)
	if !kept || old == nil {
		if cur != nil {
			return
		}
		ns, err := c.namespaces.Get(obj.GetNamespace())
		if err != nil || ns.DeletionTimestamp == nil {
			return
		}
	}
	c.loop.Add(loop.Key{Name: obj.GetNamespace()})
}

// sync makes one namespace true.
func (c *Controller) sync(ctx context.Context, key loop.Key) error {
	ns, err := c.namespaces.Get(key.Name)
	switch {
	case apierrors.IsNotFound(err):
		for _, name := range system() {
			if name == key.Name {
				return c.make(ctx, name)
			}
		}
		return nil
	case err != nil:
		return err
	case ns.DeletionTimestamp != nil:
		return c.empty(ctx, ns)
	}
	return errors.Join(c.keepAccount(ctx, ns.Name), c.keepCA(ctx, ns.Name))
}

func (c *Controller) make(ctx context.Context, name string) error {
	_, err := c.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

// keepAccount makes the default ServiceAccount unless it is there.
func (c *Controller) keepAccount(ctx context.Context, namespace string) error {
	_, err := c.accounts.ServiceAccounts(namespace).Get(accountName)
	if !apierrors.IsNotFound(err) {
		return err
	}
	_, err = c.client.CoreV1().ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Name: accountName, Namespace: namespace},
	}, metav1.CreateOptions{})
	return ignoreRaces(err, "create service account "+accountName)
}

// keepCA makes the ConfigMap with the certificate authority, or puts its content
// right.
func (c *Controller) keepCA(ctx context.Context, namespace string) error {
	if c.caCert == "" {
		return nil
	}
	data := map[string]string{caKey: c.caCert}
	stored, err := c.configMaps.ConfigMaps(namespace).Get(caName)
	switch {
	case apierrors.IsNotFound(err):
		_, err = c.client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: caName, Namespace: namespace, Annotations: map[string]string{
				"kubernetes.io/description": "The certificate authority that signs the API server's certificate. It says nothing about other servers.",
			}},
			Data: data,
		}, metav1.CreateOptions{})
		return ignoreRaces(err, "create config map "+caName)
	case err != nil:
		return err
	case len(stored.Data) == 1 && stored.Data[caKey] == c.caCert && len(stored.BinaryData) == 0:
		return nil
	}
	update := stored.DeepCopy()
	update.Data, update.BinaryData = data, nil
	_, err = c.client.CoreV1().ConfigMaps(namespace).Update(ctx, update, metav1.UpdateOptions{})
	return ignoreRaces(err, "update config map "+caName)
}

// ignoreRaces drops the errors that mean that somebody was faster, or that the
// namespace is about to go. An event brings the loop back if there is still
// something to do.
func ignoreRaces(err error, what string) error {
	if err == nil || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}
