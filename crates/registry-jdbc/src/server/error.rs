//! Errors that the stores of all database servers return. The parameter `store` is the name of the
//! store. The backend adds the server's address. The module `error` of each kind of server
//! classifies that server's error codes.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::Error;

use super::PoolError;
use BackendErrorKind::{Misconfigured, Protocol, Transient};

/// The kind and message of an error, and whether the server certainly executed nothing.
pub(crate) type ErrorClass = (BackendErrorKind, &'static str, bool);

/// Classifies an error that the client raised, not the server.
pub(crate) fn classify_client_error(error: &Error) -> ErrorClass {
    match error {
        Error::Io(io) => match io.kind() {
            std::io::ErrorKind::ConnectionRefused => (
                Transient,
                "the connection was refused; check that the server runs at this address",
                true,
            ),
            // A server removes its socket while it restarts.
            std::io::ErrorKind::NotFound => (
                Transient,
                "the socket of the server does not exist; check its path and that the server runs",
                true,
            ),
            // A firewall can cause this error too, also on an open connection.
            std::io::ErrorKind::PermissionDenied => (
                Transient,
                "the system denied the connection; check the permissions of the server's socket, or the firewall",
                false,
            ),
            _ => (
                Transient,
                "the connection was lost; check the network and that the server still runs",
                false,
            ),
        },
        Error::Tls(_) => (Misconfigured, NOT_ENCRYPTED, true),
        Error::Configuration(_) | Error::InvalidArgument(_) | Error::Encode(_) => {
            (Misconfigured, "the configuration is invalid; see the source of this error", true)
        }
        Error::ColumnDecode { .. }
        | Error::Decode(_)
        | Error::ColumnNotFound(_)
        | Error::ColumnIndexOutOfBounds { .. }
        | Error::TypeNotFound { .. }
        | Error::RowNotFound => (
            Protocol,
            "the lock tables contain a value that no version of this program writes",
            false,
        ),
        Error::Protocol(_) => (
            Protocol,
            "the response is not valid in the protocol of the server; check the kind of the server",
            false,
        ),
        // Variants that sqlx may add, or that do not occur here. The outcome is unknown, and a
        // retry is not useful.
        _ => (Protocol, "the database client failed; see the source of this error", false),
    }
}

/// Converts an error of sqlx, with its class. `redacted_code` is the server's code of an error
/// whose text may contain the name of the user.
pub(crate) fn explain(
    error: Error,
    store: &str,
    class: ErrorClass,
    redacted_code: Option<String>,
) -> BackendError {
    let (kind, message, refused) = class;
    let source = ClientError { redacted_code: redacted_code.or_else(|| named_user(&error)), error };
    let error = BackendError::new(kind, format!("{store}: {message}")).with_source(source);
    if refused { error.as_refused() } else { error }
}

/// Returns the code of a server's error whose text seems to name a user.
fn named_user(error: &Error) -> Option<String> {
    let Error::Database(database) = error else { return None };
    let text = database.message().to_lowercase();
    let text_may_name_user =
        ["user \"", "user '", "role \"", "'@'"].iter().any(|part| text.contains(part));
    text_may_name_user.then(|| database.code().unwrap_or_default().into_owned())
}

/// An error of sqlx as the source of a [`BackendError`]. Its text is hidden if it may contain the
/// name of the user.
struct ClientError {
    error: Error,
    redacted_code: Option<String>,
}

impl ClientError {
    /// Returns the redacted text, or `None` if the error's own text is shown.
    fn redacted(&self) -> Option<String> {
        let code = self.redacted_code.as_ref()?;
        Some(format!("the server returned the error {code}; its log has the text"))
    }
}

impl fmt::Debug for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.redacted() {
            Some(text) => f.write_str(&text),
            None => fmt::Debug::fmt(&self.error, f),
        }
    }
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.redacted() {
            Some(text) => f.write_str(&text),
            None => fmt::Display::fmt(&self.error, f),
        }
    }
}

impl StdError for ClientError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        if self.redacted_code.is_some() { None } else { self.error.source() }
    }
}

/// Returns the error of sqlx that is the source of `error`.
pub(crate) fn client_error(error: &BackendError) -> Option<&Error> {
    let source = StdError::source(error)?.downcast_ref::<ClientError>()?;
    Some(&source.error)
}

/// Converts the reason for a missing connection. Nothing was sent.
pub(crate) fn not_connected(
    pool_error: PoolError,
    store: &str,
    explain: impl FnOnce(Error) -> BackendError,
) -> BackendError {
    let message = match pool_error {
        // The TLS client reports an untrusted certificate in this way.
        PoolError::Sqlx(Error::Io(io)) if io.kind() == std::io::ErrorKind::InvalidData => {
            return BackendError::new(Misconfigured, format!("{store}: {NOT_ENCRYPTED}"))
                .with_source(io)
                .as_refused();
        }
        PoolError::Sqlx(error) => return explain(error).as_refused(),
        PoolError::Exhausted => "all connections were in use for too long; raise `pool`",
        PoolError::TimedOut => {
            "the server could not be reached in time; check its address and the network"
        }
    };
    BackendError::transient(format!("{store}: {message}")).as_refused()
}

