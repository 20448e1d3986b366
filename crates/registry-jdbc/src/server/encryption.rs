//! The encryption of connections to servers.

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
