//! Release notifications: a release sends one only while a listener exists, and a listener that
//! starts later misses no release.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, Release};
use registry_jdbc::sqlx::postgres::PgListener;
use registry_testkit::eventually;
use registry_testkit::postgres::PostgresServer;
use tokio::time::timeout;

use super::common::{
    TEST_TIMEOUT, app_connection, backend, busy, claim, config, grant, run, server,
};

/// The notification channel of the namespace "default". The suffix is the first eight bytes of the
/// SHA-256 of the namespace.
const CHANNEL: &str = "lock_registry_37a8eec1ce19687d";

/// The 16 presence locks of that channel: advisory locks that a listener holds. They differ only in
/// the last four bits.
const PRESENCE_LOCKS: &str = "generate_series(x'37a8eec1ce196870'::bit(64)::bigint, x'37a8eec1ce19687f'::bit(64)::bigint) AS presence_lock";

/// The number of sessions that hold a presence lock, or, if not `granted`, wait for one.
async fn presence_sessions(server: &PostgresServer, granted: bool) -> String {
    let count = format!(
        "SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND granted = {granted}"
    );
    server.sql(&count).await.unwrap()
}

async fn wait_for_presence_sessions(server: &PostgresServer, granted: bool, wanted: &str) {
    let count = async || match presence_sessions(server, granted).await {
        count if count == wanted => Ok(()),
        count => Err(std::io::Error::other(count)),
    };
    eventually(TEST_TIMEOUT, count).await;
}

#[tokio::test]
async fn a_release_sends_a_notification_only_while_a_listener_exists() {
    let server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    // Receives all notifications, but holds no presence lock.
    let mut observer = PgListener::connect(&server.url()).await.unwrap();
    observer.listen(CHANNEL).await.unwrap();

    let (unnotified, notified) = (claim("unnotified"), claim("notified"));
    grant(&backend, &unnotified).await;
    assert_eq!(backend.release(&unnotified).await.unwrap(), Release::Freed);

    grant(&backend, &notified).await;
    let waiter = claim("notified");
    let held = busy(&backend, &waiter).await;
    let waiting = tokio::spawn({
        let backend = Arc::clone(&backend);
        async move { backend.wait(&waiter, &held).await }
    });
    wait_for_presence_sessions(&server, true, "1").await;
    assert_eq!(backend.release(&notified).await.unwrap(), Release::Freed);
    timeout(TEST_TIMEOUT, waiting).await.expect("the waiter is woken").unwrap();
    // The first message received is the first one sent.
    let message = loop {
        let message = timeout(TEST_TIMEOUT, observer.recv()).await.unwrap().unwrap();
        // The listener verifies that it receives its own notifications.
        if !message.payload().starts_with("proof ") {
            break message;
        }
    };
    let id = server
        .sql("SELECT encode(id, 'hex') FROM lock_registry_locks WHERE key = 'notified'")
        .await;
    assert_eq!(
        message.payload(),
        &id.unwrap()[..32],
        "no notification was sent for the first release"
    );
}

#[tokio::test]
async fn a_listener_that_starts_during_a_release_polls_after_it() {
    let server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    let (holder, waiter) = (claim("k"), claim("k"));
    grant(&backend, &holder).await;
    // A release that has found no listener and is not committed. It takes the presence locks until
    // its end.
    let mut releasing = app_connection(&server).await;
    run(
        &mut releasing,
        &format!(
            "BEGIN; UPDATE lock_registry_locks SET claim = NULL; SELECT pg_advisory_xact_lock(presence_lock) FROM {PRESENCE_LOCKS}"
        ),
    )
    .await;

    let held = busy(&backend, &waiter).await;
    let mut waiting = tokio::spawn({
        let backend = Arc::clone(&backend);
        let waiter = waiter.clone();
        async move { backend.wait(&waiter, &held).await }
    });
    wait_for_presence_sessions(&server, false, "1").await;
    let early = timeout(Duration::from_millis(50), &mut waiting).await;
    assert!(early.is_err(), "the release is not committed yet");
    run(&mut releasing, "COMMIT").await;
    timeout(TEST_TIMEOUT, waiting).await.expect("the waiter polls").unwrap();
    grant(&backend, &waiter).await;
}
