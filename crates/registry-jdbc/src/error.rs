//! Maps SQLite's error codes to `BackendError`: each code has its own decision.
//!
//! The codes are those of <https://www.sqlite.org/rescode.html>. The low byte is the primary code.
//! The extended code is used only where the caller must act differently.

use std::path::Path;

use registry_core::{BackendError, BackendErrorKind};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Converts an error of sqlx to a `BackendError` with advice. The message names the file, because a
/// host may have many.
pub(crate) fn explain(error: sqlx::Error, path: &Path) -> BackendError {
    let Verdict { kind, says, refused } = match &error {
        sqlx::Error::Database(database) => judge(code_of(database.as_ref())),
        // The thread that owned the connection has ended; the next call opens a new connection.
        sqlx::Error::WorkerCrashed => Verdict::of(Transient, "the connection was lost"),
        sqlx::Error::Io(_) => {
            Verdict::of(Misconfigured, "the connection could not be made").refused()
        }
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => {
            Verdict::of(Misconfigured, "the path cannot be used").refused()
        }
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. }
        | sqlx::Error::TypeNotFound { .. }
        | sqlx::Error::RowNotFound
        | sqlx::Error::Protocol(_) => Verdict::of(
            Protocol,
            "the lock tables hold what no version of this program writes; move the file away",
        ),
        // Variants that sqlx may add, or does not return for SQLite. The outcome is unknown and a
        // retry may not help.
        _ => Verdict::of(Protocol, "the database client failed"),
    };
    let error = BackendError::new(kind, format!("sqlite file {path:?}: {says}")).with_source(error);
    if refused { error.as_refused() } else { error }
}

/// Returns whether another connection blocked the statement. The statement then did nothing and can
/// be retried.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    sqlite_code(error).is_some_and(|code| matches!(code & 0xff, BUSY | LOCKED))
}

/// Returns whether the statement was refused because another connection writes to the file.
pub(crate) fn tells_of_writer(error: &BackendError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(is_busy)
}

/// Returns the error of a release that is blocked by a write transaction, which this claim may have
/// fenced.
pub(crate) fn is_fenced(error: BackendError, path: &Path) -> BackendError {
    let says = format!(
        "sqlite file {path:?}: another connection writes to the file, probably in a transaction that this lock fences, and the key is free \
         only after its end; commit or roll back first, then unlock"
    );
    BackendError::transient(says).with_source(error).as_blocked()
}

/// Returns the extended code, if SQLite itself returned the error.
fn sqlite_code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error().map(code_of)
}

/// Returns whether a lock table is missing or belongs to something else.
pub(crate) fn is_no_such_table(error: &sqlx::Error) -> bool {
    // SQLITE_ERROR covers every fault of the SQL text. The text is constant, so only the tables can
    // be wrong.
    sqlite_code(error) == Some(ERROR)
}

fn code_of(database: &dyn sqlx::error::DatabaseError) -> i32 {
    database.code().and_then(|code| code.parse().ok()).unwrap_or(INTERNAL)
}

/// The kind and message for one error code.
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

    /// Marks the error as refused. Every statement is a transaction of its own: one that never got
    /// its lock, or was never compiled, did nothing.
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

