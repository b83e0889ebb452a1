// SPDX-License-Identifier: Apache-2.0

package job

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// span is the completion indexes from first to last, both included.
type span struct{ first, last int }

// indexes is a set of completion indexes: spans in order, with room between them.
type indexes []span

// indexesOf makes the set of the indexes given, in any order.
func indexesOf(list ...int) indexes {
	spans := make(indexes, len(list))
	for i, n := range list {
		spans[i] = span{n, n}
	}
	return joined(spans)
}

// parseIndexes reads what String writes, as far as it makes sense: a Job's status may
// have been written by somebody else, and completions may have shrunk since.
func parseIndexes(text string, completions int) indexes {
	var spans indexes
	for part := range strings.SplitSeq(text, ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(from)
		if err != nil {
			continue
		}
		last := first
		if isRange {
			if last, err = strconv.Atoi(to); err != nil {
				continue
			}
		}
		if last = min(last, completions-1); first >= 0 && first <= last {
			spans = append(spans, span{first, last})
		}
	}
	return joined(spans)
}

// joined puts spans in order and makes one of those that touch.
func joined(spans indexes) indexes {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && s.first <= out[n-1].last+1 {
			out[n-1].last = max(out[n-1].last, s.last)
			continue
		}
		out = append(out, s)
	}
	return out
}

// String writes the set as in a Job's status: 0,2-5,7,8.
func (x indexes) String() string {
	var parts []string
	for _, s := range x {
		first, last := strconv.Itoa(s.first), strconv.Itoa(s.last)
		switch s.last - s.first {
		case 0:
			parts = append(parts, first)
		case 1:
			parts = append(parts, first, last)
		default:
			parts = append(parts, first+"-"+last)
		}
	}
	return strings.Join(parts, ",")
}

// count is how many indexes the set has.
func (x indexes) count() int {
	n := 0
	for _, s := range x {
		n += s.last - s.first + 1
	}
	return n
}

// has reports whether i is in the set.
func (x indexes) has(i int) bool {
	_, found := slices.BinarySearchFunc(x, i, func(s span, i int) int {
		switch {
		case s.last < i:
			return -1
		case s.first > i:
			return 1
		}
		return 0
	})
	return found
}

// union is what is in one of the sets or in several.
func union(sets ...indexes) indexes { return joined(slices.Concat(sets...)) }

// common is how many indexes are in both sets.
func common(a, b indexes) int {
	n := 0
	for len(a) > 0 && len(b) > 0 {
		if both := min(a[0].last, b[0].last) - max(a[0].first, b[0].first) + 1; both > 0 {
			n += both
		}
		if a[0].last < b[0].last {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return n
}

// missing returns the first n indexes below limit that are not in the set.
func (x indexes) missing(n, limit int) []int {
	var out []int
	next := 0
	for _, s := range append(slices.Clone(x), span{limit, limit}) {
		for ; next < min(s.first, limit) && len(out) < n; next++ {
			out = append(out, next)
		}
		next = max(next, s.last+1)
	}
	return out
}
