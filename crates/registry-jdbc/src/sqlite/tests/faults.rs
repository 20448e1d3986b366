//! Faults of the file and its connections. No fault causes a wrong result.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Registry, Release, Renewal};
use sqlx::{ConnectOptions, Executor, SqliteConnection};

use super::{TestFolder, busy, claim, grant, key};
use crate::sqlite::backend::SqliteBackend;
use crate::sqlite::clock::ManualClock;
use crate::sqlite::connection::{self, CHECK_VALID_FOR};
use crate::sqlite::error::Detached;

/// Another connection with an open write transaction.
pub(super) async fn begin_write(path: &Path) -> SqliteConnection {
    let mut connection = connection::options(path).connect().await.unwrap();
    connection.execute("BEGIN IMMEDIATE").await.unwrap();
    connection
}

pub(super) async fn rollback(connection: &mut SqliteConnection) {
    connection.execute("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn an_error_names_operation_key_and_address() {
    let folder = TestFolder::new();
    let registry = Registry::builder(Arc::new(folder.process().await)).build().unwrap();
    std::fs::remove_file(folder.file()).unwrap();
    tokio::time::sleep(CHECK_VALID_FOR).await;
    let error = registry.obtain("orders/42").lock().await.unwrap_err();
    let path = folder.0.path().canonicalize().unwrap().join("locks.db");
    assert_eq!(
        registry_testkit::cause_of_failed_acquire(&error, "orders/42", &path.display().to_string()),
        "sqlite: the file was removed or replaced while in use, so other processes may use another file; \
         restart all processes that use it"
    );
}

#[tokio::test]
async fn a_file_that_stays_locked_is_a_retryable_error() {
    let folder = TestFolder::new();
    let config = folder.config().with_busy_timeout(Duration::from_millis(50));
    let backend = SqliteBackend::open(config).await.unwrap();
    let (held, other) = (claim("k"), claim("other"));
    grant(&backend, &held).await;

    let mut writer = begin_write(&folder.file()).await;
    let error = backend.try_acquire(&other).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{error:?}");
    assert!(backend.release(&held).await.unwrap_err().is_retryable());
    assert!(
        backend.renew(std::slice::from_ref(&held)).await[0].as_ref().unwrap_err().is_retryable()
    );
    // Readers do not block writers, and writers do not block readers.
    assert!(backend.inspect(&key("k")).await.unwrap().is_some());

    rollback(&mut writer).await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    grant(&backend, &other).await;
}

#[tokio::test]
async fn a_failed_commit_is_never_returned_as_a_grant() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    // A deferred constraint is checked at the commit, after the statement has returned its row. A
    // full disk has the same effect on the log, but is harder to create in a test.
    for statement in [
        "PRAGMA foreign_keys = ON",
        "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
        "CREATE TABLE child (id REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER break_commit AFTER INSERT ON lock_registry_locks BEGIN INSERT INTO child VALUES (7); END",
    ] {
        backend.writer.execute(move || sqlx::query(statement)).await.unwrap();
    }
    let refused = claim("k");
    backend.try_acquire(&refused).await.unwrap_err();
    // With the wall clock set back, the statement itself returns the token.
    clock.set_wall(0);
    backend.try_acquire(&refused).await.unwrap_err();
    assert_eq!(backend.inspect(&key("k")).await.unwrap(), None);

    backend.writer.execute(|| sqlx::query("DROP TRIGGER break_commit")).await.unwrap();
    grant(&backend, &refused).await;
}

#[tokio::test]
async fn a_full_file_is_a_clear_error_and_locks_work_again_with_free_space() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let held = claim("held");
    grant(&backend, &held).await;
    let limit =
        backend.writer.fetch_all(|| sqlx::query("PRAGMA max_page_count = 1")).await.unwrap();
    assert_eq!(limit.len(), 1);

    let claim_of_4_kb = |n: u32| claim(&format!("{n}{}", "x".repeat(4_000)));
    let error = loop {
        match backend.try_acquire(&claim_of_4_kb(fastrand::u32(..))).await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("space"), "{error}");
    // Operations that need no space still work.
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[0], Ok(Renewal::Renewed(_))));
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);

    backend.writer.fetch_all(|| sqlx::query("PRAGMA max_page_count = 100000")).await.unwrap();
    grant(&backend, &claim_of_4_kb(0)).await;
}

