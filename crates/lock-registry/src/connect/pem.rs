//! Reads certificates and keys from the files that options name.

use std::fs;
use std::io;
use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};

/// More than any certificate or key file has.
const BYTES_MAX: u64 = 1 << 20;

/// Reads the files of one store.
#[derive(Debug, Clone, Copy)]
pub(super) struct PemFiles {
    pub(super) store: &'static str,
}

impl PemFiles {
    pub(super) fn certificates(self, option: &str, path: &Path) -> Result<Vec<u8>, BackendError> {
        let named = format!("file {path:?} of option `{option}`");
        let pem = read(path).map_err(|error| {
            self.misconfigured(&format!("{named} cannot be read; check its path and permissions"))
                .with_source(error)
        })?;
        if !contains_marker(&pem, "-----BEGIN CERTIFICATE-----") {
            return Err(self.misconfigured(&format!("{named} contains no PEM certificate")));
        }
        Ok(pem)
    }

    // Errors do not show the path: a user may pass the key itself.
    pub(super) fn private_key(self, path: &Path) -> Result<Vec<u8>, BackendError> {
        let pem = read(path).map_err(|error| {
            self.misconfigured(
                "the file of option `key` cannot be read; check its path and permissions",
            )
            .with_source(error)
        })?;
        if !contains_marker(&pem, "PRIVATE KEY-----") || contains_marker(&pem, "ENCRYPTED") {
            return Err(self.misconfigured(
                "the file of option `key` contains no PEM private key without a passphrase",
            ));
        }
        Ok(pem)
    }

    fn misconfigured(self, message: &str) -> BackendError {
        let message = format!("{}: {message}", self.store);
        BackendError::new(BackendErrorKind::Misconfigured, message).as_refused()
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = fs::metadata(path)?;
    // A pipe or a device may never end.
    if !file.is_file() || file.len() > BYTES_MAX {
        return Err(io::Error::other(format!("not a regular file of at most {BYTES_MAX} bytes")));
    }
    fs::read(path)
}

fn contains_marker(pem: &[u8], marker: &str) -> bool {
    pem.windows(marker.len()).any(|window| window == marker.as_bytes())
}
