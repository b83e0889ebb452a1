// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/labs"
)

// labOptions are the flags of all lab commands.
type labOptions struct {
	g          *globals
	kubeconfig string
	langFlag   string
	lang       labs.Lang
}

func newLabCommand(g *globals) *cobra.Command {
	o := &labOptions{g: g}
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "exercises that check themselves",
		Long: `Exercises that check themselves: what the network does, not what was typed.

  kplab lab list             which there are, and how far you are
  kplab lab start 01         begin with one; brings up a lab if none runs
  kplab lab check            is the step done? what is still missing?
  kplab lab hint             a little help, and a little more each time

A lab without an argument is the one that was started last. A lab of your own is
named by the path of its folder. Exit codes: 0 passed, 1 not yet, 2 misused,
3 the lab itself is broken.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("%s: unknown command %q, see `kplab lab --help`", cmd.CommandPath(), args[0])}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f := cmd.PersistentFlags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "run on the cluster of this kubeconfig instead; steps that enter a node are skipped")
	f.StringVar(&o.langFlag, "lang", "", "language: en or zh (default from LC_ALL, LC_MESSAGES or LANG)")
	cmd.AddCommand(
		newLabListCommand(o), newLabStartCommand(o), newLabStatusCommand(o), newLabTextCommand(o), newLabCheckCommand(o), newLabHintCommand(o),
		newLabSolveCommand(o), newLabResetCommand(o), newLabStopCommand(o), newLabVerifyCommand(o), newLabNewCommand(), newLabReceiptCommand(o),
	)
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(c *cobra.Command, args []string) {
		if lang, err := labs.ParseLang(o.langFlag); err == nil && lang == labs.ZH {
			inChinese(c)
		}
		help(c, args)
	})
	return cmd
}

// labRun is the body of a lab command: it knows the language, and what a broken lab
// exits with.
func (o *labOptions) run(body func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		var err error
		if o.lang, err = labs.ParseLang(o.langFlag); err != nil {
			return usageError{err}
		}
		err = body(cmd, args)
		var fault *labs.BrokenError
		switch {
		case errors.As(err, &fault):
			fmt.Fprintf(cmd.ErrOrStderr(), "kplab: %v\n", err)
			return exitError(exitBroken)
		case errors.Is(err, labs.ErrNoLab), errors.Is(err, labs.ErrNotStarted):
			return usageError{err}
		}
		return err
	}
}

// optionalLab takes at most the name of a lab.
func optionalLab(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.CommandPath(), args[1])}
	}
	return nil
}

func first(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}

func (o *labOptions) target() (labs.Target, error) {
	program, err := os.Executable()
	if err != nil {
		return labs.Target{}, fmt.Errorf("find this program: %w", err)
	}
	return labs.Target{Name: o.g.name, Kubeconfig: o.kubeconfig, Program: program, Called: os.Args[0]}, nil
}

// session opens the lab that the arguments name on the cluster.
func (o *labOptions) session(cmd *cobra.Command, args []string) (*labs.Session, error) {
	t, err := o.target()
	if err != nil {
		return nil, err
	}
	w, err := labs.Open(cmd.Context(), t)
	if err != nil {
		return nil, err
	}
	s, err := labs.NewSession(w, first(args), o.lang)
	if err != nil {
		return nil, err
	}
	s.Say = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
	return s, nil
}

// up brings up a lab of kplab if none runs.
func (o *labOptions) up(cmd *cobra.Command, name string, disposable bool) error {
	if o.kubeconfig != "" {
		return nil
	}
	_, err := cluster.Connect(name)
	if !errors.Is(err, cluster.ErrNotRunning) {
		return err
	}
	cfg := cluster.Config{Name: name, Disposable: disposable}
	cfg.SetDefaults(0)
	args := []string{"up", "-d", "--name=" + name}
	if disposable {
		args = append(args, "--no-fsync")
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "no lab %q runs: starting it\n", name)
	err = cluster.StartDetached(cmd.Context(), cluster.UpOptions{Config: cfg}, args, newProgress(cmd.ErrOrStderr()))
	if errors.Is(err, cluster.ErrRunning) {
		return nil
	}
	return err
}

func newLabListCommand(o *labOptions) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "list the labs, and how far you are with each",
		Args:  exactArgs(),
		RunE: o.run(func(cmd *cobra.Command, _ []string) error {
			if err := checkReport(format); err != nil {
				return err
			}
			t, err := o.target()
			if err != nil {
				return err
			}
			all, err := labs.List(t, o.lang)
			if err != nil {
				return err
			}
			switch format {
			case "json":
				return printJSON(cmd.OutOrStdout(), all)
			case "junit":
				return labs.JUnitOfList(all).Write(cmd.OutOrStdout())
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "LAB\tDONE\tTIME\tTITLE")
			for _, l := range all {
				done := "-"
				if l.Started {
					done = fmt.Sprintf("%d/%d", l.Passed, l.Steps)
				}
				if l.Current {
					done += "*"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Name, done, l.Time, l.Title)
			}
			return w.Flush()
		}),
	}
	reportFlag(cmd, &format)
	return cmd
}

func newLabStartCommand(o *labOptions) *cobra.Command {
	var seed uint64
	cmd := &cobra.Command{
		Use:   "start LAB",
		Short: "begin a lab, or go on with it",
		Long: `Begin a lab, or go on with it. LAB is its number, its name, or the path of a folder.

Where no lab of kplab runs under --name, one is brought up first and left running.
The exercise has a namespace of its own, which becomes the one that kplab kubectl
means; stop goes back to the default one. One exercise is under way at a time: the
one before is put away, with its progress kept.

A lab is a program: start those that you trust.`,
		Args: exactArgs("LAB"),
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if _, err := labs.Find(args[0]); err != nil {
				return err // before anything is brought up
			}
			if err := o.up(cmd, o.g.name, false); err != nil {
				return err
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			if err := s.Start(cmd.Context(), given(cmd, seed)); err != nil {
				return err
			}
			return printLab(cmd, s)
		}),
	}
	seedFlag(cmd, &seed)
	return cmd
}

func seedFlag(cmd *cobra.Command, seed *uint64) {
	cmd.Flags().Uint64Var(seed, "seed", 0, "vary names, ports and faults by this number (0 for the first of each)")
}

func given(cmd *cobra.Command, seed uint64) *uint64 {
	if !cmd.Flags().Changed("seed") {
		return nil
	}
	return &seed
}

// printLab prints the whole text as far as the learner has come.
func printLab(cmd *cobra.Command, s *labs.Session) error {
	out := cmd.OutOrStdout()
	fmt.Fprintf(out, "# %s\n\n%s\n\n", s.Title(), s.Intro())
	printStep(out, s)
	fmt.Fprintln(cmd.ErrOrStderr(), "\n"+s.Next())
	return nil
}

func printStep(out io.Writer, s *labs.Session) {
	if step := s.Step(); step != "" {
		fmt.Fprintf(out, "## %s\n", step)
	} else {
		fmt.Fprintln(out, s.Finished())
	}
}

func newLabStatusCommand(o *labOptions) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "status [LAB]",
		Short: "show which lab is under way and how far it is",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			p := s.Progress()
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), p)
			}
			if p == nil {
				return fmt.Errorf("lab %s: %w", s.Lab().Name, labs.ErrNotStarted)
			}
			out := cmd.OutOrStdout()
			fmt.Fprintf(out, "lab        %s: %s\nnamespace  %s\nseed       %d\nstarted    %s\n\n", p.Lab, s.Title(), s.Lab().Namespace(), p.Seed, p.Started.Local().Format(time.DateTime))
			w := tabwriter.NewWriter(out, 0, 8, 3, ' ', 0)
			fmt.Fprintln(w, "STEP\tSTATE\tCHECKS\tHINTS")
			for i, step := range p.Steps {
				state := "-"
				switch {
				case step.Skipped:
					state = "skipped"
				case step.Solved && step.Passed != nil:
					state = "solved"
				case step.Passed != nil:
					state = "passed"
				case i == p.Current():
					state = "now"
				}
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\n", step.ID, state, step.Checks, step.Hints)
			}
			return w.Flush()
		}),
	}
	outputFlag(cmd, &format)
	return cmd
}

func newLabTextCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "text [LAB]",
		Short: "print the text of the lab and of the current step again",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			return printLab(cmd, s)
		}),
	}
}

func newLabCheckCommand(o *labOptions) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "check [LAB]",
		Short: "look whether the current step is done, and say what is missing",
		Long: `Look whether the current step is done, and say what is missing. What counts is what
the network and the API do, tried for a few seconds; how you got there does not.
Exit code 0 when it is done, 1 when it is not yet.`,
		Args: optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if err := checkReport(format); err != nil {
				return err
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			r, err := s.Check(cmd.Context())
			if err != nil {
				return err
			}
			return printReport(cmd, s, r, format)
		}),
	}
	reportFlag(cmd, &format)
	return cmd
}

// printReport prints what a check came to, and the next step when there is one.
func printReport(cmd *cobra.Command, s *labs.Session, r *labs.Report, format string) error {
	out := cmd.OutOrStdout()
	switch format {
	case "json":
		if err := printJSON(out, r); err != nil {
			return err
		}
	case "junit":
		if err := r.JUnit().Write(out); err != nil {
			return err
		}
	default:
		for _, c := range r.Checks {
			switch {
			case c.Passed:
				fmt.Fprintf(out, "✓ %s\n", c.Says)
			case c.Seen == "":
				fmt.Fprintf(out, "✗ %s\n", c.Missing)
			default:
				fmt.Fprintf(out, "✗ %s (%s)\n", c.Missing, c.Seen)
			}
		}
		if r.Explained != "" {
			fmt.Fprintf(out, "\n%s\n", r.Explained)
		}
		if r.Passed {
			fmt.Fprintln(out)
			printStep(out, s)
		}
	}
	if !r.Passed {
		return exitError(exitFailed)
	}
	return nil
}

func newLabHintCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "hint [LAB]",
		Short: "print the next hint of the current step",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			text, n, of, err := s.Hint()
			if err != nil {
				return err
			}
			if of > 0 {
				fmt.Fprintf(cmd.ErrOrStderr(), "%d/%d\n", n, of)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), text)
			return err
		}),
	}
}

func newLabSolveCommand(o *labOptions) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "solve [LAB]",
		Short: "do the current step, telling what is done; a receipt will say so",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if err := checkReport(format); err != nil {
				return err
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			r, err := s.Solve(cmd.Context())
			if err != nil {
				return err
			}
			return printReport(cmd, s, r, format)
		}),
	}
	reportFlag(cmd, &format)
	return cmd
}

func newLabResetCommand(o *labOptions) *cobra.Command {
	var seed uint64
	var step bool
	cmd := &cobra.Command{
		Use:   "reset [LAB]",
		Short: "begin the lab anew, or with --step the current step",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if step && cmd.Flags().Changed("seed") {
				return usageError{errors.New("another seed begins the whole lab anew: leave out --step")}
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			if err := s.Reset(cmd.Context(), given(cmd, seed), step); err != nil {
				return err
			}
			printStep(cmd.OutOrStdout(), s)
			return nil
		}),
	}
	seedFlag(cmd, &seed)
	cmd.Flags().BoolVar(&step, "step", false, "go back to the beginning of the current step; what was passed stays")
	return cmd
}

func newLabStopCommand(o *labOptions) *cobra.Command {
	return &cobra.Command{
		Use:   "stop [LAB]",
		Short: "put the lab away: what it made goes, your progress stays",
		Args:  optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			return s.Stop(cmd.Context())
		}),
	}
}

func reportFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVarP(format, "output", "o", "", "output format: json or junit, or empty for text")
}

func checkReport(format string) error {
	if format != "" && format != "json" && format != "junit" {
		return usageError{fmt.Errorf("output format %q: want json or junit", format)}
	}
	return nil
}
