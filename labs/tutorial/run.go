// SPDX-License-Identifier: Apache-2.0

package tutorial

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kplab/kplab/internal/execx"
)

// patience is how long one command may take on a slow machine. None waits for
// something that `kplab settle` would await.
const patience = 2 * time.Minute

// Options say where a tutorial runs.
type Options struct {
	// Kplab is the program, Lab the name of a lab that runs with the tutorial's
	// settings, Kubectl a kubectl to use instead of the embedded one.
	Kplab, Lab, Kubectl string
	// Dir is an empty directory to work in.
	Dir string
	// Env is the environment of every command.
	Env []string
}

// Result is what was seen of one step.
type Result struct {
	Step *Step
	// Ran is the line as it was run, with its variables' values.
	Ran string
	// Output and Stderr are what it printed; on a terminal the two are one.
	Output, Stderr string
	// Err says what was not as it should be; nil when all was, and for a step that is
	// not done.
	Err error
}

// Run runs every step in order and returns what was seen of each. A step that fails
// does not keep the next ones from being run. The error is about what kept the run
// itself from going on.
func Run(ctx context.Context, t *Tutorial, o Options) ([]Result, error) {
	r := &runner{t: t, o: o, vars: map[string]string{}, changed: true}
	if err := r.setUp(); err != nil {
		return nil, err
	}
	var results []Result
	for i := range t.Steps {
		s := &t.Steps[i]
		res := Result{Step: s}
		if s.Undone == "" {
			r.step(ctx, s, &res)
		}
		results = append(results, res)
		if ctx.Err() != nil {
			return results, context.Cause(ctx)
		}
	}
	if r.shell != nil {
		_, _, err := r.shell.wait(time.Second)
		return results, errors.Join(errors.New("the last shell was not left"), err)
	}
	return results, nil
}

type runner struct {
	t    *Tutorial
	o    Options
	env  []string
	vars map[string]string
	// shell is the terminal that commands are typed into, prompt what it shows when
	// it waits for one.
	shell  *terminal
	prompt string
	// changed says that something was changed since the lab was last seen at rest.
	changed bool
	// where is the directory that the tutorial is in.
	where string
}

// setUp puts the manifests into the directory, and the kubectl that is asked for in
// front of the others.
func (r *runner) setUp() error {
	r.where = r.o.Dir
	r.env = append(slices.Clone(r.o.Env), "MANIFESTS="+filepath.Join(r.o.Dir, "manifests"))
	if err := os.CopyFS(filepath.Join(r.o.Dir, "manifests"), os.DirFS(r.t.Dir)); err != nil {
		return fmt.Errorf("copy the tutorial's files: %w", err)
	}
	bin := filepath.Join(r.o.Dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return err
	}
	if r.o.Kubectl != "" {
		if err := os.Symlink(r.o.Kubectl, filepath.Join(bin, "kubectl")); err != nil {
			return fmt.Errorf("choose the kubectl: %w", err)
		}
	}
	path := ""
	for _, e := range r.env {
		if v, ok := strings.CutPrefix(e, "PATH="); ok {
			path = v
		}
	}
	r.env = append(r.env, "PATH="+bin+":"+path)
	return nil
}

// step runs one step and judges it.
func (r *runner) step(ctx context.Context, s *Step, res *Result) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for _, line := range s.Before {
		if out, err := r.plainly(ctx, r.expand(line), s.On); err != nil {
			res.Err = fmt.Errorf("before it: %s: %w\n%s", line, err, out)
			return
		}
	}
	// A person does not type as fast as this.
	if r.changed = r.changed || len(s.Before) > 0; r.changed {
		if err := r.settle(ctx); err != nil {
			res.Err = err
			return
		}
	}
	r.changed = changing.MatchString(s.Run)
	res.Ran = r.expand(s.Run)
	code, err := 0, error(nil)
	switch {
	case s.Inside:
		res.Output, err = r.inside(res.Ran)
	case s.Terminal:
		res.Output, code, err = r.onTerminal(s, res.Ran)
	default:
		res.Output, res.Stderr, code, err = r.shellOn(ctx, s.On, res.Ran)
	}
	if err != nil {
		res.Err = err
		return
	}
	res.Err = r.judge(s, res, code)
	if s.Leave {
		res.Err = errors.Join(res.Err, r.leave())
	}
	for _, name := range slices.Sorted(maps.Keys(s.Set)) {
		value, err := r.plainly(ctx, r.expand(s.Set[name]), s.On)
		if err != nil {
			res.Err = errors.Join(res.Err, fmt.Errorf("after it: %s: %w", s.Set[name], err))
		}
		r.vars[name] = strings.TrimSpace(value)
	}
}

// changing is a command after which the lab has something to do.
var changing = regexp.MustCompile(`kubectl (apply|create|delete|expose|run) `)

func (r *runner) settle(ctx context.Context) error {
	_, err := execx.Host().Run(ctx, execx.Cmd{Path: r.o.Kplab, Args: []string{"settle", "--name", r.o.Lab, "--timeout", "60s"}, Env: r.env})
	if err != nil {
		return fmt.Errorf("the lab does not come to rest: %w", err)
	}
	return nil
}

