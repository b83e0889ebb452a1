// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/yaml"
)

// workloadCase is what one kind is asked in [TestWorkloadKinds]. All objects are called x.
type workloadCase struct {
	kind     Kind
	manifest string
	// stored are lines of the object's YAML after it was created.
	stored []string
	// columns are the columns that are always shown, row is all of a new
	// object's cells.
	columns, row string
	// refused are fragments of a manifest, put over the good one, and the error.
	refused []rejection
	// changes are fragments for an update; want "" is a change that is allowed.
	changes []rejection
	// status is a fragment that /status stores, rejected ones that it refuses.
	status   string
	rejected []rejection
}

type rejection struct{ over, want string }

// over puts a fragment of YAML over an object: what it names is replaced.
func over(t *testing.T, obj runtime.Object, fragment string) runtime.Object {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(fragment), obj); err != nil {
		t.Fatalf("%v in:\n%s", err, fragment)
	}
	return obj
}

// TestWorkloadKinds asks of every workload kind what is the same in all: it is created
// with its defaults, listed as a table, updated, has a status of its own, and
// refuses what is wrong with upstream's words.
func TestWorkloadKinds(t *testing.T) {
	for _, tc := range workloadCases() {
		t.Run(tc.kind.Kind, func(t *testing.T) { testWorkload(t, tc) })
	}
}

func testWorkload(t *testing.T, tc workloadCase) {
	b := newBench(t, Deps{}, tc.kind)
	resource := tc.kind.Resource
	for _, r := range tc.refused {
		// Defaulted as a client's object would be: the fragment first.
		obj := over(t, b.storages[resource].New(), tc.manifest)
		b.scheme.Default(over(t, obj, r.over))
		_, err := b.create(resource, obj, false)
		wantError(t, err, r.want)
	}
	made, err := b.create(resource, b.parse(resource, tc.manifest), false)
	if err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(made)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range tc.stored {
		if !strings.Contains(string(text), line) {
			t.Errorf("stored without %q:\n%s", line, text)
		}
	}
	testWorkloadTable(t, b, tc)
	generation := accessor(t, made).GetGeneration()
	if tc.kind.TracksGeneration && generation != 1 {
		t.Errorf("generation %d", generation)
	}
	for _, c := range tc.changes {
		_, err := b.patch(resource, "x", func(obj runtime.Object) { over(t, obj, c.over) })
		switch {
		case c.want != "":
			wantError(t, err, c.want)
		case err != nil:
			t.Errorf("%s: %v", c.over, err)
		}
	}
	if tc.kind.Status != nil {
		testWorkloadStatus(t, b, tc)
	}
	b.remove(resource, "x")
}

func testWorkloadTable(t *testing.T, b *bench, tc workloadCase) {
	t.Helper()
	list, err := b.storages[tc.kind.Resource].(rest.Lister).List(b.ctx(), nil)
	if err != nil {
		t.Fatal(err)
	}
	table, err := b.storages[tc.kind.Resource].(rest.TableConvertor).ConvertToTable(b.ctx(), list, nil)
	if err != nil || len(table.Rows) != 1 {
		t.Fatalf("%v, %d rows", err, len(table.Rows))
	}
	var shown []string
	for _, c := range table.ColumnDefinitions {
		if c.Priority == 0 {
			shown = append(shown, c.Name)
		}
	}
	if got := strings.Join(shown, ", "); got != tc.columns {
		t.Errorf("columns\n%s\nwant\n%s", got, tc.columns)
	}
	uid := string(accessor(t, table.Rows[0].Object.Object).GetUID())
	cells := table.Rows[0].Cells
	if len(cells) != len(table.ColumnDefinitions) {
		t.Fatalf("%d cells for %d columns", len(cells), len(table.ColumnDefinitions))
	}
	var row []string
	for i, c := range table.ColumnDefinitions {
		cell := strings.ReplaceAll(fmt.Sprint(cells[i]), uid, "UID")
		if c.Name == "Age" || c.Name == "Created At" {
			cell = c.Name
		}
		row = append(row, cell)
	}
	if got := strings.Join(row, "|"); got != tc.row {
		t.Errorf("row\n%s\nwant\n%s", got, tc.row)
	}
}

func testWorkloadStatus(t *testing.T, b *bench, tc workloadCase) {
	t.Helper()
	path := tc.kind.Resource + "/status"
	for _, r := range tc.rejected {
		_, err := b.put(path, over(t, b.get(tc.kind.Resource, "x").DeepCopyObject(), r.over))
		wantError(t, err, r.want)
	}
	before := b.get(tc.kind.Resource, "x")
	out, err := b.put(path, over(t, before.DeepCopyObject(), tc.status))
	if err != nil {
		t.Fatal(err)
	}
	if accessor(t, out).GetGeneration() != accessor(t, before).GetGeneration() {
		t.Error("the generation counts a change of status")
	}
	kept := func(obj runtime.Object) string {
		want := over(t, obj.DeepCopyObject(), tc.status)
		a, errA := yaml.Marshal(obj)
		b, errB := yaml.Marshal(want)
		if errA != nil || errB != nil {
			t.Fatal(errA, errB)
		}
		if string(a) != string(b) {
			return string(a)
		}
		return ""
	}
	if got := kept(out); got != "" {
		t.Errorf("status is not stored:\n%s", got)
	}
	// The main resource keeps it, whatever the writer says.
	changed := out.DeepCopyObject()
	accessor(t, changed).SetLabels(map[string]string{"changed": "yes"})
	clearField(changed, "Status")
	if out, err = b.put(tc.kind.Resource, changed); err != nil {
		t.Fatal(err)
	}
	if got := kept(out); got != "" {
		t.Errorf("an update of the object took its status:\n%s", got)
	}
}

func accessor(t *testing.T, obj runtime.Object) metav1.Object {
	t.Helper()
	m, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestControllerRevisionNeedsData(t *testing.T) {
	b := newBench(t, Deps{}, controllerRevisionKind())
	_, err := b.create("controllerrevisions", b.parse("controllerrevisions", "metadata: {name: x, namespace: default}"), false)
	wantError(t, err, "data: Required value: data is mandatory")
}
