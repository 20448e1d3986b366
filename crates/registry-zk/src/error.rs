//! Maps the client library's errors to [`BackendError`], in one table.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use zookeeper_client::Error;

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Classifies an error and adds a message with the remedy.
pub(crate) fn to_backend_error(error: &Error) -> BackendError {
    let (kind, message, refused) = classify(error);
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

/// Returns whether the servers certainly did not execute the request.
pub(crate) fn is_refused(error: &Error) -> bool {
    classify(error).2
}

const fn classify(error: &Error) -> (BackendErrorKind, &'static str, bool) {
    match error {
        Error::ConnectionLoss | Error::Custom(_) => {
            (Transient, "the connection was lost; check the network and the server's log", false)
        }
        Error::Timeout => (
            Transient,
            "none of the servers could be reached in time; check their addresses and the network",
            false,
        ),
        Error::NoHosts => (
            Transient,
            "none of the servers can be reached; check that they run at these addresses",
            true,
        ),
        Error::SessionExpired => (Transient, "the session has expired; retry", false),
        Error::SessionMoved => {
            (Transient, "the session has moved to another connection; retry", false)
        }
        Error::ClientClosed => (Transient, "the session was closed; retry", false),
        Error::NotReadOnly => (
            Transient,
            "the server has lost the majority and is read-only; check the other servers",
            true,
        ),
        Error::Throttled => (Transient, "the server is overloaded; reduce its load", true),
        Error::NoAuth => {
            (Denied, "this login may not do that; the book lists the required rights", true)
        }
        Error::AuthFailed => {
            (Denied, "the servers rejected the login; check its scheme and credentials", true)
        }
        Error::InvalidAcl => {
            (Misconfigured, "the servers rejected the ACL for new nodes; check option `acl`", true)
        }
        Error::QuotaExceeded => {
            (Misconfigured, "the quota of nodes is exceeded; raise it or use another root", true)
        }
        Error::NoChildrenForEphemerals => (
            Misconfigured,
            "a lock's node cannot be created below an ephemeral node; use another root",
            true,
        ),
        Error::Unimplemented => (
            Misconfigured,
            "the server is too old for this request; ZooKeeper 3.5 or later is required",
            true,
        ),
        Error::NoNode => (
            Protocol,
            "a node that was just created does not exist; check for programs that delete nodes",
            true,
        ),
        Error::BadArguments(_) | Error::MarshallingError => {
            (Protocol, "the request cannot be encoded; see the source of this error", true)
        }
        Error::BadVersion | Error::NodeExists | Error::NotEmpty => {
            (Protocol, "the servers refused the request; see the source of this error", true)
        }
        // Variants that the library may add: the outcome is unknown, and a retry may not help.
        _ => (
            Protocol,
            "the servers sent an unexpected response; see the source of this error",
            false,
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
}
