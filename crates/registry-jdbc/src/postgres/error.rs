//! Classifies errors of the server and the client: one decision per SQLSTATE.
//!
//! For the codes see <https://www.postgresql.org/docs/current/errcodes-appendix.html>. Every
//! statement is a transaction of its own, so a failed statement has had no effect. The outcome is
//! unknown only if the error also ends the connection (severity FATAL).

use registry_core::{BackendError, BackendErrorKind};
use sqlx::Postgres;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

use crate::server::error::{ErrorClass, client_error};
pub(super) use crate::server::error::{
    fenced_transaction_open, held_by_caller_transaction, still_connected, timed_out,
};
use crate::server::{self, ErrorEffect, PoolError, ServerErrors, SessionFailure};
use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// The name of the store in errors.
pub(super) const STORE: &str = "postgres";

impl ServerErrors for Postgres {
    const STORE: &'static str = STORE;

    fn error_effect(error: &sqlx::Error) -> ErrorEffect {
        let sqlx::Error::Database(database) = error else { return ErrorEffect::Broken };
        let code = code(database.as_ref());
        // These codes mean that another server may have become the primary, that the connection is
        // lost or in another client's transaction, or that a prepared statement is unusable.
        let is_session_unusable = code.starts_with("25")
            || code.starts_with("08")
            || code.starts_with("57P")
            || matches!(code, "26000" | "42P05" | "0A000");
        if is_fatal(database.as_ref()) || is_session_unusable {
            ErrorEffect::Broken
        } else {
            ErrorEffect::Rejected
        }
    }

    fn explain(error: sqlx::Error) -> BackendError {
        let class = match &error {
            sqlx::Error::Database(database) => {
                classify_code(code(database.as_ref()), is_fatal(database.as_ref()))
            }
            // If the server closes the connection instead of answering `SSLRequest`, sqlx reads the
            // missing byte as `0x00`. A server that is crashing, or that cannot start a process for
            // the connection, answers with an error message, which begins with `0x45`.
            sqlx::Error::Protocol(message)
                if ["0x00", "0x45"]
                    .iter()
                    .any(|byte| message.contains(&format!("response from SSLRequest: {byte}"))) =>
            {
                (Transient, "the server refused the connection; see its log", true)
            }
            other => server::error::classify_client_error(other),
        };
        // Failed logins, an unknown database (by default that of the user's name), limits of a
        // role, and errors of a pooler.
        let text_may_name_user =
            |code: &&str| code.starts_with("28") || matches!(*code, "3D000" | "53300" | "08P01");
        let redacted_code = code_of(&error).filter(text_may_name_user).map(str::to_owned);
        server::error::explain(error, STORE, class, redacted_code)
    }

    fn lacks_lock_tables(error: &sqlx::Error) -> bool {
        code_of(error).is_some_and(|code| matches!(code, "42P01" | "42703" | "3F000"))
    }

    fn is_conflict(error: &sqlx::Error) -> bool {
        code_of(error).is_some_and(|code| matches!(code, "40001" | "40P01" | "55P03"))
    }

    fn is_row_lock_error(error: &BackendError) -> bool {
        client_error(error).is_some_and(is_row_locked)
    }
}

/// Converts the reason for a missing connection. Nothing was sent.
pub(super) fn not_connected(reason: PoolError) -> BackendError {
    server::error::not_connected(reason, STORE, Postgres::explain)
}

/// Converts an error of a session's statement that ran outside of a transaction.
pub(super) fn session_failure(error: sqlx::Error) -> SessionFailure {
    server::session_failure::<Postgres>(error)
}

/// Returns whether the statement failed because another transaction kept a row locked for longer
/// than the time limit.
pub(super) fn is_row_locked(error: &sqlx::Error) -> bool {
    code_of(error) == Some("55P03")
}

/// Returns whether the user lacks a right.
pub(super) fn is_denied(error: &sqlx::Error) -> bool {
    code_of(error) == Some("42501")
}

fn code_of(error: &sqlx::Error) -> Option<&str> {
    match error {
        sqlx::Error::Database(database) => Some(code(database.as_ref())),
        _ => None,
    }
}

fn code(database: &dyn sqlx::error::DatabaseError) -> &str {
    database.try_downcast_ref::<PgDatabaseError>().map_or("", PgDatabaseError::code)
}

