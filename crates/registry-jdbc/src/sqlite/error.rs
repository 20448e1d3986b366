//! Maps SQLite's error codes to `BackendError`.
//!
//! The codes are from <https://www.sqlite.org/rescode.html>. The low byte is the primary code. An
//! extended code has its own decision only if its remedy differs.

use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Creates an error whose address is the path of the file.
pub(crate) fn at_path(
    kind: BackendErrorKind,
    path: &Path,
    message: impl std::fmt::Display,
) -> BackendError {
    BackendError::new(kind, format!("sqlite: {message}")).with_address(path.display().to_string())
}

/// Converts an error of sqlx to a `BackendError`. The message contains the cause and a remedy.
pub(crate) fn explain(error: sqlx::Error, path: &Path) -> BackendError {
    let SqliteErrorClass { kind, message, refused } = match &error {
        sqlx::Error::Database(database) => classify_code(extended_code(database.as_ref())),
        // The thread that owned the connection has ended; the next call opens a new connection.
        sqlx::Error::WorkerCrashed => SqliteErrorClass::new(
            Transient,
            "the connection was lost; the next call opens a new one",
        ),
        sqlx::Error::Io(_) => SqliteErrorClass::new(
            Misconfigured,
            "opening a connection failed; check the path and the limit of open files",
        )
        .refused(),
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => {
            SqliteErrorClass::new(Misconfigured, "SQLite rejected the path; use another path")
                .refused()
        }
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. }
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::RowNotFound
        | sqlx::Error::Protocol(_) => SqliteErrorClass::new(
            Protocol,
            "the lock tables contain values that no version of this program writes; move the file away",
        ),
        // Variants that sqlx may add, or does not return for SQLite. The outcome is unknown and a
        // retry may not help.
        _ => SqliteErrorClass::new(
            Protocol,
            "the database client failed; see the source of this error",
        ),
    };
    let error = at_path(kind, path, message).with_source(error);
    if refused { error.as_refused() } else { error }
}

/// Returns whether another connection blocked the statement. Such a statement had no effect and can
/// be retried.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    sqlite_code(error).is_some_and(|code| matches!(code & 0xff, BUSY | LOCKED))
}

/// Returns whether the statement was refused because another connection writes to the file.
pub(crate) fn is_blocked_by_writer(error: &BackendError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(is_busy)
}

/// Returns the error of a release that a write transaction blocks, probably a transaction that the
/// released claim fences.
pub(crate) fn fenced_transaction_open(error: BackendError, path: &Path) -> BackendError {
    let message = "another connection has a write transaction, probably one that this lock fences; the key is released after its end; commit \
                   or roll back before `unlock`";
    at_path(Transient, path, message).with_source(error).as_blocked()
}

/// Returns the extended code, if SQLite itself returned the error.
fn sqlite_code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error().map(extended_code)
}

/// Returns whether a lock table is missing or has other columns.
pub(crate) fn is_missing_table(error: &sqlx::Error) -> bool {
    // `SQLITE_ERROR` means an error in the SQL text. The texts are constant, so the cause can only
    // be the tables.
    sqlite_code(error) == Some(ERROR)
}

fn extended_code(database: &dyn sqlx::error::DatabaseError) -> i32 {
    database.code().and_then(|code| code.parse().ok()).unwrap_or(INTERNAL)
}

/// The kind and message for one error code.
#[derive(Debug, PartialEq, Eq)]
struct SqliteErrorClass {
    kind: BackendErrorKind,
    message: &'static str,
    refused: bool,
}

impl SqliteErrorClass {
    const fn new(kind: BackendErrorKind, message: &'static str) -> Self {
        Self { kind, message, refused: false }
    }

    /// Marks the error as refused: the statement had no effect, because the file could not be
    /// opened, locked or written, or because the statement could not be compiled.
    const fn refused(mut self) -> Self {
        self.refused = true;
        self
    }
}

const ERROR: i32 = 1;
const INTERNAL: i32 = 2;
const PERM: i32 = 3;
const ABORT: i32 = 4;
const BUSY: i32 = 5;
const LOCKED: i32 = 6;
const NOMEM: i32 = 7;
const READONLY: i32 = 8;
const INTERRUPT: i32 = 9;
const IOERR: i32 = 10;
const CORRUPT: i32 = 11;
const FULL: i32 = 13;
const CANTOPEN: i32 = 14;
const PROTOCOL: i32 = 15;
const SCHEMA: i32 = 17;
const CONSTRAINT: i32 = 19;
const NOLFS: i32 = 22;
const AUTH: i32 = 23;
const NOTADB: i32 = 26;

