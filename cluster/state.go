// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/kplab/kplab/apiserver/registry"
	"github.com/kplab/kplab/apiserver/store"
)

// ErrNoState says that a lab has no kept state.
var ErrNoState = errors.New("the lab has no state")

// holdState takes the lab's lock, so that no daemon begins while its file is
// read or written here. The error is ErrRunning, wrapped, when the lab runs.
func holdState(ctx context.Context, name string) (Paths, *lock, error) {
	paths := PathsOf(name)
	if err := ValidateName(name); err != nil {
		return paths, nil, err
	}
	if d, running := readDaemon(paths.Daemon()); running {
		return paths, nil, fmt.Errorf("lab %q: %w, and its daemon (pid %d) holds the file: end it with `kplab down%s`, which keeps the state", name, ErrRunning, d.PID, nameFlag(name))
	}
	held, err := acquireFromDying(ctx, paths.Lock)
	if errors.Is(err, ErrRunning) {
		err = fmt.Errorf("another kplab is starting or ending it right now; try again: %w", err)
	}
	if err != nil {
		return paths, nil, fmt.Errorf("lab %q: %w", name, err)
	}
	return paths, held, nil
}

// noState words the error of a file that is not there.
func noState(name string, paths Paths, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("lab %q: %w in %s; `kplab up%s` makes it", name, ErrNoState, paths.State, nameFlag(name))
	}
	return fmt.Errorf("lab %q: %w", name, err)
}

// Compaction is what CompactState did, in bytes of the file.
type Compaction struct {
	File   string `json:"file"`
	Before int64  `json:"before"`
	After  int64  `json:"after"`
}

// CompactState makes the file of a stopped lab as small as what is in it. Nothing
// that can be seen through the API changes: not the objects, not their
// resource versions, not how far back a watch can go.
func CompactState(ctx context.Context, name string) (_ Compaction, err error) {
	paths, held, err := holdState(ctx, name)
	if err != nil {
		return Compaction{}, err
	}
	defer func() { err = errors.Join(err, held.release()) }()
	c := Compaction{File: paths.Database()}
	before, after, err := store.Rewrite(c.File)
	if err != nil {
		return c, noState(name, paths, err)
	}
	c.Before, c.After = before.Size, after.Size
	return c, nil
}

// stateDecoder reads objects as they lie in the file.
type stateDecoder struct{ runtime.Decoder }

func newStateDecoder() (stateDecoder, error) {
	scheme, err := registry.NewScheme(registry.Kinds())
	if err != nil {
		return stateDecoder{}, err
	}
	return stateDecoder{serializer.NewCodecFactory(scheme).UniversalDeserializer()}, nil
}

// decode reads one object and checks that it lies where its name says. Kinds that
// the scheme does not know are stored as JSON.
func (d stateDecoder) decode(o store.Object) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	obj, gvk, err := d.Decode(o.Value, nil, nil)
	switch {
	case runtime.IsNotRegisteredError(err):
		err = u.UnmarshalJSON(o.Value)
	case err == nil:
		if u.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(obj); err == nil {
			u.SetGroupVersionKind(*gvk)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("cannot be decoded: %w", err)
	}
	m, err := meta.Accessor(u)
	if err != nil {
		return nil, err
	}
	place := m.GetName()
	if m.GetNamespace() != "" {
		place = m.GetNamespace() + "/" + place
	}
	if place == "" || !strings.HasSuffix(o.Key, "/"+place) {
		return nil, fmt.Errorf("is called %q, which is not its place", place)
	}
	u.SetResourceVersion(fmt.Sprint(o.Revision))
	return u, nil
}