#[tokio::test]
async fn a_removed_or_replaced_file_ends_all_grants_in_it() {
    for replace in [false, true] {
        let folder = TestFolder::new();
        let backend = folder.process().await;
        let held = claim("k");
        grant(&backend, &held).await;
        for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
            std::fs::remove_file(folder.0.path().join(name)).unwrap();
        }
        let successor = if replace { Some(folder.process().await) } else { None };
        if let Some(successor) = &successor {
            grant(successor, &claim("k")).await;
        }
        assert_eq!(backend.release(&held).await.unwrap(), Release::NotHeld);
        assert_eq!(backend.renew(&[held]).await[0].as_ref().unwrap(), &Renewal::Gone);
        assert!(backend.inspect(&key("k")).await.is_err() && backend.list().await.is_err());
        assert!(backend.force_release(&key("k")).await.is_err());
        let error = backend.try_acquire(&claim("other")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
        assert!(error.to_string().contains("replaced"), "{error}");
        assert!(backend.diagnose().await.is_err());
    }
}

/// Removes a file while it is in use.
fn remove(file: &Path) {
    std::fs::remove_file(file).unwrap();
}

/// Replaces a file by another with the same name, like a restored copy.
fn replace(file: &Path) {
    let copy = file.with_extension("copy");
    std::fs::copy(file, &copy).unwrap();
    std::fs::rename(&copy, file).unwrap();
}

/// Checks that held grants end, that no lock is granted, and that each error gives the reason.
async fn check_all_grants_end(file: &str, change: impl Fn(&Path), message: &str) {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let (held, other) = (claim("k"), claim("other"));
    grant(&backend, &held).await;
    grant(&backend, &other).await;
    change(&folder.0.path().join(file));
    tokio::time::sleep(CHECK_VALID_FOR).await;

    let error = backend.try_acquire(&claim("free")).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Misconfigured, true));
    assert!(error.to_string().contains(message), "{error}");
    assert!(Detached::from_error(&error).is_some(), "{error:?}");
    backend.try_acquire(&held).await.unwrap_err();
    for renewal in backend.renew(&[held.clone(), other.clone()]).await {
        assert_eq!(renewal.unwrap(), Renewal::Gone);
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::NotHeld);
    backend.inspect(&key("k")).await.unwrap_err();
    backend.list().await.unwrap_err();
    backend.force_release(&key("k")).await.unwrap_err();
    match backend.diagnose().await {
        Ok(findings) => assert!(findings.iter().any(|finding| finding.message.contains(message))),
        Err(error) => assert!(error.to_string().contains(message), "{error}"),
    }
}

#[tokio::test]
async fn a_removed_log_ends_all_grants() {
    check_all_grants_end("locks.db-wal", remove, "(-wal) was removed or replaced").await;
}

#[tokio::test]
async fn a_replaced_log_ends_all_grants() {
    check_all_grants_end("locks.db-wal", replace, "(-wal) was removed or replaced").await;
}

#[tokio::test]
async fn removed_shared_memory_ends_all_grants() {
    check_all_grants_end("locks.db-shm", remove, "(-shm) was removed or replaced").await;
}

#[tokio::test]
async fn replaced_shared_memory_ends_all_grants() {
    check_all_grants_end("locks.db-shm", replace, "(-shm) was removed or replaced").await;
}

#[tokio::test]
async fn an_added_hard_link_ends_all_grants() {
    let link = |file: &Path| std::fs::hard_link(file, file.with_extension("second")).unwrap();
    check_all_grants_end("locks.db", link, "more than one name").await;
}

#[tokio::test]
async fn grants_work_again_after_a_hard_link_is_removed() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let second = folder.file().with_extension("second");
    std::fs::hard_link(folder.file(), &second).unwrap();
    // The row may be written, and then it stays for its lease.
    backend.try_acquire(&claim("refused")).await.unwrap_err();
    let findings = backend.diagnose().await.unwrap();
    assert!(findings.iter().any(|finding| finding.message.contains("hard link")), "{findings:?}");
    remove(&second);
    grant(&backend, &claim("k")).await;
}

#[tokio::test]
async fn a_statement_on_removed_files_returns_an_error() {
    for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let folder = TestFolder::new();
        let backend = folder.process().await;
        let file = folder.0.path().join(name);
        // The statement is created after the check that precedes it.
        let statement = move || {
            remove(&file);
            sqlx::query("UPDATE lock_registry_meta SET sweep_key = x'00'")
        };
        let error = backend.writer.execute(statement).await.unwrap_err();
        assert!(Detached::from_error(&error).is_some(), "{name}: {error:?}");
        assert!(!error.refused(), "{name}: the statement may have been committed");
    }
}