const READONLY_DBMOVED: i32 = READONLY | 4 << 8;
const CANTOPEN_ISDIR: i32 = CANTOPEN | 2 << 8;
const IOERR_WRITE: i32 = IOERR | 3 << 8;
const IOERR_RDLOCK: i32 = IOERR | 9 << 8;
const IOERR_UNLOCK: i32 = IOERR | 8 << 8;
const IOERR_NOMEM: i32 = IOERR | 12 << 8;
const IOERR_CHECKRESERVEDLOCK: i32 = IOERR | 14 << 8;
const IOERR_LOCK: i32 = IOERR | 15 << 8;
const IOERR_SHMOPEN: i32 = IOERR | 18 << 8;
const IOERR_SHMSIZE: i32 = IOERR | 19 << 8;
const IOERR_SHMLOCK: i32 = IOERR | 20 << 8;
const IOERR_SHMMAP: i32 = IOERR | 21 << 8;

fn classify_code(code: i32) -> SqliteErrorClass {
    // Extended codes come first, because they override their primary code.
    match code {
        READONLY_DBMOVED => return database_moved(),
        IOERR_WRITE => {
            return SqliteErrorClass::new(
                Protocol,
                "a write failed: a disk quota or file size limit is reached, or the disk has an error; see the \
                 system's log",
            );
        }
        CANTOPEN_ISDIR => {
            return SqliteErrorClass::new(Misconfigured, "the path is a folder; name a file")
                .refused();
        }
        // The system temporarily ran out of locks or memory.
        IOERR_RDLOCK
        | IOERR_UNLOCK
        | IOERR_NOMEM
        | IOERR_CHECKRESERVEDLOCK
        | IOERR_LOCK
        | IOERR_SHMLOCK => {
            return SqliteErrorClass::new(
                Transient,
                "the system temporarily failed to lock the file; retry",
            );
        }
        IOERR_SHMOPEN | IOERR_SHMSIZE | IOERR_SHMMAP => {
            return SqliteErrorClass::new(
                Misconfigured,
                "the shared-memory file (-shm) cannot be created or enlarged; use a local disk with \
                 free space",
            );
        }
        _ => {}
    }
    match code & 0xff {
        BUSY | LOCKED => SqliteErrorClass::new(
            Transient,
            "another connection kept the file locked for longer than `busy_timeout`; shorten its write transactions",
        )
        .refused(),
        ABORT | INTERRUPT => SqliteErrorClass::new(Transient, "the statement was interrupted; retry"),
        NOMEM => SqliteErrorClass::new(Transient, "the process is out of memory; free some"),
        PROTOCOL => SqliteErrorClass::new(Transient, "too many processes opened the file at the same time; retry"),
        SCHEMA => SqliteErrorClass::new(Transient, "another process changes the tables; retry").refused(),
        PERM | READONLY => SqliteErrorClass::new(
            Denied,
            "this process has no write access; grant it for the file, its folder and the files next to \
             it (-wal, -shm)",
        )
        .refused(),
        AUTH => SqliteErrorClass::new(Denied, "access was denied; check the access rights on the file").refused(),
        CANTOPEN => SqliteErrorClass::new(
            Misconfigured,
            "the file or one next to it (-wal, -shm) cannot be opened; check the path, the access \
             rights and the limit of open files",
        )
        .refused(),
        // A full disk is not transient: with retries, the caller would get this error only at the
        // deadline.
        FULL => SqliteErrorClass::new(Misconfigured, "the disk has no free space; free some"),
        NOLFS => SqliteErrorClass::new(Misconfigured, "the file exceeds the size limit of this system; delete other data in it, or use another file"),
        ERROR => SqliteErrorClass::new(
            Misconfigured,
            "the tables lock_registry_meta and lock_registry_locks are missing or were created by \
             another program; restore or drop both",
        )
        .refused(),
        NOTADB => SqliteErrorClass::new(
            Protocol,
            "the file is no SQLite database, or is encrypted; choose another path, or move this file away",
        )
        .refused(),
        CORRUPT => {
            SqliteErrorClass::new(Protocol, "the file is damaged; restore it, or move it away so that a new file is created")
        }
        CONSTRAINT => SqliteErrorClass::new(
            Protocol,
            "a row violates a constraint of the lock tables: it was changed manually, or its token is at \
             the limit of 2^63 - 1; correct or delete the row",
        ),
        IOERR => SqliteErrorClass::new(Protocol, "a read or write of the disk failed; see the system's log"),
        // INTERNAL, MISUSE, RANGE and codes that SQLite may add are program faults, which a retry
        // does not fix.
        _ => SqliteErrorClass::new(Protocol, "SQLite failed with an unexpected code; see the source of this error"),
    }
}

/// The reason why a connection no longer shares its files with other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FileMismatch {
    #[error("the file at the database's path is not the open one")]
    Database,
    #[error("the file at the write-ahead log's path is not the open one")]
    Log,
    #[error("the file at the shared memory's path is not the open one")]
    SharedMemory,
    #[error("the database has more than one hard link")]
    HardLink,
}

impl FileMismatch {
    /// Returns the reason in an error that [`file_mismatch_error`] returned.
    pub(crate) fn from_error(error: &BackendError) -> Option<Self> {
        std::error::Error::source(error)?.downcast_ref().copied()
    }
}

