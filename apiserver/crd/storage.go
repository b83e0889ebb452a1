// SPDX-License-Identifier: Apache-2.0

package crd

import (
	"context"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// Endable returns a storage over s for custom resources, and the function that gives
// it up: its watches end then, as those of a watch cache would, and their clients
// come back to what has followed. It happens when a definition changes or goes.
//
// Its watches get bookmarks from time to time when they ask for them.
func Endable(s storage.Interface) (storage.Interface, func()) {
	ctx, end := context.WithCancel(context.Background())
	return endable{s, ctx}, end
}

type endable struct {
	storage.Interface
	life context.Context
}

// Watch implements storage.Interface.
func (e endable) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	opts.ProgressNotify = opts.ProgressNotify || opts.Predicate.AllowWatchBookmarks
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(e.life, cancel)
	// When the request is over, the storage need not know it any more.
	context.AfterFunc(ctx, func() { stop() })
	w, err := e.Interface.Watch(ctx, key, opts)
	if err != nil {
		cancel()
	}
	return w, err
}
