//! The encryption of connections to servers, which methods or options of a configuration set.

use std::fmt;

use registry_core::BackendError;
use registry_core::config::{InvalidValue, OptionError, OptionRow, PemFiles, Values, parse_choice};

/// Whether connections are encrypted, and which servers are trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Encryption {
    /// Connections are never encrypted.
    Off,
    /// Connections are encrypted if the server supports it, without a check of its certificate.
    /// This protects only against passive listeners. Without the feature `tls` it has the effect of
    /// [`Off`](Self::Off).
    #[default]
    Preferred,
    /// Connections are always encrypted, without a check of the server's certificate. Feature
    /// `tls`.
    Required,
    /// Connections are always encrypted, and a trusted authority must have issued the server's
    /// certificate. Feature `tls`.
    VerifyAuthority,
    /// Connections are always encrypted. A trusted authority must have issued the server's
    /// certificate for the host's name. Feature `tls`.
    VerifyHost,
}

/// How connections of one store are encrypted.
#[derive(Clone, Default)]
pub(crate) struct EncryptionSettings {
    encryption: Encryption,
    /// Trusted certificates (PEM).
    #[cfg(feature = "tls")]
    pub(crate) authority: Option<Vec<u8>>,
    /// The client's certificate and its private key (PEM).
    #[cfg(feature = "tls")]
    client: Option<(Vec<u8>, Vec<u8>)>,
    /// The value of the option `sslmode`.
    sslmode: Option<Encryption>,
    /// The values of the options that name PEM files.
    pem_files: PemFiles,
}

/// The client's connection options of one kind of server.
pub(crate) trait EncryptedOptions: Sized {
    fn with_encryption(self, encryption: Encryption) -> Self;

    #[cfg(feature = "tls")]
    fn with_authority(self, certificates: Vec<u8>) -> Self;

    #[cfg(feature = "tls")]
    fn with_client(self, certificate: &[u8], key: &[u8]) -> Self;
}

impl EncryptionSettings {
    pub(crate) const SSLMODE: OptionRow = OptionRow::new(
        "sslmode",
        Values::Choice {
            what: "TLS mode",
            names: &["disable", "prefer", "require", "verify-ca", "verify-full"],
        },
        "`prefer`; with `cert` `require`; with `ca` `verify-full`",
        "whether connections are encrypted, and whether the server is verified",
    );

    /// Sets the mode. Replaces an earlier value of the option `sslmode`.
    pub(crate) fn set(&mut self, encryption: Encryption) {
        self.encryption = encryption;
        self.sslmode = Some(encryption);
    }

    /// Sets the trusted certificates. The servers are then verified, whatever mode was set before.
    #[cfg(feature = "tls")]
    pub(crate) fn set_authority(&mut self, certificates: Vec<u8>) {
        self.authority = Some(certificates);
        self.encryption = Encryption::VerifyHost;
        self.sslmode = None;
    }

    /// Sets the client's certificate and its private key. The certificate identifies this program
    /// only on an encrypted connection, which is therefore required unless a mode was set.
    #[cfg(feature = "tls")]
    pub(crate) fn set_client(&mut self, certificate: Vec<u8>, key: Vec<u8>) {
        self.client = Some((certificate, key));
        if self.sslmode.is_none() && !self.encryption.needs_tls() {
            self.encryption = Encryption::Required;
        }
    }

    /// Returns whether trusted certificates are set, by a method or an option.
    #[cfg(all(feature = "tls", feature = "postgres"))]
    pub(crate) fn has_authority(&self) -> bool {
        self.authority.is_some() || self.pem_files.has_ca()
    }

    /// Returns whether a client's certificate is set, by a method or an option.
    #[cfg(all(feature = "tls", feature = "postgres"))]
    pub(crate) fn has_client(&self) -> bool {
        self.client.is_some() || self.pem_files.has_cert()
    }

    /// Sets an option, if `name` is an option of encryption. Returns whether it is.
    pub(super) fn assign(&mut self, name: &str, value: &str) -> Result<bool, InvalidValue> {
        if name != "sslmode" {
            return self.pem_files.assign(name, value);
        }
        let modes = [
            ("disable", Encryption::Off),
            ("prefer", Encryption::Preferred),
            ("require", Encryption::Required),
            ("verify-ca", Encryption::VerifyAuthority),
            ("verify-full", Encryption::VerifyHost),
        ];
        self.sslmode = Some(parse_choice(value, &modes)?);
        Ok(true)
    }

