// SPDX-License-Identifier: Apache-2.0

package labs

import "io/fs"

// Lab is one exercise, as its folder has it: every text may hold templates, which
// [Lab.render] fills.
type Lab struct {
	// Name is the folder's, such as 03-clusterip.
	Name string
	// Dir is where the folder lies; "" for a lab that is built in.
	Dir string
	// Digest is a SHA-256 over the names and contents of its files.
	Digest string

	Title      Text   `yaml:"title"`
	Objectives []Text `yaml:"objectives"`
	// Time is about how long it takes, such as 15m.
	Time string `yaml:"time"`
	// Modes are the proxy modes in which it holds; verify proves each.
	Modes []string `yaml:"modes"`
	Needs Needs    `yaml:"needs"`
	// Namespaces are made beside the lab's own, and go with it.
	Namespaces []string `yaml:"namespaces"`
	Values     Values   `yaml:"values"`
	// Setup makes what is there before the first step.
	Setup []Action `yaml:"setup"`
	// Cleanup undoes what removing the namespaces does not: links, faults. It runs
	// on things that may not be there, so its commands may fail.
	Cleanup []Action `yaml:"cleanup"`
	Steps   []Step   `yaml:"steps"`

	files fs.FS
	docs  map[Lang]*document
}

// Needs is what a lab asks of the cluster and of this machine.
type Needs struct {
	// Node is true when the lab makes no sense without entering a node. A step of
	// another lab that needs one is skipped on clusters without.
	Node bool `yaml:"node"`
	// Workers is how many nodes take pods.
	Workers int `yaml:"workers"`
	// Tools are programs of this machine.
	Tools []string `yaml:"tools"`
}

// Step is one thing to do.
type Step struct {
	Line int
	ID   string `yaml:"id"`
	// Node is true when the step enters a node or the outside client, which only a
	// lab of kplab lets one do.
	Node bool `yaml:"node"`
	// Within is how long its checks are tried, such as 10s.
	Within string `yaml:"within"`
	// Setup runs when the learner comes to the step: it may break something.
	Setup    []Action `yaml:"setup"`
	Checks   []Check  `yaml:"checks"`
	Solution []Action `yaml:"solution"`
	// Wrong are answers that must not pass; verify tries them.
	Wrong []Wrong `yaml:"wrong"`
}

// Wrong is an answer that a learner might give and that must not pass.
type Wrong struct {
	Line int
	Why  string   `yaml:"why"`
	Do   []Action `yaml:"do"`
}

// Action is one thing that the engine does: a manifest to apply, or a command.
type Action struct {
	Line int
	// Apply is a file of the lab's folder, or a manifest itself.
	Apply string `yaml:"apply"`
	// Run is a line for sh.
	Run string `yaml:"run"`
	// In is where Run runs; see [Check.In].
	In string `yaml:"in"`
}

// Check is one thing that has to hold. It looks at behaviour, at what a command
// does or what the API says, and never at what was typed.
type Check struct {
	Line int
	// Says is what has to hold, as a sentence; Missing is what to say when it does
	// not, when that is more than "not so".
	Says    Text `yaml:"says"`
	Missing Text `yaml:"missing"`
	// Modes are the proxy modes in which it is looked at; none means all.
	Modes []string `yaml:"modes"`
	// Keep marks what holds before the step already and has to hold after it.
	Keep bool `yaml:"keep"`

	// Run is a line for sh, whose behaviour is looked at.
	Run string `yaml:"run"`
	// In is where Run runs: a node's name, outside, pod/NAME or pod/NAMESPACE/NAME;
	// "" is this machine, with kubectl and kplab bound to the lab.
	In string `yaml:"in"`
	// Exit is the exit code: a number, several by commas, fails (any but 0) or any.
	Exit string `yaml:"exit"`
	// Stdout and Stderr are regular expressions that match, Not one that does not
	// match what was printed.
	Stdout string `yaml:"stdout"`
	Stderr string `yaml:"stderr"`
	Not    string `yaml:"not"`
	// Find is a regular expression; the first group of each match in stdout, or the
	// match itself, is a value. Count is how many there are, Distinct how many
	// different ones, Share which part each of them has.
	Find     string `yaml:"find"`
	Count    string `yaml:"count"`
	Distinct string `yaml:"distinct"`
	Share    string `yaml:"share"`

	// Get is an object of the API, KIND/NAME, or KIND for all that Selector selects.
	Get       string `yaml:"get"`
	Namespace string `yaml:"namespace"`
	Selector  string `yaml:"selector"`
	// JSONPath picks a field as kubectl's -o jsonpath does, Op compares it with
	// Value: exists, absent, equals, not-equals, matches, not-matches, in, at-least,
	// at-most. Count counts the values that JSONPath finds, or the objects.
	JSONPath string `yaml:"jsonpath"`
	Op       string `yaml:"op"`
	Value    string `yaml:"value"`
}

// Namespace is the one that the lab has for itself.
func (l *Lab) Namespace() string { return "lab-" + l.slug() }

// needsNode says whether a step enters a node.
func (l *Lab) needsNode(s *Step) bool { return s.Node || l.Needs.Node }
