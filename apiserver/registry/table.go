// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
)

var (
	nameColumn = metav1.TableColumnDefinition{Name: "Name", Type: "string", Format: "name", Description: "Name is unique within a namespace."}
	ageColumn  = metav1.TableColumnDefinition{Name: "Age", Type: "string", Description: "Time since the object was created."}
)

// column describes a column that is always shown.
func column(name, typ, description string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: typ, Description: description}
}

// wideColumn describes a column of text that only the wide output shows.
func wideColumn(name, description string) metav1.TableColumnDefinition {
	return metav1.TableColumnDefinition{Name: name, Type: "string", Description: description, Priority: 1}
}

// age renders the time since t as kubectl shows ages.
func age(t metav1.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// tableConvertor renders objects and lists of one kind as tables.
type tableConvertor struct {
	columns []metav1.TableColumnDefinition
	row     func(obj runtime.Object) ([]any, []metav1.TableRowCondition)
}

func newTableConvertor(k Kind) tableConvertor {
	if k.Row == nil {
		return tableConvertor{
			columns: []metav1.TableColumnDefinition{nameColumn, ageColumn},
			row: func(obj runtime.Object) ([]any, []metav1.TableRowCondition) {
				m, err := meta.Accessor(obj)
				if err != nil {
					return []any{"", "<unknown>"}, nil
				}
				return []any{m.GetName(), age(m.GetCreationTimestamp())}, nil
			},
		}
	}
	return tableConvertor{columns: k.Columns, row: k.Row}
}

// ConvertToTable implements rest.TableConvertor.
func (c tableConvertor) ConvertToTable(_ context.Context, object, tableOptions runtime.Object) (*metav1.Table, error) {
	table := &metav1.Table{Rows: []metav1.TableRow{}}
	if opt, ok := tableOptions.(*metav1.TableOptions); !ok || !opt.NoHeaders {
		table.ColumnDefinitions = c.columns
	}
	add := func(obj runtime.Object) error {
		cells, conditions := c.row(obj)
		table.Rows = append(table.Rows, metav1.TableRow{Cells: cells, Conditions: conditions, Object: runtime.RawExtension{Object: obj}})
		return nil
	}
	if meta.IsListType(object) {
		list, err := meta.ListAccessor(object)
		if err != nil {
			return nil, err
		}
		table.ResourceVersion = list.GetResourceVersion()
		table.Continue = list.GetContinue()
		table.RemainingItemCount = list.GetRemainingItemCount()
		return table, meta.EachListItem(object, add)
	}
	m, err := meta.CommonAccessor(object)
	if err != nil {
		return nil, err
	}
	table.ResourceVersion = m.GetResourceVersion()
	return table, add(object)
}
