//! Maps the errors of etcd and of the connection to `BackendError`.

use std::error::Error as _;
use std::sync::Arc;

use registry_core::{BackendError, BackendErrorKind};
use tonic::{Code, Status};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The member does not know the lease. Nothing was executed.
    LeaseNotFound,
    /// The login has expired or is missing. Nothing was executed.
    Unauthenticated,
    /// The transaction has more operations than the members permit. Nothing was executed.
    TooManyOperations,
    /// This member failed. Another member may succeed.
    MemberFailed(BackendError),
    /// Any other store error.
    Other(BackendError),
}

impl CallError {
    /// Adds the address of the member to the error.
    pub(crate) fn with_address(self, address: &Arc<str>) -> Self {
        match self {
            Self::MemberFailed(error) => {
                Self::MemberFailed(error.with_address(Arc::clone(address)))
            }
            Self::Other(error) => Self::Other(error.with_address(Arc::clone(address))),
            failure => failure,
        }
    }

    pub(crate) fn into_error(self) -> BackendError {
        match self {
            Self::LeaseNotFound => {
                BackendError::transient("etcd: the lease has expired or was revoked; retry").as_refused()
            }
            Self::Unauthenticated => BackendError::new(
                Denied,
                "etcd: the members require a login, or rejected the token of a new login; check user and password",
            )
            .as_refused(),
            Self::TooManyOperations => BackendError::new(
                Misconfigured,
                "etcd: the transaction exceeds the members' limit of operations; raise `--max-txn-ops`",
            )
            .as_refused(),
            Self::MemberFailed(error) | Self::Other(error) => error,
        }
    }
}

/// Returns `Misconfigured` for a configuration that cannot work.
pub(crate) fn misconfigured(text: impl std::fmt::Display) -> BackendError {
    BackendError::new(Misconfigured, format!("etcd: {text}")).as_refused()
}

/// Returns `Protocol` for a response that no etcd member sends.
pub(crate) fn protocol_error() -> BackendError {
    BackendError::new(
        Protocol,
        "etcd: the member sent an unexpected response; check that the server is etcd 3.4 or later",
    )
}

/// Classifies the status of a failed call.
pub(crate) fn classify(status: &Status) -> CallError {
    let message = status.message();
    let has = |part: &str| message.contains(part);
    let error = |kind, text: &str| {
        BackendError::new(kind, format!("etcd: {text}"))
            .with_source(SourceMessage(message.to_owned()))
    };
    let refused = |kind, text| CallError::Other(error(kind, text).as_refused());
    if let Some(alert) = causes_of(status).find(|cause| cause.contains(TLS_ALERT)) {
        // In TLS 1.3, the client's handshake completes before the member has checked the client
        // certificate. A member that rejects the certificate sends an alert and reads no request.
        if alert.contains("ertificate") || alert.contains("UnknownCA") {
            return CallError::Other(certificate_rejected(alert));
        }
    }
    match status.code() {
        Code::NotFound if has("lease not found") => CallError::LeaseNotFound,
        Code::Unauthenticated => CallError::Unauthenticated,
        Code::InvalidArgument if has("auth store is old") => CallError::Unauthenticated,
        Code::InvalidArgument if has("authentication failed") => {
            refused(Denied, "the members rejected this user or password; check both")
        }
        // Authentication was enabled after this connection was opened without a login.
        Code::InvalidArgument if has("user name is empty") => CallError::Unauthenticated,
        Code::InvalidArgument if has("too many operations") => CallError::TooManyOperations,
        Code::PermissionDenied => refused(
            Denied,
            "this user lacks a permission; the book's chapter on etcd lists the required ones",
        ),
        // Members check the space before they propose a request, and again when they execute it. If
        // only the second check fails, they execute the request and return the same error.
        Code::ResourceExhausted if has("database space exceeded") => CallError::Other(error(
            Transient,
            "the members have no space for writes (alarm NOSPACE); compact and defragment them",
        )),
        // For some requests, members return this error with the status code `Unknown`.
        Code::ResourceExhausted | Code::Unknown if has("etcdserver: too many requests") => {
            refused(Transient, "the members are overloaded: too many requests; reduce their load")
        }
        // The former leader may have replicated the request, so the members may still execute it.
        Code::Unavailable if has("etcdserver:") => CallError::MemberFailed(error(
            Transient,
            "the cluster has no leader or lost it; check that a majority of the members runs",
        )),
        Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Aborted => {
            CallError::MemberFailed(error(Transient, CONNECTION_LOST))
        }
        // The client library reports a truncated stream with these codes.
        Code::Unknown | Code::Internal if !has("etcdserver:") => {
            CallError::MemberFailed(error(Transient, CONNECTION_LOST))
        }
        // Members check a request before they execute any part of it.
        Code::ResourceExhausted if has("received message larger than max") => {
            refused(Misconfigured, INVALID_REQUEST)
        }
        Code::InvalidArgument => refused(Misconfigured, INVALID_REQUEST),
        Code::Unimplemented => {
            refused(Misconfigured, "the server is not etcd 3.4 or later; update it")
        }
        Code::DataLoss => {
            refused(Protocol, "the data of a member is corrupt (alarm CORRUPT); replace the member")
        }
        _ => CallError::Other(error(
            Protocol,
            "the member returned an unknown error; see the source of this error",
        )),
    }
}

