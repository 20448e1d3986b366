//! How connections to servers are encrypted.

/// Whether connections are encrypted, and whom they trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Encryption {
    /// Never.
    Off,
    /// If the server can, without a look at its certificate: keeps out those who only listen. Without the feature `tls` as [`Off`](Self::Off).
    #[default]
    Preferred,
    /// Always, without a look at the server's certificate. Feature `tls`.
    Required,
    /// Always, with a certificate of an authority that is trusted. Feature `tls`.
    VerifyAuthority,
    /// Always, with a certificate of an authority that is trusted, made out to the host's name. Feature `tls`.
    VerifyHost,
}
