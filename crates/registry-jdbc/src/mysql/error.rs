//! Maps errors of the server and the client to `BackendError`: one decision for each error number.
//!
//! The numbers are from <https://mariadb.com/kb/en/mariadb-error-codes/> and from MySQL's error
//! reference. Every statement is one transaction, so a failed statement has had no effect. The
//! outcome is unknown only after errors for which the client closes the connection.

use registry_core::{BackendError, BackendErrorKind};
use sqlx::MySql;
use sqlx::mysql::MySqlDatabaseError;

use crate::server::error::{READ_ONLY, client_error};
pub(super) use crate::server::error::{
    fenced_transaction_open, held_by_caller_transaction, read_only, row_locked, still_connected,
    timed_out,
};
use crate::server::{ErrorEffect, PoolError, ServerErrors, error};
use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// The name of the store in errors.
pub(super) const STORE: &str = "mysql";

/// As [`fenced_transaction_open`], for a key that several claims hold.
pub(super) fn fenced_transaction_of_holder_open() -> BackendError {
    BackendError::transient(format!(
        "{STORE}: a transaction that this lock, or another holder of the key, fences is still open, and this release follows its end; commit or roll back your own transaction first, then unlock"
    ))
    .as_blocked()
}

impl ServerErrors for MySql {
    const STORE: &'static str = STORE;

    fn error_effect(error: &sqlx::Error) -> ErrorEffect {
        match number_of(error) {
            Some(DEADLOCK | CHECK_READ) => ErrorEffect::RolledBack,
            Some(number) if classify_code(number).discards_connection => ErrorEffect::Broken,
            Some(_) => ErrorEffect::Rejected,
            None => ErrorEffect::Broken,
        }
    }

    fn explain(error: sqlx::Error) -> BackendError {
        let class = match &error {
            sqlx::Error::Database(_) => {
                let MySqlErrorClass { kind, message, discards_connection } =
                    classify_code(number_of(&error).unwrap_or(0));
                (kind, message, !discards_connection)
            }
            other => error::classify_client_error(other),
        };
        // Missing rights, failed logins, and limits of a user.
        let text_may_name_user =
            |number: &u16| class.0 == Denied || matches!(number, 1203 | 1226 | 1449);
        let redacted_code =
            number_of(&error).filter(text_may_name_user).map(|number| number.to_string());
        error::explain(error, STORE, class, redacted_code)
    }

    fn lacks_lock_tables(error: &sqlx::Error) -> bool {
        matches!(number_of(error), Some(NO_SUCH_TABLE | BAD_FIELD | BAD_DB))
    }

    fn is_conflict(error: &sqlx::Error) -> bool {
        matches!(number_of(error), Some(DEADLOCK | CHECK_READ | LOCK_WAIT_TIMEOUT))
    }

    fn is_row_lock_error(error: &BackendError) -> bool {
        source_number(error) == Some(LOCK_WAIT_TIMEOUT)
    }

    /// The nodes of some clusters have no named locks.
    fn lacks_named_locks(error: &BackendError) -> bool {
        matches!(source_number(error), Some(NOT_SUPPORTED_YET | UNKNOWN_ERROR))
    }
}

/// Converts the reason for a missing connection. Nothing was sent.
pub(super) fn not_connected(reason: PoolError) -> BackendError {
    error::not_connected(reason, STORE, MySql::explain)
}

/// Adds a hint to `error` if the user lacks the right to end the connection that holds the key.
pub(super) fn explain_termination_denied(error: BackendError) -> BackendError {
    if source_number(&error) != Some(KILL_DENIED) {
        return error;
    }
    let message = "mysql: the key is held by another user's connection, which this user cannot end; grant it the right CONNECTION ADMIN (CONNECTION_ADMIN in MySQL)";
    BackendError::new(Denied, message).with_source(error).as_refused()
}

/// Returns whether the connection to be ended no longer exists.
pub(super) fn is_no_such_connection(error: &BackendError) -> bool {
    source_number(error) == Some(NO_SUCH_THREAD)
}

fn source_number(error: &BackendError) -> Option<u16> {
    client_error(error).and_then(number_of)
}

/// Returns whether the server refused access, for example because the user lacks a right.
pub(super) fn is_denied(error: &sqlx::Error) -> bool {
    number_of(error).is_some_and(|number| classify_code(number).kind == Denied)
}

fn number_of(error: &sqlx::Error) -> Option<u16> {
    let sqlx::Error::Database(database) = error else { return None };
    Some(database.try_downcast_ref::<MySqlDatabaseError>().map_or(0, MySqlDatabaseError::number))
}

/// Returns whether the user lacks a right on a table.
pub(super) fn is_table_denied(error: &sqlx::Error) -> bool {
    number_of(error) == Some(TABLE_ACCESS_DENIED)
}

/// The kind and message for one error number.
#[derive(Debug, PartialEq, Eq)]
struct MySqlErrorClass {
    kind: BackendErrorKind,
    message: &'static str,
    /// If true, the client closes the connection, even if the server has left it open. The outcome
    /// is unknown, unless nothing was sent.
    discards_connection: bool,
}

