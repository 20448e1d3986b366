//! Locks that end with the connection of their holder.

use std::sync::Arc;
use std::time::{Duration, Instant};

use registry_core::{Attempt, Claim, LockBackend, LockRegistry, Registry, Release, Renewal};
use registry_jdbc::sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use registry_jdbc::{MySqlBackend, MySqlConfig, SqlMode};
use registry_testkit::mariadb::MariaDbServer;
use tokio::time::timeout;

use crate::common::{
    TEST_TIMEOUT, backend, claim, close_all_connections, config, data, grant, key, lock, server,
};

/// The time limit for a loss notification: well before the next renewal.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The name of the lock of `orders/42`: the SHA-256 of 00 00 00 00 00 00 00 07 "default"
/// "orders/42".
const NAME: &str = "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff";

async fn session(server: &MariaDbServer) -> Arc<MySqlBackend> {
    Arc::new(MySqlBackend::open_mode(config(server), SqlMode::Session).await.unwrap())
}

fn registry(backend: &Arc<MySqlBackend>) -> Registry {
    Registry::builder(Arc::<MySqlBackend>::clone(backend)).build().unwrap()
}

async fn attempt(backend: &MySqlBackend, claim: &Claim) -> Attempt {
    backend.try_acquire(claim).await.unwrap()
}

async fn number(connection: &mut MySqlConnection, expression: &str) -> Option<i64> {
    let text = format!("SELECT CAST({expression} AS SIGNED)");
    connection.fetch_one(AssertSqlSafe(text)).await.unwrap().get(0)
}

#[tokio::test]
async fn a_closed_connection_frees_the_lock_and_notifies_the_holder_at_once() {
    let server = server().await;
    let (first, second) = (registry(&session(&server).await), registry(&session(&server).await));
    let guards = [lock(&first, "orders/42").await, lock(&first, "orders/43").await];
    let token = guards[0].fencing_token();
    let began = Instant::now();
    close_all_connections(&server).await;
    for guard in &guards {
        timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    }
    assert!(began.elapsed() < AT_ONCE, "after {:?}", began.elapsed());
    let next = timeout(TEST_TIMEOUT, second.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > token);
    let other = lock(&first, "orders/43").await;
    assert!(other.is_held() && first.obtain("orders/42").try_lock().await.unwrap().is_none());
}

#[tokio::test]
async fn a_restarted_server_has_no_locks_and_notifies_their_holders() {
    let mut server = server().await;
    let registry = registry(&session(&server).await);
    let guard = lock(&registry, "orders/42").await;
    server.stop().await.unwrap();
    timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    server.start_again().await.unwrap();
    let next = timeout(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
}

#[tokio::test]
async fn a_lock_ends_with_its_process_and_not_with_a_lease() {
    let server = server().await;
    let other = session(&server).await;
    // A runtime that is shut down stands for a process that dies: the socket is closed without a
    // disconnect message.
    let url = server.url();
    let lease_claim = claim("orders/42");
    let dead = lease_claim.clone();
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let config = MySqlConfig::from_url(&url).unwrap();
            let backend = MySqlBackend::open_mode(config, SqlMode::Session).await.unwrap();
            assert!(matches!(attempt(&backend, &dead).await, Attempt::Granted(_)));
        });
        runtime.shutdown_background();
    })
    .await
    .unwrap();
    let began = Instant::now();
    let guard =
        timeout(TEST_TIMEOUT, registry(&other).obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(began.elapsed() < lease_claim.lease() / 2, "after {:?}", began.elapsed());
    assert!(guard.is_held());
}

