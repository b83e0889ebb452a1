// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Validity of certificates, and how long before its end one is replaced. A
// lab's certificates are looked at whenever it starts.
const (
	authorityLife  = 10 * 365 * 24 * time.Hour
	leafLife       = 365 * 24 * time.Hour
	authorityRenew = 180 * 24 * time.Hour
	leafRenew      = 30 * 24 * time.Hour
	// backdate makes certificates valid on a machine whose clock is a little
	// behind.
	backdate = time.Hour
)

// pki is a lab's certificates and keys, kept as files in one directory. All
// keys are ECDSA P-256: generating RSA keys alone would take longer than the
// rest of a lab's start.
type pki struct {
	dir string
	// serving signs the certificates of servers, clients those of clients.
	// They differ, so that a kubelet's serving certificate is no login.
	serving, clients authority
	// tokens signs service account tokens.
	tokens *ecdsa.PrivateKey
	// server is the API's own serving certificate.
	server keyPair
}

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// keyPair is a certificate and its key, PEM encoded.
type keyPair struct{ cert, key []byte }

func (p keyPair) tls() (tls.Certificate, error) { return tls.X509KeyPair(p.cert, p.key) }

// openPKI reads the certificates in dir and makes those that are missing, about
// to expire, or, for the API's own, made for other names or addresses.
func openPKI(dir string, names []string, ips []net.IP) (*pki, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the lab's certificates: %w", err)
	}
	p := &pki{dir: dir}
	var err error
	if p.serving, err = p.openAuthority("ca", "kplab"); err != nil {
		return nil, err
	}
	if p.clients, err = p.openAuthority("client-ca", "kplab-clients"); err != nil {
		return nil, err
	}
	if p.tokens, err = p.openKey("service-account.key"); err != nil {
		return nil, err
	}
	p.server, err = p.openServer(names, ips)
	return p, err
}

func (p *pki) openAuthority(file, commonName string) (authority, error) {
	pair, err := p.read(file)
	if err == nil {
		a, err := parseAuthority(pair)
		if err != nil {
			return authority{}, fmt.Errorf("read certificate authority %s: %w (delete %s to make new certificates; kubeconfigs are then written anew at the next start)", file, err, p.dir)
		}
		if time.Until(a.cert.NotAfter) > authorityRenew {
			return a, nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return authority{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, fmt.Errorf("make the key of authority %s: %w", file, err)
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: commonName},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	pair, err = sign(template, authorityLife, key, template, key)
	if err != nil {
		return authority{}, fmt.Errorf("make certificate authority %s: %w", file, err)
	}
	if err := p.write(file, pair); err != nil {
		return authority{}, err
	}
	return parseAuthority(pair)
}

func parseAuthority(pair keyPair) (authority, error) {
	c, err := pair.tls()
	if err != nil {
		return authority{}, err
	}
	key, ok := c.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return authority{}, errors.New("its key is not an ECDSA key")
	}
	return authority{cert: c.Leaf, key: key, pem: pair.cert}, nil
}

// openKey reads an ECDSA key, or makes one.
func (p *pki) openKey(file string) (*ecdsa.PrivateKey, error) {
	path := filepath.Join(p.dir, file)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("make %s: %w", file, err)
		}
		if data, err = encodeKey(key); err != nil {
			return nil, fmt.Errorf("encode %s: %w", file, err)
		}
		return key, writeFile(path, data)
	}
	if err != nil {
		return nil, fmt.Errorf("read a key of the lab: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("read %s: no PEM block (delete it to make a new key; tokens of service accounts then stop working)", path)
	}
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w (delete it to make a new key; tokens of service accounts then stop working)", path, err)
	}
	return key, nil
}

func (p *pki) openServer(names []string, ips []net.IP) (keyPair, error) {
	const file = "apiserver"
	if pair, err := p.read(file); err == nil && p.serverFits(pair, names, ips) {
		return pair, nil
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return keyPair{}, err
	}
	pair, err := p.issueServing("kube-apiserver", names, ips)
	if err != nil {
		return keyPair{}, err
	}
	return pair, p.write(file, pair)
}