const CHECK_READ: u16 = 1020;
const BAD_DB: u16 = 1049;
const BAD_FIELD: u16 = 1054;
const NO_SUCH_THREAD: u16 = 1094;
const KILL_DENIED: u16 = 1095;
const UNKNOWN_ERROR: u16 = 1105;
const NOT_SUPPORTED_YET: u16 = 1235;
const TABLE_ACCESS_DENIED: u16 = 1142;
const NO_SUCH_TABLE: u16 = 1146;
const LOCK_WAIT_TIMEOUT: u16 = 1205;
const DEADLOCK: u16 = 1213;

fn classify_code(number: u16) -> MySqlErrorClass {
    let (kind, message, discards_connection) = match number {
        DEADLOCK | CHECK_READ => {
            (Transient, "the server rolled the statement back because of a conflict; retry", false)
        }
        LOCK_WAIT_TIMEOUT => (
            Transient,
            "another transaction, perhaps a fenced one, kept the row of the lock locked for too long; retry, or shorten that transaction",
            false,
        ),
        // Connection limits: of the server, of this user, of this user per hour.
        1040 | 1203 | 1226 => (
            Transient,
            "the server accepts no more connections; raise its limits, or lower `pool`",
            false,
        ),
        // The server lacks memory, sort memory, lock memory or threads.
        1037 | 1038 | 1041 | 1135 | 1206 => {
            (Transient, "the server's memory ran out; reduce its load", false)
        }
        // A write to a read-only server. The server was probably replaced by a new primary, or will
        // be.
        1290 | 1792 | 1836 => (Transient, READ_ONLY, true),
        // A replication group could not agree on the transaction.
        3100 | 3101 => (Transient, "the replication group rolled the statement back; retry", false),
        3032 => (Transient, "the server is in offline mode; turn `offline_mode` off", true),
        1637 => (Transient, "the server has too many transactions; reduce its load", false),
        // Statement timeouts of MariaDB and MySQL, and KILL QUERY.
        1969 | 3024 | 1317 => {
            (Transient, "a time limit or an operator interrupted the statement; retry", false)
        }
        1053 => (Transient, "the server is shutting down; start it again", true),
        // KILL CONNECTION, an idle limit, and broken connections as the server reports them.
        1927 | 4031 | 1152..=1161 | 1184 => {
            (Transient, "the server ended the connection; see its log", true)
        }
        // A node that is currently not a member of its Galera cluster.
        1047 => (
            Transient,
            "this node of the cluster is not ready; check its state, or use another node",
            true,
        ),
        1412 => (Transient, "the lock tables were changed concurrently; retry", false),
        1615 | 1243 => (Transient, "the server no longer has a prepared statement; retry", true),
        1180 | 1181 => (Protocol, "the server failed to commit; see its log", true),
        1044 | 1045 | TABLE_ACCESS_DENIED | 1143 | 1227 | 1370 | 1698 => (
            Denied,
            "access was refused; check user and password, and the rights on the lock tables",
            false,
        ),
        1130 | 1129 => (
            Denied,
            "the server accepts no connections from this host; check its grants, or run FLUSH HOSTS",
            false,
        ),
        1820 | 1862 => (Denied, "the password has expired; change it", false),
        3118 | 4151 => (Denied, "the account is locked; unlock it", false),
        1251 | 2059 => (
            Denied,
            "the server requires another authentication method; change the method of this user",
            false,
        ),
        3159 | 4038 => {
            (Denied, "the server requires an encrypted connection; set `sslmode`", false)
        }
        BAD_DB => {
            (Misconfigured, "the database does not exist; create it or name another one", false)
        }
        NO_SUCH_TABLE => (
            Misconfigured,
            "the lock tables are missing; create them with the output of `lockreg schema mysql`",
            false,
        ),
        BAD_FIELD | 1050 | 1136 => (
            Misconfigured,
            "the lock tables do not have this program's schema; compare them with the output of `lockreg schema mysql`",
            false,
        ),
        1064 | 1149 | 1235 => (
            Misconfigured,
            "the server does not know a statement of this program; it must be MariaDB 10.6, MySQL 8.0, or newer",
            false,
        ),
        1193 | 1231 | 1286 | 3161 => (
            Misconfigured,
            "the server does not support the required InnoDB tables; enable InnoDB",
            false,
        ),
        1665 => (
            Misconfigured,
            "the server logs statements, not rows, for its replicas; set binlog_format to ROW or MIXED",
            false,
        ),
        1021 | 1114 => (Misconfigured, "the server has no space left; free some", false),
        1062 | 1264 | 1265 | 1292 | 1365 | 1366 | 1406 | 1048 | 1690 | 3819 | 4025 => (
            Protocol,
            "a row breaks the rules of the lock tables; check for a manual edit of the row, for a trigger on the tables, and for a token at its limit",
            false,
        ),
        1030 | 1034 | 1035 | 1194 | 1195 => {
            (Protocol, "the server's storage failed; see its log", false)
        }
        // Any other number points to a bug, which a retry does not fix.
        _ => (Protocol, "the server returned an unexpected error; see its log", false),
    };
    MySqlErrorClass { kind, message, discards_connection }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_number_has_a_kind() {
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
        for (kind, discards_connection, numbers) in table {
            for &number in *numbers {
                let class = classify_code(number);
                assert_eq!(
                    (class.kind, class.discards_connection),
                    (*kind, *discards_connection),
                    "{number}: {class:?}"
                );
            }
        }
    }
}
