// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/kplab/kplab/cluster"
)

// defaultWithin is how long the checks of a step are tried.
const defaultWithin = 5 * time.Second

// ErrNotStarted says that no lab was started.
var ErrNotStarted = errors.New("no lab is started")

// Session is one learner's run of a lab.
type Session struct {
	Lang Lang
	// Say tells the person what happens, a line at a time; nil for silence.
	Say func(string)

	w        *World
	raw      *Lab
	lab      *Lab // raw with its templates filled
	progress *Progress
	values   map[string]any
	forget   bool // progress is not written: verify
}

// NewSession opens a lab on a cluster. arg names it as [Find] takes it; "" is the one
// that was started last.
func NewSession(w *World, arg string, lang Lang) (*Session, error) {
	if arg == "" {
		name, dir, err := w.current()
		if err != nil {
			return nil, err
		}
		if name == "" {
			return nil, fmt.Errorf("%w: `kplab lab list` shows them, `kplab lab start LAB` starts one", ErrNotStarted)
		}
		if arg = name; dir != "" {
			arg = dir
		}
	}
	l, err := Find(arg)
	if err != nil {
		return nil, err
	}
	s := &Session{Lang: lang, w: w, raw: l}
	if s.progress, err = readProgress(w.dir, l.Name); err != nil {
		return nil, err
	}
	if s.progress != nil && s.progress.Dir != l.Dir {
		s.progress = nil // another lab of this name
	}
	return s, s.fill()
}

// fill fills the templates as the cluster is now.
func (s *Session) fill() (err error) {
	seed := uint64(0)
	if s.progress != nil {
		seed = s.progress.Seed
	}
	s.values = s.w.values(s.raw, seed)
	if s.lab, err = s.raw.render(s.values); err != nil {
		return err
	}
	return s.w.bind(s.lab.Namespace())
}

// namespaces are all that the lab has.
func (s *Session) namespaces() []string {
	return append([]string{s.lab.Namespace()}, s.lab.Namespaces...)
}

func (s *Session) say(p phrase, args ...any) {
	if s.Say != nil {
		s.Say(p.in(s.Lang, args...))
	}
}

func (s *Session) save() error {
	if s.forget {
		return nil
	}
	return writeProgress(s.w.dir, s.progress)
}

// checkNeeds says what the cluster or this machine lacks for the lab.
func (s *Session) checkNeeds() error {
	need := s.lab.Needs
	if need.Node && s.w.Foreign() {
		return fmt.Errorf("lab %s enters nodes, which only a lab of kplab lets one do: start it without --kubeconfig", s.lab.Name)
	}
	for _, tool := range need.Tools {
		if _, err := exec.LookPath(tool); err != nil {
			if _, err := exec.LookPath("/usr/sbin/" + tool); err != nil {
				return fmt.Errorf("lab %s needs the program %s on this machine", s.lab.Name, tool)
			}
		}
	}
	if s.w.Foreign() || need.Workers == 0 {
		return nil
	}
	workers := 0
	for _, n := range s.w.Status.Nodes {
		if n.Role == cluster.Worker {
			workers++
		}
	}
	if workers < need.Workers {
		return fmt.Errorf("lab %s needs %d workers and the lab %q has %d: `kplab lab start %s --name NEW` brings up another", s.lab.Name, need.Workers, s.w.Name, workers, s.lab.Name)
	}
	return nil
}

// Start begins the lab, or goes on with it. seed nil keeps the one that it was
// started with.
func (s *Session) Start(ctx context.Context, seed *uint64) error {
	if err := s.checkNeeds(); err != nil {
		return err
	}
	if p := s.progress; p != nil {
		if seed != nil && *seed != p.Seed {
			return fmt.Errorf("lab %s was started with seed %d: `kplab lab reset %s --seed %d` begins it anew", p.Lab, p.Seed, s.arg(), *seed)
		}
		if p.Digest != s.raw.Digest {
			return fmt.Errorf("lab %s has changed since it was started: `kplab lab reset %s` begins it anew", p.Lab, s.arg())
		}
	}
	if err := s.leaveOther(ctx); err != nil {
		return err
	}
	if s.progress == nil {
		s.begin(seed)
		if err := s.fill(); err != nil {
			return err
		}
	}
	if p := s.progress; !p.Ready || !s.inPlace(ctx) {
		if err := s.makeUpTo(ctx, p.Current()); err != nil {
			return err
		}
	}
	return s.settleIn()
}

