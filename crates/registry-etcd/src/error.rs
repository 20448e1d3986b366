//! Maps the errors of etcd and of the connection to `BackendError`: one table.

use std::error::Error as _;

use registry_core::{BackendError, BackendErrorKind};
use tonic::{Code, Status};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The member does not know the lease. Nothing was executed.
    NoLease,
    /// The login has expired. Nothing was executed.
    Login,
    /// The transaction has more operations than the members permit. Nothing was executed.
    TooMany,
    /// This member failed; another one may succeed.
    Elsewhere(BackendError),
    /// Any other store error.
    Trouble(BackendError),
}

impl Failure {
    pub(crate) fn into_error(self) -> BackendError {
        match self {
            Self::NoLease => BackendError::transient("etcd: the lease ended just now").as_refused(),
            Self::Login => BackendError::new(
                Denied,
                "etcd: the members ask for a user and a password, or do not take the login that they gave just now",
            )
            .as_refused(),
            Self::TooMany => BackendError::new(
                Misconfigured,
                "etcd: the transaction has more parts than the members take (--max-txn-ops)",
            )
            .as_refused(),
            Self::Elsewhere(error) | Self::Trouble(error) => error,
        }
    }
}

/// Returns `Misconfigured` for a configuration that cannot work.
pub(crate) fn unusable(says: impl std::fmt::Display) -> BackendError {
    BackendError::new(Misconfigured, format!("etcd: {says}")).as_refused()
}

/// Returns `Protocol` for a response that no etcd member sends.
pub(crate) fn unreadable() -> BackendError {
    BackendError::new(Protocol, "etcd: the member answered what makes no sense")
}

/// Classifies the status of a failed call.
pub(crate) fn judge(status: &Status) -> Failure {
    let said = status.message();
    let has = |part: &str| said.contains(part);
    let error = |kind, says: &str| {
        BackendError::new(kind, format!("etcd: {says}")).with_source(Said(said.to_owned()))
    };
    let refused = |kind, says| Failure::Trouble(error(kind, says).as_refused());
    if let Some(alert) = causes(status).find(|cause| cause.contains(ALERT)) {
        // In TLS 1.3 the client considers the handshake complete before the member has checked the
        // client certificate. The member does not read a request that the client sends before it
        // receives the alert.
        if alert.contains("ertificate") || alert.contains("UnknownCA") {
            return Failure::Trouble(untaken(alert));
        }
    }
    match status.code() {
        Code::NotFound if has("lease not found") => Failure::NoLease,
        Code::Unauthenticated => Failure::Login,
        Code::InvalidArgument if has("auth store is old") => Failure::Login,
        Code::InvalidArgument if has("authentication failed") => {
            refused(Denied, "the members do not take this user or password")
        }
        // Authentication was enabled after this connection was opened without a login.
        Code::InvalidArgument if has("user name is empty") => Failure::Login,
        Code::InvalidArgument if has("too many operations") => Failure::TooMany,
        Code::PermissionDenied => refused(
            Denied,
            "this user may not do that; see the book for the rights that are needed",
        ),
        Code::ResourceExhausted if has("database space exceeded") => refused(
            Transient,
            "the members have no space left for writes (alarm NOSPACE): compact and defragment them",
        ),
        Code::ResourceExhausted if has("too many requests") => {
            refused(Transient, "the members have too many requests to carry out")
        }
        // The request may still be executed: a lost leader may have replicated it.
        Code::Unavailable if has("etcdserver:") => {
            Failure::Elsewhere(error(Transient, "the members have no leader just now, or lost it"))
        }
        Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Aborted => {
            Failure::Elsewhere(error(Transient, "the connection was lost"))
        }
        // The client library reports a truncated stream with these codes.
        Code::Unknown | Code::Internal if !has("etcdserver:") => {
            Failure::Elsewhere(error(Transient, "the connection was lost"))
        }
        Code::Unimplemented => {
            refused(Misconfigured, "this is no etcd, or one that is older than version 3.4")
        }
        Code::DataLoss => refused(Protocol, "the data of a member is corrupt (alarm CORRUPT)"),
        _ => Failure::Trouble(error(Protocol, "the member said no")),
    }
}

/// Returns `Denied`: the member ended the TLS connection because of the client certificate.
pub(crate) fn untaken(said: String) -> BackendError {
    BackendError::new(Denied, "etcd: the member does not take our certificate, or wants one")
        .with_source(Said(said))
        .as_refused()
}

fn causes(status: &Status) -> impl Iterator<Item = String> {
    std::iter::successors(status.source(), |&cause| cause.source()).map(ToString::to_string)
}

/// The text of a TLS connection that the other side refused.
pub(crate) const ALERT: &str = "received fatal alert";

/// The member's message, without additions by the client library. It never contains a password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Said(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_told() {
        for (code, said, kind, refused) in [
            (Code::Unavailable, "etcdserver: request timed out", Transient, false),
            (Code::Unavailable, "etcdserver: leader changed", Transient, false),
            (Code::Unavailable, "error reading from server", Transient, false),
            (Code::Unknown, "h2 protocol error", Transient, false),
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded", Transient, true),
            (Code::ResourceExhausted, "etcdserver: too many requests", Transient, true),
            (Code::PermissionDenied, "etcdserver: permission denied", Denied, true),
            (
                Code::InvalidArgument,
                "etcdserver: authentication failed, invalid user ID or password",
                Denied,
                true,
            ),
            (Code::InvalidArgument, "etcdserver: user name is empty", Denied, true),
            (
                Code::InvalidArgument,
                "etcdserver: too many operations in txn request",
                Misconfigured,
                true,
            ),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Denied, true),
            (Code::NotFound, "etcdserver: requested lease not found", Transient, true),
            (Code::DataLoss, "etcdserver: corrupt cluster", Protocol, true),
            (Code::Unimplemented, "unknown service", Misconfigured, true),
            (Code::OutOfRange, "something else", Protocol, false),
        ] {
            let error = judge(&Status::new(code, said)).into_error();
            assert_eq!((error.kind(), error.refused()), (kind, refused), "{said}: {error:?}");
        }
    }

    #[test]
    fn a_certificate_that_is_not_taken_is_no_lost_connection() {
        for (said, kind, refused) in [
            ("received fatal alert: CertificateRequired", Denied, true),
            ("received fatal alert: BadCertificate", Denied, true),
            ("received fatal alert: UnknownCA", Denied, true),
            ("received fatal alert: InternalError", Transient, false),
            ("connection reset by peer", Transient, false),
        ] {
            let error = judge(&Status::from_error(said.into())).into_error();
            assert_eq!((error.kind(), error.refused()), (kind, refused), "{said}: {error:?}");
        }
    }
}
