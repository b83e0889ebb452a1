// SPDX-License-Identifier: Apache-2.0

package tutorial

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"

	"sigs.k8s.io/yaml"
)

// Mark says how near to a tutorial a current cluster can be in one command.
type Mark string

// The marks of a command. They say what is compared, not how it came out.
const (
	Literal Mark = "literal" // what the tutorial shows
	Shape   Mark = "shape"   // the same shape; names, addresses and ages differ
	Changed Mark = "changed" // what a current cluster shows, which the tutorial's age did not
	User    Mark = "user"    // no command of kubectl: done as a person would do it here
)

// Tutorial is one commands.yaml.
type Tutorial struct {
	Title string `json:"title"`
	// Config is what `kplab up --config` takes, Node where the commands run that name
	// no other.
	Config string `json:"config"`
	Node   string `json:"node"`
	Steps  []Step `json:"steps"`

	// Dir is the folder.
	Dir string `json:"-"`
}

// Step is one command.
type Step struct {
	ID string `json:"id"`
	// Typed is the command as the tutorial has it; empty when it is Run.
	Typed string `json:"typed,omitempty"`
	// Run is a line for the shell. $NAME is a variable that an earlier step has set.
	Run string `json:"run"`
	// On is the node; empty means the tutorial's.
	On   string `json:"on,omitempty"`
	Mark Mark   `json:"mark"`

	// Terminal gives the command a terminal. With a Prompt it is a shell that stays
	// open: the steps with Inside are typed into it, up to the one with Leave.
	Terminal bool   `json:"terminal,omitempty"`
	Prompt   string `json:"prompt,omitempty"`
	Inside   bool   `json:"inside,omitempty"`
	Leave    bool   `json:"leave,omitempty"`

	// What must be seen, in (?m) regular expressions: in the output, not in the
	// output, and of what goes to stderr. $NAME stands for a variable's value.
	Want   []string `json:"want,omitempty"`
	Not    []string `json:"not,omitempty"`
	Stderr []string `json:"stderr,omitempty"`
	// Lines is the number of lines of the output; 0 for any.
	Lines int `json:"lines,omitempty"`
	// Silent says that there is no output at all.
	Silent bool `json:"silent,omitempty"`
	Exit   int  `json:"exit,omitempty"`

	// Before are lines that make what the tutorial has at this point without saying
	// how.
	Before []string `json:"before,omitempty"`
	// Set takes variables from lines run after the command.
	Set map[string]string `json:"set,omitempty"`
	// Note is for the reader of the page; Undone says why the step is not done.
	Note   string `json:"note,omitempty"`
	Undone string `json:"undone,omitempty"`
}

// typed is the command for people.
func (s *Step) typed() string {
	if s.Typed != "" {
		return s.Typed
	}
	return s.Run
}

// Load reads the tutorial in a folder and says everything that is wrong with it.
func Load(dir string) (*Tutorial, error) {
	path := filepath.Join(dir, "commands.yaml")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the tutorial: %w", err)
	}
	t := &Tutorial{Dir: dir}
	if err := yaml.UnmarshalStrict(data, t); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var errs []error
	seen := map[string]bool{}
	for i := range t.Steps {
		s := &t.Steps[i]
		bad := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("%s: step %s: %s", path, s.ID, fmt.Sprintf(format, args...)))
		}
		if s.ID == "" || seen[s.ID] {
			bad("number %d has no id of its own", i+1)
		}
		seen[s.ID] = true
		switch s.Mark {
		case Literal, Shape, Changed, User:
		default:
			bad("mark %q", s.Mark)
		}
		if s.Undone != "" {
			continue
		}
		if s.Run == "" {
			bad("nothing to run")
		}
		if s.Inside && len(s.Want) == 0 {
			bad("a line that is typed into a shell has to print something")
		}
		if len(s.Want)+len(s.Stderr)+s.Lines == 0 && !s.Silent && s.Prompt == "" {
			bad("nothing that must be seen")
		}
		for _, list := range [][]string{s.Want, s.Not, s.Stderr} {
			for _, expr := range list {
				// Variables have no value yet; what they are replaced by is quoted.
				if _, err := regexp.Compile(expr); err != nil {
					bad("%v", err)
				}
			}
		}
	}
	return t, errors.Join(errs...)
}
