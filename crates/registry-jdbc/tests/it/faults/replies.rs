//! Requests that the server executed, but whose replies were lost, truncated or late.

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, Release};
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::workload::{
    assert_releases_without_reply_free_their_keys, end_acquisition_without_reply,
};
use registry_testkit::{error_text, eventually};

use super::server::{ServerKind, TEST_TIMEOUT, backend, registry};
use super::workload::{LEASE, Workload};

/// So long that only a release can free the key in time.
const LONG_LEASE: Duration = Duration::from_secs(600);
const ROUNDS: u32 = 10;

async fn a_grant_with_a_lost_reply_is_returned_or_released(kind: ServerKind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let second_registry = registry(&server.url(), LONG_LEASE).await;
    let watcher = backend(&server.url()).await;
    for round in 0..ROUNDS {
        let key = format!("reply/{round}");
        // A new registry in each round: the proxy would otherwise cut off the reply to a pending
        // release of the previous round.
        let first_registry = registry(&server.url_via(proxy.addr()), LONG_LEASE).await;
        // From here on an idle connection with the statement prepared exists.
        first_registry.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
        let lock = first_registry.obtain(&key);
        let acquiring = tokio::spawn(async move { lock.lock().await });
        // The server has granted the claim, but the reply was lost.
        let stored_key = Key::new(&key).unwrap();
        eventually(TEST_TIMEOUT, async || {
            !watcher.admin().unwrap().inspect(&stored_key).await.unwrap().is_empty()
        })
        .await;
        end_acquisition_without_reply(round, &proxy, acquiring, &second_registry, &key).await;
    }
}

/// The connection was idle before the attempt. If the backend repeated the attempt, the new
/// connection would break before the request is sent. That error alone would count as refused.
async fn an_attempt_that_may_have_been_executed_is_never_refused(kind: ServerKind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let proxied = backend(&server.url_via(proxy.addr())).await;
    let claim = |key: &str| Claim::new(Key::new(key).unwrap(), LONG_LEASE);
    // Prepares the statement, so that the next request is the attempt itself.
    assert!(matches!(proxied.try_acquire(&claim("other")).await.unwrap(), Attempt::Granted(_)));
    proxy.set_mode(ProxyMode::ResetAfterRequest).await.unwrap();
    let held = claim("k");
    let error = proxied.try_acquire(&held).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_text(&error));
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    assert!(
        !proxied.admin().unwrap().inspect(held.key()).await.unwrap().is_empty(),
        "the attempt had arrived"
    );
    assert_eq!(proxied.release(&held).await.unwrap(), Release::Freed);
}

async fn a_release_with_a_lost_reply_frees_the_key_and_is_no_loss(kind: ServerKind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let first_registry = registry(&server.url_via(proxy.addr()), LONG_LEASE).await;
    let second_registry = registry(&server.url(), LONG_LEASE).await;
    assert_releases_without_reply_free_their_keys(
        ROUNDS,
        &proxy,
        &first_registry,
        &second_registry,
    )
    .await;
}

async fn lost_truncated_or_late_replies_violate_no_property(kind: ServerKind) {
    let server = kind.start().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let urls: Vec<_> = proxies.iter().map(|proxy| server.url_via(proxy.addr())).collect();
    let workload = Workload::begin_with_urls(&urls, LEASE).await;
    workload.disturb_connections(&proxies, Duration::ZERO).await;
    workload.end(&server).await.assert_guarantees();
}

on_both_servers! {
    a_grant_with_a_lost_reply_is_returned_or_released,
    an_attempt_that_may_have_been_executed_is_never_refused,
    a_release_with_a_lost_reply_frees_the_key_and_is_no_loss,
    lost_truncated_or_late_replies_violate_no_property,
}