fn judge(code: i32) -> Verdict {
    // Extended codes first: they override their primary code.
    match code {
        READONLY_DBMOVED => return moved(),
        IOERR_WRITE => {
            return Verdict::of(
                Protocol,
                "it could not be written to: a quota or a limit on the size of files is reached, or the disk \
                 failed; see the system's log",
            );
        }
        CANTOPEN_ISDIR => {
            return Verdict::of(Misconfigured, "this is a folder; name a file").refused();
        }
        // The system temporarily ran out of locks or memory.
        IOERR_RDLOCK
        | IOERR_UNLOCK
        | IOERR_NOMEM
        | IOERR_CHECKRESERVEDLOCK
        | IOERR_LOCK
        | IOERR_SHMLOCK => {
            return Verdict::of(Transient, "the system could not lock the file for a moment");
        }
        IOERR_SHMOPEN | IOERR_SHMSIZE | IOERR_SHMMAP => {
            return Verdict::of(
                Misconfigured,
                "the file beside it that processes share (-shm) cannot be made or grown; \
                 use a local disk with free space",
            );
        }
        _ => {}
    }
    match code & 0xff {
        BUSY | LOCKED => Verdict::of(
            Transient,
            "another process kept it locked for too long; look for long write transactions",
        )
        .refused(),
        ABORT | INTERRUPT => Verdict::of(Transient, "the statement was interrupted"),
        NOMEM => Verdict::of(Transient, "memory ran out"),
        PROTOCOL => Verdict::of(Transient, "too many processes opened it at the same moment"),
        SCHEMA => Verdict::of(Transient, "its tables are being changed").refused(),
        PERM | READONLY => Verdict::of(
            Denied,
            "this process may not write to it; give it write access to the file, its folder \
             and the files beside it (-wal, -shm)",
        )
        .refused(),
        AUTH => Verdict::of(Denied, "access was refused").refused(),
        CANTOPEN => Verdict::of(
            Misconfigured,
            "it or a file beside it (-wal, -shm) cannot be opened; check the path, the access \
             rights and the limit of open files",
        )
        .refused(),
        // Not transient: a retry would look like contention, and the caller would get this error
        // only at the deadline.
        FULL => Verdict::of(Misconfigured, "there is no space left; free some on its disk"),
        NOLFS => Verdict::of(Misconfigured, "it has grown beyond what this system can hold"),
        ERROR => Verdict::of(
            Misconfigured,
            "the tables lock_registry_meta and lock_registry_locks are missing or were made by \
             something else; restore or drop both",
        )
        .refused(),
        NOTADB => Verdict::of(
            Protocol,
            "this is no SQLite database, or it is encrypted; name another file or move this one away",
        )
        .refused(),
        CORRUPT => {
            Verdict::of(Protocol, "it is damaged; restore it, or move it away to start afresh")
        }
        CONSTRAINT => Verdict::of(
            Protocol,
            "a row breaks the rules of the lock tables; was it edited by hand, or is a token \
             at its limit?",
        ),
        IOERR => Verdict::of(Protocol, "the disk failed to read or write; see the system's log"),
        // INTERNAL, MISUSE, RANGE and codes that SQLite may add are program faults, which a retry
        // does not fix.
        _ => Verdict::of(Protocol, "SQLite failed in a way that is not expected"),
    }
}

/// Why a connection no longer shares its files with the other processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Detached {
    #[error("the database under this name is not the one that is open")]
    Database,
    #[error("the write-ahead log under this name is not the one that is open")]
    Log,
    #[error("the shared memory under this name is not the one that is open")]
    SharedMemory,
    #[error("the database has more than one name")]
    OtherName,
}

impl Detached {
    /// Returns the reason in an error that [`detached`] created.
    pub(crate) fn of(error: &BackendError) -> Option<Self> {
        std::error::Error::source(error)?.downcast_ref().copied()
    }
}

/// Returns the error for files that other processes no longer open under this path, or may open
/// under another name.
pub(crate) fn detached(path: &Path, what: Detached) -> BackendError {
    let says = match what {
        Detached::Database => moved().says,
        Detached::Log => {
            "the log beside it (-wal) was removed or replaced while in use, so other processes may lock in another \
             one; restart all processes that use it"
        }
        Detached::SharedMemory => {
            "the file beside it that processes share (-shm) was removed or replaced while in use, so other \
             processes may lock in another one; restart all processes that use it"
        }
        Detached::OtherName => {
            "it has more than one name (a hard link), and processes that open it by another one would not meet this \
             one's locks; leave it a single name, then restart all processes that use it"
        }
    };
    BackendError::new(Misconfigured, format!("sqlite file {path:?}: {says}")).with_source(what)
}

const fn moved() -> Verdict {
    Verdict::of(
        Misconfigured,
        "it was removed or replaced while in use, so other processes may lock in another file; \
         restart all processes that use it",
    )
    .refused()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_sorted_by_what_the_caller_can_do() {
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
            let verdict = judge(code);
            assert_eq!(
                (verdict.kind, verdict.refused),
                (kind, refused),
                "code {code}: {verdict:?}"
            );
        }
    }

    #[test]
    fn errors_of_the_client_are_sorted_too() {
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
            let told = explain(error, path);
            assert_eq!((told.kind(), told.refused()), (kind, refused), "{text}");
            assert!(told.to_string().contains("locks.db"), "{told}");
        }
    }

    #[test]
    fn only_a_transaction_in_the_way_counts_as_busy() {
        assert!(!is_busy(&sqlx::Error::WorkerCrashed));
        assert_eq!(sqlite_code(&sqlx::Error::RowNotFound), None);
        assert!(!is_no_such_table(&sqlx::Error::RowNotFound));
    }
}
