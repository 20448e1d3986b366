//! Faults on the way to the file. No fault causes a wrong result.

use std::path::Path;
use std::time::Duration;

use registry_core::{BackendErrorKind, LockBackend, Release, Renewal};
use sqlx::{ConnectOptions, Executor, SqliteConnection};

use super::{Folder, busy, claim, grant, key};
use crate::error::Detached;
use crate::sqlite::backend::SqliteBackend;
use crate::sqlite::clock::ManualClock;
use crate::sqlite::link::{self, SEEN_FOR};

/// Another connection with an open write transaction.
pub(super) async fn write_lock(path: &Path) -> SqliteConnection {
    let mut connection = link::options(path).connect().await.unwrap();
    connection.execute("BEGIN IMMEDIATE").await.unwrap();
    connection
}

pub(super) async fn unlock(connection: &mut SqliteConnection) {
    connection.execute("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn a_file_that_stays_locked_is_an_error_that_may_pass() {
    let folder = Folder::new();
    let config = folder.config().with_busy_timeout(Duration::from_millis(50));
    let backend = SqliteBackend::open(config).await.unwrap();
    let (held, other) = (claim("k"), claim("other"));
    grant(&backend, &held).await;

    let mut writer = write_lock(&folder.file()).await;
    let error = backend.try_acquire(&other).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{error:?}");
    assert!(backend.release(&held).await.unwrap_err().is_retryable());
    assert!(
        backend.renew(std::slice::from_ref(&held)).await[0].as_ref().unwrap_err().is_retryable()
    );
    // Readers do not block writers, and writers do not block readers.
    assert!(backend.inspect(&key("k")).await.unwrap().is_some());

    unlock(&mut writer).await;
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    grant(&backend, &other).await;
}

#[tokio::test]
async fn a_commit_that_fails_is_never_told_as_a_grant() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_at(&clock).await;
    // A deferred constraint is checked at the commit, after the statement has returned its row. A
    // full disk has the same effect on the log, but is harder to create in a test.
    for statement in [
        "PRAGMA foreign_keys = ON",
        "CREATE TABLE parent (id INTEGER PRIMARY KEY)",
        "CREATE TABLE child (id REFERENCES parent DEFERRABLE INITIALLY DEFERRED)",
        "CREATE TRIGGER break_commit AFTER INSERT ON lock_registry_locks BEGIN INSERT INTO child VALUES (7); END",
    ] {
        backend.writer.changes(move || sqlx::query(statement)).await.unwrap();
    }
    let refused = claim("k");
    backend.try_acquire(&refused).await.unwrap_err();
    // With the wall clock set back, the statement itself returns the token.
    clock.set_wall(0);
    backend.try_acquire(&refused).await.unwrap_err();
    assert_eq!(backend.inspect(&key("k")).await.unwrap(), None);

    backend.writer.changes(|| sqlx::query("DROP TRIGGER break_commit")).await.unwrap();
    grant(&backend, &refused).await;
}

#[tokio::test]
async fn a_file_without_room_is_a_clear_error_and_locks_go_on_when_there_is_room() {
    let folder = Folder::new();
    let backend = folder.process().await;
    let held = claim("held");
    grant(&backend, &held).await;
    let limit = backend.writer.rows(|| sqlx::query("PRAGMA max_page_count = 1")).await.unwrap();
    assert_eq!(limit.len(), 1);

    let long = |n: u32| claim(&format!("{n}{}", "x".repeat(4_000)));
    let error = loop {
        match backend.try_acquire(&long(fastrand::u32(..))).await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("space"), "{error}");
    // Operations that need no space still work.
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[0], Ok(Renewal::Renewed(_))));
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);

    backend.writer.rows(|| sqlx::query("PRAGMA max_page_count = 100000")).await.unwrap();
    grant(&backend, &long(0)).await;
}

#[tokio::test]
async fn a_file_that_is_removed_or_replaced_ends_all_grants_in_it() {
    for replace in [false, true] {
        let folder = Folder::new();
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
async fn ends_all_grants(file: &str, damage: impl Fn(&Path), says: &str) {
    let folder = Folder::new();
    let backend = folder.process().await;
    let (held, other) = (claim("k"), claim("other"));
    grant(&backend, &held).await;
    grant(&backend, &other).await;
    damage(&folder.0.path().join(file));
    tokio::time::sleep(SEEN_FOR).await;

    let error = backend.try_acquire(&claim("free")).await.unwrap_err();
    assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Misconfigured, true));
    assert!(error.to_string().contains(says), "{error}");
    assert!(Detached::of(&error).is_some(), "{error:?}");
    backend.try_acquire(&held).await.unwrap_err();
    for renewal in backend.renew(&[held.clone(), other.clone()]).await {
        assert_eq!(renewal.unwrap(), Renewal::Gone);
    }
    assert_eq!(backend.release(&held).await.unwrap(), Release::NotHeld);
    backend.inspect(&key("k")).await.unwrap_err();
    backend.list().await.unwrap_err();
    backend.force_release(&key("k")).await.unwrap_err();
    match backend.diagnose().await {
        Ok(findings) => assert!(findings.iter().any(|finding| finding.message.contains(says))),
        Err(error) => assert!(error.to_string().contains(says), "{error}"),
    }
}

