//! The options `ca`, `cert` and `key`, and the files that they name.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::value::{InvalidValue, Secret, parse_path};
use super::{OptionError, OptionRow, Values};
use crate::error::{BackendError, BackendErrorKind};

/// The paths of the options [`CA`](Self::CA), [`CERT`](Self::CERT) and [`KEY`](Self::KEY).
#[derive(Debug, Clone, Default)]
pub struct PemFiles {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    /// The path is a secret, because a user may pass the key itself.
    key: Option<Secret>,
}

/// The contents of the files.
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct PemTexts {
    /// The trusted certificate authorities.
    pub ca: Option<Vec<u8>>,
    /// The client's certificate and its private key.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for PemTexts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PemTexts").finish_non_exhaustive()
    }
}

impl PemFiles {
    /// The row of `ca`.
    pub const CA: OptionRow = OptionRow::new(
        "ca",
        Values::Path,
        "those of the host",
        "the trusted certificate authorities",
    );
    /// The row of `cert`.
    pub const CERT: OptionRow =
        OptionRow::new("cert", Values::Path, "none", "this client's certificate");
    /// The row of `key`.
    pub const KEY: OptionRow = OptionRow::new(
        "key",
        Values::SecretPath,
        "none",
        "the private key of `cert`, without a passphrase",
    );

    /// Sets the option `name`. Returns false if `name` is not `ca`, `cert` or `key`.
    ///
    /// # Errors
    /// [`InvalidValue`] if the value is not a path.
    pub fn assign(&mut self, name: &str, value: &str) -> Result<bool, InvalidValue> {
        match name {
            "ca" => self.ca = Some(parse_path(value)?),
            "cert" => self.cert = Some(parse_path(value)?),
            "key" => self.key = Some(parse_path(value).map(|_| Secret::new(value))?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Returns whether the option `ca` is set.
    #[must_use]
    pub fn has_ca(&self) -> bool {
        self.ca.is_some()
    }

    /// Returns whether the option `cert` is set.
    #[must_use]
    pub fn has_cert(&self) -> bool {
        self.cert.is_some()
    }

    /// Returns whether no option is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ca.is_none() && self.cert.is_none() && self.key.is_none()
    }

    /// Refuses a certificate without its key, and a key without its certificate.
    ///
    /// # Errors
    /// [`OptionError`] of the option that is set. Its text names the missing one.
    pub fn validate(&self) -> Result<(), OptionError> {
        match (&self.cert, &self.key) {
            (Some(_), None) => {
                Err(OptionError::new("cert", "has no effect without `key`; set both"))
            }
            (None, Some(_)) => {
                Err(OptionError::new("key", "has no effect without `cert`; set both"))
            }
            _ => Ok(()),
        }
    }

    /// Reads the files. `store` names the store in errors.
    ///
    /// # Errors
    /// `Misconfigured` if a file cannot be read, is larger than 1 MiB, or contains no PEM text of
    /// its kind. A private key with a passphrase is also an error.
    pub fn read(&self, store: &str) -> Result<PemTexts, BackendError> {
        let certificates = |option, path: &Option<PathBuf>| {
            path.as_deref().map(|path| read_certificates(store, option, path)).transpose()
        };
        let ca = certificates("ca", &self.ca)?;
        let cert = certificates("cert", &self.cert)?;
        let key = self.key.as_ref().map(|key| read_private_key(store, key.expose().as_ref()));
        Ok(PemTexts { ca, client: cert.zip(key.transpose()?) })
    }
}

fn read_certificates(store: &str, option: &str, path: &Path) -> Result<Vec<u8>, BackendError> {
    let named = format!("file {path:?} of option `{option}`");
    let pem = read(path).map_err(|error| {
        let problem = format!(
            "{named} cannot be read, or is no file of at most 1 MiB; check its path and permissions"
        );
        misconfigured(store, &problem).with_source(error)
    })?;
    if !contains_marker(&pem, "-----BEGIN CERTIFICATE-----") {
        let problem = format!(
            "{named} contains no PEM certificate; write the path of a file with a line `-----BEGIN CERTIFICATE-----`"
        );
        return Err(misconfigured(store, &problem));
    }
    Ok(pem)
}

// Errors do not show the path, because a user may pass the key itself.
fn read_private_key(store: &str, path: &Path) -> Result<Vec<u8>, BackendError> {
    let pem = read(path).map_err(|error| {
        let problem =
            "the file of option `key` cannot be read, or is no file of at most 1 MiB; check its path and permissions";
        misconfigured(store, problem).with_source(error)
    })?;
    if !contains_marker(&pem, "PRIVATE KEY-----") || contains_marker(&pem, "ENCRYPTED") {
        let problem =
            "the file of option `key` must contain a PEM private key without a passphrase";
        return Err(misconfigured(store, problem));
    }
    Ok(pem)
}

fn misconfigured(store: &str, problem: &str) -> BackendError {
    BackendError::new(BackendErrorKind::Misconfigured, format!("{store}: {problem}")).as_refused()
}

/// The maximum size of a file, which is larger than any certificate or key.
const BYTES_MAX: u64 = 1 << 20;

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let metadata = fs::metadata(path)?;
    // Reading a pipe or a device may never end.
    if !metadata.is_file() || metadata.len() > BYTES_MAX {
        return Err(io::Error::other(format!("not a regular file of at most {BYTES_MAX} bytes")));
    }
    fs::read(path)
}

fn contains_marker(pem: &[u8], marker: &str) -> bool {
    pem.windows(marker.len()).any(|window| window == marker.as_bytes())
}
