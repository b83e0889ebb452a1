// SPDX-License-Identifier: Apache-2.0

package workload

import "context"

// images is the list of all images.
func images() []Image {
	return []Image{
		{Names: []string{"agnhost"}, New: newAgnhost},
		{Names: []string{"busybox"}, Process: true, DefaultArgs: []string{"sh"}},
		// Their tools are this machine's: what they are asked for is a shell.
		{Names: []string{"alpine", "debian", "netshoot", "ubuntu"}, Process: true, DefaultArgs: []string{"sh"}},
		// This program under another name; see package dns.
		{Names: []string{"coredns"}, Process: true, Self: "coredns"},
		{Names: []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "routed"}, New: newComponent, Part: true},
		{Names: []string{"httpd"}, New: newHttpd, Content: httpdContent, Programs: []string{"httpd", "httpd-foreground"}},
		{Names: []string{"mariadb", "mysql"}, New: newMysql, Programs: []string{"mariadbd", "mysqld"}},
		{Names: []string{"nginx", "nginx-slim"}, New: newNginx, Content: nginxContent, Programs: []string{"nginx"}},
		{Names: []string{"pause"}, New: newPause},
		{Names: []string{"redis"}, New: newRedis, Programs: []string{"redis-server"}},
		{Names: []string{"udp-echo"}, New: newUDPEcho},
	}
}

// pause does nothing for as long as it may.
type pause struct{}

func newPause(Context) (Server, error) { return pause{}, nil }

// Run implements Server.
func (pause) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
