// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kplab/kplab/cluster"
	"github.com/kplab/kplab/labs"
)

// The lab commands of those who write labs and those who mark them.

func newLabVerifyCommand(o *labOptions) *cobra.Command {
	var opts labs.VerifyOptions
	var format string
	var all bool
	cmd := &cobra.Command{
		Use:   "verify [LAB…]",
		Short: "prove that labs work: checks fail before the solution and pass after it (for authors)",
		Long: `Prove of each step that its checks fail before the solution, fail after each wrong
answer that the lab lists, and pass after the solution, in each proxy mode that the
lab names; and of each check that it failed at least once.

It brings up a lab of kplab for that and deletes it afterwards. With --name, that lab
is used, and left running. Exit code 3 says that an exercise is broken.`,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			if err := checkReport(format); err != nil {
				return err
			}
			if all == (len(args) > 0) {
				return usageError{fmt.Errorf("%s: want either labs or --all", cmd.CommandPath())}
			}
			if all {
				args = labs.Builtin()
			}
			opts.Say = func(line string) { fmt.Fprintln(cmd.ErrOrStderr(), line) }
			results, err := o.verify(cmd, args, opts)
			if err != nil {
				return err
			}
			return printVerified(cmd, results, format)
		}),
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, "all built-in labs")
	f.StringSliceVar(&opts.Modes, "mode", nil, "only in these proxy modes (default: those that the lab names)")
	f.Uint64Var(&opts.Seed, "seed", 0, "fill the templates with this seed")
	f.DurationVar(&opts.Patience, "patience", time.Second, "how long to try checks that have to fail")
	f.BoolVar(&opts.SkipWrong, "skip-wrong", false, "leave out the wrong answers")
	reportFlag(cmd, &format)
	return cmd
}

// verify verifies labs on the running lab of --name, or on one of its own.
func (o *labOptions) verify(cmd *cobra.Command, args []string, opts labs.VerifyOptions) (results []*labs.Verified, err error) {
	for _, arg := range args {
		if _, err := labs.Find(arg); err != nil {
			return nil, err // before anything is brought up
		}
	}
	t, err := o.target()
	if err != nil {
		return nil, err
	}
	named := cmd.Flags().Changed("name") || os.Getenv("KPLAB_LAB") != ""
	if o.kubeconfig == "" && !named {
		t.Name = fmt.Sprintf("verify-%d", os.Getpid())
	}
	if err := o.up(cmd, t.Name, !named); err != nil {
		return nil, err
	}
	if o.kubeconfig == "" && !named {
		defer func() {
			// Also after Ctrl-C, which ended the command's context.
			_, e := cluster.Down(context.WithoutCancel(cmd.Context()), t.Name, cluster.DownOptions{Purge: true})
			err = errors.Join(err, e)
		}()
	}
	w, err := labs.Open(cmd.Context(), t)
	if err != nil {
		return nil, err
	}
	for _, arg := range args {
		v, err := labs.Verify(cmd.Context(), w, arg, opts)
		if err != nil {
			return results, err
		}
		results = append(results, v)
	}
	return results, nil
}

func printVerified(cmd *cobra.Command, results []*labs.Verified, format string) error {
	out := cmd.OutOrStdout()
	good := true
	for _, v := range results {
		good = good && v.OK
	}
	switch format {
	case "json":
		if err := printJSON(out, results); err != nil {
			return err
		}
	case "junit":
		if err := labs.JUnitOf(results).Write(out); err != nil {
			return err
		}
	default:
		for _, v := range results {
			said := "verified"
			if !v.OK {
				said = "broken"
			}
			fmt.Fprintf(out, "%s %s\n", v.Lab, said)
		}
	}
	if !good {
		return exitError(exitBroken)
	}
	return nil
}

func newLabNewCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "new FOLDER",
		Short: "write the folder of a small lab, to begin your own with",
		Args:  exactArgs("FOLDER"),
		RunE: func(cmd *cobra.Command, args []string) error {
			files, err := labs.New(args[0])
			if err != nil {
				return err
			}
			for _, f := range files {
				fmt.Fprintln(cmd.OutOrStdout(), f)
			}
			folder := filepath.Clean(args[0])
			if !filepath.IsAbs(folder) {
				folder = "./" + folder
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "next: edit them, then %s lab verify %s\n", os.Args[0], folder)
			return nil
		},
	}
}

func newLabReceiptCommand(o *labOptions) *cobra.Command {
	var keyFile, output string
	cmd := &cobra.Command{
		Use:   "receipt [LAB] --key FILE",
		Short: "write what you passed as JSON, under the key from your teacher",
		Long: `Write what you passed as JSON, with an HMAC under the key that your teacher gave you.
The teacher checks it with: kplab lab receipt verify FILE --key KEYFILE.
It proves that kplab wrote it on a machine that has the key; who is root there can
still forge one.`,
		Args: optionalLab,
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			key, err := readKey(keyFile)
			if err != nil {
				return err
			}
			s, err := o.session(cmd, args)
			if err != nil {
				return err
			}
			r, err := s.Receipt(key)
			if err != nil {
				return err
			}
			if output == "" {
				return printJSON(cmd.OutOrStdout(), r)
			}
			data, err := json.MarshalIndent(r, "", "  ")
			if err != nil {
				return err
			}
			return os.WriteFile(output, append(data, '\n'), 0o644)
		}),
	}
	cmd.Flags().StringVar(&keyFile, "key", "", "file with your key")
	cmd.Flags().StringVarP(&output, "file", "f", "", "write to this file instead of standard output")
	var verifyKey, lab string
	verify := &cobra.Command{
		Use:   "verify FILE --key KEYFILE",
		Short: "check that a receipt was written under a key, and about the same lab",
		Args:  exactArgs("FILE"),
		RunE: o.run(func(cmd *cobra.Command, args []string) error {
			key, err := readKey(verifyKey)
			if err != nil {
				return err
			}
			data, err := os.ReadFile(args[0])
			if err != nil {
				return fmt.Errorf("read the receipt: %w", err)
			}
			r, err := labs.VerifyReceipt(data, key, lab)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "genuine: lab %s, seed %d, %d of %d steps passed\n", r.Lab, r.Seed, r.Passed, r.Of)
			return err
		}),
	}
	verify.Flags().StringVar(&verifyKey, "key", "", "file with the learner's key")
	verify.Flags().StringVar(&lab, "lab", "", "folder of the lab, where it is none of the built-in ones")
	cmd.AddCommand(verify)
	return cmd
}

func readKey(path string) ([]byte, error) {
	if path == "" {
		return nil, usageError{errors.New("missing --key FILE")}
	}
	return labs.ReadKey(path)
}
