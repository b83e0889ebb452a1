// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/pager"
	"sigs.k8s.io/yaml"

	"github.com/kplab/kplab/apiserver/store"
)

// ExportOptions choose what ExportState takes.
type ExportOptions struct {
	// All takes every object as the API shows it, with status and what the
	// server set. Without it only what people made is taken, without that.
	All bool
}

// Export is the objects of a lab at one revision, in the order in which another
// lab can take them.
type Export struct {
	Lab      string
	Revision string
	Objects  []*unstructured.Unstructured
	// Notices are what the person should know, one sentence each.
	Notices []string
}

func (e *Export) notice(format string, args ...any) {
	e.Notices = append(e.Notices, fmt.Sprintf(format, args...))
}

// ExportState reads the objects of a lab: through its API when it runs, from its
// file when it does not.
func ExportState(ctx context.Context, name string, opts ExportOptions) (_ *Export, err error) {
	var e *Export
	paths, held, err := holdState(ctx, name)
	switch {
	case errors.Is(err, ErrRunning):
		cfg, err := adminConfig(name)
		if err != nil {
			return nil, err
		}
		if e, err = exportAPI(ctx, cfg); err != nil {
			return nil, fmt.Errorf("lab %q: export its objects: %w", name, err)
		}
	case err != nil:
		return nil, err
	default:
		defer func() { err = errors.Join(err, held.release()) }()
		if e, err = exportFile(paths.Database()); err != nil {
			return nil, noState(name, paths, err)
		}
		e.notice("lab %q does not run: read from %s", name, paths.Database())
	}
	e.Lab = name
	e.finish(opts)
	return e, nil
}

// adminConfig is how the administrator's clients find a running lab.
func adminConfig(name string) (*rest.Config, error) {
	if _, err := Connect(name); err != nil {
		return nil, err
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", PathsOf(name).Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("lab %q: read its kubeconfig: %w", name, err)
	}
	cfg.QPS = -1 // the lab is ours alone
	cfg.WarningHandler = rest.NoWarnings{}
	return cfg, nil
}

// exportAPI lists every kind that can be listed, all at the revision of the
// first list.
func exportAPI(ctx context.Context, cfg *rest.Config) (*Export, error) {
	disco, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return nil, err
	}
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	e := &Export{}
	lists, err := disco.ServerPreferredResources()
	if discovery.IsGroupDiscoveryFailedError(err) {
		e.notice("some API groups do not answer, their objects are missing: %v", err)
	} else if err != nil {
		return nil, fmt.Errorf("ask the API for its kinds: %w", err)
	}
	seen := map[types.UID]bool{}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, fmt.Errorf("group version %q of the API: %w", list.GroupVersion, err)
		}
		for _, r := range list.APIResources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "create") {
				continue
			}
			if err := e.list(ctx, client.Resource(gv.WithResource(r.Name)), seen); err != nil {
				return nil, fmt.Errorf("list %s: %w", gv.WithResource(r.Name).GroupResource(), err)
			}
		}
	}
	return e, nil
}

// list adds the objects of one resource. What is served in two API groups is
// taken once.
func (e *Export) list(ctx context.Context, client dynamic.ResourceInterface, seen map[types.UID]bool) error {
	// A page names its revision in the token; only the first asks for one.
	p := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		opts.ResourceVersion, opts.ResourceVersionMatch = "", ""
		if e.Revision != "" && opts.Continue == "" {
			opts.ResourceVersion, opts.ResourceVersionMatch = e.Revision, metav1.ResourceVersionMatchExact
		}
		list, err := client.List(ctx, opts)
		if apierrors.IsMethodNotSupported(err) || apierrors.IsNotFound(err) {
			return &unstructured.UnstructuredList{}, nil // not a kind that is stored
		}
		if err == nil && e.Revision == "" {
			e.Revision = list.GetResourceVersion()
		}
		return list, err
	})
	return p.EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
		u, ok := obj.(*unstructured.Unstructured)
		if ok && !seen[u.GetUID()] {
			seen[u.GetUID()] = true
			e.Objects = append(e.Objects, u)
		}
		return nil
	})
}

// exportFile reads the objects of a stopped lab. One that cannot be read is left
// out, with a notice: saving the others is what this is for.
func exportFile(path string) (*Export, error) {
	decoder, err := newStateDecoder()
	if err != nil {
		return nil, err
	}
	e := &Export{}
	found, err := store.Inspect(path, func(o store.Object) error {
		u, err := decoder.decode(o)
		if err == nil {
			e.Objects = append(e.Objects, u)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, p := range found.Problems {
		e.notice("damaged: %s", p)
	}
	e.Revision = fmt.Sprint(found.Revision)
	return e, nil
}

// finish leaves out, cleans and sorts.
func (e *Export) finish(opts ExportOptions) {
	if !opts.All {
		e.Objects = slices.DeleteFunc(e.Objects, e.leaveOut)
		for _, u := range e.Objects {
			e.clean(u)
		}
	}
	slices.SortStableFunc(e.Objects, compareForImport)
	secrets := 0
	for _, u := range e.Objects {
		if isKind(u, "", "Secret") {
			secrets++
		}
	}
	if secrets > 0 {
		e.notice("Secrets are in it (%d), in the clear: keep it to yourself", secrets)
	}
}

// leaveOut says whether an object is not part of what people made.
func (e *Export) leaveOut(u *unstructured.Unstructured) bool {
	switch {
	case u.GetDeletionTimestamp() != nil:
		e.notice("%s is being deleted: left out", objectName(u))
		return true
	case isKind(u, "", "Node") && !madeByLab(u):
		e.notice("%s is the lab's own: what people changed on it (labels, taints) is left out", objectName(u))
	}
	return derived(u)
}

// clean drops what the server and the lab's controllers set.
func (e *Export) clean(u *unstructured.Unstructured) {
	if len(u.GetOwnerReferences()) > 0 {
		e.notice("%s has owners, whose UIDs are another lab's: left out", objectName(u))
	}
	if isKind(u, "", "Secret") && secretType(u) == "kubernetes.io/service-account-token" {
		e.notice("%s is a service account's token, which only this lab honours: its data is left out", objectName(u))
	}
	cleanObject(u)
}

// WriteYAML writes the objects as YAML documents, with one line of comment
// before the first.
func (e *Export) WriteYAML(w io.Writer) error {
	if _, err := fmt.Fprintf(w, "# %d objects of lab %q at revision %s\n", len(e.Objects), e.Lab, e.Revision); err != nil {
		return err
	}
	for _, u := range e.Objects {
		data, err := yaml.Marshal(u.Object)
		if err != nil {
			return fmt.Errorf("encode %s: %w", objectName(u), err)
		}
		if _, err := fmt.Fprintf(w, "---\n%s", data); err != nil {
			return err
		}
	}
	return nil
}

// WriteFile writes the objects into a file that only the person can read, or
// into what is there instead of a file, a pipe for instance.
func (e *Export) WriteFile(path string) error {
	var b strings.Builder
	if err := e.WriteYAML(&b); err != nil {
		return err
	}
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return os.WriteFile(path, []byte(b.String()), 0)
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := writeFile(path, []byte(b.String()), 0o600); err != nil {
		return err
	}
	if uid, gid, ok := sudoUser(); ok {
		return os.Chown(path, uid, gid)
	}
	return nil
}
