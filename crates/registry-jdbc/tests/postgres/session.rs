//! Locks that end with the connection of their holder.

use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{
    Attempt, Claim, GuaranteeClass, LockBackend, LockOptions, LockRegistry, Registry, Release,
    Renewal,
};
use registry_jdbc::sqlx::{AssertSqlSafe, Executor, Row};
use registry_jdbc::{PostgresConfig, PostgresSessionBackend};
use registry_testkit::eventually;
use registry_testkit::pgbouncer::PgBouncer;
use registry_testkit::postgres::PostgresServer;
use tokio::time::timeout;

use crate::lab::{LEASE, SOON, backend, claim, config, data, grant, lock, run, server, told};

/// The time limit for a loss notification: well before the next renewal.
const AT_ONCE: Duration = Duration::from_secs(5);

async fn session(server: &PostgresServer) -> Arc<PostgresSessionBackend> {
    Arc::new(PostgresSessionBackend::open(config(server)).await.unwrap())
}

fn registry(backend: &Arc<PostgresSessionBackend>) -> Registry {
    Registry::builder(Arc::<PostgresSessionBackend>::clone(backend)).build().unwrap()
}

async fn attempt(backend: &PostgresSessionBackend, claim: &Claim) -> Attempt {
    backend.try_acquire(claim).await.unwrap()
}

const HOLDERS: &str =
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'";

#[tokio::test]
async fn a_holder_is_told_at_once_that_its_connection_was_cut_and_the_lock_is_free() {
    let server = server().await;
    let (a, b) = (session(&server).await, session(&server).await);
    let (first, second) = (registry(&a), registry(&b));
    let guards = [lock(&first, "orders/42").await, lock(&first, "orders/43").await];
    let token = guards[0].fencing_token();
    let began = Instant::now();
    server.sql(&format!("SELECT pg_terminate_backend(pid) FROM ({HOLDERS}) h")).await.unwrap();
    for guard in &guards {
        timeout(SOON, guard.lost()).await.unwrap();
    }
    assert!(began.elapsed() < AT_ONCE, "after {:?}", began.elapsed());
    let next = timeout(SOON, second.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    // The store continues with another connection.
    let other = lock(&first, "orders/43").await;
    assert!(other.is_held() && first.obtain("orders/42").try_lock().await.unwrap().is_none());
}

#[tokio::test]
async fn a_server_that_is_started_anew_has_no_locks_and_their_holders_know() {
    let mut server = server().await;
    let registry = registry(&session(&server).await);
    let guard = lock(&registry, "orders/42").await;
    server.stop().await.unwrap();
    timeout(SOON, guard.lost()).await.unwrap();
    server.start_again().await.unwrap();
    let next = timeout(SOON, registry.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
}

#[tokio::test]
async fn a_lock_ends_with_its_process_and_not_with_a_lease() {
    let server = server().await;
    let other = session(&server).await;
    // A runtime that is shut down stands for a process that dies: the socket is closed without a
    // disconnect message.
    let server_url = server.url();
    let claim_of_dead = claim("orders/42");
    let dead = claim_of_dead.clone();
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let config = PostgresConfig::from_url(&server_url).unwrap();
            let backend = PostgresSessionBackend::open(config).await.unwrap();
            assert!(matches!(attempt(&backend, &dead).await, Attempt::Granted(_)));
        });
        runtime.shutdown_background();
    })
    .await
    .unwrap();
    let began = Instant::now();
    let guard = timeout(SOON, registry(&other).obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(began.elapsed() < claim_of_dead.lease() / 2, "after {:?}", began.elapsed());
    assert!(guard.is_held());
}

