// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	informers "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions/apiextensions/v1"
	listers "k8s.io/apiextensions-apiserver/pkg/client/listers/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/controller/apiapproval"
	"k8s.io/apiextensions-apiserver/pkg/controller/establish"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apiextensions-apiserver/pkg/controller/nonstructuralschema"
	"k8s.io/apiextensions-apiserver/pkg/controller/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

const (
	// requestTimeout is how long the storage of an old form of a definition is kept for
	// requests that are being answered, as upstream has it.
	requestTimeout = time.Minute
	// workers of each controller: definitions change seldom.
	workers = 1
)

// engine is everything behind the definitions.
type engine struct {
	cfg       Config
	factory   externalversions.SharedInformerFactory
	crds      informers.CustomResourceDefinitionInformer
	published *published
	// resources serves the custom resources.
	resources http.Handler
	synced    cache.DoneChecker

	establishing *establish.EstablishingController
	controllers  []func(context.Context)
}

func newEngine(ctx context.Context, cfg Config) (*engine, error) {
	client, err := clientset.NewForConfig(cfg.Client)
	if err != nil {
		return nil, fmt.Errorf("make a client for custom resource definitions: %w", err)
	}
	e := &engine{cfg: cfg, factory: externalversions.NewSharedInformerFactory(client, 0)}
	e.crds = e.factory.Apiextensions().V1().CustomResourceDefinitions()
	e.published = newPublished(cfg, e.crds.Lister())
	v1 := client.ApiextensionsV1()
	e.establishing = establish.NewEstablishingController(e.crds, v1)
	// The two handlers of discovery cannot be made outside of the library; their part is
	// published's. The schemas that those of custom resources refer to are in each of
	// them, so the base is empty; nil would turn off the typed merge of apply.
	handler, err := apiextensions.NewCustomResourceDefinitionHandler(nil, nil, hastyInformer{e.crds}, cfg.NotFound,
		cfg.Resources, cfg.Admission, e.establishing, cfg.Services, cfg.Dial.wrap, 1, cfg.Authorizer,
		requestTimeout, cfg.MinRequestTimeout, map[string]*spec.Schema{}, cfg.MaxRequestBytes)
	if err != nil {
		return nil, fmt.Errorf("make the handler of custom resources: %w", err)
	}
	e.resources = handler
	naming := status.NewNamingConditionController(klog.FromContext(ctx), e.crds, v1)
	schemas := nonstructuralschema.NewConditionController(e.crds, v1)
	approval := apiapproval.NewKubernetesAPIApprovalPolicyConformantConditionController(e.crds, v1)
	finalizing := finalizer.NewCRDFinalizer(e.crds, v1, handler)
	e.controllers = []func(context.Context){
		naming.RunWithContext,
		e.establishing.RunWithContext,
		func(ctx context.Context) { schemas.RunWithContext(workers, ctx) },
		func(ctx context.Context) { approval.RunWithContext(workers, ctx) },
		func(ctx context.Context) { finalizing.RunWithContext(workers, ctx) },
	}
	// The last one to subscribe, so that the others know a definition that it publishes.
	registration, err := e.crds.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { e.published.update() },
		UpdateFunc: func(any, any) { e.published.update() },
		DeleteFunc: func(any) { e.published.update() },
	})
	if err != nil {
		return nil, fmt.Errorf("watch custom resource definitions: %w", err)
	}
	e.synced = registration.HasSyncedChecker()
	return e, nil
}

// run calls synced once when all definitions that are stored are served, and returns
// when ctx has ended and every controller with it.
func (e *engine) run(ctx context.Context, synced func()) {
	e.factory.Start(ctx.Done())
	defer e.factory.Shutdown()
	select {
	case <-ctx.Done():
		return
	case <-e.synced.Done():
	}
	var running sync.WaitGroup
	for _, run := range e.controllers {
		// They look every 100 ms whether the informer has synced, which it has by now.
		running.Go(func() { run(ctx) })
	}
	e.resume()
	synced()
	<-ctx.Done()
	running.Wait()
}

// resume takes up definitions whose names were accepted when the server was stopped:
// what would establish them is the event of that, which is past.
func (e *engine) resume() {
	// The lister of an informer's cache returns no error.
	all, _ := e.crds.Lister().List(labels.Everything())
	for _, crd := range all {
		if apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.NamesAccepted) && !apihelpers.IsCRDConditionTrue(crd, apiextensionsv1.Established) {
			e.establishing.QueueCRD(crd.Name, 0)
		}
	}
}

// ServeHTTP implements http.Handler.
func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	info, ok := request.RequestInfoFrom(r.Context())
	if !ok || info.IsResourceRequest {
		e.resources.ServeHTTP(w, r)
		return
	}
	if h := e.published.handler(r.URL.Path); h != nil {
		h.ServeHTTP(w, r)
		return
	}
	e.cfg.NotFound.ServeHTTP(w, r)
}

// hastyInformer is the informer as the handler of custom resources sees it. The
// handler makes the creation of an object wait for two seconds when its definition
// was established just now, so that the other API servers of a cluster hear of the
// definition. Here is only one; it is shown definitions that were established long
// ago.
type hastyInformer struct {
	informers.CustomResourceDefinitionInformer
}

// Lister implements informers.CustomResourceDefinitionInformer.
func (i hastyInformer) Lister() listers.CustomResourceDefinitionLister {
	return hastyLister{i.CustomResourceDefinitionInformer.Lister()}
}

type hastyLister struct {
	listers.CustomResourceDefinitionLister
}

// Get implements listers.CustomResourceDefinitionLister.
func (l hastyLister) Get(name string) (*apiextensionsv1.CustomResourceDefinition, error) {
	crd, err := l.CustomResourceDefinitionLister.Get(name)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(crd.Status.Conditions, func(c apiextensionsv1.CustomResourceDefinitionCondition) bool {
		return c.Type == apiextensionsv1.Established
	})
	if i < 0 || time.Since(crd.Status.Conditions[i].LastTransitionTime.Time) > time.Minute {
		return crd, nil
	}
	long := *crd
	long.Status.Conditions = slices.Clone(crd.Status.Conditions)
	long.Status.Conditions[i].LastTransitionTime = metav1.Time{}
	return &long, nil
}
