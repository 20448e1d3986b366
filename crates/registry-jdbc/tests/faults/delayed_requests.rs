//! A request that reaches the server after the release of its own retry leaves no lock behind.

use registry_core::Key;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::{eventually, within};
use std::time::Duration;

use crate::server::{Server, ServerKind, TEST_TIMEOUT, backend, registry};

const KEY: &str = "orders/42";
/// So long that only a release can free the key in time.
const ENDLESS: Duration = Duration::from_secs(600);

/// The answer that the retry receives.
#[derive(Debug, Clone, Copy)]
enum SecondReply {
    Granted,
    Busy,
    Refused,
}

async fn a_delayed_request_leaves_no_lock(server: &Server, second: SecondReply) {
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let first_registry = registry(&server.url_via(proxy.addr()), ENDLESS).await;
    let second_registry = registry(&server.url(), ENDLESS).await;
    let watcher = backend(&server.url()).await;
    // From here on an idle connection with the statement prepared exists, so the next request is
    // the attempt.
    first_registry.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    let held = match second {
        SecondReply::Busy => Some(second_registry.obtain(KEY).lock().await.unwrap()),
        SecondReply::Granted | SecondReply::Refused => None,
    };
    if matches!(second, SecondReply::Refused) {
        proxy.set_mode(ProxyMode::Refuse).await.unwrap();
    }
    proxy.withhold_next_request();
    let tried = within(TEST_TIMEOUT, first_registry.obtain(KEY).try_lock()).await;
    match (second, tried) {
        (SecondReply::Granted, Ok(Some(guard))) => guard.unlock().await.unwrap(),
        (SecondReply::Busy, Ok(None)) | (SecondReply::Refused, Err(_)) => {}
        (_, tried) => panic!("{second:?}: {tried:?}"),
    }
    if let Some(held) = held {
        held.unlock().await.unwrap();
    }
    assert_eq!(proxy.deliver_withheld().await.unwrap(), 1, "{second:?}");
    proxy.set_mode(ProxyMode::Pass).await.unwrap();
    let key = Key::new(KEY).unwrap();
    eventually(TEST_TIMEOUT, async || {
        watcher.admin().unwrap().inspect(&key).await.unwrap().is_empty()
    })
    .await;
    let next = within(TEST_TIMEOUT, second_registry.obtain(KEY).lock()).await.unwrap();
    next.unlock().await.unwrap();
}

async fn a_request_delayed_past_the_unlock_leaves_no_lock(kind: ServerKind) {
    a_delayed_request_leaves_no_lock(&kind.start().await, SecondReply::Granted).await;
}

async fn a_request_delayed_past_a_busy_reply_leaves_no_lock(kind: ServerKind) {
    a_delayed_request_leaves_no_lock(&kind.start().await, SecondReply::Busy).await;
}

async fn a_request_delayed_past_an_error_leaves_no_lock(kind: ServerKind) {
    a_delayed_request_leaves_no_lock(&kind.start().await, SecondReply::Refused).await;
}

/// The engine retries where a backend must not.
async fn a_single_try_succeeds_over_connections_that_broke_while_idle(kind: ServerKind) {
    let server = kind.start().await;
    let first_registry = registry(&server.url(), ENDLESS).await;
    for _ in 0..3 {
        let guard = first_registry.obtain(KEY).try_lock().await.unwrap().unwrap();
        guard.unlock().await.unwrap();
        server.close_all_connections().await;
    }
}

on_both_servers! {
    a_request_delayed_past_the_unlock_leaves_no_lock,
    a_request_delayed_past_a_busy_reply_leaves_no_lock,
    a_request_delayed_past_an_error_leaves_no_lock,
    a_single_try_succeeds_over_connections_that_broke_while_idle,
}