#[tokio::test]
async fn all_locks_of_a_process_share_one_connection() {
    let server = server().await;
    let backend = session(&server).await;
    let registry = registry(&backend);
    let mut guards = Vec::new();
    for n in 0..30 {
        guards.push(lock(&registry, &format!("orders/{n}")).await);
    }
    let pids = format!("SELECT count(*), count(DISTINCT pid) FROM ({HOLDERS}) h");
    assert_eq!(server.sql(&pids).await.unwrap(), "30|1");
    // Two registries over the same store still exclude each other.
    let twin = Registry::builder(Arc::<PostgresSessionBackend>::clone(&backend)).build().unwrap();
    assert!(twin.obtain("orders/7").try_lock().await.unwrap().is_none());
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert_eq!(server.sql(&format!("SELECT count(*) FROM ({HOLDERS}) h")).await.unwrap(), "0");
    let guard = lock(&twin, "orders/7").await;
    assert!(registry.obtain("orders/7").try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn other_programs_keep_it_out_by_the_number_of_the_lock() {
    let server = server().await;
    let backend = session(&server).await;
    let mut other = data(&server).await;
    // The first eight bytes of the SHA-256 of: 00 00 00 00 00 00 00 07 "default" "orders/42"
    let number = "('x' || left(encode(sha256('\\x0000000000000007'::bytea || 'defaultorders/42'), 'hex'), 16))::bit(64)::bigint";
    run(&mut other, &format!("SELECT pg_advisory_lock({number})")).await;
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Busy(_)));
    run(&mut other, &format!("SELECT pg_advisory_unlock({number})")).await;
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Granted(_)));
    let text = format!("SELECT pg_try_advisory_lock({number})");
    let row = other.fetch_one(AssertSqlSafe(text)).await.unwrap();
    assert!(!row.get::<bool, _>(0));
}

#[tokio::test]
async fn cancelled_waits_leave_no_lock_behind() {
    let server = server().await;
    let (a, b) = (registry(&session(&server).await), registry(&session(&server).await));
    let guard = lock(&a, "orders/42").await;
    for n in 1..20 {
        let waiting = b.obtain("orders/42");
        let limit = Duration::from_millis(n);
        assert!(timeout(limit, waiting.lock()).await.is_err());
    }
    guard.unlock().await.unwrap();
    for n in 1..20 {
        let free = b.obtain("orders/42");
        let _ = timeout(Duration::from_micros(100 * n), free.lock()).await;
    }
    b.idle().await;
    assert_eq!(server.sql(&format!("SELECT count(*) FROM ({HOLDERS}) h")).await.unwrap(), "0");
    lock(&a, "orders/42").await.unlock().await.unwrap();
}

/// Sends a request and lets the server reply, but does not poll for the reply. The session already
/// holds a lock.
async fn asked<'a>(
    server: &PostgresServer,
    backend: &'a PostgresSessionBackend,
    claim: &'a Claim,
) -> impl Future<Output = Attempt> + 'a {
    let pid: i32 = server.sql(HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    let mut asking = Box::pin(attempt(backend, claim));
    assert!(futures_util::poll!(&mut asking).is_pending());
    server.resume_backend(pid).unwrap();
    asking
}

#[tokio::test]
async fn who_does_not_go_on_after_a_question_holds_nobody_up() {
    let server = server().await;
    let backend = session(&server).await;
    let (first, second, third) = (claim("orders/1"), claim("orders/2"), claim("orders/3"));
    assert!(matches!(attempt(&backend, &first).await, Attempt::Granted(_)));
    let asking = asked(&server, &backend, &second).await;
    assert_eq!(timeout(SOON, backend.release(&first)).await.unwrap().unwrap(), Release::Freed);
    let granted = timeout(SOON, attempt(&backend, &third)).await.unwrap();
    assert!(matches!(granted, Attempt::Granted(_)));
    assert!(matches!(timeout(SOON, asking).await.unwrap(), Attempt::Granted(_)));
}

