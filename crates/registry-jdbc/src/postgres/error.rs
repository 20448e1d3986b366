//! Classifies errors of the server and the client: one decision per SQLSTATE.
//!
//! For the codes see <https://www.postgresql.org/docs/current/errcodes-appendix.html>. Every
//! statement is a transaction of its own, so a failed statement has had no effect. The outcome is
//! unknown only if the error also ends the connection (severity FATAL).

use registry_core::{BackendError, BackendErrorKind};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

use crate::server::Failure;
use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Classifies an error of sqlx, and adds a hint.
pub(super) fn explain(error: sqlx::Error) -> BackendError {
    let Verdict { kind, says, refused } = match &error {
        sqlx::Error::Database(database) => {
            judge(code(database.as_ref()), is_fatal(database.as_ref()))
        }
        sqlx::Error::Io(io) => match io.kind() {
            std::io::ErrorKind::ConnectionRefused => {
                Verdict::of(Transient, "the connection was refused").refused()
            }
            std::io::ErrorKind::NotFound => {
                Verdict::of(Misconfigured, "there is no server's socket in this folder").refused()
            }
            _ => Verdict::of(Transient, "the connection was lost"),
        },
        sqlx::Error::Tls(_) => Verdict::of(Misconfigured, NOT_ENCRYPTED).refused(),
        sqlx::Error::Configuration(_)
        | sqlx::Error::InvalidArgument(_)
        | sqlx::Error::Encode(_) => {
            Verdict::of(Misconfigured, "the configuration cannot be used").refused()
        }
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. }
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::RowNotFound => {
            Verdict::of(Protocol, "the lock tables hold what no version of this program writes")
        }
        // sqlx does not detect the end of the connection here, and takes the missing byte for the
        // server's answer.
        sqlx::Error::Protocol(says) if says.contains("response from SSLRequest: 0x00") => {
            Verdict::of(Transient, "the server hung up before it said anything").refused()
        }
        sqlx::Error::Protocol(_) => {
            Verdict::of(Protocol, "the server answered what no PostgreSQL server answers")
        }
        // Includes future variants and those that do not occur here. The outcome is unknown, and a
        // retry is not useful.
        _ => Verdict::of(Protocol, "the database client failed"),
    };
    let error = BackendError::new(kind, format!("postgres: {says}")).with_source(error);
    if refused { error.as_refused() } else { error }
}

/// Classifies a failure to connect. No statement was sent, so nothing was executed.
pub(super) fn not_connected(error: sqlx::Error) -> BackendError {
    match error {
        // The TLS client reports an untrusted certificate in this way.
        sqlx::Error::Io(io) if io.kind() == std::io::ErrorKind::InvalidData => {
            BackendError::new(Misconfigured, format!("postgres: {NOT_ENCRYPTED}"))
                .with_source(io)
                .as_refused()
        }
        error => explain(error).as_refused(),
    }
}

const NOT_ENCRYPTED: &str = "the connection cannot be encrypted: the server does not encrypt, or its certificate is not trusted";

/// Returns whether the connection is usable after this error.
pub(super) fn spares_connection(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(database) = error else { return false };
    let code = code(database.as_ref());
    // These codes mean that another server may have become the primary, that the connection is in a
    // foreign transaction, or that prepared statements are missing.
    let is_strange = code.starts_with("25")
        || code.starts_with("08")
        || code.starts_with("57P")
        || matches!(code, "26000" | "42P05" | "0A000");
    !is_fatal(database.as_ref()) && !is_strange
}

/// Classifies an error outside of a transaction for a session.
pub(super) fn failure(error: sqlx::Error) -> Failure {
    if spares_connection(&error) {
        Failure::Answered(explain(error))
    } else {
        Failure::Broken(explain(error))
    }
}

/// The task of the session has ended.
pub(super) fn closed() -> BackendError {
    BackendError::transient("postgres: the store was closed meanwhile")
}

/// Returns whether a schema, a table or a column is missing.
pub(super) fn is_no_such_table(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| matches!(code, "42P01" | "42703" | "3F000"))
}

/// Returns whether a conflict with another transaction caused the error, so that a retry of the
/// transaction can succeed.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    code_of(error).is_some_and(|code| matches!(code, "40001" | "40P01" | "55P03"))
}

/// Returns whether another transaction kept a row locked for longer than the limit.
pub(super) fn is_row_locked(error: &sqlx::Error) -> bool {
    code_of(error) == Some("55P03")
}