    /// Checks the settings together. `server` is the name of the server's feature.
    pub(super) fn validate(&self, server: &str) -> Result<(), OptionError> {
        let verifies = matches!(
            self.sslmode,
            None | Some(Encryption::VerifyAuthority | Encryption::VerifyHost)
        );
        if self.pem_files.has_ca() && !verifies {
            return Err(OptionError::new(
                "ca",
                "has no effect, because `sslmode` does not verify the server; write `sslmode=verify-full` or leave `sslmode` out",
            ));
        }
        if self.pem_files.has_cert()
            && matches!(self.sslmode, Some(Encryption::Off | Encryption::Preferred))
        {
            return Err(OptionError::new(
                "cert",
                "may have no effect, because `sslmode` allows connections without encryption; write `sslmode=require` or leave `sslmode` out",
            ));
        }
        self.pem_files.validate()?;
        self.check_built_in(server)
    }

    /// Returns an error if the settings need TLS, and this build does not contain it.
    fn check_built_in(&self, server: &str) -> Result<(), OptionError> {
        let needs_tls = self.sslmode.unwrap_or(self.encryption).needs_tls();
        if !cfg!(feature = "tls") && (needs_tls || !self.pem_files.is_empty()) {
            return Err(OptionError::general(format!(
                "encrypted connections are not built in; enable feature `tls` of registry-jdbc, or feature `{server}-tls` of lock-registry"
            )));
        }
        Ok(())
    }

    /// Reads the files of the options, and applies the options. `server` is the name of the
    /// server's feature.
    pub(crate) fn apply_options(&mut self, server: &str) -> Result<(), BackendError> {
        self.check_built_in(server).map_err(|error| error.into_backend_error(server))?;
        #[cfg(feature = "tls")]
        {
            let pem = self.pem_files.read(server)?;
            if pem.ca.is_some() {
                self.authority = pem.ca;
                self.encryption = Encryption::VerifyHost;
            }
            if pem.client.is_some() {
                self.client = pem.client;
                if !self.encryption.needs_tls() {
                    self.encryption = Encryption::Required;
                }
            }
        }
        self.encryption = self.sslmode.unwrap_or(self.encryption);
        Ok(())
    }

    /// Adds these settings to the options of a connection.
    pub(crate) fn apply_to<O: EncryptedOptions>(&self, options: O) -> O {
        let options = options.with_encryption(self.encryption);
        #[cfg(feature = "tls")]
        let options = match &self.authority {
            Some(authority) => options.with_authority(authority.clone()),
            None => options,
        };
        #[cfg(feature = "tls")]
        let options = match &self.client {
            Some((certificate, key)) => options.with_client(certificate, key),
            None => options,
        };
        options
    }
}

impl Encryption {
    fn needs_tls(self) -> bool {
        !matches!(self, Self::Off | Self::Preferred)
    }
}

// Implemented manually, because the fields include a private key.
impl fmt::Debug for EncryptionSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.encryption.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "tls")]
    #[test]
    fn a_client_certificate_requires_encryption_unless_a_mode_was_set() {
        let with_client = |mut settings: EncryptionSettings| {
            settings.set_client(b"certificate".to_vec(), b"key".to_vec());
            settings.encryption
        };
        assert_eq!(with_client(EncryptionSettings::default()), Encryption::Required);
        let mut preferred = EncryptionSettings::default();
        preferred.set(Encryption::Preferred);
        assert_eq!(with_client(preferred), Encryption::Preferred);
        let mut verified = EncryptionSettings::default();
        verified.set_authority(b"certificate".to_vec());
        assert_eq!(with_client(verified), Encryption::VerifyHost);
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn encryption_that_is_not_built_in_is_refused_before_connecting() {
        for (name, value) in [("sslmode", "require"), ("sslmode", "verify-full"), ("ca", "a.pem")] {
            let mut settings = EncryptionSettings::default();
            assert!(settings.assign(name, value).unwrap());
            let error = settings.validate("postgres").unwrap_err().to_string();
            assert!(error.contains("`postgres-tls`"), "{name}={value}: {error}");
        }
        let mut settings = EncryptionSettings::default();
        assert!(settings.assign("sslmode", "prefer").unwrap());
        settings.validate("postgres").unwrap();
    }
}
