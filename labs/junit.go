// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"encoding/xml"
	"fmt"
	"io"
)

// JUnit is a test report as build servers read it.
type JUnit struct {
	XMLName  xml.Name    `xml:"testsuite"`
	Name     string      `xml:"name,attr"`
	Tests    int         `xml:"tests,attr"`
	Failures int         `xml:"failures,attr"`
	Skipped  int         `xml:"skipped,attr"`
	Cases    []JUnitCase `xml:"testcase"`
}

// JUnitCase is one test of a report.
type JUnitCase struct {
	Class   string      `xml:"classname,attr"`
	Name    string      `xml:"name,attr"`
	Time    string      `xml:"time,attr"`
	Failure *JUnitCause `xml:"failure,omitempty"`
	Skipped *JUnitCause `xml:"skipped,omitempty"`
}

// JUnitCause is why a test failed or was skipped.
type JUnitCause struct {
	Message string `xml:"message,attr"`
}

// add puts one case into the report.
func (j *JUnit) add(class, name string, seconds float64, ok bool, skipped bool, why string) {
	c := JUnitCase{Class: class, Name: name, Time: fmt.Sprintf("%.3f", seconds)}
	j.Tests++
	switch {
	case skipped:
		j.Skipped++
		c.Skipped = &JUnitCause{why}
	case !ok:
		j.Failures++
		c.Failure = &JUnitCause{why}
	}
	j.Cases = append(j.Cases, c)
}

// Write writes the report as XML.
func (j *JUnit) Write(w io.Writer) error {
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(j); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

// JUnit is the report as one.
func (r *Report) JUnit() *JUnit {
	j := &JUnit{Name: r.Lab}
	for _, c := range r.Checks {
		why := c.Missing
		if c.Seen != "" {
			why += " (" + c.Seen + ")"
		}
		j.add(r.Lab+"."+r.Step, c.Says, r.Took.Seconds()/float64(len(r.Checks)), c.Passed, false, why)
	}
	return j
}

// JUnitOf is what Verify tried as one report.
func JUnitOf(all []*Verified) *JUnit {
	j := &JUnit{Name: "kplab lab verify"}
	for _, v := range all {
		for _, p := range v.Proofs {
			class := v.Lab
			for _, part := range []string{p.Mode, p.Step} {
				if part != "" {
					class += "." + part
				}
			}
			j.add(class, p.What, p.Took.Seconds(), p.OK, p.Skipped, p.Why)
		}
	}
	return j
}
