// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// VerifyOptions choose what Verify proves.
type VerifyOptions struct {
	// Modes are the proxy modes; nil means those that the lab names.
	Modes []string
	// Seed is what the templates are filled with.
	Seed uint64
	// Patience is how long checks are tried that have to fail.
	Patience time.Duration
	// SkipWrong leaves out the wrong answers.
	SkipWrong bool
	// Say is told what was proved, a line at a time; nil for silence.
	Say func(string)
}

// Proof is one thing that Verify tried.
type Proof struct {
	Lab  string `json:"lab"`
	Mode string `json:"mode,omitempty"`
	Step string `json:"step,omitempty"`
	// What was tried: "fails before", "wrong answer: …", "passes after".
	What string `json:"what"`
	OK   bool   `json:"ok"`
	// Why it is not so, or why it was skipped.
	Why     string        `json:"why,omitempty"`
	Skipped bool          `json:"skipped,omitempty"`
	Took    time.Duration `json:"took"`
}

// Verified is all that Verify tried of a lab.
type Verified struct {
	Lab    string  `json:"lab"`
	OK     bool    `json:"ok"`
	Proofs []Proof `json:"proofs"`
}

// verifier goes through a lab.
type verifier struct {
	*Session
	opts   VerifyOptions
	mode   string
	out    *Verified
	failed map[string]bool // checks that failed once, by step and number
}

// Verify proves of each step that its checks fail before the solution, fail after
// each wrong answer and pass after the solution, in each proxy mode, and of each
// check that it failed at least once. What the lab made is removed at the end.
// The error is about the cluster; faults of the lab are in the result.
func Verify(ctx context.Context, w *World, arg string, opts VerifyOptions) (v *Verified, err error) {
	l, err := Find(arg)
	if err != nil {
		return nil, err
	}
	if p, err := readProgress(w.dir, l.Name); err != nil {
		return nil, err
	} else if p != nil && p.Ready {
		return nil, fmt.Errorf("lab %s is being done on this cluster: `kplab lab stop` puts it away", l.Name)
	}
	if opts.Patience == 0 {
		opts.Patience = time.Second
	}
	s := &Session{Lang: EN, w: w, raw: l, forget: true}
	s.begin(&opts.Seed)
	if err := s.fill(); err != nil {
		return nil, err
	}
	v = &Verified{Lab: l.Name, OK: true}
	modes := opts.Modes
	if modes == nil {
		modes = l.Modes
	}
	if w.Foreign() {
		modes = []string{""}
	}
	before := w.mode()
	for _, mode := range modes {
		vr := &verifier{Session: s, opts: opts, mode: mode, out: v, failed: map[string]bool{}}
		if err := vr.inMode(ctx); err != nil {
			return v, err
		}
	}
	if !w.Foreign() && w.mode() != before {
		if err := w.SetMode(ctx, before); err != nil {
			return v, err
		}
	}
	return v, nil
}

// record notes one thing that was tried.
func (v *verifier) record(began time.Time, step, what, why string, skipped bool) {
	p := Proof{Lab: v.raw.Name, Mode: v.mode, Step: step, What: what, OK: why == "" || skipped, Why: why, Skipped: skipped, Took: time.Since(began)}
	v.out.Proofs = append(v.out.Proofs, p)
	v.out.OK = v.out.OK && p.OK
	if v.opts.Say == nil {
		return
	}
	mark := "✓"
	if !p.OK {
		mark = "✗"
	} else if skipped {
		mark = "-"
	}
	line := fmt.Sprintf("%s %s", mark, v.raw.Name)
	for _, part := range []string{v.mode, step, what} {
		if part != "" {
			line += "  " + part
		}
	}
	line += fmt.Sprintf("  %.1fs", p.Took.Seconds())
	if why != "" {
		line += "\n    " + why
	}
	v.opts.Say(line)
}

func (v *verifier) inMode(ctx context.Context) error {
	began := time.Now()
	if v.mode != "" && v.w.mode() != v.mode {
		if err := v.w.SetMode(ctx, v.mode); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			v.record(began, "", "mode", fmt.Sprintf("this machine cannot do it: %v", err), true)
			return nil
		}
	}
	if err := v.fill(); err != nil {
		return err
	}
	if err := v.checkNeeds(); err != nil {
		v.record(began, "", "needs", err.Error(), true)
		return nil
	}
	err := v.steps(ctx)
	if ctx.Err() != nil {
		// Removing is not to be cut off with the rest.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_ = v.remove(clean)
		return ctx.Err()
	}
	if err != nil {
		v.record(began, "", "lab", err.Error(), false)
	}
	began = time.Now()
	if err := v.remove(ctx); err != nil {
		v.record(began, "", "cleanup", err.Error(), false)
	}
	return nil
}

