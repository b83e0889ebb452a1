// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"context"
	"fmt"
	"net/http"
	"path"
	"time"
)

// nginxRoot is where the image has its pages, and nginxVersion what it calls
// itself when the tag does not say.
const (
	nginxRoot    = "/usr/share/nginx/html"
	nginxVersion = "1.27.5"
)

// nginx is the web server of most tutorials.
type nginx struct{ site *site }

func newNginx(c Context) (Server, error) {
	server := "nginx/" + version(c.Image, nginxVersion)
	return &nginx{&site{
		ctx: c, server: server, root: nginxRoot,
		pages: map[string][]byte{"index.html": []byte(nginxWelcome), "50x.html": []byte(nginxError(server, 500))},
		errorPage: func(status int) string {
			return nginxError(server, status)
		},
		logLine: nginxLog,
	}}, nil
}

// nginxContent is the image's pages as files.
func nginxContent(*Context) map[string][]byte {
	return map[string][]byte{path.Join(nginxRoot, "index.html"): []byte(nginxWelcome)}
}

// Run implements Server.
func (n *nginx) Run(ctx context.Context) error {
	c := n.site.ctx
	var open []func(context.Context) (service, error)
	for _, port := range c.ports("TCP", 80) {
		open = append(open, httpService(c.NetNS, port, n.site, c.Stderr))
	}
	return runAll(ctx, open...)
}

// nginxLog is a line of the access log as the image configures it: the combined
// format and the address that a proxy forwarded.
func nginxLog(r *http.Request, status int, bytes int64, at time.Time) string {
	return fmt.Sprintf("%s \"%s\" \"%s\" \"%s\"", commonLog(r, status, bytes, at),
		orDash(r.Referer()), orDash(r.UserAgent()), orDash(r.Header.Get("X-Forwarded-For")))
}

// nginxError is the page for a status.
func nginxError(server string, status int) string {
	title := fmt.Sprintf("%d %s", status, http.StatusText(status))
	if status == http.StatusMethodNotAllowed {
		title = "405 Not Allowed"
	}
	return fmt.Sprintf("<html>\r\n<head><title>%s</title></head>\r\n<body>\r\n<center><h1>%s</h1></center>\r\n<hr><center>%s</center>\r\n</body>\r\n</html>\r\n",
		title, title, server)
}

// nginxWelcome has the title and the heading by which people and scripts know that
// nginx answers; the rest says what it is here.
const nginxWelcome = `<!DOCTYPE html>
<html>
<head>
<title>Welcome to nginx!</title>
<style>
html { color-scheme: light dark; }
body { width: 35em; margin: 0 auto;
font-family: Tahoma, Verdana, Arial, sans-serif; }
</style>
</head>
<body>
<h1>Welcome to nginx!</h1>
<p>You have reached a pod of a kplab lab: its built-in web server answers on the
pod's own address. The response headers X-Kplab-Pod and X-Kplab-Node say
which pod that is, and X-Kplab-Client which address your request came from.</p>

<p>To serve a page of your own, mount a volume at /usr/share/nginx/html.</p>
</body>
</html>
`
