//! All locks of a session share one connection. Callers that wait must not cause the loss of other
//! locks of the session.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, LockOptions, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SqlMode};
use registry_testkit::{eventually, within};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::app_connection::AppConnection;
use super::server::{LockMode, Server, ServerKind, TEST_TIMEOUT, registry_with_mode};

const LEASE: Duration = Duration::from_secs(12);
/// So many that renewals would be late if the session waited for each row.
const FENCED_KEYS: usize = 24;
/// The time limit of an uncontended lock on a busy machine. Without bounded waits it takes tens of
/// seconds.
const DURATION_MAX: Duration = Duration::from_secs(12);

/// Opens a registry with session locks and the default timeouts.
async fn registry(server: &Server) -> Registry {
    let url = server.url();
    let backend: Arc<dyn LockBackend> = match server {
        Server::Postgres(_) => {
            let config = PostgresConfig::from_url(&url).unwrap();
            let open = async || PostgresBackend::open_mode(config.clone(), SqlMode::Session).await;
            Arc::new(eventually(TEST_TIMEOUT, open).await)
        }
        Server::MariaDb(_) => {
            let config = MySqlConfig::from_url(&url).unwrap();
            let open = async || MySqlBackend::open_mode(config.clone(), SqlMode::Session).await;
            Arc::new(eventually(TEST_TIMEOUT, open).await)
        }
    };
    Registry::builder(backend).lease(LEASE).build().unwrap()
}

async fn contended_fenced_keys_end_no_other_lock_of_a_session(kind: ServerKind) {
    let server = Arc::new(kind.start().await);
    let (first_registry, second_registry) = (registry(&server).await, registry(&server).await);
    let (mut end_senders, mut transactions) = (Vec::new(), JoinSet::new());
    for number in 0..FENCED_KEYS {
        let guard = second_registry.obtain(&format!("fenced/{number}")).lock().await.unwrap();
        let (fenced_sender, fenced) = oneshot::channel();
        let (end_sender, end) = oneshot::channel::<()>();
        let server = Arc::clone(&server);
        transactions.spawn(async move {
            let mut app_connection = AppConnection::connect(&server).await;
            let mut transaction = app_connection.begin().await;
            transaction.fence(&guard).await.unwrap();
            guard.unlock().await.unwrap();
            fenced_sender.send(()).unwrap();
            let _ = end.await;
            transaction.commit().await;
        });
        fenced.await.unwrap();
        end_senders.push(end_sender);
    }
    let other_guard = first_registry.obtain("bystander").lock().await.unwrap();
    let mut waiting = JoinSet::new();
    for number in 0..FENCED_KEYS {
        let lock = first_registry.obtain(&format!("fenced/{number}"));
        waiting.spawn(async move {
            let options = LockOptions::new().wait(TEST_TIMEOUT);
            let guard = lock.lock_with(options).await.unwrap();
            // On a busy machine the reply may come too late; the release is then retried in the
            // background.
            let _ = guard.unlock().await;
        });
    }
    // For three leases, other callers lock other keys.
    let (until, mut longest) = (Instant::now() + LEASE * 3, Duration::ZERO);
    while Instant::now() < until {
        let began = Instant::now();
        let guard = within(TEST_TIMEOUT, first_registry.obtain("unrelated").lock()).await.unwrap();
        let _ = guard.unlock().await;
        longest = longest.max(began.elapsed());
        assert!(other_guard.is_held(), "lost while others waited for fenced keys");
        sleep(Duration::from_millis(20)).await;
    }
    println!("{kind:?}: a pair took {longest:?} at most");
    assert!(longest < DURATION_MAX, "{longest:?}");
    drop(end_senders);
    within(TEST_TIMEOUT, transactions.join_all()).await;
    within(TEST_TIMEOUT, waiting.join_all()).await;
    assert!(other_guard.is_held());
    let _ = other_guard.unlock().await;
}

async fn a_waiter_does_not_wake_itself_while_a_lease_holds_the_key(kind: ServerKind) {
    const MEASURED_TIME: Duration = Duration::from_secs(5);
    // Expected are four polls a second, and in MariaDB about twenty checks between two polls.
    const WORK_MAX: u64 = 1_000;
    let server = kind.start().await;
    let leases = registry_with_mode(&server.url(), TEST_TIMEOUT, LockMode::Lease).await;
    let sessions = registry_with_mode(&server.url(), LEASE, LockMode::Session).await;
    let held = leases.obtain("orders/42").lock().await.unwrap();
    let lock = sessions.obtain("orders/42");
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    // After this pause the waiter listens.
    sleep(MEASURED_TIME / 5).await;
    let (began, before) = (Instant::now(), server.work_done().await);
    sleep(MEASURED_TIME).await;
    let done = server.work_done().await - before;
    let elapsed = began.elapsed();
    println!("{kind:?}: {done} in {elapsed:?}");
    // On a loaded machine the measurement may take longer.
    let work_max = u128::from(WORK_MAX) * elapsed.as_millis() / MEASURED_TIME.as_millis();
    assert!(u128::from(done) < work_max, "{done} in {elapsed:?}");
    held.unlock().await.unwrap();
    within(TEST_TIMEOUT, waiter).await.unwrap().unlock().await.unwrap();
}

on_both_servers! {
    contended_fenced_keys_end_no_other_lock_of_a_session,
    a_waiter_does_not_wake_itself_while_a_lease_holds_the_key,
}