func (v *verifier) steps(ctx context.Context) error {
	began := time.Now()
	if err := v.makeUpTo(ctx, 0); err != nil {
		return fmt.Errorf("setup: %w", err)
	}
	v.record(began, "", "setup", "", false)
	for i := range v.lab.Steps {
		step := &v.lab.Steps[i]
		if v.progress.Steps[i].Skipped {
			v.record(time.Now(), step.ID, "step", "it needs a node", true)
			continue
		}
		if i > 0 {
			if err := v.doAll(ctx, step.Setup); err != nil {
				return fmt.Errorf("step %s: setup: %w", step.ID, err)
			}
		}
		if err := v.mustFail(ctx, i, "fails before"); err != nil {
			return err
		}
		if err := v.wrongs(ctx, i); err != nil {
			return err
		}
		began := time.Now()
		if err := v.doAll(ctx, step.Solution); err != nil {
			return fmt.Errorf("step %s: solution: %w", step.ID, err)
		}
		within := defaultWithin
		if d, err := time.ParseDuration(step.Within); err == nil {
			within = d
		}
		// A loaded machine is slower than a learner's.
		results, err := v.tryFor(ctx, i, 3*within)
		if err != nil {
			return err
		}
		why := ""
		for _, r := range results {
			if !r.Passed {
				why = fmt.Sprintf("%s (%s)", r.Missing, r.Seen)
				break
			}
		}
		v.record(began, step.ID, "passes after", why, false)
		if why != "" {
			return nil // the next steps build on this one
		}
		v.neverFailed(i)
	}
	return nil
}

// mustFail tries the checks for a while; they must not pass together.
func (v *verifier) mustFail(ctx context.Context, i int, what string) error {
	began := time.Now()
	results, err := v.tryFor(ctx, i, v.opts.Patience)
	if err != nil {
		return err
	}
	why := ""
	if passed(results) {
		why = "every check passes"
	}
	j := 0
	for k, c := range v.lab.Steps[i].Checks {
		if len(c.Modes) > 0 && !slices.Contains(c.Modes, v.w.mode()) {
			continue
		}
		r := results[j]
		j++
		if !r.Passed {
			v.failed[fmt.Sprint(i, k)] = true
		}
		if what == "fails before" && c.Keep && !r.Passed {
			why = fmt.Sprintf("line %d is marked keep and does not hold: %s (%s)", c.Line, r.Missing, r.Seen)
		}
	}
	v.record(began, v.lab.Steps[i].ID, what, why, false)
	return nil
}

// wrongs tries each wrong answer, and makes what it spoilt anew.
func (v *verifier) wrongs(ctx context.Context, i int) error {
	step := &v.lab.Steps[i]
	if v.opts.SkipWrong {
		return nil
	}
	for _, wrong := range step.Wrong {
		what := "wrong: " + wrong.Why
		// What is wrong may also fail as a command; then it does not pass either.
		err := v.doAll(ctx, wrong.Do)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			v.record(time.Now(), step.ID, what, fmt.Sprintf("the answer itself fails, which proves nothing: %v", err), false)
		} else if err := v.mustFail(ctx, i, what); err != nil {
			return err
		}
		if err := v.makeUpTo(ctx, i); err != nil {
			return fmt.Errorf("step %s: make it anew: %w", step.ID, err)
		}
	}
	return nil
}

// neverFailed finds checks that held before the solution and under every wrong
// answer: they prove nothing.
func (v *verifier) neverFailed(i int) {
	if v.opts.SkipWrong {
		return
	}
	for k, c := range v.lab.Steps[i].Checks {
		if c.Keep || v.failed[fmt.Sprint(i, k)] || len(c.Modes) > 0 && !slices.Contains(c.Modes, v.w.mode()) {
			continue
		}
		v.record(time.Now(), v.lab.Steps[i].ID, "each check fails once",
			fmt.Sprintf("line %d never failed (%s): mark it keep, or add a wrong answer that it catches", c.Line, c.Says.EN), false)
	}
}