const NOT_ENCRYPTED: &str = "the connection cannot be encrypted: the server does not encrypt, or its certificate is not trusted; check `sslmode` and `ca`";

/// Returns the error of a request that the server did not answer within `limit`.
pub(crate) fn timed_out(store: &str, limit: Duration) -> BackendError {
    BackendError::transient(format!(
        "{store}: the server did not answer within {limit:?}; check its load and the network"
    ))
}

/// Returns the error of a request to a session whose task has ended, because its runtime ended or a
/// command panicked. The next request starts a new task.
pub(crate) fn session_ended(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: the task of the session ended during the operation; retry"
    ))
}

/// Returns the error of an acquisition that was queued for too long, because the session's
/// connection ran other statements. The acquisition was not sent.
pub(crate) fn queue_timed_out(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: the session's connection was in use for too long, so no request was sent; retry"
    ))
    .as_refused()
}

/// Returns the error of a request on a row that another transaction has locked.
pub(crate) fn row_locked(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: another transaction, perhaps a fenced one, has locked the row of this lock, or the server is a replica; retry, or use the address of the primary"
    ))
    .as_refused()
}

/// Returns the error of a release whose claim fences a transaction that is still open.
pub(crate) fn fenced_transaction_open(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: a transaction that this lock fences is still open, and the key is free only after its end; commit or roll back first, then unlock"
    ))
    .as_blocked()
}

/// Returns the error of a request to a read-only server. The error is not marked as refused: the
/// previous primary may have executed an earlier attempt.
pub(crate) fn read_only(store: &str) -> BackendError {
    BackendError::transient(format!("{store}: {READ_ONLY}"))
}

pub(crate) const READ_ONLY: &str = "the server accepts no writes: it is a replica, or about to be one; use the address of the primary";

/// Returns the error of a forced release whose holder's connection still exists, although the
/// server was requested to end it.
pub(crate) fn still_connected(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: the connection that holds the key still exists, although the server was requested to end it; retry"
    ))
}

/// Returns the error of a forced release of a key that an application's transaction holds. Only the
/// application can end this transaction.
pub(crate) fn held_by_caller_transaction(store: &str) -> BackendError {
    BackendError::transient(format!(
        "{store}: an application's transaction holds the key until it ends, and cannot be ended from here; end that transaction"
    ))
    .as_refused()
}

/// Returns the error of a row that contains a value that this program does not write.
pub(crate) fn corrupt(store: &str, message: &str) -> BackendError {
    let text =
        format!("{store}: {message}; was it edited manually? Restore or drop the lock tables");
    BackendError::new(Protocol, text)
}

#[cfg(test)]
mod tests {
    use super::super::{ErrorEffect, ServerErrors};
    use super::*;

    const STORE: &str = "mysql";

    fn explained(error: Error) -> BackendError {
        let class = classify_client_error(&error);
        explain(error, STORE, class, None)
    }

    #[test]
    fn client_errors_have_a_kind() {
        let io = |kind| Error::Io(std::io::Error::from(kind));
        let cases = [
            (io(std::io::ErrorKind::ConnectionRefused), Transient, true),
            (io(std::io::ErrorKind::NotFound), Transient, true),
            (io(std::io::ErrorKind::PermissionDenied), Transient, false),
            (io(std::io::ErrorKind::InvalidData), Transient, false),
            (io(std::io::ErrorKind::UnexpectedEof), Transient, false),
            (io(std::io::ErrorKind::ConnectionReset), Transient, false),
            (Error::Tls("x".into()), Misconfigured, true),
            (Error::Configuration("x".into()), Misconfigured, true),
            (Error::InvalidArgument("x".to_owned()), Misconfigured, true),
            (Error::Encode("x".into()), Misconfigured, true),
            (Error::RowNotFound, Protocol, false),
            (Error::Decode("x".into()), Protocol, false),
            (Error::Protocol("x".to_owned()), Protocol, false),
            (Error::PoolClosed, Protocol, false),
        ];
        for (error, kind, refused) in cases {
            check_dialects(&error);
            let text = error.to_string();
            let explained = explained(error);
            assert_eq!((explained.kind(), explained.refused()), (kind, refused), "{text}");
            assert!(explained.to_string().starts_with("mysql: "), "{explained}");
        }
    }

    /// Checks that each dialect treats an error of the client as a broken connection.
    fn check_dialects(error: &Error) {
        fn check<D: ServerErrors>(error: &Error) {
            assert!(!D::is_conflict(error) && !D::lacks_lock_tables(error));
            assert_eq!(D::error_effect(error), ErrorEffect::Broken);
        }
        #[cfg(feature = "postgres")]
        check::<sqlx::Postgres>(error);
        #[cfg(feature = "mysql")]
        check::<sqlx::MySql>(error);
    }

    #[test]
    fn without_a_connection_the_error_is_refused() {
        for reason in [
            PoolError::Exhausted,
            PoolError::TimedOut,
            PoolError::Sqlx(Error::Io(std::io::ErrorKind::UnexpectedEof.into())),
        ] {
            let error = not_connected(reason, STORE, explained);
            assert_eq!((error.kind(), error.refused()), (Transient, true), "{error}");
        }
    }
}
