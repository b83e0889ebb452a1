// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
)

// Listed is a lab in a list.
type Listed struct {
	Name  string   `json:"name"`
	Title string   `json:"title"`
	Time  string   `json:"time"`
	Steps int      `json:"steps"`
	Modes []string `json:"modes"`
	Node  bool     `json:"node"`
	// Passed counts the steps that are done; Started is true once it was begun.
	Passed  int  `json:"passed"`
	Started bool `json:"started"`
	Current bool `json:"current"`
}

// List returns the built-in labs with the learner's progress on a cluster, which need
// not run.
func List(t Target, lang Lang) ([]Listed, error) {
	host := ""
	if t.Kubeconfig != "" {
		cfg, err := clientcmd.BuildConfigFromFlags("", t.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("read the kubeconfig: %w", err)
		}
		host = cfg.Host
	}
	var all []Listed
	w := &World{Target: t, dir: stateDir(t, host)}
	current, _, err := w.current()
	if err != nil {
		return nil, err
	}
	for _, name := range Builtin() {
		l, err := Find(name)
		if err != nil {
			return nil, err
		}
		p, err := readProgress(w.dir, name)
		if err != nil {
			return nil, err
		}
		item := Listed{
			Name: name, Title: l.Title.In(lang), Time: l.Time, Steps: len(l.Steps), Modes: l.Modes, Current: name == current,
			Node: l.Needs.Node,
		}
		if p != nil {
			item.Started = true
			for _, s := range p.Steps {
				if s.Passed != nil || s.Skipped {
					item.Passed++
				}
			}
		}
		all = append(all, item)
	}
	return all, nil
}

// JUnitOfList is a list as a report: what is not done is skipped.
func JUnitOfList(all []Listed) *JUnit {
	j := &JUnit{Name: "kplab lab list"}
	for _, l := range all {
		j.add("labs", l.Name, 0, true, l.Passed < l.Steps, fmt.Sprintf("%d of %d steps", l.Passed, l.Steps))
	}
	return j
}
