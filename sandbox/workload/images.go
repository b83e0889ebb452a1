// SPDX-License-Identifier: Apache-2.0

package workload

import "context"

// images is the list of all images.
func images() []Image {
	return []Image{
		{Names: []string{"agnhost"}, New: newAgnhost},
		{Names: []string{"busybox"}, Process: true, DefaultArgs: []string{"sh"}},
		{Names: []string{"httpd"}, New: newHttpd, Content: httpdContent},
		{Names: []string{"mariadb", "mysql"}, New: newMysql},
		{Names: []string{"nginx"}, New: newNginx, Content: nginxContent},
		{Names: []string{"pause"}, New: newPause},
		{Names: []string{"redis"}, New: newRedis},
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
