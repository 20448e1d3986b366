//! Maps the client library's errors to [`BackendError`], in one table.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use zookeeper_client::Error;

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Returns the [`BackendError`] for an error of the client library, with a message that contains a
/// hint.
pub(crate) fn to_backend_error(error: &Error) -> BackendError {
    let ErrorClass { kind, message, refused } = classify(error);
    // The client library's errors contain no credentials and no data.
    let converted =
        BackendError::new(kind, format!("zookeeper: {message}")).with_source(error.clone());
    if refused { converted.as_refused() } else { converted }
}

/// Returns the error of a request without a response within `limit`.
pub(crate) fn timed_out(limit: Duration) -> BackendError {
    BackendError::transient(format!(
        "zookeeper: no response from the servers within {limit:?}; check their load and the network"
    ))
}

/// Returns the error of a request that was not sent because no server is connected.
pub(crate) fn not_connected() -> BackendError {
    BackendError::transient(
        "zookeeper: not connected to any server; check that a majority of them runs",
    )
    .as_refused()
}

/// Returns the error of a client that could not connect. `error` is `None` at the time limit.
pub(crate) fn connect_error(error: Option<&Error>, is_encrypted: bool) -> BackendError {
    let converted = error.map_or_else(not_connected, to_backend_error).as_refused();
    // The client library reports a server that fails the TLS handshake as unreachable.
    if !is_encrypted || !matches!(error, None | Some(Error::NoHosts | Error::Timeout)) {
        return converted;
    }
    let message = format!(
        "{}, and that they accept encrypted connections with a certificate of `ca`",
        converted.message()
    );
    let hinted = BackendError::transient(message).as_refused();
    match error {
        Some(error) => hinted.with_source(error.clone()),
        None => hinted,
    }
}

/// Returns whether the servers certainly did not execute the request.
pub(crate) fn is_refused(error: &Error) -> bool {
    classify(error).refused
}

struct ErrorClass {
    kind: BackendErrorKind,
    message: &'static str,
    /// The servers did not execute the request.
    refused: bool,
}

const fn refused(kind: BackendErrorKind, message: &'static str) -> ErrorClass {
    ErrorClass { kind, message, refused: true }
}

const fn unknown_outcome(kind: BackendErrorKind, message: &'static str) -> ErrorClass {
    ErrorClass { kind, message, refused: false }
}

const fn classify(error: &Error) -> ErrorClass {
    match error {
        Error::ConnectionLoss | Error::Custom(_) => unknown_outcome(
            Transient,
            "the connection was lost; check the network and the server's log",
        ),
        Error::Timeout => unknown_outcome(
            Transient,
            "none of the servers could be reached in time; check their addresses and the network",
        ),
        Error::NoHosts => refused(
            Transient,
            "none of the servers can be reached; check that they run at these addresses",
        ),
        Error::SessionExpired => unknown_outcome(Transient, "the session has expired; retry"),
        Error::SessionMoved => {
            unknown_outcome(Transient, "the session has moved to another connection; retry")
        }
        Error::ClientClosed => unknown_outcome(Transient, "the session was closed; retry"),
        Error::NotReadOnly => refused(
            Transient,
            "the server has lost the majority and is read-only; check the other servers",
        ),
        Error::Throttled => refused(Transient, "the server is overloaded; reduce its load"),
        Error::NoAuth => {
            refused(Denied, "this login lacks a required right; the book lists the rights")
        }
        Error::AuthFailed => {
            refused(Denied, "the servers rejected the login; check its scheme and credentials")
        }
        Error::InvalidAcl => {
            refused(Misconfigured, "the servers rejected the ACL for new nodes; check option `acl`")
        }
        Error::QuotaExceeded => {
            refused(Misconfigured, "the quota of nodes is exceeded; raise it or use another root")
        }
        Error::NoChildrenForEphemerals => refused(
            Misconfigured,
            "a lock's node cannot be created below an ephemeral node; use another root",
        ),
        Error::Unimplemented => refused(
            Misconfigured,
            "the server is too old for this request; ZooKeeper 3.5 or later is required",
        ),
        Error::NoNode => refused(
            Protocol,
            "a node that was just created does not exist; check for programs that delete nodes",
        ),
        Error::BadArguments(_) | Error::MarshallingError => {
            refused(Protocol, "the request cannot be encoded; see the source of this error")
        }
        Error::BadVersion | Error::NodeExists | Error::NotEmpty => {
            refused(Protocol, "the servers refused the request; see the source of this error")
        }
        // The outcome of all other errors is unknown, including errors that the library may add. A
        // retry may not help.
        _ => unknown_outcome(
            Protocol,
            "the servers sent an unexpected response; see the source of this error",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_maps_to_its_kind_and_to_whether_it_was_refused() {
        for (error, kind, refused) in [
            (Error::ConnectionLoss, Transient, false),
            (Error::SessionExpired, Transient, false),
            (Error::NoHosts, Transient, true),
            (Error::NoAuth, Denied, true),
            (Error::AuthFailed, Denied, true),
            (Error::InvalidAcl, Misconfigured, true),
            (Error::QuotaExceeded, Misconfigured, true),
            (Error::UnexpectedErrorCode(-1), Protocol, false),
            (Error::UnexpectedError("?".to_owned()), Protocol, false),
        ] {
            let converted = to_backend_error(&error);
            assert_eq!((converted.kind(), converted.refused()), (kind, refused), "{error:?}");
        }
    }

    #[test]
    fn only_an_unreachable_encrypted_server_causes_a_hint_about_certificates() {
        let has_hint = |error: Option<Error>, is_encrypted| {
            let error = connect_error(error.as_ref(), is_encrypted);
            assert!(error.refused(), "{error:?}");
            error.message().ends_with("with a certificate of `ca`")
        };
        assert!(has_hint(None, true) && has_hint(Some(Error::NoHosts), true));
        assert!(!has_hint(None, false) && !has_hint(Some(Error::NoHosts), false));
        assert!(!has_hint(Some(Error::AuthFailed), true));
    }
}
