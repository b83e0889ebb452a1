// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/netip"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// ClientConfig returns a configuration for a client in this process that acts
// as user: protobuf on the wire, no limit on the client's side. All such clients
// share one connection. The credential ends with the process.
func (s *Server) ClientConfig(user string, groups ...string) *rest.Config {
	return &rest.Config{
		Host:            "https://" + s.listener.Addr().String(),
		BearerToken:     s.local.tokenFor(user, groups),
		TLSClientConfig: rest.TLSClientConfig{CAData: s.pki.serving.pem},
		// The field manager of its writes is what comes before the slash.
		UserAgent: user + "/kplab",
		QPS:       -1,
		ContentConfig: rest.ContentConfig{
			ContentType:        runtime.ContentTypeProtobuf,
			AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		},
	}
}

func (s *Server) unversionedConfig() *rest.Config {
	c := s.ClientConfig("system:kplab:ready", "system:masters")
	c.GroupVersion = &schema.GroupVersion{}
	c.NegotiatedSerializer = scheme.Codecs
	return c
}

// AdminKubeconfig returns a kubeconfig for the lab called name, whose only
// context is kplab-NAME and whose user may do everything. serverURL is where
// the reader of the file reaches the API. The file holds a private key: keep it
// readable by its owner only.
func (s *Server) AdminKubeconfig(name, serverURL string) ([]byte, error) {
	pair, err := s.pki.issueClient("kubernetes-admin", []string{"system:masters"})
	if err != nil {
		return nil, err
	}
	context := "kplab-" + name
	c := clientcmdapi.NewConfig()
	c.Clusters[context] = &clientcmdapi.Cluster{Server: serverURL, CertificateAuthorityData: s.pki.serving.pem}
	c.AuthInfos[context] = &clientcmdapi.AuthInfo{ClientCertificateData: pair.cert, ClientKeyData: pair.key}
	c.Contexts[context] = &clientcmdapi.Context{Cluster: context, AuthInfo: context}
	c.CurrentContext = context
	data, err := clientcmd.Write(*c)
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig: %w", err)
	}
	return data, nil
}

// ServingAuthority is the PEM certificate of the authority that signs the
// serving certificates of the API and of kubelets. Pods get it as ca.crt.
func (s *Server) ServingAuthority() []byte { return s.pki.serving.pem }

// ClientAuthorities are the roots of client certificates, for a server that
// asks its clients for one as a kubelet does.
func (s *Server) ClientAuthorities() *x509.CertPool { return s.pki.clients.pool() }

// IssueServing makes a certificate, good for a year, for a server with these
// names and addresses. commonName is what the certificate calls it
// ("system:node:node1" for a kubelet).
func (s *Server) IssueServing(commonName string, names []string, ips []netip.Addr) (tls.Certificate, error) {
	var addrs []net.IP
	for _, ip := range ips {
		addrs = append(addrs, ip.AsSlice())
	}
	pair, err := s.pki.issueServing(commonName, names, addrs)
	if err != nil {
		return tls.Certificate{}, err
	}
	return pair.tls()
}

// IssueClient makes a certificate, good for a year, that logs in as user.
func (s *Server) IssueClient(user string, groups ...string) (tls.Certificate, error) {
	pair, err := s.pki.issueClient(user, groups)
	if err != nil {
		return tls.Certificate{}, err
	}
	return pair.tls()
}

// kubeletTLS is how this server talks to kubelets.
func (s *Server) kubeletTLS() (*tls.Config, error) {
	cert, err := s.IssueClient("kube-apiserver-kubelet-client", "system:masters")
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		RootCAs:      s.pki.serving.pool(),
		Certificates: []tls.Certificate{cert},
	}, nil
}
