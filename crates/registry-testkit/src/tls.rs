//! Certificates for TLS connections: a test authority and the certificates that it signs. The
//! program `openssl` creates them.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::{fs, io};

use tempfile::TempDir;

/// The `openssl` configuration with the extensions of each certificate.
const OPENSSL_CONFIG: &str = "
[req]
distinguished_name = empty
[empty]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
[server]
basicConstraints = CA:FALSE
# The servers of a cluster also connect to each other as clients.
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = HOSTS
[client]
basicConstraints = CA:FALSE
extendedKeyUsage = clientAuth
";

/// A folder with the certificate of an authority, and with a server and a client certificate that
/// the authority has signed, each with its private key, as PEM files. Clones share the folder;
/// dropping the last clone removes it.
#[derive(Debug, Clone)]
pub struct TlsFolder(Arc<TempDir>);

impl TlsFolder {
    /// Creates a new authority, a client certificate, and a server certificate for `127.0.0.1` and
    /// `localhost`.
    pub fn new() -> io::Result<Self> {
        Self::for_hosts(&["127.0.0.1", "localhost"])
    }

    /// Like [`new`](Self::new), for a server with other host names.
    pub fn for_hosts(hosts: &[&str]) -> io::Result<Self> {
        let tls = Self(Arc::new(tempfile::tempdir()?));
        let kind = |host: &str| if host.parse::<IpAddr>().is_ok() { "IP" } else { "DNS" };
        let hosts: Vec<String> =
            hosts.iter().map(|host| format!("{}:{host}", kind(host))).collect();
        fs::write(tls.file("openssl.cnf"), OPENSSL_CONFIG.replace("HOSTS", &hosts.join(",")))?;
        tls.openssl(&format!(
            "req -x509 {} -out ca.pem -extensions authority",
            certificate_args("ca")
        ))?;
        for name in ["server", "client"] {
            tls.openssl(&format!("req -new {} -out {name}.csr", certificate_args(name)))?;
            tls.openssl(&format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 \
                 -extfile openssl.cnf -extensions {name} -out {name}.pem"
            ))?;
        }
        Ok(tls)
    }

    fn openssl(&self, line: &str) -> io::Result<()> {
        let done =
            Command::new("openssl").args(line.split(' ')).current_dir(self.0.path()).output();
        let done = done.map_err(|error| {
            io::Error::other(format!("openssl is needed (apt-get install openssl): {error}"))
        })?;
        if !done.status.success() {
            let output_text = String::from_utf8_lossy(&done.stderr);
            return Err(io::Error::other(format!("openssl {line}: {output_text}")));
        }
        Ok(())
    }

    /// Returns the file with the authority's certificate.
    #[must_use]
    pub fn ca_file(&self) -> PathBuf {
        self.file("ca.pem")
    }

    /// Returns the file with the server's certificate.
    #[must_use]
    pub fn server_cert_file(&self) -> PathBuf {
        self.file("server.pem")
    }

    /// Returns the file with the key of the server's certificate.
    #[must_use]
    pub fn server_key_file(&self) -> PathBuf {
        self.file("server.key")
    }

    /// Returns the file with the client's certificate.
    #[must_use]
    pub fn client_cert_file(&self) -> PathBuf {
        self.file("client.pem")
    }

    /// Returns the file with the key of the client's certificate.
    #[must_use]
    pub fn client_key_file(&self) -> PathBuf {
        self.file("client.key")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// Returns the arguments common to all certificate requests: a new key, and a name.
fn certificate_args(name: &str) -> String {
    format!(
        "-config openssl.cnf -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {name}.key \
         -subj /CN={name} -days 30"
    )
}