#[tokio::test]
async fn all_locks_of_a_process_share_one_connection() {
    let server = server().await;
    let backend = session(&server).await;
    let registry = registry(&backend);
    let first = lock(&registry, "orders/42").await;
    let mut data = data(&server).await;
    let holder = number(&mut data, &format!("IS_USED_LOCK('{NAME}')")).await;
    assert!(holder.is_some());
    let mut guards = Vec::new();
    for n in 0..30 {
        guards.push(lock(&registry, &format!("orders/many/{n}")).await);
    }
    assert_eq!(registry.held(), 31);
    // The server would grant a named lock to its own session again.
    let second_registry = Registry::builder(Arc::<MySqlBackend>::clone(&backend)).build().unwrap();
    assert!(second_registry.obtain("orders/42").try_lock().await.unwrap().is_none());
    let connection = holder.unwrap();
    server.sql(&format!("KILL CONNECTION {connection}")).await.unwrap();
    for guard in guards.iter().chain([&first]) {
        timeout(TEST_TIMEOUT, guard.lost()).await.unwrap();
    }
    assert_eq!(number(&mut data, &format!("IS_USED_LOCK('{NAME}')")).await, None);
}

#[tokio::test]
async fn other_programs_exclude_the_session_by_the_lock_name() {
    let server = server().await;
    let backend = session(&server).await;
    let mut other = data(&server).await;
    assert_eq!(number(&mut other, &format!("GET_LOCK('{NAME}', 0)")).await, Some(1));
    assert!(matches!(attempt(&backend, &claim("orders/42")).await, Attempt::Busy(_)));
    assert_eq!(number(&mut other, &format!("RELEASE_LOCK('{NAME}')")).await, Some(1));
    let lease_claim = claim("orders/42");
    assert!(matches!(attempt(&backend, &lease_claim).await, Attempt::Granted(_)));
    assert_eq!(number(&mut other, &format!("GET_LOCK('{NAME}', 0)")).await, Some(0));
    assert_eq!(backend.release(&lease_claim).await.unwrap(), Release::Freed);
    assert_eq!(number(&mut other, &format!("GET_LOCK('{NAME}', 0)")).await, Some(1));
}

#[tokio::test]
async fn cancelled_waits_leave_no_lock_behind() {
    let server = server().await;
    let (a, b) = (registry(&session(&server).await), registry(&session(&server).await));
    let guard = lock(&a, "orders/42").await;
    for n in 1..20 {
        let waiting = b.obtain("orders/42");
        assert!(timeout(Duration::from_millis(n), waiting.lock()).await.is_err());
    }
    guard.unlock().await.unwrap();
    for n in 1..20 {
        let free = b.obtain("orders/42");
        let _ = timeout(Duration::from_micros(100 * n), free.lock()).await;
    }
    b.idle().await;
    let mut data = data(&server).await;
    assert_eq!(number(&mut data, &format!("IS_USED_LOCK('{NAME}')")).await, None);
    lock(&a, "orders/42").await.unlock().await.unwrap();
}

#[tokio::test]
async fn a_lock_without_renewal_is_released_at_the_end_of_its_lease() {
    let server = server().await;
    let (a, b) = (session(&server).await, session(&server).await);
    let short = Claim::new(key("orders/42"), Duration::from_millis(300));
    assert!(matches!(attempt(&a, &short).await, Attempt::Granted(_)));
    assert!(matches!(attempt(&b, &claim("orders/42")).await, Attempt::Busy(_)));
    let guard =
        timeout(TEST_TIMEOUT, registry(&b).obtain("orders/42").lock()).await.unwrap().unwrap();
    assert!(guard.is_held());
    assert!(matches!(a.renew(std::slice::from_ref(&short)).await[0], Ok(Renewal::Gone)));
    assert_eq!(a.release(&short).await.unwrap(), Release::NotHeld);
}

#[tokio::test]
async fn leases_and_session_locks_exclude_each_other_and_tokens_increase() {
    let server = server().await;
    let (leases, sessions) = (backend(config(&server)).await, session(&server).await);
    let lease = claim("orders/42");
    let first = grant(&leases, &lease).await.token;
    assert!(matches!(attempt(&sessions, &claim("orders/42")).await, Attempt::Busy(_)));
    let mut data = data(&server).await;
    assert_eq!(number(&mut data, &format!("IS_USED_LOCK('{NAME}')")).await, None);
    leases.release(&lease).await.unwrap();
    let held = claim("orders/42");
    let Attempt::Granted(second) = attempt(&sessions, &held).await else { panic!("busy") };
    sessions.release(&held).await.unwrap();
    let third = grant(&leases, &lease).await.token;
    assert!(first < second.token && second.token < third);
}
