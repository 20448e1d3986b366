//! Maps errors of the server and the client to `BackendError`: each number has its own decision.
//!
//! The numbers are those of <https://mariadb.com/kb/en/mariadb-error-codes/> and of MySQL's error
//! reference. Every statement is a transaction of its own, so a statement that returned an error
//! did nothing. If the connection ends with the error, the outcome is unknown.

use std::time::Duration;

use registry_core::{BackendError, BackendErrorKind};
use sqlx::mysql::MySqlDatabaseError;

use crate::server::Refusal;

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// What a failed statement means for a retry and for its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// The server rolled the statement back because of a conflict. It may be sent again at once, on
    /// the same connection.
    Undone,
    /// The server returned an error. The connection is usable.
    Answered,
    /// The connection is unusable.
    Broken,
}

/// Returns what to do after an error.
pub(super) fn fate(error: &sqlx::Error) -> Fate {
    match number_of(error) {
        Some(DEADLOCK | CHECK_READ) => Fate::Undone,
        Some(number) if judge(number).ends_connection => Fate::Broken,
        Some(_) => Fate::Answered,
        None => Fate::Broken,
    }
}

/// Converts an error of sqlx to a `BackendError` with advice.
pub(super) fn explain(error: sqlx::Error, place: &str) -> BackendError {
    let (kind, says, refused) = match &error {
        sqlx::Error::Database(_) => {
            let Verdict { kind, says, ends_connection } = judge(number_of(&error).unwrap_or(0));
            (kind, says, !ends_connection)
        }
        sqlx::Error::Io(io) => match io.kind() {
            std::io::ErrorKind::ConnectionRefused => {
                (Transient, "the connection was refused", true)
            }
            std::io::ErrorKind::NotFound => (Misconfigured, "there is no such socket", true),
            _ => (Transient, "the connection was lost", false),
        },
        sqlx::Error::Tls(_) => (Misconfigured, NOT_ENCRYPTED, true),
        sqlx::Error::Configuration(_)
        | sqlx::Error::InvalidArgument(_)
        | sqlx::Error::Encode(_) => (Misconfigured, "the configuration cannot be used", true),
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. }
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::RowNotFound => {
            (Protocol, "the lock tables hold what no version of this program writes", false)
        }
        sqlx::Error::Protocol(_) => {
            (Protocol, "the server answered what neither MariaDB nor MySQL answers", false)
        }
        // Variants that sqlx may add, or does not return here. The outcome is unknown and a retry
        // may not help.
        _ => (Protocol, "the database client failed", false),
    };
    let error = BackendError::new(kind, format!("mysql at {place}: {says}")).with_source(error);
    if refused { error.as_refused() } else { error }
}

const NOT_ENCRYPTED: &str = "the connection cannot be encrypted: the server does not encrypt, or its certificate is not trusted";

/// Converts the reason for a missing connection. Nothing was sent, so the error is refused.
pub(super) fn not_connected(refusal: Refusal, place: &str) -> BackendError {
    let says = match refusal {
        // The client reports certificate errors in this way.
        Refusal::Sqlx(sqlx::Error::Io(io)) if io.kind() == std::io::ErrorKind::InvalidData => {
            return BackendError::new(Misconfigured, format!("mysql at {place}: {NOT_ENCRYPTED}"))
                .with_source(io)
                .as_refused();
        }
        Refusal::Sqlx(error) => return explain(error, place).as_refused(),
        Refusal::Exhausted => "all connections were at work for too long; allow more of them",
        Refusal::Silent => "the server could not be reached in time",
    };
    BackendError::transient(format!("mysql at {place}: {says}")).as_refused()
}

/// Returns the error for a server that did not answer in time.
pub(super) fn silent(place: &str, limit: Duration) -> BackendError {
    BackendError::transient(format!("mysql at {place}: the server did not answer within {limit:?}"))
}

/// Returns the error for an acquisition that a session's connection did not send in time.
pub(super) fn overdue(place: &str) -> BackendError {
    BackendError::transient(format!(
        "mysql at {place}: the connection of the session was at work for too long, so the lock was not asked for"
    ))
    .as_refused()
}

/// Returns the error for a grant whose row was locked, so that this renewal skipped it.
pub(super) fn row_is_locked(place: &str) -> BackendError {
    BackendError::transient(format!(
        "mysql at {place}: a transaction keeps the lock's row to itself; is it a fence that is open for long, or the server a replica?"
    ))
    .as_refused()
}

/// Returns the error for a release whose claim has fenced a transaction that is still open.
pub(super) fn is_fenced(place: &str) -> BackendError {
    BackendError::transient(format!(
        "mysql at {place}: a transaction that this lock fences is still open, and the key is free only after its end; commit or roll back first, then unlock"
    ))
    .as_blocked()
}

/// Returns why the connection that has a row locked was not ended.
pub(super) fn not_ended(error: BackendError, place: &str) -> BackendError {
    if number_behind(&error) != Some(KILL_DENIED) {
        return error;
    }
    let says = format!(
        "mysql at {place}: the key is held by another user's connection, which this user may not end: that takes the right CONNECTION ADMIN (CONNECTION_ADMIN in MySQL)"
    );
    BackendError::new(Denied, says).with_source(error).as_refused()
}