/// Returns the same for a classified error.
pub(super) fn tells_of_locked_row(error: &BackendError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(is_row_locked)
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

/// The server did not answer within the time limit.
pub(super) fn silent() -> BackendError {
    BackendError::transient("postgres: the server did not answer in time")
}

/// The connection was not established within the time limit.
pub(super) fn unreachable_in_time() -> BackendError {
    BackendError::transient("postgres: the server could not be reached in time").as_refused()
}

/// No connection became free within the time limit.
pub(super) fn exhausted() -> BackendError {
    BackendError::transient(
        "postgres: all connections were at work for too long; allow more of them",
    )
    .as_refused()
}

/// The session's connection was busy with other statements for too long.
pub(super) fn overdue() -> BackendError {
    BackendError::transient(
        "postgres: the connection of the session was at work for too long, so the lock was not asked for",
    )
    .as_refused()
}

/// Another transaction has locked the row of one claim.
pub(super) fn row_is_locked() -> BackendError {
    BackendError::transient("postgres: another transaction has locked this lock's row").as_refused()
}

/// The error of a release whose claim has fenced a transaction that is still open.
pub(super) fn is_fenced(error: BackendError) -> BackendError {
    let says = "postgres: a transaction that this lock fences is still open, and the key is free only after its end; commit or roll back first, then unlock";
    BackendError::transient(says).with_source(error).as_blocked()
}

/// The error of an attempt to end the connection that has a row locked.
pub(super) fn not_ended(error: BackendError) -> BackendError {
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref());
    if !source.is_some_and(is_denied) {
        return error;
    }
    let says = "postgres: the key is held by another user's connection, which this user may not end: that takes membership in that user's role, or in pg_signal_backend";
    BackendError::new(Denied, says).with_source(error).as_refused()
}

/// The server was asked to end a connection, which still exists.
pub(super) fn still_there() -> BackendError {
    BackendError::transient(
        "postgres: the server was told to end the connection that holds the key, and has not done so yet",
    )
}

/// The holder is a caller's transaction, which only its owner ends.
pub(super) fn is_a_callers() -> BackendError {
    BackendError::transient(
        "postgres: the key is held by a transaction of an application, and is free when that ends; it cannot be broken from here",
    )
    .as_refused()
}

/// A lock's row, or the row of the table `meta`, contains a value that this program does not write.
pub(super) fn damaged(says: &str) -> BackendError {
    BackendError::new(Protocol, format!("postgres: {says}; was it edited by hand?"))
}

/// The classification of one code.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    kind: BackendErrorKind,
    says: &'static str,
    refused: bool,
}

impl Verdict {
    const fn of(kind: BackendErrorKind, says: &'static str) -> Self {
        Self { kind, says, refused: false }
    }

    const fn refused(mut self) -> Self {
        self.refused = true;
        self
    }
}

fn judge(code: &str, fatal: bool) -> Verdict {
    let (kind, says, before_anything) = sort(code, fatal);
    Verdict { kind, says, refused: before_anything || !fatal }
}