// command is a shell on a node with one line to run.
func (r *runner) command(ctx context.Context, on, line string) *exec.Cmd {
	if on == "" {
		on = r.t.Node
	}
	cmd := exec.CommandContext(ctx, r.o.Kplab, "--name", r.o.Lab, "exec", on, "--", "bash", "-c", line) //nolint:forbidigo // some of these get a terminal
	cmd.Env, cmd.Dir = r.env, r.where
	return cmd
}

// shellOn runs a line on a node.
func (r *runner) shellOn(ctx context.Context, on, line string) (out, stderr string, code int, err error) {
	// A directory is the shell's own, and here each command has a new shell.
	changes := strings.HasPrefix(line, "cd ")
	if changes {
		line += " && pwd"
	}
	var o, e bytes.Buffer
	cmd := r.command(ctx, on, line)
	cmd.Stdout, cmd.Stderr = &o, &e
	err = cmd.Run()
	if changes && err == nil {
		r.where = strings.TrimSpace(o.String())
		o.Reset()
	}
	var exit *exec.ExitError
	if ctx.Err() == nil && (err == nil || errors.As(err, &exit)) {
		return o.String(), e.String(), exitCode(err), nil
	}
	return o.String(), e.String(), 0, fmt.Errorf("%s: %w\n%s%s", line, err, o.String(), e.String())
}

// plainly runs a line that has to succeed.
func (r *runner) plainly(ctx context.Context, line, on string) (string, error) {
	out, stderr, code, err := r.shellOn(ctx, on, line)
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, stderr)
	}
	return out, err
}

// onTerminal runs a line on a terminal: to its end, or up to the prompt of a shell.
func (r *runner) onTerminal(s *Step, line string) (string, int, error) {
	if r.shell != nil {
		return "", 0, errors.New("a shell in a pod is still open")
	}
	// Not bound to the step's context: it may outlive it.
	t, err := openTerminal(r.command(context.Background(), s.On, line))
	if err != nil {
		return "", 0, err
	}
	if s.Prompt == "" {
		return t.wait(patience)
	}
	seen, err := t.until(s.Prompt, patience)
	if err != nil {
		rest, _, waitErr := t.wait(time.Second)
		return seen + rest, 0, errors.Join(err, waitErr)
	}
	r.shell, r.prompt = t, s.Prompt
	return seen, 0, nil
}

// inside types a line into the open shell.
func (r *runner) inside(line string) (string, error) {
	if r.shell == nil { // the step that opens it has failed
		return "", errors.New("no shell in a pod is open")
	}
	if err := r.shell.write(line); err != nil {
		return "", err
	}
	seen, err := r.shell.answer(line, r.prompt, patience)
	if err != nil {
		err = errors.Join(err, r.leave())
	}
	return seen, err
}

// leave ends the open shell.
func (r *runner) leave() error {
	if r.shell == nil {
		return nil
	}
	err := r.shell.write("exit")
	_, _, waitErr := r.shell.wait(patience)
	r.shell = nil
	return errors.Join(err, waitErr)
}

// judge compares what was seen with what must be.
func (r *runner) judge(s *Step, res *Result, code int) error {
	var errs []error
	miss := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if code != s.Exit {
		miss("exit code %d, want %d", code, s.Exit)
	}
	for _, c := range []struct {
		text  string
		exprs []string
		want  bool
		what  string
	}{{res.Output, s.Want, true, "output"}, {res.Output, s.Not, false, "output"}, {res.Stderr, s.Stderr, true, "stderr"}} {
		for _, expr := range c.exprs {
			re, err := regexp.Compile("(?m)" + r.quoted(expr))
			if err != nil {
				miss("%v", err)
			} else if re.MatchString(c.text) != c.want {
				miss("%s: match of %s is %v, want %v", c.what, re, !c.want, c.want)
			}
		}
	}
	if n := strings.Count(res.Output, "\n"); s.Lines != 0 && n != s.Lines {
		miss("%d lines, want %d", n, s.Lines)
	}
	if s.Silent && res.Output+res.Stderr != "" {
		miss("it is not silent")
	}
	return errors.Join(errs...)
}

var variable = regexp.MustCompile(`\$\{?([A-Z][A-Z0-9_]*)\}?`)

// expand puts the variables' values into a line; what is none stays for the shell.
func (r *runner) expand(line string) string {
	return r.replace(line, func(v string) string { return v })
}

func (r *runner) quoted(expr string) string { return r.replace(expr, regexp.QuoteMeta) }

func (r *runner) replace(text string, with func(string) string) string {
	return variable.ReplaceAllStringFunc(text, func(m string) string {
		value, ok := r.vars[variable.FindStringSubmatch(m)[1]]
		if !ok {
			return m
		}
		return with(value)
	})
}

// exitCode is the code in what exec says of a program's end.
func exitCode(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}