/// Returns whether the connection to be ended no longer exists.
pub(super) fn tells_of_no_such_connection(error: &BackendError) -> bool {
    number_behind(error) == Some(NO_SUCH_THREAD)
}

/// Returns whether the server has no named locks. Nodes of some clusters have none.
pub(super) fn tells_of_no_named_locks(error: &BackendError) -> bool {
    matches!(number_behind(error), Some(NOT_SUPPORTED_YET | UNKNOWN_ERROR))
}

fn number_behind(error: &BackendError) -> Option<u16> {
    std::error::Error::source(error).and_then(|source| source.downcast_ref()).and_then(number_of)
}

/// Returns the error for a connection that received a `KILL` and has not ended yet.
pub(super) fn still_there(place: &str) -> BackendError {
    BackendError::transient(format!(
        "mysql at {place}: the server was told to end the connection that holds the key, and has not done so yet"
    ))
}

/// Returns the error for a key whose holder is a caller's transaction, which only the caller can
/// end.
pub(super) fn is_a_callers(place: &str) -> BackendError {
    BackendError::transient(format!(
        "mysql at {place}: the key is held by a transaction of an application, and is free when that ends; it cannot be broken from here"
    ))
    .as_refused()
}

/// Returns the error for a read-only server that would still write for this user. Not refused: a
/// statement may have been executed on its predecessor.
pub(super) fn read_only(place: &str) -> BackendError {
    BackendError::transient(format!("mysql at {place}: {READ_ONLY}"))
}

const READ_ONLY: &str = "the server does not take writes; it is a replica, or about to be one";

/// Returns the error for inconsistent data.
pub(super) fn damaged(place: &str, says: &str) -> BackendError {
    BackendError::new(
        Protocol,
        format!("mysql at {place}: {says}; was it edited by hand? Restore or drop the lock tables"),
    )
}

/// Returns whether a table is missing or belongs to something else.
pub(super) fn is_no_such_table(error: &sqlx::Error) -> bool {
    matches!(number_of(error), Some(NO_SUCH_TABLE | BAD_FIELD | BAD_DB))
}

/// Returns whether another transaction conflicted, so that a new transaction may succeed.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(number_of(error), Some(DEADLOCK | CHECK_READ | LOCK_WAIT_TIMEOUT))
}

/// Returns whether another transaction had the row locked for longer than the statement waits.
pub(super) fn tells_of_locked_row(error: &BackendError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(|error| number_of(error) == Some(LOCK_WAIT_TIMEOUT))
}

/// Returns whether the server refused because of a missing privilege.
pub(super) fn is_denied(error: &sqlx::Error) -> bool {
    number_of(error).is_some_and(|number| judge(number).kind == Denied)
}

fn number_of(error: &sqlx::Error) -> Option<u16> {
    let sqlx::Error::Database(database) = error else { return None };
    Some(database.try_downcast_ref::<MySqlDatabaseError>().map_or(0, MySqlDatabaseError::number))
}

/// The kind and message for one error number.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    kind: BackendErrorKind,
    says: &'static str,
    /// If so, the outcome is unknown, unless nothing had been sent.
    ends_connection: bool,
}

const CHECK_READ: u16 = 1020;
const BAD_DB: u16 = 1049;
const BAD_FIELD: u16 = 1054;
const NO_SUCH_THREAD: u16 = 1094;
const KILL_DENIED: u16 = 1095;
const UNKNOWN_ERROR: u16 = 1105;
const NOT_SUPPORTED_YET: u16 = 1235;
const NO_SUCH_TABLE: u16 = 1146;
const LOCK_WAIT_TIMEOUT: u16 = 1205;
const DEADLOCK: u16 = 1213;

