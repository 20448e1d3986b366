//! The recipients of release notifications, and releases without listeners.

use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, Release};
use registry_jdbc::sqlx::postgres::PgListener;
use registry_testkit::eventually;
use registry_testkit::postgres::PostgresServer;
use tokio::time::timeout;

use crate::common::{TEST_TIMEOUT, backend, busy, claim, config, data, grant, run, server};

/// The channel of releases in the namespace "default": the first bytes of the SHA-256 of its name.
const CHANNEL: &str = "lock_registry_37a8eec1ce19687d";

/// The 16 advisory locks of a listener of that channel. They share all bits of the channel name but
/// the last four.
const MARKS: &str = "generate_series(x'37a8eec1ce196870'::bit(64)::bigint, x'37a8eec1ce19687f'::bit(64)::bigint) AS mark";

/// The number of sessions that have an advisory lock, or with `false` wait for one.
async fn sessions_with_marks(server: &PostgresServer, granted: bool) -> String {
    let count = format!(
        "SELECT count(DISTINCT pid) FROM pg_locks WHERE locktype = 'advisory' AND granted = {granted}"
    );
    server.sql(&count).await.unwrap()
}

async fn until_sessions_with_marks(server: &PostgresServer, granted: bool, wanted: &str) {
    let count = async || match sessions_with_marks(server, granted).await {
        count if count == wanted => Ok(()),
        count => Err(std::io::Error::other(count)),
    };
    eventually(TEST_TIMEOUT, count).await;
}

#[tokio::test]
async fn a_release_sends_a_notification_only_while_a_listener_exists() {
    let server = server().await;
    let backend = Arc::new(backend(config(&server)).await);
    // Receives all notifications, but sets no mark.
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
    until_sessions_with_marks(&server, true, "1").await;
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
    // An uncommitted release that has found no listener.
    let mut releasing = data(&server).await;
    run(
        &mut releasing,
        &format!(
            "BEGIN; UPDATE lock_registry_locks SET claim = NULL; SELECT pg_advisory_xact_lock(mark) FROM {MARKS}"
        ),
    )
    .await;

    let held = busy(&backend, &waiter).await;
    let mut waiting = tokio::spawn({
        let backend = Arc::clone(&backend);
        let waiter = waiter.clone();
        async move { backend.wait(&waiter, &held).await }
    });
    until_sessions_with_marks(&server, false, "1").await;
    let early = timeout(Duration::from_millis(50), &mut waiting).await;
    assert!(early.is_err(), "the release is not committed yet");
    run(&mut releasing, "COMMIT").await;
    timeout(TEST_TIMEOUT, waiting).await.expect("the waiter polls").unwrap();
    grant(&backend, &waiter).await;
}
