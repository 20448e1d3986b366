//! Reads certificates and keys from the files that options name, before anything is sent.

use std::fs;
use std::io;
use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};

/// More than any certificate or key file has.
const BYTES_MAX: u64 = 1 << 20;

/// Reads the files of one store.
#[derive(Debug, Clone, Copy)]
pub(super) struct Files {
    pub(super) store: &'static str,
}

impl Files {
    pub(super) fn certificates(self, option: &str, path: &Path) -> Result<Vec<u8>, BackendError> {
        let named = format!("{path:?}, the file of option `{option}`,");
        let pem = read(path)
            .map_err(|error| self.refused(&format!("{named} cannot be read")).with_source(error))?;
        if !holds(&pem, "-----BEGIN CERTIFICATE-----") {
            return Err(self.refused(&format!("{named} holds no certificate in the form PEM")));
        }
        Ok(pem)
    }

    // Errors do not show the path: a user may pass the key itself.
    pub(super) fn private_key(self, path: &Path) -> Result<Vec<u8>, BackendError> {
        let pem = read(path).map_err(|error| {
            self.refused("the file of option `key` cannot be read").with_source(error)
        })?;
        if !holds(&pem, "PRIVATE KEY-----") || holds(&pem, "ENCRYPTED") {
            return Err(self.refused(
                "the file of option `key` holds no private key in the form PEM that is free of a passphrase",
            ));
        }
        Ok(pem)
    }

    fn refused(self, says: &str) -> BackendError {
        let says = format!("{}: {says}", self.store);
        BackendError::new(BackendErrorKind::Misconfigured, says).as_refused()
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = fs::metadata(path)?;
    // Pipes and devices have no end.
    if !file.is_file() || file.len() > BYTES_MAX {
        return Err(io::Error::other(format!("not a file of at most {BYTES_MAX} bytes")));
    }
    fs::read(path)
}

fn holds(pem: &[u8], mark: &str) -> bool {
    pem.windows(mark.len()).any(|window| window == mark.as_bytes())
}