fn judge(number: u16) -> Verdict {
    let (kind, says, ends_connection) = match number {
        DEADLOCK | CHECK_READ => {
            (Transient, "the server undid the statement because of another one", false)
        }
        LOCK_WAIT_TIMEOUT => (
            Transient,
            "another transaction kept the lock's row to itself for too long; is it a fence that is open for long?",
            false,
        ),
        // Connection limits: of the server, of this user, of this user per hour.
        1040 | 1203 | 1226 => (Transient, "the server takes no more connections", false),
        // Memory of the host, not of this process alone.
        1037 | 1038 | 1041 | 1135 | 1206 => (Transient, "the server lacks memory", false),
        // A write to a read-only server: most likely it has, or is about to have, a successor.
        1290 | 1792 | 1836 => (Transient, READ_ONLY, true),
        // A replication group could not agree on the transaction.
        3100 | 3101 => (Transient, "the group of servers undid the statement", false),
        3032 => (Transient, "the server is set off-line", true),
        1637 => (Transient, "the server has too many transactions", false),
        // Statement timeouts of MariaDB and MySQL, and KILL QUERY.
        1969 | 3024 | 1317 => (Transient, "somebody, or a limit, broke the statement off", false),
        1053 => (Transient, "the server shuts down", true),
        // KILL CONNECTION, an idle limit, and broken connections as the server reports them.
        1927 | 4031 | 1152..=1161 | 1184 => (Transient, "the server ended the connection", true),
        // A node that is currently not a member of its Galera cluster.
        1047 => (Transient, "this node of the cluster is not ready", true),
        1412 => (Transient, "the lock tables were changed just now", false),
        1615 | 1243 => (Transient, "the server has forgotten a prepared statement", true),
        1180 | 1181 => (Protocol, "the server failed to commit", true),
        1044 | 1045 | 1142 | 1143 | 1227 | 1370 | 1698 => (
            Denied,
            "access was refused; check user and password, and the rights on the lock tables",
            false,
        ),
        1130 | 1129 => (Denied, "the server lets nobody in from this host", false),
        1820 | 1862 => (Denied, "the password has expired", false),
        3118 | 4151 => (Denied, "the account is locked", false),
        1251 | 2059 => (Denied, "the server wants a login of another kind", false),
        3159 | 4038 => (Denied, "the server takes only encrypted connections", false),
        BAD_DB => (Misconfigured, "there is no such database", false),
        NO_SUCH_TABLE => (
            Misconfigured,
            "the lock tables are missing; have them made by what `lockreg schema mysql` prints",
            false,
        ),
        BAD_FIELD | 1050 | 1136 => {
            (Misconfigured, "the lock tables are not those of this program", false)
        }
        1064 | 1149 | 1235 => (
            Misconfigured,
            "the server does not know a statement of this program; it must be MariaDB 10.6, MySQL 8.0, or newer",
            false,
        ),
        1193 | 1231 | 1286 | 3161 => {
            (Misconfigured, "the server has no InnoDB tables as they are needed here", false)
        }
        1665 => (
            Misconfigured,
            "the server logs statements, not rows, for its replicas; set binlog_format to ROW or MIXED",
            false,
        ),
        1021 | 1114 => (Misconfigured, "the server has no space left", false),
        1062 | 1264 | 1265 | 1292 | 1365 | 1366 | 1406 | 1048 | 1690 | 3819 | 4025 => (
            Protocol,
            "a row breaks the rules of the lock tables; was it edited by hand, is there a trigger on them, or is a token at its limit?",
            false,
        ),
        1030 | 1034 | 1035 | 1194 | 1195 => {
            (Protocol, "the server's storage failed; see its log", false)
        }
        // Any other number is a program fault, which a retry does not fix.
        _ => (Protocol, "the server failed in a way that is not expected", false),
    };
    Verdict { kind, says, ends_connection }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_sorted_by_what_the_caller_can_do() {
        let table: &[(BackendErrorKind, bool, &[u16])] = &[
            (
                Transient,
                false,
                &[
                    1213, 1205, 1020, 1040, 1203, 1226, 1037, 1038, 1041, 1135, 1206, 1637, 1969,
                    3024, 1317, 1412, 3100, 3101,
                ],
            ),
            (
                Transient,
                true,
                &[
                    1290, 1792, 1836, 1053, 1927, 4031, 1152, 1158, 1161, 1184, 1047, 1615, 1243,
                    3032,
                ],
            ),
            (
                Denied,
                false,
                &[
                    1044, 1045, 1142, 1143, 1227, 1370, 1698, 1129, 1130, 1820, 1862, 3118, 4151,
                    1251, 2059, 3159, 4038,
                ],
            ),
            (
                Misconfigured,
                false,
                &[
                    1049, 1146, 1054, 1050, 1136, 1064, 1149, 1235, 1193, 1231, 1286, 3161, 1665,
                    1021, 1114,
                ],
            ),
            (
                Protocol,
                false,
                &[
                    1062, 1264, 1265, 1292, 1365, 1366, 1406, 1048, 1690, 3819, 4025, 1030, 1034,
                    1035, 1194, 1195, 0, 1105, 65_535,
                ],
            ),
            (Protocol, true, &[1180, 1181]),
        ];
        for (kind, ends_connection, numbers) in table {
            for &number in *numbers {
                let verdict = judge(number);
                assert_eq!(
                    (verdict.kind, verdict.ends_connection),
                    (*kind, *ends_connection),
                    "{number}: {verdict:?}"
                );
            }
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
            assert!(!is_busy(&error) && !is_no_such_table(&error) && !is_denied(&error));
            assert_eq!(fate(&error), Fate::Broken);
            let text = error.to_string();
            let told = explain(error, "db:3306");
            assert_eq!((told.kind(), told.refused()), (kind, refused), "{text}");
            assert!(told.to_string().contains("db:3306"), "{told}");
        }
    }

    #[test]
    fn without_a_connection_nothing_was_done() {
        for refusal in [
            Refusal::Exhausted,
            Refusal::Silent,
            Refusal::Sqlx(sqlx::Error::Io(std::io::ErrorKind::UnexpectedEof.into())),
        ] {
            let told = not_connected(refusal, "db:3306");
            assert_eq!((told.kind(), told.refused()), (Transient, true), "{told}");
        }
    }
}
