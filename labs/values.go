// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"go.yaml.in/yaml/v3"
)

// Values are what a seed chooses, by name. In YAML each is a list to choose from,
// of texts or of mappings, or a range of numbers such as 8000-8999.
type Values map[string]value

type value struct {
	choices   []any // each a string or a map[string]any
	low, high int   // a range, when there are no choices
}

var rangeForm = regexp.MustCompile(`^(\d+)-(\d+)$`)

func (v *Values) decode(d *decoder, n *yaml.Node) {
	if n.Kind != yaml.MappingNode {
		d.fault(n, "want a mapping of names to choices, found %s", kindName(n))
		return
	}
	*v = Values{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, from := n.Content[i], n.Content[i+1]
		if !valueName.MatchString(key.Value) {
			d.fault(key, "value %q: want a name of lower-case letters, digits and _", key.Value)
		}
		if _, taken := placeholders()[key.Value]; taken {
			d.fault(key, "value %q: kplab gives this one itself", key.Value)
		}
		var val value
		switch from.Kind {
		case yaml.ScalarNode:
			m := rangeForm.FindStringSubmatch(from.Value)
			if m == nil {
				val.choices = []any{from.Value}
				break
			}
			val.low, _ = strconv.Atoi(m[1])
			val.high, _ = strconv.Atoi(m[2])
			if val.low > val.high {
				d.fault(from, "value %s: the range %s is empty", key.Value, from.Value)
			}
		case yaml.SequenceNode:
			for _, c := range from.Content {
				val.choices = append(val.choices, choice(d, c))
			}
			if len(val.choices) == 0 {
				d.fault(from, "value %s: no choices", key.Value)
			}
		default:
			d.fault(from, "value %s: want a list to choose from, or a range such as 8000-8999", key.Value)
		}
		(*v)[key.Value] = val
	}
}

var valueName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

func choice(d *decoder, n *yaml.Node) any {
	if n.Kind != yaml.MappingNode {
		s := ""
		d.value(n, reflect.ValueOf(&s).Elem())
		return s
	}
	m := map[string]any{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		s := ""
		d.value(n.Content[i+1], reflect.ValueOf(&s).Elem())
		m[n.Content[i].Value] = s
	}
	return m
}

// draw returns the value of each name for a seed. Seed 0 takes the first of all
// choices, so that a lab without a seed is the one that its author looked at. A
// value depends on its name alone: adding one does not move the others.
func (v Values) draw(lab string, seed uint64) map[string]any {
	out := map[string]any{}
	for name, val := range v {
		h := fnv.New64a()
		_, _ = h.Write([]byte(lab + "\x00" + name))
		pick := func(n int) int {
			if seed == 0 {
				return 0
			}
			return rand.New(rand.NewPCG(seed, h.Sum64())).IntN(n)
		}
		if len(val.choices) > 0 {
			out[name] = val.choices[pick(len(val.choices))]
		} else {
			out[name] = strconv.Itoa(val.low + pick(val.high-val.low+1))
		}
	}
	return out
}

// placeholders are the values that kplab gives, as they are in the default lab.
func placeholders() map[string]any {
	return map[string]any{
		"namespace": "lab-x", "mode": "iptables", "seed": "0", "lab": "kplab", "domain": "cluster.local",
		"master": "master", "node1": "node1", "node2": "node2",
		"master_ip": "10.0.0.131", "node1_ip": "10.0.0.132", "node2_ip": "10.0.0.133", "outside_ip": "10.0.0.200",
		"node1_pods": "10.244.1.0/24", "node2_pods": "10.244.2.0/24",
	}
}

var missingKey = regexp.MustCompile(`map has no entry for key "([^"]+)"`)

// fill executes one text as a template.
func fill(text string, values map[string]any) (string, error) {
	if !strings.Contains(text, "{{") {
		return text, nil
	}
	t, err := template.New("").Option("missingkey=error").Parse(text)
	if err == nil {
		var b strings.Builder
		if err = t.Execute(&b, values); err == nil {
			return b.String(), nil
		}
	}
	if m := missingKey.FindStringSubmatch(err.Error()); m != nil {
		return "", fmt.Errorf("template: no value is called %q%s", m[1], didYouMean(m[1], slices.Sorted(maps.Keys(values))))
	}
	return "", fmt.Errorf("template: %s", strings.TrimPrefix(err.Error(), "template: "))
}

// render returns a copy of the lab in which every template is filled.
func (l *Lab) render(values map[string]any) (*Lab, error) {
	out := *l
	var faults []string
	at := func(line int, err error) {
		faults = append(faults, fmt.Sprintf("%s:%d: %v", l.file("lab.yaml"), line, err))
	}
	fillAll(reflect.ValueOf(&out).Elem(), values, 1, at)
	out.docs = map[Lang]*document{}
	for lang, doc := range l.docs {
		d := &document{Sections: slices.Clone(doc.Sections)}
		text := func(line int, s string) string {
			got, err := fill(s, values)
			if err != nil {
				faults = append(faults, fmt.Sprintf("%s:%d: %v", l.file(textFile(lang)), line, err))
			}
			return got
		}
		d.Intro = text(1, doc.Intro)
		for i := range d.Sections {
			s := &d.Sections[i]
			s.Title, s.Text, s.Explained = text(s.Line, s.Title), text(s.Line, s.Text), text(s.Line, s.Explained)
			s.Hints = slices.Clone(s.Hints)
			for j := range s.Hints {
				s.Hints[j] = text(s.Line, s.Hints[j])
			}
		}
		out.docs[lang] = d
	}
	if len(faults) > 0 {
		return nil, broken("%s", strings.Join(faults, "\n"))
	}
	return &out, nil
}

// fillAll fills the templates in every text below v, copying slices on the way.
func fillAll(v reflect.Value, values map[string]any, line int, fault func(int, error)) {
	switch v.Kind() {
	case reflect.String:
		s, err := fill(v.String(), values)
		if err != nil {
			fault(line, err)
			return
		}
		v.SetString(s)
	case reflect.Slice:
		c := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		reflect.Copy(c, v)
		for i := range c.Len() {
			fillAll(c.Index(i), values, line, fault)
		}
		if v.Len() > 0 {
			v.Set(c)
		}
	case reflect.Struct:
		if f := v.FieldByName("Line"); f.IsValid() {
			line = int(f.Int())
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() && v.Type().Field(i).Type != reflect.TypeFor[Values]() {
				fillAll(v.Field(i), values, line, fault)
			}
		}
	}
}