/// Returns the kind, the text, and whether the error occurs only before anything was executed.
fn sort(code: &str, fatal: bool) -> (BackendErrorKind, &'static str, bool) {
    match code {
        "40001" => (Transient, "another transaction changed the row at the same moment", false),
        "40P01" => {
            (Transient, "another transaction waited for this one, and this one for it", false)
        }
        "55P03" => (
            Transient,
            "another transaction kept the lock's row locked for too long, perhaps one with a fence",
            false,
        ),
        "57014" => {
            (Transient, "the statement was cancelled, by hand or by statement_timeout", false)
        }
        "57P01" | "57P02" => {
            (Transient, "the server is shutting down, or ended the connection", false)
        }
        "57P03" => (Transient, "the server is starting up or shutting down", true),
        "57P04" => (Misconfigured, "the database was dropped", false),
        "57P05" => {
            (Transient, "the server ended the connection, which had been idle for too long", true)
        }
        "25006" => {
            (Transient, "the server is a standby, or takes no writes for another reason", false)
        }
        "53100" => (Misconfigured, "the server's disk is full", false),
        "53200" => (Transient, "the server's memory ran out", false),
        "53300" => (
            Transient,
            "the server has no connection left; raise max_connections, or allow fewer here",
            true,
        ),
        "28000" | "28P01" => (
            Denied,
            "the server does not take this user or password, or wants an encrypted connection",
            true,
        ),
        "3D000" => (Misconfigured, "there is no database of this name", true),
        "42P01" | "42703" | "3F000" => (
            Misconfigured,
            "the lock tables are missing or were made by something else; `lockreg schema postgres` prints what makes them",
            true,
        ),
        "42501" => (
            Denied,
            "this user lacks a right: SELECT, INSERT, UPDATE and DELETE on the table of locks, SELECT and UPDATE on \
             that with the name meta, USAGE on their schema",
            true,
        ),
        "26000" | "42P05" => (
            Misconfigured,
            "a pooler mixes the connections up: behind one in transaction mode turn prepared statements off (prepared=false)",
            true,
        ),
        // A pooler uses this code for what it does not support, and for a failure of its server
        // connection.
        "08P01" if fatal => {
            (Transient, "the pooler has no connection to the server, or lost it", false)
        }
        "08P01" => (
            Misconfigured,
            "the statement is not the one that was prepared: behind a pooler in transaction mode turn prepared \
             statements off (prepared=false)",
            false,
        ),
        "08001" | "08004" => {
            (Transient, "the server cannot be reached or does not let anybody in", true)
        }
        "0A000" => (Transient, "the lock tables were changed just now", false),
        "22003" => (Protocol, "a token is at its limit; was a row edited by hand?", false),
        _ => match code.get(..2).unwrap_or_default() {
            "08" => (Transient, "the connection was lost", false),
            "25" => (Transient, "the connection was in a transaction that is not ours", false),
            "28" => (Denied, "access was refused", true),
            "40" => (Transient, "the server undid the statement", false),
            "53" => (Transient, "the server lacks resources", false),
            "55" => (Transient, "the server is not ready for the statement", false),
            "57" => (Transient, "somebody intervened in the server", false),
            "22" | "23" => (
                Protocol,
                "a row breaks the rules of the lock tables; was it edited by hand, or is there a trigger on them?",
                false,
            ),
            "42" => (
                Misconfigured,
                "the lock tables, or what they are made of, are not those of this program",
                true,
            ),
            "58" | "XX" => (Protocol, "the server has damaged data or a fault; see its log", false),
            // Everything else is a fault in a program, which a retry does not cure.
            _ => (Protocol, "the server failed in a way that is not expected", false),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_sorted_by_what_the_caller_can_do() {
        let table: &[(&str, BackendErrorKind)] = &[
            ("40001", Transient),
            ("40P01", Transient),
            ("40003", Transient),
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
            let verdict = judge(code, false);
            assert_eq!((verdict.kind, verdict.refused), (kind, true), "{code}: {verdict:?}");
        }
    }

    #[test]
    fn an_outcome_is_open_only_if_the_connection_ended_in_the_midst() {
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
            let verdict = judge(code, true);
            assert_eq!((verdict.kind, verdict.refused), (kind, refused), "{code}: {verdict:?}");
        }
    }

    #[test]
    fn errors_of_the_client_are_sorted_too() {
        let io = |kind| sqlx::Error::Io(std::io::Error::from(kind));
        let cases = [
            (io(std::io::ErrorKind::ConnectionRefused), Transient, true),
            (io(std::io::ErrorKind::NotFound), Misconfigured, true),
            (io(std::io::ErrorKind::InvalidData), Transient, false),
            (io(std::io::ErrorKind::UnexpectedEof), Transient, false),
            (io(std::io::ErrorKind::ConnectionReset), Transient, false),
            (sqlx::Error::Tls("x".into()), Misconfigured, true),
            (sqlx::Error::Configuration("x".into()), Misconfigured, true),
            (sqlx::Error::InvalidArgument("x".to_owned()), Misconfigured, true),
            (sqlx::Error::Encode("x".into()), Misconfigured, true),
            (sqlx::Error::RowNotFound, Protocol, false),
            (sqlx::Error::Decode("x".into()), Protocol, false),
            (sqlx::Error::Protocol("x".to_owned()), Protocol, false),
            (sqlx::Error::PoolClosed, Protocol, false),
        ];
        for (error, kind, refused) in cases {
            assert!(!spares_connection(&error) && !is_busy(&error) && !is_no_such_table(&error));
            let text = error.to_string();
            let told = explain(error);
            assert_eq!((told.kind(), told.refused()), (kind, refused), "{text}");
        }
    }
}