// serverFits says whether a stored serving certificate can be used again.
func (p *pki) serverFits(pair keyPair, names []string, ips []net.IP) bool {
	c, err := pair.tls()
	if err != nil || time.Until(c.Leaf.NotAfter) < leafRenew || c.Leaf.CheckSignatureFrom(p.serving.cert) != nil {
		return false
	}
	for _, n := range names {
		if !slices.Contains(c.Leaf.DNSNames, n) {
			return false
		}
	}
	for _, ip := range ips {
		if !slices.ContainsFunc(c.Leaf.IPAddresses, ip.Equal) {
			return false
		}
	}
	return len(c.Leaf.DNSNames) == len(names) && len(c.Leaf.IPAddresses) == len(ips)
}

// issueServing makes a certificate for a server.
func (p *pki) issueServing(commonName string, names []string, ips []net.IP) (keyPair, error) {
	return p.issue(p.serving, &x509.Certificate{
		Subject:     pkix.Name{CommonName: commonName},
		DNSNames:    names,
		IPAddresses: ips,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
}

// issueClient makes a certificate that logs in as user.
func (p *pki) issueClient(user string, groups []string) (keyPair, error) {
	return p.issue(p.clients, &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// signClient makes the certificate that a client asked for with a request of its
// own key. It implements registry.CertificateSigner.
func (p *pki) signClient(csr *x509.CertificateRequest, life time.Duration) ([]byte, error) {
	template := &x509.Certificate{
		Subject:     csr.Subject,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := signKey(template, life, csr.PublicKey, p.clients.cert, p.clients.key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate for %s: %w", csr.Subject.CommonName, err)
	}
	return encodeCertificate(der), nil
}

func (p *pki) issue(by authority, template *x509.Certificate) (keyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return keyPair{}, fmt.Errorf("make a key for %s: %w", template.Subject.CommonName, err)
	}
	pair, err := sign(template, leafLife, key, by.cert, by.key)
	if err != nil {
		return keyPair{}, fmt.Errorf("make a certificate for %s: %w", template.Subject.CommonName, err)
	}
	return pair, nil
}

// signKey makes a certificate for a public key.
func signKey(template *x509.Certificate, life time.Duration, key any, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = now.Add(-backdate), now.Add(life)
	return x509.CreateCertificate(rand.Reader, template, parent, key, parentKey)
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func sign(template *x509.Certificate, life time.Duration, key *ecdsa.PrivateKey, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (keyPair, error) {
	der, err := signKey(template, life, &key.PublicKey, parent, parentKey)
	if err != nil {
		return keyPair{}, err
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return keyPair{}, err
	}
	return keyPair{cert: encodeCertificate(der), key: keyPEM}, nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func (p *pki) read(file string) (keyPair, error) {
	cert, err := os.ReadFile(filepath.Join(p.dir, file+".crt"))
	if err != nil {
		return keyPair{}, fmt.Errorf("read a certificate of the lab: %w", err)
	}
	key, err := os.ReadFile(filepath.Join(p.dir, file+".key"))
	if err != nil {
		return keyPair{}, fmt.Errorf("read a key of the lab: %w", err)
	}
	return keyPair{cert, key}, nil
}

// write stores the key first: a crash in between leaves a pair that does not
// fit together, which openServer replaces.
func (p *pki) write(file string, pair keyPair) error {
	if err := writeFile(filepath.Join(p.dir, file+".key"), pair.key); err != nil {
		return err
	}
	return writeFile(filepath.Join(p.dir, file+".crt"), pair.cert)
}

// writeFile replaces a file in one step, readable by its owner only.
func writeFile(path string, data []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return fmt.Errorf("write a certificate of the lab: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write a certificate of the lab: %w", err)
	}
	return nil
}

// pool is the authority as a set of roots.
func (a authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}
