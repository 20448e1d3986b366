//! The holder of a row lock can be inspected and force-released, although in the server such a lock
//! is only an open transaction.

use std::time::Duration;

use registry_core::{
    BackendErrorKind, Holder, LockError, LockGuard, LockOptions, LostReason, Registry,
};
use registry_testkit::{eventually, within};

use super::app_connection::AppConnection;
use super::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const LEASE: Duration = Duration::from_secs(30);

async fn registry(server: &Server, mode: LockMode) -> Registry {
    registry_with_mode(&server.url(), LEASE, mode).await
}

async fn lock(registry: &Registry, key: &str, label: &str) -> LockGuard {
    let options = LockOptions::new().label(label);
    within(TEST_TIMEOUT, registry.obtain(key).lock_with(options)).await.unwrap()
}

async fn holder(registry: &Registry, key: &str) -> Option<Holder> {
    registry.obtain(key).holders().await.unwrap().pop()
}

fn assert_is_of(holder: &Holder, guard: &LockGuard, label: &str) {
    assert_eq!((holder.key.as_str(), holder.label.as_deref()), (guard.key(), Some(label)));
    assert_eq!(holder.token, Some(guard.fencing_token()));
    assert!(holder.held_for.is_some_and(|held| held < TEST_TIMEOUT), "{holder:?}");
}

/// A namespace may contain leases and row locks. A backend of either mode inspects and
/// force-releases both.
async fn lease_and_row_backends_list_and_break_each_others_locks(kind: ServerKind) {
    let server = kind.start().await;
    let modes = [LockMode::Lease, LockMode::Row];
    let (leases, rows) = (registry(&server, modes[0]).await, registry(&server, modes[1]).await);
    let lease = lock(&leases, "a", "by lease").await;
    let row = lock(&rows, "b", "by row").await;
    let other = lock(&rows, "c", "other").await;
    for registry in [&leases, &rows] {
        assert_is_of(&holder(registry, "a").await.unwrap(), &lease, "by lease");
        assert_is_of(&holder(registry, "b").await.unwrap(), &row, "by row");
        assert_eq!(holder(registry, "d").await, None);
        let listed = registry.list().await.unwrap();
        assert_eq!(listed.len(), 3, "{listed:?}");
        for (holder, (guard, label)) in
            listed.iter().zip([(&lease, "by lease"), (&row, "by row"), (&other, "other")])
        {
            assert_is_of(holder, guard, label);
        }
    }
    for (breaking, registry) in [(&leases, &rows), (&rows, &leases)] {
        let guard = lock(registry, "e", "to be broken").await;
        let token = guard.fencing_token();
        assert!(breaking.force_release("e").await.unwrap());
        assert!(!breaking.force_release("e").await.unwrap());
        assert_eq!(holder(registry, "e").await, None);
        let next = lock(breaking, "e", "next").await;
        assert!(next.fencing_token() > token);
        next.unlock().await.unwrap();
        drop(guard);
        registry.idle().await;
    }
    assert!(leases.force_release("b").await.unwrap());
    assert_eq!(within(TEST_TIMEOUT, row.lost()).await, LostReason::Gone);
    // No other lock was lost.
    other.unlock().await.unwrap();
    lease.unlock().await.unwrap();
    assert_eq!(rows.list().await.unwrap(), []);
}

/// A released key has no holder, even while its former connection holds another lock, and after a
/// restart of the server.
async fn a_released_row_lock_is_free_and_cannot_be_broken(kind: ServerKind) {
    let server = kind.start().await;
    let rows = registry(&server, LockMode::Row).await;
    lock(&rows, "a", "gone").await.unlock().await.unwrap();
    // The backend uses the same connection for the next lock.
    let guard = lock(&rows, "b", "here").await;
    assert_eq!(holder(&rows, "a").await, None);
    assert!(!rows.force_release("a").await.unwrap());
    guard.unlock().await.unwrap();
    // After the restart the server assigns the same connection ids again.
    let guard = lock(&rows, "a", "gone").await;
    let mut server = server;
    server.kill();
    server.restart().await;
    within(TEST_TIMEOUT, guard.lost()).await;
    let inspect_again = async || try_inspect(&rows, "a").await;
    assert_eq!(eventually(TEST_TIMEOUT, inspect_again).await, None);
    lock(&rows, "b", "here").await.unlock().await.unwrap();
    assert!(!rows.force_release("a").await.unwrap());
}

async fn try_inspect(registry: &Registry, key: &str) -> Result<Option<Holder>, LockError> {
    Ok(registry.obtain(key).holders().await?.pop())
}

/// Inspection shows that an application's transaction holds the key, but neither token nor label.
/// The transaction cannot be force-released.
async fn a_callers_transaction_is_listed_and_cannot_be_broken(kind: ServerKind) {
    let server = kind.start().await;
    let mut app_connection = AppConnection::connect(&server).await;
    for mode in [LockMode::Lease, LockMode::Row] {
        let registry = registry(&server, mode).await;
        // First with new keys, and then with a row that names an earlier holder.
        for key in ["a", "b", "b"] {
            let mut transaction = app_connection.begin().await;
            transaction.try_lock_in(&registry, key).await.unwrap().unwrap();
            let reply = holder(&registry, key).await.unwrap();
            assert_eq!((reply.key.as_str(), reply.token, &reply.label), (key, None, &None));
            let error = registry.force_release(key).await.unwrap_err();
            let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
            assert_eq!(source.kind(), BackendErrorKind::Transient);
            assert!(source.to_string().contains("application's transaction"), "{source}");
            transaction.commit().await;
            assert_eq!(holder(&registry, key).await, None);
            lock(&registry, key, "earlier").await.unlock().await.unwrap();
        }
    }
}

async fn a_refused_forced_release_names_the_missing_right(kind: ServerKind) {
    let server = kind.start().await;
    let rows = registry(&server, LockMode::Row).await;
    let guard = lock(&rows, "a", "by row").await;
    let (user, right) = match kind {
        ServerKind::Postgres => ("worker", "pg_signal_backend"),
        ServerKind::MariaDb => ("worker@'127.0.0.1'", "CONNECTION ADMIN"),
    };
    let create_user = match kind {
        ServerKind::Postgres => "CREATE ROLE worker LOGIN",
        ServerKind::MariaDb => "CREATE USER worker@'127.0.0.1'",
    };
    let grants = format!(
        "{create_user}; GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_locks TO {user}; \
         GRANT SELECT, UPDATE ON lock_registry_meta TO {user}; \
         GRANT SELECT, INSERT, UPDATE ON lock_registry_values TO {user}; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON lock_registry_waiters TO {user}"
    );
    server.sql(&grants).await.unwrap();
    let worker = super::server::registry_as_user(&server.url(), "worker", LEASE).await;
    assert_is_of(&holder(&worker, "a").await.unwrap(), &guard, "by row");
    let error = worker.force_release("a").await.unwrap_err();
    let LockError::Backend { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), BackendErrorKind::Denied, "{source:?}");
    assert!(source.to_string().contains(right), "{source}");
    guard.unlock().await.unwrap();
}

on_both_servers! {
    lease_and_row_backends_list_and_break_each_others_locks,
    a_released_row_lock_is_free_and_cannot_be_broken,
    a_callers_transaction_is_listed_and_cannot_be_broken,
    a_refused_forced_release_names_the_missing_right,
}