#[tokio::test]
async fn a_question_that_is_dropped_is_carried_through_and_the_session_stays_in_step() {
    let server = server().await;
    let backend = session(&server).await;
    let (first, second) = (claim("orders/1"), claim("orders/2"));
    assert!(matches!(attempt(&backend, &first).await, Attempt::Granted(_)));
    let asking = asked(&server, &backend, &second).await;
    drop(asking);
    // A request that was still queued is not sent.
    timeout(SOON, backend.release(&second)).await.unwrap().unwrap();
    assert_eq!(backend.release(&first).await.unwrap(), Release::Freed);
    assert_eq!(server.sql(&format!("SELECT count(*) FROM ({HOLDERS}) h")).await.unwrap(), "0");
}

#[tokio::test]
async fn who_waits_is_woken_by_a_release_in_another_process() {
    let server = server().await;
    let (a, b) = (registry(&session(&server).await), registry(&session(&server).await));
    let guard = lock(&a, "orders/42").await;
    let waiting = b.obtain("orders/42");
    let mut waiting = Box::pin(waiting.lock());
    assert!(timeout(Duration::from_millis(500), &mut waiting).await.is_err());
    guard.unlock().await.unwrap();
    drop(timeout(SOON, waiting).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_lock_that_nobody_renews_is_given_back_when_its_lease_is_over() {
    let server = server().await;
    let (a, b) = (session(&server).await, session(&server).await);
    let short = Claim::new(crate::lab::key("orders/42"), Duration::from_millis(300));
    assert!(matches!(attempt(&a, &short).await, Attempt::Granted(_)));
    assert!(matches!(attempt(&b, &claim("orders/42")).await, Attempt::Busy(_)));
    let options = LockOptions::new().wait(SOON);
    let guard = registry(&b).obtain("orders/42").lock_with(options).await.unwrap();
    assert!(guard.is_some());
    assert!(matches!(a.renew(std::slice::from_ref(&short)).await[0], Ok(Renewal::Gone)));
    assert_eq!(a.release(&short).await.unwrap(), Release::NotHeld);
}

#[tokio::test]
async fn a_lease_in_the_same_place_is_respected_and_tokens_grow_from_one_to_the_other() {
    let server = server().await;
    let (leases, sessions) = (backend(config(&server)).await, session(&server).await);
    let lease = claim("orders/42");
    let first = grant(&leases, &lease).await.token;
    assert!(matches!(attempt(&sessions, &claim("orders/42")).await, Attempt::Busy(_)));
    assert_eq!(server.sql(&format!("SELECT count(*) FROM ({HOLDERS}) h")).await.unwrap(), "0");
    leases.release(&lease).await.unwrap();
    let held = claim("orders/42");
    let Attempt::Granted(second) = attempt(&sessions, &held).await else { panic!("busy") };
    sessions.release(&held).await.unwrap();
    let third = grant(&leases, &lease).await.token;
    assert!(first < second.token && second.token < third);
}

/// The floor keeps the tokens of a deleted row. It becomes visible only when the deletion is
/// committed.
#[tokio::test]
async fn tokens_grow_over_a_row_that_is_deleted_while_it_is_wanted() {
    let server = server().await;
    let (first, second) = (session(&server).await, session(&server).await);
    let mut purge = data(&server).await;
    // Far ahead of the clock, as after it was set back: only the stored tokens can make the next
    // one larger.
    let far = claim("orders/42").with_token_block(u32::MAX);
    let Attempt::Granted(grant) = attempt(&first, &far).await else { panic!("busy") };
    let last = grant.token.unwrap().get() + u64::from(u32::MAX) - 1;
    assert_eq!(first.release(&far).await.unwrap(), Release::Freed);
    run(&mut purge, "BEGIN; DELETE FROM lock_registry_locks").await;
    let next = claim("orders/42");
    let error = second.try_acquire(&next).await.unwrap_err();
    assert!(error.is_retryable() && error.refused(), "{}", told(&error));
    run(&mut purge, "COMMIT").await;
    let Attempt::Granted(grant) = attempt(&second, &next).await else { panic!("busy") };
    let token = grant.token.unwrap().get();
    assert!(token > last, "{token} after {last}");
}

#[tokio::test]
async fn a_server_that_stands_still_for_a_moment_costs_no_lock() {
    let server = server().await;
    let backend = session(&server).await;
    let registry = registry(&backend);
    let guard = lock(&registry, "orders/42").await;
    let pid: i32 = server.sql(HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    assert!(timeout(Duration::from_secs(2), guard.lost()).await.is_err());
    server.resume_backend(pid).unwrap();
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_server_that_stays_silent_ends_the_lock_before_anybody_can_have_it() {
    let server = server().await;
    let config = config(&server).with_response_timeout(Duration::from_millis(1500));
    let registry = registry(&Arc::new(PostgresSessionBackend::open(config).await.unwrap()));
    let guard = lock(&registry, "orders/42").await;
    let pid: i32 = server.sql(HOLDERS).await.unwrap().parse().unwrap();
    server.pause_backend(pid).unwrap();
    timeout(SOON, guard.lost()).await.unwrap();
    assert_eq!(server.sql(HOLDERS).await.unwrap(), pid.to_string(), "its lock is still there");
    server.resume_backend(pid).unwrap();
    drop(timeout(SOON, registry.obtain("orders/42").lock()).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_grant_that_nobody_looks_at_ends_with_its_lease() {
    let server = server().await;
    let short = Claim::new(crate::lab::key("orders/42"), Duration::from_secs(2));
    // Polls until the server has granted the lock, and no further. If the reply has already arrived
    // by then, the test retries.
    let asking = eventually(SOON, async || {
        let (session, claim) = (session(&server).await, short.clone());
        let mut asking = Box::pin(async move { attempt(&session, &claim).await });
        while server.sql(HOLDERS).await.unwrap().is_empty() {
            if futures_util::poll!(&mut asking).is_ready() {
                return None;
            }
        }
        Some(asking)
    });
    let asking = asking.await;
    // Far earlier than the server ends a silent session.
    let other = registry(&session(&server).await);
    let guard = timeout(SOON, other.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(guard.is_held());
    drop(asking);
}

/// The server still holds the lock for the session, but the session does not know it. If the
/// session did not end, no client could ever acquire the lock.
#[tokio::test]
async fn a_session_that_cannot_give_a_lock_back_ends_with_it() {
    let server = server().await;
    // The session calls this function instead of the built-in one.
    let broken = "CREATE FUNCTION public.pg_advisory_unlock(bigint) RETURNS boolean LANGUAGE plpgsql \
        AS $$BEGIN RAISE EXCEPTION 'on purpose'; END$$; \
        DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = public, pg_catalog', current_database()); END$$";
    server.sql(broken).await.unwrap();
    let (sessions, claim) = (session(&server).await, claim("orders/42"));
    assert!(matches!(attempt(&sessions, &claim).await, Attempt::Granted(_)));
    assert_eq!(sessions.release(&claim).await.unwrap(), Release::NotHeld);
    eventually(SOON, async || server.sql(HOLDERS).await.unwrap().is_empty()).await;
}

#[tokio::test]
async fn a_pooler_that_mixes_connections_up_is_refused() {
    let server = server().await;
    let bouncer = PgBouncer::start(&server).await.unwrap();
    let config = PostgresConfig::from_url(&bouncer.url()).unwrap().with_prepared(false);
    let error = PostgresSessionBackend::open(config).await.unwrap_err();
    assert!(!error.is_retryable() && error.to_string().contains("pooler"), "{}", told(&error));
}

#[tokio::test]
async fn the_server_ends_a_session_that_stands_still_no_sooner_than_the_longest_lease() {
    let server = server().await;
    let backend = session(&server).await;
    let capabilities = backend.capabilities();
    assert_eq!(capabilities.class, GuaranteeClass::C);
    assert!(
        capabilities.lease_max <= PostgresSessionBackend::SILENCE
            && LEASE <= capabilities.lease_max
    );
    assert!(capabilities.reports_invalidations && !capabilities.inspect);
}
