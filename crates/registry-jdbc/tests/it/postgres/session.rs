//! Session locks, which end with the connection of the session.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{Attempt, Claim, GuaranteeClass, LockBackend, Registry, Release};
use registry_jdbc::sqlx::{AssertSqlSafe, Executor, Row};
use registry_jdbc::{PostgresBackend, PostgresConfig, SqlMode, StatementMode};
use registry_testkit::eventually;
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::PostgresServer;
use tokio::time::timeout;

use super::common::{
    LEASE, TEST_TIMEOUT, app_connection, claim, config, error_chain, lock, run, server,
};
use super::server::{SESSION_HOLDERS, assert_no_session_locks};
use super::servers::session::*;

#[tokio::test]
async fn all_locks_of_a_process_share_one_connection() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let registry = registry_over(&backend);
    let mut guards = Vec::new();
    for n in 0..30 {
        guards.push(lock(&registry, &format!("orders/{n}")).await);
    }
    let pids = format!("SELECT count(*), count(DISTINCT pid) FROM ({SESSION_HOLDERS}) h");
    assert_eq!(server.sql(&pids).await.unwrap(), "30|1");
    // Two registries over the same store still exclude each other.
    let second_registry =
        Registry::builder(Arc::<PostgresBackend>::clone(&backend)).build().unwrap();
    assert!(second_registry.obtain("orders/7").try_lock().await.unwrap().is_none());
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert_no_session_locks(&server).await;
    let guard = lock(&second_registry, "orders/7").await;
    assert!(registry.obtain("orders/7").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn other_programs_exclude_the_session_by_the_advisory_lock_key() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let mut other = app_connection(&server).await;
    // The first eight bytes of the SHA-256 of the namespace's length in eight bytes, the namespace
    // "default", and the key "orders/42".
    let number = "('x' || left(encode(sha256('\\x0000000000000007'::bytea || 'defaultorders/42'), 'hex'), 16))::bit(64)::bigint";
    run(&mut other, &format!("SELECT pg_advisory_lock({number})")).await;
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Busy(_)));
    run(&mut other, &format!("SELECT pg_advisory_unlock({number})")).await;
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Granted(_)));
    let text = format!("SELECT pg_try_advisory_lock({number})");
    let row = other.fetch_one(AssertSqlSafe(text)).await.unwrap();
    assert!(!row.get::<bool, _>(0));
}

/// Begins an attempt while the server process of the session is paused, and then resumes that
/// process. The server replies, but no task polls for the reply. The session must already hold a
/// lock.
async fn begin_attempt<'a>(
    server: &PostgresServer,
    backend: &'a PostgresBackend,
    claim: &'a Claim,
) -> impl Future<Output = Attempt> + 'a {
    let pid: i32 = server.sql(SESSION_HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    let mut attempting = Box::pin(attempt(backend, claim));
    assert!(futures_util::poll!(&mut attempting).is_pending());
    server.resume_backend(pid).unwrap();
    attempting
}

#[tokio::test]
async fn an_unpolled_caller_does_not_delay_other_callers() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let (first, second, third) = (claim("orders/1"), claim("orders/2"), claim("orders/3"));
    assert!(matches!(attempt(&backend, &first).await, Attempt::Granted(_)));
    let attempting = begin_attempt(&server, &backend, &second).await;
    assert_eq!(
        timeout(TEST_TIMEOUT, backend.release(&first)).await.unwrap().unwrap(),
        Release::Freed
    );
    let granted = timeout(TEST_TIMEOUT, attempt(&backend, &third)).await.unwrap();
    assert!(matches!(granted, Attempt::Granted(_)));
    assert!(matches!(timeout(TEST_TIMEOUT, attempting).await.unwrap(), Attempt::Granted(_)));
}

#[tokio::test]
async fn a_dropped_command_runs_to_its_end_and_the_session_stays_usable() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let (first, second) = (claim("orders/1"), claim("orders/2"));
    assert!(matches!(attempt(&backend, &first).await, Attempt::Granted(_)));
    let attempting = begin_attempt(&server, &backend, &second).await;
    drop(attempting);
    // The release leaves no lock behind, even if the server had granted the dropped request.
    timeout(TEST_TIMEOUT, backend.release(&second)).await.unwrap().unwrap();
    assert_eq!(backend.release(&first).await.unwrap(), Release::Freed);
    assert_no_session_locks(&server).await;
}

#[tokio::test]
async fn a_waiter_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (session_backend(&server).await, session_backend(&server).await);
    let (a, b) = (registry_over(&a), registry_over(&b));
    let guard = lock(&a, "orders/42").await;
    let waiting = b.obtain("orders/42");
    let mut waiting = Box::pin(waiting.lock());
    assert!(timeout(Duration::from_millis(500), &mut waiting).await.is_err());
    guard.unlock().await.unwrap();
    drop(timeout(TEST_TIMEOUT, waiting).await.unwrap().unwrap());
}

