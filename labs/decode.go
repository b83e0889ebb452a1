// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// BrokenError says that a lab itself is at fault and not who does it.
type BrokenError struct{ Err error }

func (e *BrokenError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *BrokenError) Unwrap() error { return e.Err }

func broken(format string, args ...any) error {
	return &BrokenError{Err: fmt.Errorf(format, args...)}
}

// nodeDecoder is a type with a YAML form of its own.
type nodeDecoder interface {
	decode(d *decoder, n *yaml.Node)
}

// decoder reads YAML into structs whose fields carry a yaml tag. It takes no key
// that it does not know, and collects every fault with its line.
type decoder struct {
	file   string
	faults []string
}

func (d *decoder) fault(n *yaml.Node, format string, args ...any) {
	d.faults = append(d.faults, fmt.Sprintf("%s:%d: %s", d.file, n.Line, fmt.Sprintf(format, args...)))
}

// err returns all faults as one error, or nil.
func (d *decoder) err() error {
	if len(d.faults) == 0 {
		return nil
	}
	return broken("%s", strings.Join(d.faults, "\n"))
}

// document decodes a whole file.
func (d *decoder) document(data []byte, out any) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		text := strings.TrimPrefix(err.Error(), "yaml: ")
		if line, rest, ok := strings.Cut(strings.TrimPrefix(text, "line "), ": "); ok && line != "" && strings.Trim(line, "0123456789") == "" {
			text = line + ": " + rest
		} else {
			text = "1: " + text
		}
		if strings.Contains(string(data), ": {{") {
			text += " (a value that begins with {{ has to stand in quotes)"
		}
		d.faults = append(d.faults, d.file+":"+text)
		return
	}
	if len(doc.Content) == 0 {
		d.faults = append(d.faults, d.file+":1: the file is empty")
		return
	}
	d.value(doc.Content[0], reflect.ValueOf(out).Elem())
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	default:
		return fmt.Sprintf("%q", n.Value)
	}
}

// value decodes one node into v.
func (d *decoder) value(n *yaml.Node, v reflect.Value) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind == yaml.MappingNode && len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode {
		d.fault(n, "a value that begins with {{ has to stand in quotes")
		return
	}
	if v.CanAddr() {
		if own, ok := v.Addr().Interface().(nodeDecoder); ok {
			own.decode(d, n)
			return
		}
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(n, v.Elem())
	case reflect.Struct:
		d.structure(n, v)
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			d.fault(n, "want a list, found %s", kindName(n))
			return
		}
		for _, item := range n.Content {
			e := reflect.New(v.Type().Elem()).Elem()
			d.value(item, e)
			v.Set(reflect.Append(v, e))
		}
	case reflect.String:
		if n.Kind != yaml.ScalarNode {
			d.fault(n, "want a text, found %s", kindName(n))
			return
		}
		v.SetString(n.Value)
	case reflect.Bool:
		if n.Kind != yaml.ScalarNode || n.Value != "true" && n.Value != "false" {
			d.fault(n, "want true or false, found %s", kindName(n))
			return
		}
		v.SetBool(n.Value == "true")
	case reflect.Int:
		i := 0
		if _, err := fmt.Sscanf(n.Value, "%d", &i); err != nil || fmt.Sprint(i) != n.Value {
			d.fault(n, "want a number, found %s", kindName(n))
			return
		}
		v.SetInt(int64(i))
	default:
		panic("labs: no YAML form for " + v.Type().String())
	}
}

// structure decodes a mapping; a field named Line gets the line it begins at.
func (d *decoder) structure(n *yaml.Node, v reflect.Value) {
	if n.Kind != yaml.MappingNode {
		d.fault(n, "want a mapping, found %s", kindName(n))
		return
	}
	t := v.Type()
	var known []string
	index := map[string]int{}
	for i := range t.NumField() {
		if key := t.Field(i).Tag.Get("yaml"); key != "" {
			known = append(known, key)
			index[key] = i
		}
	}
	if f := v.FieldByName("Line"); f.IsValid() {
		f.SetInt(int64(n.Line))
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		field, ok := index[key.Value]
		switch {
		case !ok:
			d.fault(key, "unknown key %q%s", key.Value, didYouMean(key.Value, known))
		case seen[key.Value]:
			d.fault(key, "key %q stands here twice", key.Value)
		default:
			d.value(n.Content[i+1], v.Field(field))
		}
		seen[key.Value] = true
	}
}

// didYouMean names the known word nearest to what was written, or else all of them.
func didYouMean(word string, known []string) string {
	best, distance := "", 3
	for _, k := range known {
		if n := editDistance(word, k); n < distance || len(word) > 3 && strings.HasPrefix(k, word) && n < 6 && best == "" {
			best, distance = k, n
		}
	}
	if best != "" {
		return fmt.Sprintf(": did you mean %q?", best)
	}
	return "; want one of " + strings.Join(known, ", ")
}

// editDistance counts the letters to insert, delete or replace.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		left := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			left, row[j+1] = row[j+1], min(left+cost, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}

// Text is a sentence in the languages of the labs. In YAML it is a plain text,
// which is every language's, or {en: …, zh: …}.
type Text struct {
	EN, ZH string
}

func (t *Text) decode(d *decoder, n *yaml.Node) {
	switch n.Kind {
	case yaml.ScalarNode:
		t.EN = n.Value
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			key, value := n.Content[i], n.Content[i+1]
			to := map[string]*string{"en": &t.EN, "zh": &t.ZH}[key.Value]
			if to == nil {
				d.fault(key, "unknown language %q%s", key.Value, didYouMean(key.Value, []string{"en", "zh"}))
				continue
			}
			d.value(value, reflect.ValueOf(to).Elem())
		}
		if t.EN == "" {
			d.fault(n, "a text needs en")
		}
	default:
		d.fault(n, "want a text, or {en: …, zh: …}, found %s", kindName(n))
	}
}

// In returns the text in a language, in English where there is no other.
func (t Text) In(l Lang) string {
	if l == ZH && t.ZH != "" {
		return t.ZH
	}
	return t.EN
}

// parseBound reads a range of numbers: "3", ">=2", "<=4" or "2-4", of shares with
// "%" after each.
func parseBound(s string) (low, high float64, err error) {
	const most = 1e18
	plain := strings.ReplaceAll(strings.ReplaceAll(s, "%", ""), " ", "")
	number := func(s string) (x float64) {
		if x, err = strconv.ParseFloat(s, 64); err != nil || x < 0 {
			err = fmt.Errorf(`%q: want a number or a range ("3", ">=2", "<=4", "2-4")`, s)
		}
		return x
	}
	from, to, isRange := strings.Cut(plain, "-")
	switch {
	case strings.HasPrefix(plain, ">="):
		return number(plain[2:]), most, err
	case strings.HasPrefix(plain, "<="):
		return 0, number(plain[2:]), err
	case isRange:
		if low = number(from); err == nil {
			high = number(to)
		}
		if err == nil && low > high {
			err = fmt.Errorf("%q: the range is empty", s)
		}
		return low, high, err
	}
	low = number(plain)
	return low, low, err
}