fn is_fatal(database: &dyn sqlx::error::DatabaseError) -> bool {
    database
        .try_downcast_ref::<PgDatabaseError>()
        .is_none_or(|error| matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic))
}

/// Returns the error of a request on a row that another transaction has locked.
pub(super) fn row_locked() -> BackendError {
    server::error::row_locked(STORE)
}

/// Adds a hint to `error` if the user lacks the right to end the connection that holds the key.
pub(super) fn explain_termination_denied(error: BackendError) -> BackendError {
    if !client_error(&error).is_some_and(is_denied) {
        return error;
    }
    let message = "postgres: the key is held by another user's connection, which this user cannot end; grant it membership in that user's role or in pg_signal_backend";
    BackendError::new(Denied, message).with_source(error).as_refused()
}

/// Returns the error of a row that contains a value that this program does not write.
pub(super) fn corrupt(message: &str) -> BackendError {
    server::error::corrupt(STORE, message)
}

/// Returns the kind, the message, and whether the server certainly executed nothing.
fn classify_code(code: &str, is_fatal: bool) -> ErrorClass {
    let (kind, message, is_before_execution) = classify(code, is_fatal);
    (kind, message, is_before_execution || !is_fatal && code != COMPLETION_UNKNOWN)
}

/// `statement_completion_unknown`: the statement may have had its effect, although the connection
/// continues.
const COMPLETION_UNKNOWN: &str = "40003";