#[tokio::test]
async fn a_log_that_is_removed_ends_all_grants() {
    ends_all_grants("locks.db-wal", remove, "(-wal) was removed or replaced").await;
}

#[tokio::test]
async fn a_log_that_is_replaced_ends_all_grants() {
    ends_all_grants("locks.db-wal", replace, "(-wal) was removed or replaced").await;
}

#[tokio::test]
async fn shared_memory_that_is_removed_ends_all_grants() {
    ends_all_grants("locks.db-shm", remove, "(-shm) was removed or replaced").await;
}

#[tokio::test]
async fn shared_memory_that_is_replaced_ends_all_grants() {
    ends_all_grants("locks.db-shm", replace, "(-shm) was removed or replaced").await;
}

#[tokio::test]
async fn a_hard_link_that_is_added_later_ends_all_grants() {
    let link = |file: &Path| std::fs::hard_link(file, file.with_extension("second")).unwrap();
    ends_all_grants("locks.db", link, "more than one name").await;
}

#[tokio::test]
async fn a_hard_link_that_is_gone_again_is_no_hindrance() {
    let folder = Folder::new();
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
async fn a_statement_is_not_believed_when_the_files_were_taken_away_before_it() {
    for name in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let folder = Folder::new();
        let backend = folder.process().await;
        let file = folder.0.path().join(name);
        // The statement is created after the check that precedes it.
        let statement = move || {
            remove(&file);
            sqlx::query("UPDATE lock_registry_meta SET sweep_key = x'00'")
        };
        let error = backend.writer.changes(statement).await.unwrap_err();
        assert!(Detached::of(&error).is_some(), "{name}: {error:?}");
        assert!(!error.refused(), "{name}: it has been written, if only for nobody");
    }
}

#[tokio::test]
async fn what_sqlite_does_to_its_log_ends_no_grant() {
    let folder = Folder::new();
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
        let mut data = link::options(&folder.file()).connect().await.unwrap();
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
async fn shared_memory_that_was_removed_is_noticed_by_who_opens_the_file_in_the_same_process() {
    let folder = Folder::new();
    let before = folder.process().await;
    grant(&before, &claim("k")).await;
    // All connections of a process share the file that the first one opened. Other processes do not
    // see it.
    replace(&folder.0.path().join("locks.db-shm"));
    let error = SqliteBackend::open(folder.config()).await.unwrap_err();
    assert_eq!(Detached::of(&error), Some(Detached::SharedMemory), "{error}");
    drop(before);
}

#[tokio::test]
async fn a_future_that_is_dropped_in_the_middle_poisons_nothing() {
    use std::future::Future;
    use std::task::{Context, Waker};

    let folder = Folder::new();
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
async fn callers_that_are_not_polled_hold_up_nobody() {
    use std::task::{Context, Waker};

    let folder = Folder::new();
    let backend = folder.process().await;
    let held = claim("held");
    grant(&backend, &held).await;
    // Another connection writes when they begin, so that none of them can end at once.
    let mut other = write_lock(&folder.file()).await;
    let stalled_claims = [claim("a"), claim("b"), claim("c")];
    let mut stalled = stalled_claims.each_ref().map(|claim| backend.try_acquire(claim));
    for attempt in &mut stalled {
        assert!(attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    unlock(&mut other).await;

    grant(&backend, &claim("d")).await;
    assert!(matches!(backend.renew(std::slice::from_ref(&held)).await[0], Ok(Renewal::Renewed(_))));
    assert!(backend.inspect(&key("held")).await.unwrap().is_some());
    assert_eq!(backend.release(&held).await.unwrap(), Release::Freed);
    for attempt in stalled {
        assert!(matches!(attempt.await.unwrap(), registry_core::Attempt::Granted(_)));
    }
}

#[tokio::test]
async fn a_connection_that_broke_is_made_again() {
    let folder = Folder::new();
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
    let error = backend.writer.changes(|| sqlx::query("SELECT 1")).await.unwrap_err();
    assert!(error.refused(), "{error:?}");
    assert!(!folder.file().exists());
}

#[tokio::test]
async fn connections_that_broke_together_are_made_again_with_a_log_of_their_own() {
    let folder = Folder::new();
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
async fn a_closed_store_refuses_and_does_not_hang() {
    let folder = Folder::new();
    let backend = folder.process().await;
    backend.close().await;
    backend.close().await;
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert!(error.refused() && error.to_string().contains("closed"), "{error}");
    assert!(backend.renew(&[claim("k")]).await[0].is_err());
    assert!(backend.inspect(&key("k")).await.is_err());
}

#[tokio::test]
async fn tables_that_were_changed_by_hand_are_named() {
    for damage in ["DROP TABLE lock_registry_locks", "DELETE FROM lock_registry_meta"] {
        let folder = Folder::new();
        let backend = folder.process().await;
        backend.writer.changes(move || sqlx::query(damage)).await.unwrap();
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("lock_registry_meta"), "{error}");
    }
}

#[tokio::test]
async fn doctor_finds_nothing_in_a_healthy_store() {
    let folder = Folder::new();
    let backend = folder.process().await;
    let findings = backend.diagnose().await.unwrap();
    // A nearly full disk and missing watches depend on the machine, and are no fault here.
    assert!(
        findings.iter().all(|f| f.message.contains("MiB left") || f.message.contains("inotify")),
        "{findings:?}"
    );
}