// settleIn makes the lab the current one.
func (s *Session) settleIn() error {
	s.progress.Ready = true
	if err := s.save(); err != nil {
		return err
	}
	if err := s.w.setCurrent(s.lab.Name); err != nil {
		return err
	}
	return s.w.enter(s.lab.Namespace())
}

// inPlace says whether the lab's namespace is there.
func (s *Session) inPlace(ctx context.Context) bool {
	_, err := s.w.Get(ctx, "namespace/"+s.lab.Namespace(), "", "")
	return err == nil
}

// begin makes a progress that is at its beginning.
func (s *Session) begin(seed *uint64) {
	p := &Progress{Lab: s.raw.Name, Dir: s.raw.Dir, Digest: s.raw.Digest, Started: time.Now().UTC()}
	if seed != nil {
		p.Seed = *seed
	}
	for i := range s.raw.Steps {
		step := &s.raw.Steps[i]
		p.Steps = append(p.Steps, StepProgress{ID: step.ID, Skipped: s.w.Foreign() && s.raw.needsNode(step)})
	}
	s.progress = p
}

// leaveOther puts away the lab that was the current one, if it is another.
func (s *Session) leaveOther(ctx context.Context) error {
	name, _, err := s.w.current()
	if err != nil || name == "" || name == s.lab.Name {
		return err
	}
	other, err := NewSession(s.w, "", s.Lang)
	if err == nil {
		err = other.Stop(ctx)
	}
	if err != nil {
		// Its folder may be gone, and with it what is to be put away.
		s.say(msgNotLeft, name, err)
		return s.w.setCurrent("")
	}
	s.say(msgLeft, name)
	return s.fill() // the other one was bound
}

// makeUpTo makes what is there when a step begins: the lab's setup, and for the
// steps before what was theirs and their solutions.
func (s *Session) makeUpTo(ctx context.Context, step int) error {
	if err := s.remove(ctx); err != nil {
		return err
	}
	if err := s.w.makeNamespaces(ctx, s.lab, s.namespaces()); err != nil {
		return err
	}
	if err := s.doAll(ctx, s.lab.Setup); err != nil {
		return err
	}
	for i := range min(step, len(s.lab.Steps)) {
		if s.progress.Steps[i].Skipped {
			continue
		}
		if err := s.doAll(ctx, s.lab.Steps[i].Setup, s.lab.Steps[i].Solution); err != nil {
			return err
		}
	}
	if step < len(s.lab.Steps) {
		return s.doAll(ctx, s.lab.Steps[step].Setup)
	}
	return nil
}

// doAll does actions, one after the other, and lets the lab come to rest after each
// list of them.
func (s *Session) doAll(ctx context.Context, lists ...[]Action) error {
	for _, list := range lists {
		for _, a := range list {
			if err := s.w.act(ctx, s.lab, a, s.values); err != nil {
				return err
			}
			if err := s.w.Settle(ctx); err != nil {
				return err
			}
		}
	}
	return s.w.refresh(ctx)
}