/// Returns `Denied`: the member ended the TLS connection because of the client certificate.
pub(crate) fn certificate_rejected(message: String) -> BackendError {
    BackendError::new(
        Denied,
        "etcd: the member rejected the client certificate or requires one; check both files",
    )
    .with_source(SourceMessage(message))
    .as_refused()
}

fn causes_of(status: &Status) -> impl Iterator<Item = String> {
    std::iter::successors(status.source(), |&cause| cause.source()).map(ToString::to_string)
}

const CONNECTION_LOST: &str =
    "the connection was lost; check the network and the member, or use etcds:// if it requires TLS";

const INVALID_REQUEST: &str =
    "the request is too large or invalid, for example it writes a key twice; correct the request";

/// A part of the error text of a TLS connection that the other side refused.
pub(crate) const TLS_ALERT: &str = "received fatal alert";

/// The source of an error: the member's message without additions by the client library, or the
/// text of a TLS error. It never contains a password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct SourceMessage(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_is_classified() {
        for (code, message, kind, refused) in [
            (Code::Unavailable, "etcdserver: request timed out", Transient, false),
            (Code::Unavailable, "etcdserver: leader changed", Transient, false),
            (Code::Unavailable, "error reading from server", Transient, false),
            (Code::Unknown, "h2 protocol error", Transient, false),
            (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                Transient,
                false,
            ),
            (Code::ResourceExhausted, "etcdserver: too many requests", Transient, true),
            (Code::Unknown, "etcdserver: too many requests", Transient, true),
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
            (
                Code::InvalidArgument,
                "etcdserver: duplicate key given in txn request",
                Misconfigured,
                true,
            ),
            (Code::InvalidArgument, "etcdserver: key is not provided", Misconfigured, true),
            (Code::InvalidArgument, "etcdserver: request is too large", Misconfigured, true),
            (
                Code::ResourceExhausted,
                "grpc: received message larger than max (3000000 vs. 2097152)",
                Misconfigured,
                true,
            ),
            (Code::ResourceExhausted, "something else", Protocol, false),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Denied, true),
            (Code::NotFound, "etcdserver: requested lease not found", Transient, true),
            (Code::DataLoss, "etcdserver: corrupt cluster", Protocol, true),
            (Code::Unimplemented, "unknown service", Misconfigured, true),
            (Code::OutOfRange, "something else", Protocol, false),
        ] {
            let error = classify(&Status::new(code, message)).into_error();
            assert_eq!((error.kind(), error.refused()), (kind, refused), "{message}: {error:?}");
        }
    }

    #[test]
    fn a_rejected_certificate_is_not_a_lost_connection() {
        for (message, kind, refused) in [
            ("received fatal alert: CertificateRequired", Denied, true),
            ("received fatal alert: BadCertificate", Denied, true),
            ("received fatal alert: UnknownCA", Denied, true),
            ("received fatal alert: InternalError", Transient, false),
            ("connection reset by peer", Transient, false),
        ] {
            let error = classify(&Status::from_error(message.into())).into_error();
            assert_eq!((error.kind(), error.refused()), (kind, refused), "{message}: {error:?}");
        }
    }
}
