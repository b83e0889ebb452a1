// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"fmt"
	"net/http"
	"path"
)

const (
	httpdRoot    = "/usr/local/apache2/htdocs"
	httpdVersion = "2.4.63"
	httpdWelcome = "<html><body><h1>It works!</h1></body></html>\n"
)

// httpd is Apache's web server.
type httpd struct{ site *site }

func newHttpd(c Context) (Server, error) {
	server := "Apache/" + version(c.Image, httpdVersion) + " (Unix)"
	return &httpd{&site{
		ctx: c, server: server, root: httpdRoot,
		pages: map[string][]byte{"index.html": []byte(httpdWelcome)},
		errorPage: func(status int) string {
			return fmt.Sprintf("<html><head><title>%d %s</title></head><body><h1>%s</h1></body></html>\n",
				status, http.StatusText(status), http.StatusText(status))
		},
		logLine: commonLog,
	}}, nil
}

// httpdContent is the image's page as a file.
func httpdContent(*Context) map[string][]byte {
	return map[string][]byte{path.Join(httpdRoot, "index.html"): []byte(httpdWelcome)}
}

// Run implements Server.
func (h *httpd) Run(ctx context.Context) error {
	c := h.site.ctx
	var open []func(context.Context) (service, error)
	for _, port := range c.ports("TCP", 80) {
		open = append(open, httpService(c.NetNS, port, h.site, c.Stderr))
	}
	return runAll(ctx, open...)
}