/// The column `floor` keeps the largest token of deleted rows. Other clients see its update only
/// after the commit.
#[tokio::test]
async fn tokens_increase_when_a_row_is_deleted_during_an_attempt() {
    let server = server().await;
    let (first, second) = (session_backend(&server).await, session_backend(&server).await);
    let mut purge = app_connection(&server).await;
    // The tokens are far ahead of the clock, as after it was set back. So only the stored tokens
    // can make the next one larger.
    let large_block = claim("orders/42").with_token_block(u32::MAX);
    let Attempt::Granted(grant) = attempt(&first, &large_block).await else { panic!("busy") };
    let last = grant.token.get() + u64::from(u32::MAX) - 1;
    assert_eq!(first.release(&large_block).await.unwrap(), Release::Freed);
    run(&mut purge, "BEGIN; DELETE FROM lock_registry_locks").await;
    let next = claim("orders/42");
    let error = second.try_acquire(&next).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", error_chain(&error));
    run(&mut purge, "COMMIT").await;
    let Attempt::Granted(grant) = attempt(&second, &next).await else { panic!("busy") };
    let token = grant.token.get();
    assert!(token > last, "{token} after {last}");
}

#[tokio::test]
async fn a_short_pause_of_the_server_ends_no_lock() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let registry = registry_over(&backend);
    let guard = lock(&registry, "orders/42").await;
    let pid: i32 = server.sql(SESSION_HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    assert!(timeout(Duration::from_secs(2), guard.lost()).await.is_err());
    server.resume_backend(pid).unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn an_unresponsive_server_ends_the_lock_before_the_next_grant() {
    let server = server().await;
    let config = config(&server).with_response_timeout(Duration::from_millis(1500));
    let backend = PostgresBackend::open_mode(config, SqlMode::Session).await.unwrap();
    let registry = registry_over(&Arc::new(backend));
    let guard = lock(&registry, "orders/42").await;
    let pid: i32 = server.sql(SESSION_HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    assert_eq!(
        server.sql(SESSION_HOLDERS).await.unwrap(),
        pid.to_string(),
        "its lock is still there"
    );
    server.resume_backend(pid).unwrap();
    drop(timeout(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap().unwrap());
}

#[tokio::test]
async fn an_unreceived_grant_ends_with_its_lease() {
    let server = server().await;
    let short = Claim::new(super::common::key("orders/42"), Duration::from_secs(2));
    // Polls until the server has granted the lock, and no further. If the reply has already arrived
    // by then, the test retries.
    let attempting = eventually(TEST_TIMEOUT, async || {
        let (session, claim) = (session_backend(&server).await, short.clone());
        let mut attempting = Box::pin(async move { attempt(&session, &claim).await });
        while server.sql(SESSION_HOLDERS).await.unwrap().is_empty() {
            if futures_util::poll!(&mut attempting).is_ready() {
                return None;
            }
        }
        Some(attempting)
    });
    let attempting = attempting.await;
    // The next grant follows the end of the lease, far earlier than the server ends an idle
    // session.
    let other = registry_over(&session_backend(&server).await);
    let guard = timeout(TEST_TIMEOUT, other.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(guard.is_held());
    drop(attempting);
}

/// After a failed release, the server still holds the lock for the session, but the backend no
/// longer counts it as held. If the session did not end, no client could acquire the lock.
#[tokio::test]
async fn a_failed_release_ends_the_session() {
    let server = server().await;
    // With this search path, the session calls this function instead of the built-in one.
    let failing_unlock = "CREATE FUNCTION public.pg_advisory_unlock(bigint) RETURNS boolean LANGUAGE plpgsql \
        AS $$BEGIN RAISE EXCEPTION 'on purpose'; END$$; \
        DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, pg_catalog', current_database()); END$$";
    server.sql(failing_unlock).await.unwrap();
    let (sessions, claim) = (session_backend(&server).await, claim("orders/42"));
    assert!(matches!(attempt(&sessions, &claim).await, Attempt::Granted(_)));
    assert_eq!(sessions.release(&claim).await.unwrap(), Release::NotHeld);
    eventually(TEST_TIMEOUT, async || server.sql(SESSION_HOLDERS).await.unwrap().is_empty()).await;
}

#[tokio::test]
async fn a_pooler_in_transaction_mode_is_refused() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let config = PostgresConfig::from_url(&bouncer.url())
        .unwrap()
        .with_statements(StatementMode::Unprepared);
    let error = PostgresBackend::open_mode(config, SqlMode::Session).await.unwrap_err();
    assert!(
        !error.is_retryable() && error.to_string().contains("pooler"),
        "{}",
        error_chain(&error)
    );
}

#[tokio::test]
async fn the_server_ends_an_idle_session_only_after_the_maximum_lease() {
    let server = server().await;
    let backend = session_backend(&server).await;
    let capabilities = backend.capabilities();
    assert_eq!(capabilities.class, GuaranteeClass::BestEffort);
    assert!(
        capabilities.lease_max <= PostgresBackend::IDLE_TIMEOUT && LEASE <= capabilities.lease_max
    );
    assert!(capabilities.reports_invalidations && !capabilities.inspect);
}
