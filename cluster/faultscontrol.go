// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
)

// LinkStatus is one link of the lab, as the kernel has it.
type LinkStatus struct {
	// Node is a node's name, or "outside"; Port the link's end in the fabric.
	Node string `json:"node"`
	Port string `json:"port"`
	// Up says that the port is up, Carrier that both ends are.
	Up      bool `json:"up"`
	Carrier bool `json:"carrier"`
	// Faults of this link, and of ways from and to its node.
	Faults []Fault `json:"faults,omitempty"`
}

// Links returns the state of each link, and what is wrong with it on purpose.
func (l *Lab) Links() ([]LinkStatus, error) {
	states, err := l.fabric.Links()
	var out []LinkStatus
	for _, s := range states {
		st := LinkStatus{Node: s.Node, Port: s.Port, Up: s.Up, Carrier: s.Carrier}
		for _, f := range l.Faults() {
			if f.Kind == LinkFault && (f.Node == s.Node || f.Link.To == s.Node) {
				st.Faults = append(st.Faults, f)
			}
		}
		out = append(out, st)
	}
	return out, err
}

// serveFaults adds what the control socket answers about faults.
func (l *Lab) serveFaults(mux *http.ServeMux) {
	mux.HandleFunc("GET /faults", func(w http.ResponseWriter, r *http.Request) { answer(w, l.Faults(), nil) })
	mux.HandleFunc("POST /faults", func(w http.ResponseWriter, r *http.Request) {
		var f Fault
		err := json.Unmarshal([]byte(r.URL.Query().Get("fault")), &f)
		if err == nil {
			f, err = l.AddFault(r.Context(), f)
		}
		answer(w, f, err)
	})
	mux.HandleFunc("DELETE /faults", func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		cleared, err := l.ClearFaults(r.Context(), q.Get("all") != "", q["id"]...)
		answer(w, cleared, err)
	})
	mux.HandleFunc("POST /nodes", func(w http.ResponseWriter, r *http.Request) {
		var n NodeConfig
		err := json.Unmarshal([]byte(r.URL.Query().Get("node")), &n)
		if err == nil {
			n, err = l.AddNode(r.Context(), n)
		}
		answer(w, n, err)
	})
	mux.HandleFunc("DELETE /nodes", func(w http.ResponseWriter, r *http.Request) {
		answer(w, struct{}{}, l.RemoveNode(r.Context(), r.URL.Query().Get("name")))
	})
	mux.HandleFunc("POST /nodes/{action}", func(w http.ResponseWriter, r *http.Request) {
		answer(w, struct{}{}, l.ActOnNode(r.Context(), r.URL.Query().Get("name"), NodeAction(r.PathValue("action"))))
	})
	mux.HandleFunc("GET /links", func(w http.ResponseWriter, r *http.Request) {
		links, err := l.Links()
		answer(w, links, err)
	})
	mux.HandleFunc("POST /links", func(w http.ResponseWriter, r *http.Request) {
		var with LinkFaults
		err := json.Unmarshal([]byte(r.URL.Query().Get("with")), &with)
		var f Fault
		if err == nil {
			f, err = l.SetLink(r.Context(), r.URL.Query().Get("node"), with)
		}
		answer(w, f, err)
	})
	mux.HandleFunc("DELETE /links", func(w http.ResponseWriter, r *http.Request) {
		cleared, err := l.LinkUp(r.Context(), r.URL.Query().Get("node"), r.URL.Query().Get("to"))
		answer(w, cleared, err)
	})
}

// Faults asks what is broken on purpose.
func (c *Client) Faults(ctx context.Context) ([]Fault, error) {
	var out []Fault
	return out, c.call(ctx, http.MethodGet, "/faults", &out)
}

// AddFault breaks something, as [Lab.AddFault] does.
func (c *Client) AddFault(ctx context.Context, f Fault) (Fault, error) {
	f.setDefaults()
	if err := f.check(); err != nil {
		return f, err
	}
	var made Fault
	return made, c.callWith(ctx, http.MethodPost, "/faults", url.Values{}, "fault", f, &made)
}

// ClearFaults undoes faults, as [Lab.ClearFaults] does.
func (c *Client) ClearFaults(ctx context.Context, all bool, ids ...string) ([]Fault, error) {
	q := url.Values{"id": ids}
	if all {
		q.Set("all", "1")
	}
	var cleared []Fault
	return cleared, c.call(ctx, http.MethodDelete, "/faults?"+q.Encode(), &cleared)
}

// AddNode adds a node, as [Lab.AddNode] does.
func (c *Client) AddNode(ctx context.Context, n NodeConfig) (NodeConfig, error) {
	var made NodeConfig
	return made, c.callWith(ctx, http.MethodPost, "/nodes", url.Values{}, "node", n, &made)
}

// RemoveNode takes a node away for good, as [Lab.RemoveNode] does.
func (c *Client) RemoveNode(ctx context.Context, name string) error {
	return c.call(ctx, http.MethodDelete, "/nodes?"+url.Values{"name": {name}}.Encode(), nil)
}

// ActOnNode does something to a node, as [Lab.ActOnNode] does.
func (c *Client) ActOnNode(ctx context.Context, name string, action NodeAction) error {
	return c.call(ctx, http.MethodPost, "/nodes/"+string(action)+"?"+url.Values{"name": {name}}.Encode(), nil)
}

// Links asks for the state of the links.
func (c *Client) Links(ctx context.Context) ([]LinkStatus, error) {
	var out []LinkStatus
	return out, c.call(ctx, http.MethodGet, "/links", &out)
}

// SetLink makes a link faulty, as [Lab.SetLink] does. The fault that it returns has no
// words when nothing is wrong with the link any more.
func (c *Client) SetLink(ctx context.Context, nodeName string, with LinkFaults) (Fault, error) {
	var made Fault
	return made, c.callWith(ctx, http.MethodPost, "/links", url.Values{"node": {nodeName}}, "with", with, &made)
}

// LinkUp takes the faults of a link back, as [Lab.LinkUp] does.
func (c *Client) LinkUp(ctx context.Context, nodeName, to string) ([]Fault, error) {
	var cleared []Fault
	return cleared, c.call(ctx, http.MethodDelete, "/links?"+url.Values{"node": {nodeName}, "to": {to}}.Encode(), &cleared)
}

// callWith is call with a value as JSON in the query.
func (c *Client) callWith(ctx context.Context, method, path string, q url.Values, key string, value, out any) error {
	data, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	q.Set(key, string(data))
	return c.call(ctx, method, path+"?"+q.Encode(), out)
}

// CheckLink says what is wrong with the words of `kplab link set`.
func CheckLink(nodeName string, with LinkFaults) error {
	words := LinkFaults{To: with.To}
	words.add(with)
	_, err := words.parse("", nodeName)
	return err
}
