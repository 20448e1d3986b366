//! The network delays an acquisition request, and the client's connection is reset. The engine
//! repeats the request. The delayed one reaches the server after the repeated one was answered, and
//! leaves no lock behind.

use std::time::Duration;

use registry_core::Key;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::{eventually, within};

use super::server::{Server, ServerKind, TEST_TIMEOUT, backend, registry};

const KEY: &str = "orders/42";
/// So long that only a release can free the key in time.
const LONG_LEASE: Duration = Duration::from_secs(600);

/// The reply to the repeated request.
#[derive(Debug, Clone, Copy)]
enum RepeatedReply {
    Granted,
    Busy,
    Refused,
}

async fn a_delayed_request_leaves_no_lock(server: &Server, reply: RepeatedReply) {
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let first_registry = registry(&server.url_via(proxy.addr()), LONG_LEASE).await;
    let second_registry = registry(&server.url(), LONG_LEASE).await;
    let watcher = backend(&server.url()).await;
    // From here on an idle connection with the statement prepared exists, so the next request is
    // the attempt.
    first_registry.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    let held = match reply {
        RepeatedReply::Busy => Some(second_registry.obtain(KEY).lock().await.unwrap()),
        RepeatedReply::Granted | RepeatedReply::Refused => None,
    };
    if matches!(reply, RepeatedReply::Refused) {
        proxy.set_mode(ProxyMode::Refuse).await.unwrap();
    }
    proxy.withhold_next_request();
    let attempt = within(TEST_TIMEOUT, first_registry.obtain(KEY).try_lock()).await;
    match (reply, attempt) {
        (RepeatedReply::Granted, Ok(Some(guard))) => guard.unlock().await.unwrap(),
        (RepeatedReply::Busy, Ok(None)) | (RepeatedReply::Refused, Err(_)) => {}
        (_, attempt) => panic!("{reply:?}: {attempt:?}"),
    }
    if let Some(held) = held {
        held.unlock().await.unwrap();
    }
    assert_eq!(proxy.deliver_withheld().await.unwrap(), 1, "{reply:?}");
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
    a_delayed_request_leaves_no_lock(&kind.start().await, RepeatedReply::Granted).await;
}

async fn a_request_delayed_past_a_busy_reply_leaves_no_lock(kind: ServerKind) {
    a_delayed_request_leaves_no_lock(&kind.start().await, RepeatedReply::Busy).await;
}

async fn a_request_delayed_past_an_error_leaves_no_lock(kind: ServerKind) {
    a_delayed_request_leaves_no_lock(&kind.start().await, RepeatedReply::Refused).await;
}

/// The connections broke while idle. The backend must not repeat an attempt that may have been
/// executed; the engine does, even for `try_lock`.
async fn a_single_try_succeeds_over_connections_that_broke_while_idle(kind: ServerKind) {
    let server = kind.start().await;
    let first_registry = registry(&server.url(), LONG_LEASE).await;
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