/// Returns the error for files that are no longer at their paths, or have a second path.
pub(crate) fn file_mismatch_error(path: &Path, reason: FileMismatch) -> BackendError {
    let message = match reason {
        FileMismatch::Database => database_moved().message,
        FileMismatch::Log => {
            "the log (-wal) was removed or replaced while in use, so other processes may use another \
             log; restart all processes that use the file"
        }
        FileMismatch::SharedMemory => {
            "the shared-memory file (-shm) was removed or replaced while in use, so other processes \
             may use another one; restart all processes that use the file"
        }
        FileMismatch::HardLink => {
            "the file has more than one name (a hard link), and locks under one name do not exclude those under the \
             other; remove the other names, then restart all processes that use the file"
        }
    };
    at_path(Misconfigured, path, message).with_source(reason)
}

const fn database_moved() -> SqliteErrorClass {
    SqliteErrorClass::new(
        Misconfigured,
        "the file was removed or replaced while in use, so other processes may use another file; restart all \
         processes that use it",
    )
    .refused()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_the_kind_and_refusal_of_its_cause() {
        let table: &[(i32, BackendErrorKind, bool)] = &[
            (ERROR, Misconfigured, true),
            (INTERNAL, Protocol, false),
            (PERM, Denied, true),
            (ABORT, Transient, false),
            (ABORT | 2 << 8, Transient, false),
            (BUSY, Transient, true),
            (BUSY | 1 << 8, Transient, true),
            (BUSY | 2 << 8, Transient, true),
            (LOCKED, Transient, true),
            (NOMEM, Transient, false),
            (READONLY, Denied, true),
            (READONLY | 6 << 8, Denied, true),
            (READONLY_DBMOVED, Misconfigured, true),
            (INTERRUPT, Transient, false),
            (IOERR, Protocol, false),
            (IOERR_WRITE, Protocol, false),
            (IOERR_RDLOCK, Transient, false),
            (IOERR_UNLOCK, Transient, false),
            (IOERR_NOMEM, Transient, false),
            (IOERR_CHECKRESERVEDLOCK, Transient, false),
            (IOERR_LOCK, Transient, false),
            (IOERR_SHMLOCK, Transient, false),
            (IOERR_SHMOPEN, Misconfigured, false),
            (IOERR_SHMSIZE, Misconfigured, false),
            (IOERR_SHMMAP, Misconfigured, false),
            (CORRUPT, Protocol, false),
            (FULL, Misconfigured, false),
            (CANTOPEN, Misconfigured, true),
            (CANTOPEN_ISDIR, Misconfigured, true),
            (PROTOCOL, Transient, false),
            (SCHEMA, Transient, true),
            (CONSTRAINT, Protocol, false),
            (NOLFS, Misconfigured, false),
            (AUTH, Denied, true),
            (NOTADB, Protocol, true),
            (21, Protocol, false),
            (25, Protocol, false),
            (200, Protocol, false),
        ];
        for &(code, kind, refused) in table {
            let class = classify_code(code);
            assert_eq!((class.kind, class.refused), (kind, refused), "code {code}: {class:?}");
        }
    }

    #[test]
    fn errors_of_sqlx_have_the_kind_and_refusal_of_their_cause() {
        let path = Path::new("locks.db");
        let cases = [
            (sqlx::Error::WorkerCrashed, Transient, false),
            (sqlx::Error::Io(std::io::Error::other("x")), Misconfigured, true),
            (sqlx::Error::InvalidArgument("x".to_owned()), Misconfigured, true),
            (sqlx::Error::Configuration("x".into()), Misconfigured, true),
            (sqlx::Error::RowNotFound, Protocol, false),
            (sqlx::Error::Decode("x".into()), Protocol, false),
            (sqlx::Error::Protocol("x".to_owned()), Protocol, false),
            (sqlx::Error::ColumnNotFound("x".to_owned()), Protocol, false),
            (sqlx::Error::ColumnIndexOutOfBounds { index: 1, len: 0 }, Protocol, false),
            (sqlx::Error::TypeNotFound { type_name: "x".to_owned() }, Protocol, false),
            (
                sqlx::Error::ColumnDecode { index: "x".to_owned(), source: "x".into() },
                Protocol,
                false,
            ),
            (sqlx::Error::PoolClosed, Protocol, false),
        ];
        for (error, kind, refused) in cases {
            let text = error.to_string();
            let error = explain(error, path);
            assert_eq!((error.kind(), error.refused()), (kind, refused), "{text}");
            assert!(error.to_string().contains("locks.db"), "{error}");
        }
    }

    #[test]
    fn only_a_lock_of_another_connection_counts_as_busy() {
        assert!(!is_busy(&sqlx::Error::WorkerCrashed));
        assert_eq!(sqlite_code(&sqlx::Error::RowNotFound), None);
        assert!(!is_missing_table(&sqlx::Error::RowNotFound));
    }
}
