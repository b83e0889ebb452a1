// SPDX-License-Identifier: Apache-2.0

package labs

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// Lang is a language that labs speak.
type Lang string

// The languages of the labs.
const (
	EN Lang = "en"
	ZH Lang = "zh"
)

// ParseLang reads the value of --lang; "" asks the environment, as programs do.
func ParseLang(s string) (Lang, error) {
	switch s {
	case "":
		for _, name := range []string{"LC_ALL", "LC_MESSAGES", "LANG"} {
			if v := os.Getenv(name); v != "" {
				s = v
				break
			}
		}
		if strings.HasPrefix(s, "zh") {
			return ZH, nil
		}
		return EN, nil
	case string(EN), string(ZH):
		return Lang(s), nil
	}
	return "", fmt.Errorf("language %q: want en or zh", s)
}

// textFile is the file with a lab's text in a language.
func textFile(l Lang) string {
	if l == ZH {
		return "lab.zh.md"
	}
	return "lab.md"
}

// document is a lab's text in one language.
type document struct {
	// Intro is what stands before the first step.
	Intro    string
	Sections []section
}

// section is the text of one step.
type section struct {
	Line  int
	Title string
	Text  string
	Hints []string
	// Explained is told once the step is done.
	Explained string
}

// The headings inside a step's section, in both languages.
var (
	hintHeading      = regexp.MustCompile(`^### +(Hint|提示)`)
	explainedHeading = regexp.MustCompile(`^### +(Explained|说明)`)
)

// parseDocument takes a Markdown file apart: "## " begins a step, "### Hint" and
// "### Explained" ("### 提示" and "### 说明") part it.
func parseDocument(data string) *document {
	doc := &document{}
	to := &doc.Intro
	fenced := false
	var s *section
	var hints [][]*string
	for i, line := range strings.Split(data, "\n") {
		if strings.HasPrefix(line, "```") {
			fenced = !fenced
		}
		switch title, isStep := strings.CutPrefix(line, "## "); {
		case fenced:
		case isStep:
			doc.Sections = append(doc.Sections, section{Line: i + 1, Title: strings.TrimSpace(title)})
			s = &doc.Sections[len(doc.Sections)-1]
			hints = append(hints, nil)
			to = &s.Text
			continue
		case s != nil && hintHeading.MatchString(line):
			to = new(string)
			hints[len(hints)-1] = append(hints[len(hints)-1], to)
			continue
		case s != nil && explainedHeading.MatchString(line):
			to = &s.Explained
			continue
		}
		*to += line + "\n"
	}
	doc.Intro = strings.TrimSpace(doc.Intro)
	for i := range doc.Sections {
		s := &doc.Sections[i]
		s.Text, s.Explained = strings.TrimSpace(s.Text), strings.TrimSpace(s.Explained)
		for _, h := range hints[i] {
			s.Hints = append(s.Hints, strings.TrimSpace(*h))
		}
	}
	return doc
}

var (
	codePiece = regexp.MustCompile("(?ms)^```.*?^```|`[^`\n]+`")
	// A program's name where a command begins.
	programName = regexp.MustCompile("(?m)(^|[`$|;&(] *|\\$ )(kplab|kubectl)( )")
)

// withPrograms writes the commands in a text as they are to be typed here: kplab as
// it was called, and kubectl as what is bound to this cluster.
func withPrograms(text, kplab, kubectl string) string {
	return codePiece.ReplaceAllStringFunc(text, func(code string) string {
		return inCommand(code, kplab, kubectl)
	})
}

// inCommand is withPrograms for what is a command as a whole.
func inCommand(code, kplab, kubectl string) string {
	return programName.ReplaceAllStringFunc(code, func(m string) string {
		p := programName.FindStringSubmatch(m)
		as := kplab
		if p[2] == "kubectl" {
			as = kubectl
		}
		return p[1] + as + p[3]
	})
}
