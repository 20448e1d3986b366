//! Maps the client library's errors to [`BackendError`], in one table.

use registry_core::{BackendError, BackendErrorKind};
use zookeeper_client::Error;

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Classifies an error and adds a message with the remedy.
pub(crate) fn explain(error: &Error) -> BackendError {
    let (kind, says, refused) = judge(error);
    // The client library's errors contain no credentials and no data.
    let explained =
        BackendError::new(kind, format!("zookeeper: {says}")).with_source(error.clone());
    if refused { explained.as_refused() } else { explained }
}

/// The error of a request without a response in time.
pub(crate) fn silent() -> BackendError {
    BackendError::transient("zookeeper: the servers did not answer in time")
}

/// The error of a request that was not sent because no server is connected.
pub(crate) fn unreachable() -> BackendError {
    BackendError::transient("zookeeper: there is no connection to any of the servers").as_refused()
}

/// Returns whether the servers certainly did not execute the request.
pub(crate) fn is_refusal(error: &Error) -> bool {
    judge(error).2
}

const fn judge(error: &Error) -> (BackendErrorKind, &'static str, bool) {
    match error {
        Error::ConnectionLoss | Error::Custom(_) => (Transient, "the connection was lost", false),
        Error::Timeout => (Transient, "none of the servers could be reached in time", false),
        Error::NoHosts => (Transient, "none of the servers can be reached", true),
        Error::SessionExpired => (Transient, "the session is over", false),
        Error::SessionMoved => (Transient, "the session has moved to another connection", false),
        Error::ClientClosed => (Transient, "the session was closed", false),
        Error::NotReadOnly => {
            (Transient, "the server has lost the others and only answers questions", true)
        }
        Error::Throttled => (Transient, "the servers have too much to do", true),
        Error::NoAuth => (
            Denied,
            "this login may not do that; see the book for the rights that are needed",
            true,
        ),
        Error::AuthFailed => (Denied, "the servers do not take this login", true),
        Error::InvalidAcl => {
            (Misconfigured, "the servers do not take these rights for new nodes", true)
        }
        Error::QuotaExceeded => (Misconfigured, "the quota for nodes is used up", true),
        Error::NoChildrenForEphemerals => {
            (Misconfigured, "a lock's node cannot be made below a node that is ephemeral", true)
        }
        Error::Unimplemented => (Misconfigured, "the server is too old for this", true),
        Error::NoNode => (Protocol, "a node is missing that was made just now", true),
        Error::BadArguments(_) | Error::MarshallingError => {
            (Protocol, "the request cannot be made", true)
        }
        Error::BadVersion | Error::NodeExists | Error::NotEmpty => {
            (Protocol, "the servers refused the request", true)
        }
        // Variants that the library may add: the outcome is unknown, and a retry may not help.
        _ => (Protocol, "the servers answered what they should not", false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_says_whether_it_may_pass_and_whether_nothing_was_done() {
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
            let explained = explain(&error);
            assert_eq!((explained.kind(), explained.refused()), (kind, refused), "{error:?}");
        }
    }
}