#[tokio::test]
async fn checkpoints_and_vacuum_end_no_grant() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let held = claim("k");
    grant(&backend, &held).await;
    for statement in [
        "PRAGMA wal_checkpoint(PASSIVE)",
        "PRAGMA wal_checkpoint(TRUNCATE)",
        "VACUUM",
        "PRAGMA wal_checkpoint(RESTART)",
        "PRAGMA wal_checkpoint(TRUNCATE)",
    ] {
        let other = folder.process().await;
        let mut data = connection::options(&folder.file()).connect().await.unwrap();
        data.execute(statement).await.unwrap();
        // The log cannot be turned off either.
        data.execute("PRAGMA journal_mode = DELETE").await.unwrap_err();
        sqlx::Connection::close(data).await.unwrap();
        other.close().await;
        let renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{statement}: {renewed:?}");
        busy(&backend, &claim("k")).await;
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn opening_the_file_again_in_the_same_process_detects_replaced_shared_memory() {
    let folder = TestFolder::new();
    let before = folder.process().await;
    grant(&before, &claim("k")).await;
    // All connections of a process share the file that the first one opened. Other processes do not
    // see it.
    replace(&folder.0.path().join("locks.db-shm"));
    let error = SqliteBackend::open(folder.config()).await.unwrap_err();
    assert_eq!(Detached::from_error(&error), Some(Detached::SharedMemory), "{error}");
    drop(before);
}

#[tokio::test]
async fn a_dropped_attempt_does_not_block_the_next_one() {
    use std::future::Future;
    use std::task::{Context, Waker};

    let folder = TestFolder::new();
    let backend = folder.process().await;
    for polls in 0..6 {
        let dropped = claim("k");
        let mut attempt = Box::pin(backend.try_acquire(&dropped));
        let mut done = false;
        for _ in 0..polls {
            done =
                done || attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            tokio::task::yield_now().await;
        }
        drop(attempt);
        // Whether granted or not, its own release frees the key.
        backend.release(&dropped).await.unwrap();
        let next = claim("k");
        grant(&backend, &next).await;
        busy(&backend, &claim("k")).await;
        assert_eq!(backend.release(&next).await.unwrap(), Release::Freed);
    }
}

#[tokio::test]
async fn an_unpolled_caller_does_not_delay_other_callers() {
    use std::task::{Context, Waker};

    let folder = TestFolder::new();
    let backend = folder.process().await;
    let held = claim("held");
    grant(&backend, &held).await;
    // Another connection writes when they begin, so that none of them can end at once.
    let mut other = begin_write(&folder.file()).await;
    let stalled_claims = [claim("a"), claim("b"), claim("c")];
    let mut stalled = stalled_claims.each_ref().map(|claim| backend.try_acquire(claim));
    for attempt in &mut stalled {
        assert!(attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    rollback(&mut other).await;

    grant(&backend, &claim("d")).await;
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[0], Ok(Renewal::Renewed(_))));
    assert!(backend.inspect(&key("held")).await.unwrap().is_some());
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    for attempt in stalled {
        assert!(matches!(attempt.await.unwrap(), registry_core::Attempt::Granted(_)));
    }
}

#[tokio::test]
async fn a_broken_connection_is_reopened() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let held = claim("k");
    grant(&backend, &held).await;
    backend.writer.break_connection().await;
    backend.reader.break_connection().await;
    busy(&backend, &claim("k")).await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);

    // But never on a file that no longer exists.
    backend.writer.break_connection().await;
    std::fs::remove_file(folder.file()).unwrap();
    let error = backend.writer.execute(|| sqlx::query("SELECT 1")).await.unwrap_err();
    assert!(error.refused(), "{error:?}");
    assert!(!folder.file().exists());
}

#[tokio::test]
async fn connections_that_break_together_are_reopened_with_a_new_log() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let held = claim("k");
    grant(&backend, &held).await;
    for _ in 0..20 {
        // No other process has the file open, so the last connection to close removes the log.
        tokio::join!(backend.writer.break_connection(), backend.reader.break_connection());
        let renewed = backend.renew(std::slice::from_ref(&held)).await.remove(0);
        assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
        busy(&backend, &claim("k")).await;
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
}

#[tokio::test]
async fn a_closed_store_returns_errors_at_once() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    backend.close().await;
    backend.close().await;
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(error.refused() && error.to_string().contains("closed"), "{error}");
    assert!(backend.renew(&[claim("k")]).await[0].is_err());
    assert!(backend.inspect(&key("k")).await.is_err());
}

#[tokio::test]
async fn an_error_names_manually_changed_tables() {
    for change in ["DROP TABLE lock_registry_locks", "DELETE FROM lock_registry_meta"] {
        let folder = TestFolder::new();
        let backend = folder.process().await;
        backend.writer.execute(move || sqlx::query(change)).await.unwrap();
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("lock_registry_meta"), "{error}");
    }
}

#[tokio::test]
async fn diagnose_finds_nothing_in_a_healthy_store() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let findings = backend.diagnose().await.unwrap();
    // A nearly full disk and missing watches depend on the machine, and are no fault here.
    assert!(
        findings.iter().all(|f| f.message.contains("MiB left") || f.message.contains("inotify")),
        "{findings:?}"
    );
}