// remove removes all that the lab made.
func (s *Session) remove(ctx context.Context) error {
	for _, a := range s.lab.Cleanup {
		// What is to be undone may never have been done.
		_ = s.w.act(ctx, s.lab, a, s.values)
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return s.w.removeNamespaces(ctx, s.lab, s.namespaces())
}

// Stop puts the lab away: what it made goes, its progress stays.
func (s *Session) Stop(ctx context.Context) error {
	if s.progress == nil {
		return fmt.Errorf("lab %s: %w", s.lab.Name, ErrNotStarted)
	}
	if err := s.remove(ctx); err != nil {
		return err
	}
	s.progress.Ready = false
	if err := s.save(); err != nil {
		return err
	}
	if name, _, err := s.w.current(); err != nil || name != s.lab.Name {
		return err
	}
	if err := s.w.setCurrent(""); err != nil {
		return err
	}
	return s.w.enter("")
}

// Reset begins the lab anew, with another seed where one is given; with onlyStep it
// goes back to the beginning of the current step.
func (s *Session) Reset(ctx context.Context, seed *uint64, onlyStep bool) error {
	if err := s.checkNeeds(); err != nil {
		return err
	}
	if err := s.leaveOther(ctx); err != nil {
		return err
	}
	step := 0
	switch {
	case onlyStep && s.progress == nil:
		return fmt.Errorf("lab %s: %w", s.lab.Name, ErrNotStarted)
	case onlyStep:
		step = min(s.progress.Current(), len(s.lab.Steps)-1)
	default:
		// What was made for the old seed goes by the old names.
		if err := s.remove(ctx); err != nil {
			return err
		}
		if seed == nil && s.progress != nil {
			seed = &s.progress.Seed
		}
		s.begin(seed)
		if err := s.fill(); err != nil {
			return err
		}
	}
	if err := s.makeUpTo(ctx, step); err != nil {
		return err
	}
	return s.settleIn()
}

// Report is what a check of a step came to.
type Report struct {
	Lab      string        `json:"lab"`
	Seed     uint64        `json:"seed"`
	Step     string        `json:"step"`
	Number   int           `json:"number"`
	Of       int           `json:"of"`
	Title    string        `json:"title"`
	Passed   bool          `json:"passed"`
	Finished bool          `json:"finished"`
	Checks   []CheckResult `json:"checks"`
	// Explained is what there is to know once the step is done.
	Explained string        `json:"explained,omitempty"`
	Took      time.Duration `json:"took"`
}

// Check looks whether the current step is done, and goes to the next one when it is.
func (s *Session) Check(ctx context.Context) (*Report, error) {
	if err := s.needStarted(); err != nil {
		return nil, err
	}
	i := s.progress.Current()
	if i == len(s.lab.Steps) {
		return &Report{Lab: s.lab.Name, Seed: s.progress.Seed, Number: i, Of: i, Passed: true, Finished: true, Checks: []CheckResult{}}, nil
	}
	began := time.Now()
	within := defaultWithin
	if d, err := time.ParseDuration(s.lab.Steps[i].Within); err == nil {
		within = d
	}
	results, err := s.tryFor(ctx, i, within)
	if err != nil {
		return nil, err
	}
	r := &Report{
		Lab: s.lab.Name, Seed: s.progress.Seed, Step: s.lab.Steps[i].ID, Number: i + 1, Of: len(s.lab.Steps),
		Title: s.section(i).Title, Passed: passed(results), Checks: results, Took: time.Since(began),
	}
	s.progress.Steps[i].Checks++
	if r.Passed {
		now := time.Now().UTC()
		s.progress.Steps[i].Passed = &now
		r.Explained = s.text(s.section(i).Explained)
		if next := s.progress.Current(); next == len(s.lab.Steps) {
			r.Finished, s.progress.Finished = true, &now
		} else if err := s.doAll(ctx, s.lab.Steps[next].Setup); err != nil {
			return nil, errors.Join(err, s.save())
		}
	}
	return r, s.save()
}

func (s *Session) needStarted() error {
	switch {
	case s.progress == nil || !s.progress.Ready:
		return fmt.Errorf("lab %s is put away, or was never started (%w): `kplab lab start %s` goes on with it", s.lab.Name, ErrNotStarted, s.arg())
	case s.progress.Digest != s.raw.Digest:
		return fmt.Errorf("lab %s has changed since it was started: `kplab lab reset %s` begins it anew", s.lab.Name, s.arg())
	}
	return nil
}

// arg is how the lab is named in a command.
func (s *Session) arg() string {
	if s.raw.Dir != "" {
		return s.raw.Dir
	}
	return s.raw.Name
}

func passed(results []CheckResult) bool {
	return !slices.ContainsFunc(results, func(r CheckResult) bool { return !r.Passed })
}

// retryInterval is the time between two rounds of checks.
const retryInterval = 250 * time.Millisecond

// tryFor tries all checks of a step again and again until all pass in one round, or
// the time is over. The time is that of trying: a round that has begun is ended.
func (s *Session) tryFor(ctx context.Context, step int, within time.Duration) ([]CheckResult, error) {
	if err := s.w.Settle(ctx); err != nil {
		return nil, err
	}
	over := time.NewTimer(within)
	defer over.Stop()
	for {
		results, err := s.tryOnce(ctx, step)
		if err != nil || passed(results) {
			return results, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-over.C:
			return results, nil
		case <-time.After(retryInterval):
		}
	}
}

// tryOnce tries each check of a step once.
func (s *Session) tryOnce(ctx context.Context, step int) ([]CheckResult, error) {
	if err := s.w.refresh(ctx); err != nil {
		return nil, err
	}
	results := []CheckResult{}
	for _, c := range s.lab.Steps[step].Checks {
		if len(c.Modes) > 0 && !slices.Contains(c.Modes, s.w.mode()) {
			continue
		}
		r := CheckResult{Says: c.Says.In(s.Lang)}
		var err error
		if r.Passed, r.Seen, err = c.try(ctx, s.w); err != nil {
			return nil, broken("%s:%d: %w", s.raw.file("lab.yaml"), c.Line, err)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if r.Passed {
			r.Seen = ""
		} else if r.Missing = c.Missing.In(s.Lang); r.Missing == "" {
			r.Missing = msgNotSo.in(s.Lang, r.Says)
		}
		results = append(results, r)
	}
	return results, nil
}

// Hint returns the next hint of the current step, its number and how many there are.
// After the last one it is the last one again.
func (s *Session) Hint() (text string, number, of int, err error) {
	if err := s.needStarted(); err != nil {
		return "", 0, 0, err
	}
	i := s.progress.Current()
	if i == len(s.lab.Steps) {
		return msgFinished.in(s.Lang, s.lab.Name), 0, 0, nil
	}
	hints := s.section(i).Hints
	if len(hints) == 0 {
		return msgNoHints.in(s.Lang), 0, 0, nil
	}
	p := &s.progress.Steps[i]
	p.Hints = min(p.Hints+1, len(hints))
	return s.text(hints[p.Hints-1]), p.Hints, len(hints), s.save()
}

// Solve does what solves the current step, telling what it does, and checks.
func (s *Session) Solve(ctx context.Context) (*Report, error) {
	if err := s.needStarted(); err != nil {
		return nil, err
	}
	i := s.progress.Current()
	if i < len(s.lab.Steps) {
		s.progress.Steps[i].Solved = true
		for _, a := range s.lab.Steps[i].Solution {
			s.say(msgDoing, s.typed(a.describe()))
			if err := s.w.act(ctx, s.lab, a, s.values); err != nil {
				return nil, fmt.Errorf("%w; `kplab lab reset --step` goes back to the beginning of the step", errors.Join(err, s.save()))
			}
			if err := s.w.Settle(ctx); err != nil {
				return nil, err
			}
		}
	}
	return s.Check(ctx)
}

// section is the text of a step.
func (s *Session) section(i int) section { return s.lab.doc(s.Lang).Sections[i] }

// text is a piece of the lab's text as it is shown here.
func (s *Session) text(t string) string {
	return withPrograms(t, s.kplab(), s.kubectl())
}

// typed is a command as it is typed here.
func (s *Session) typed(line string) string {
	return inCommand(line, s.kplab(), s.kubectl())
}

func (s *Session) kplab() string {
	if s.w.Name != cluster.DefaultName && !s.w.Foreign() {
		return s.w.Called + " --name " + s.w.Name
	}
	return s.w.Called
}

func (s *Session) kubectl() string {
	if s.w.Foreign() {
		return "kubectl"
	}
	return s.kplab() + " kubectl"
}

// Title and Intro are the lab's own.
func (s *Session) Title() string { return s.lab.Title.In(s.Lang) }

// Intro is the lab's text before its first step, its objectives first.
func (s *Session) Intro() string {
	var b strings.Builder
	for _, o := range s.lab.Objectives {
		fmt.Fprintf(&b, "- %s\n", o.In(s.Lang))
	}
	if len(s.lab.Objectives) > 0 {
		b.WriteString("\n")
	}
	b.WriteString(s.text(s.lab.doc(s.Lang).Intro))
	return strings.TrimSpace(b.String())
}

// Step is the text of the current step with its number; "" when all are done.
func (s *Session) Step() string {
	if s.progress == nil {
		return ""
	}
	i := s.progress.Current()
	if i == len(s.lab.Steps) {
		return ""
	}
	sec := s.section(i)
	text := msgStep.in(s.Lang, i+1, len(s.lab.Steps), sec.Title) + "\n\n" + s.text(sec.Text)
	for _, p := range s.progress.Steps[:i] {
		if p.Skipped {
			text = msgSkipped.in(s.Lang, p.ID) + "\n" + text
		}
	}
	return text
}

// Progress is how far the learner is; nil before the start.
func (s *Session) Progress() *Progress { return s.progress }

// Lab is the lab of the session.
func (s *Session) Lab() *Lab { return s.raw }

// Next says what to type now.
func (s *Session) Next() string {
	flag := ""
	if s.w.Foreign() {
		flag = " --kubeconfig " + s.w.Kubeconfig
		return msgNextForeign.in(s.Lang, s.kplab(), flag, s.w.KubeconfigCopy(), s.lab.Namespace())
	}
	return msgNext.in(s.Lang, s.kplab(), flag, s.lab.Namespace())
}

// Finished says that the lab is done.
func (s *Session) Finished() string { return msgFinished.in(s.Lang, s.lab.Name) }