/// Returns the kind, the message, and whether the error occurs only before anything was executed.
fn classify(code: &str, is_fatal: bool) -> (BackendErrorKind, &'static str, bool) {
    match code {
        "40001" => (Transient, "another transaction changed the row concurrently; retry", false),
        "40P01" => {
            (Transient, "the server detected a deadlock with another transaction; retry", false)
        }
        COMPLETION_UNKNOWN => {
            (Transient, "it is unknown whether the server completed the statement; retry", false)
        }
        "55P03" => (
            Transient,
            "another transaction, perhaps a fenced one, kept the row of the lock locked for too long; retry, or shorten that transaction",
            false,
        ),
        "57014" => (
            Transient,
            "the statement was cancelled, manually or by statement_timeout; retry, or raise statement_timeout",
            false,
        ),
        "57P01" | "57P02" => {
            (Transient, "the server is shutting down, or ended the connection; see its log", false)
        }
        "57P03" => (Transient, "the server is starting up or shutting down; retry", true),
        "57P04" => {
            (Misconfigured, "the database was dropped; restore it or name another one", false)
        }
        "57P05" => (
            Transient,
            "the server ended the connection, which had been idle for too long; retry, or raise idle_session_timeout",
            true,
        ),
        "25006" => (
            Transient,
            "the server is a standby, or accepts no writes for another reason; use the address of the primary",
            false,
        ),
        "53100" => (Misconfigured, "the server's disk is full; free space", false),
        "53200" => (Transient, "the server's memory ran out; reduce its load", false),
        "53300" => (
            Transient,
            "the server has no free connection; raise max_connections, or lower `pool`",
            true,
        ),
        "28000" | "28P01" => (
            Denied,
            "the server rejects this user or password, or requires an encrypted connection; check both and `sslmode`",
            true,
        ),
        "3D000" => {
            (Misconfigured, "the database does not exist; create it or name another one", true)
        }
        "3F000" => (
            Misconfigured,
            "the schema for the lock tables does not exist; create the schema, or set `schema` to another one",
            true,
        ),
        "42P01" | "42703" => (
            Misconfigured,
            "the lock tables are missing or belong to another program; create them with the output of `lockreg schema postgres`",
            true,
        ),
        "42501" => (
            Denied,
            "this user lacks a right on the lock tables or their schema; grant the rights that `lockreg schema postgres` lists",
            true,
        ),
        "26000" | "42P05" => (
            Misconfigured,
            "a pooler in transaction mode has changed the server connection; turn prepared statements off (prepared=false)",
            true,
        ),
        // A pooler uses this code for unsupported requests, and for a failure of its server
        // connection.
        "08P01" if is_fatal => (
            Transient,
            "the pooler has no connection to the server, or lost it; check the server",
            false,
        ),
        "08P01" => (
            Misconfigured,
            "the statement is not the one that was prepared: behind a pooler in transaction mode turn prepared \
             statements off (prepared=false)",
            false,
        ),
        "08001" | "08004" => {
            (Transient, "the server cannot be reached or accepts no connections; see its log", true)
        }
        "0A000" => (Transient, "the lock tables were changed concurrently; retry", false),
        "22003" => (Protocol, "a token is at its limit; check for a manual edit of the row", false),
        _ => match code.get(..2).unwrap_or_default() {
            "08" => (
                Transient,
                "the connection was lost; check the network and that the server still runs",
                false,
            ),
            "25" => (
                Transient,
                "the connection was in another client's transaction; retry, or connect to the server directly",
                false,
            ),
            "28" => (Denied, "access was refused; check the user and its rights", true),
            "40" => (Transient, "the server rolled the statement back; retry", false),
            "53" => (Transient, "the server lacks resources; see its log", false),
            "55" => (Transient, "the server is not ready for the statement; retry", false),
            "57" => (Transient, "an operator intervened in the server; see its log", false),
            "22" | "23" => (
                Protocol,
                "a row breaks the rules of the lock tables; check for a manual edit of the row and for a trigger on the tables",
                false,
            ),
            "42" => (
                Misconfigured,
                "the lock tables do not have this program's schema; compare them with the output of `lockreg schema postgres`",
                true,
            ),
            "58" | "XX" => (Protocol, "the server has corrupt data or a fault; see its log", false),
            // Any other code points to a bug, which a retry does not fix.
            _ => (Protocol, "the server returned an unexpected error; see its log", false),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_kind() {
        let table: &[(&str, BackendErrorKind)] = &[
            ("40001", Transient),
            ("40P01", Transient),
            ("55P03", Transient),
            ("55006", Transient),
            ("57014", Transient),
            ("57P01", Transient),
            ("57P02", Transient),
            ("57P03", Transient),
            ("57P04", Misconfigured),
            ("57P05", Transient),
            ("25006", Transient),
            ("25P02", Transient),
            ("25P03", Transient),
            ("53100", Misconfigured),
            ("53200", Transient),
            ("53300", Transient),
            ("53400", Transient),
            ("28000", Denied),
            ("28P01", Denied),
            ("3D000", Misconfigured),
            ("3F000", Misconfigured),
            ("42P01", Misconfigured),
            ("42703", Misconfigured),
            ("42501", Denied),
            ("42883", Misconfigured),
            ("26000", Misconfigured),
            ("42P05", Misconfigured),
            ("08006", Transient),
            ("08001", Transient),
            ("08P01", Misconfigured),
            ("0A000", Transient),
            ("22003", Protocol),
            ("23502", Protocol),
            ("23514", Protocol),
            ("58030", Protocol),
            ("XX001", Protocol),
            ("P0001", Protocol),
            ("", Protocol),
        ];
        for &(code, kind) in table {
            let class = classify_code(code, false);
            assert_eq!((class.0, class.2), (kind, true), "{code}: {class:?}");
        }
        let class = classify_code("40003", false);
        assert_eq!((class.0, class.2), (Transient, false), "its outcome is unknown: {class:?}");
    }

    /// sqlx 0.9 creates these errors.
    #[test]
    fn a_server_that_refuses_a_connection_is_unreachable() {
        for (byte, kind) in [("0x00", Transient), ("0x45", Transient), ("0x78", Protocol)] {
            let text = format!("unexpected response from SSLRequest: {byte}");
            let error = Postgres::explain(sqlx::Error::Protocol(text));
            assert_eq!((error.kind(), error.refused()), (kind, kind == Transient), "{byte}");
        }
    }

    #[test]
    fn the_outcome_is_unknown_only_if_the_connection_ended_during_the_statement() {
        let table: &[(&str, BackendErrorKind, bool)] = &[
            ("57P01", Transient, false),
            ("57P02", Transient, false),
            ("57P04", Misconfigured, false),
            ("25P03", Transient, false),
            ("08006", Transient, false),
            ("XX000", Protocol, false),
            ("57P03", Transient, true),
            ("57P05", Transient, true),
            ("53300", Transient, true),
            ("28P01", Denied, true),
            ("3D000", Misconfigured, true),
            ("08P01", Transient, false),
        ];
        for &(code, kind, refused) in table {
            let class = classify_code(code, true);
            assert_eq!((class.0, class.2), (kind, refused), "{code}: {class:?}");
        }
    }
}
