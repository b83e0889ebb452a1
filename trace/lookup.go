// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// queryTime is how long one question waits for its answer, unless the lab says so.
const queryTime = 2 * time.Second

// lookup resolves a name as the C library does in a place: each suffix of the
// search list in turn, the name as it is first when it has enough dots. Every try
// becomes a step.
func (l *Lab) lookup(ctx context.Context, p *Place, name string, x *Index) (netip.Addr, []*Step, *Verdict) {
	conf, err := dns.ClientConfigFromReader(strings.NewReader(p.ResolvConf))
	if err != nil || p.ResolvConf == "" || len(conf.Servers) == 0 {
		return netip.Addr{}, nil, &Verdict{
			Outcome: "unresolved", Reason: "no-resolver", Place: p.Name,
			Text: fmt.Sprintf("%s has no name server: only pods use the cluster's DNS, so %q cannot be looked up from here", p.Name, name),
			Fix:  "give an address or svc/NAME, or trace from a pod: pod/NAME",
		}
	}
	var steps []*Step
	var tried []string
	silent := false
	for _, full := range conf.NameList(name) {
		q := ask(ctx, p, conf.Servers[0], full, cmp.Or(l.queryTime, queryTime))
		step := &Step{Leg: Lookup, Kind: KindQuery, Place: p.Name, Query: q}
		steps, tried = append(steps, step), append(tried, full)
		var found netip.Addr
		for _, v := range q.Values {
			if a, err := netip.ParseAddr(v); err == nil && a.Is4() && !found.IsValid() {
				found = a
			}
		}
		switch {
		case found.IsValid():
			who := ""
			if n := x.serviceAt(found); n != "" {
				who, step.Objects = "the cluster IP of Service "+n, []string{"service/" + n}
			} else {
				who, step.Objects = x.Describe(found)
			}
			if who != "" {
				who = ", " + who
			}
			step.Text = fmt.Sprintf("%s %s: %s%s", full, q.Type, strings.Join(q.Values, ", "), who)
			return found, steps, nil
		case q.Answer == "NOERROR":
			step.Text = fmt.Sprintf("%s %s: the name is there, without an address of this kind; the search ends here only when the last name was tried", full, q.Type)
			if len(q.Values) > 0 {
				step.Text = fmt.Sprintf("%s %s: %s, and no address for that", full, q.Type, strings.Join(q.Values, ", "))
			}
		default:
			step.Text = fmt.Sprintf("%s %s: %s", full, q.Type, q.Answer)
			silent = silent || !strings.HasPrefix(q.Answer, "NX")
		}
	}
	v := &Verdict{Outcome: "unresolved", Reason: "no-such-name", Place: p.Name,
		Text: fmt.Sprintf("no name resolves: tried %s", strings.Join(tried, ", ")),
		Fix:  "see `kubectl get svc -A`; a Service of another namespace is NAME.NAMESPACE"}
	if silent {
		v.Reason = "dns-failed"
		v.Text = fmt.Sprintf("the name server %s gives no good answer: %s", conf.Servers[0], steps[len(steps)-1].Query.Answer)
		v.Fix = "see `kubectl -n kube-system get pods,svc -l k8s-app=kube-dns`"
	}
	return netip.Addr{}, steps, v
}

func (x *Index) serviceAt(a netip.Addr) string {
	for key, s := range x.services {
		for _, ip := range s.Spec.ClusterIPs {
			if ip == a.String() {
				return key
			}
		}
	}
	return ""
}

// ask sends one question from a place.
func ask(ctx context.Context, p *Place, server, name string, patience time.Duration) *Query {
	q := &Query{Name: name, Type: "A", Server: server}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := p.ns.Dial(ctx, "udp", net.JoinHostPort(server, "53"))
	if err != nil {
		q.Answer = plainError(err, patience)
		return q
	}
	defer conn.Close()
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	c := dns.Client{Timeout: patience}
	r, _, err := c.ExchangeWithConnContext(ctx, m, &dns.Conn{Conn: conn})
	if err != nil {
		q.Answer = plainError(err, patience)
		return q
	}
	q.Answer = dns.RcodeToString[r.Rcode]
	for _, rr := range r.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			q.Values = append(q.Values, rr.A.String())
		case *dns.CNAME:
			q.Values = append(q.Values, "CNAME "+rr.Target)
		}
	}
	return q
}

func plainError(err error, patience time.Duration) string {
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return "no answer within " + patience.String()
	}
	return err.Error()
}
