//! A request that reaches the server after the release of its own retry leaves no lock behind.

use registry_core::{Key, LockRegistry};
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::{eventually, within};
use std::time::Duration;

use crate::server::{Kind, LONG, Server, backend, registry};

const KEY: &str = "orders/42";
/// So long that only a release can free the key in time.
const ENDLESS: Duration = Duration::from_secs(600);

/// The answer that the retry receives.
#[derive(Debug, Clone, Copy)]
enum Second {
    Granted,
    Busy,
    Refused,
}

async fn a_request_that_arrives_late_leaves_no_lock(server: &Server, second: Second) {
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let ours = registry(&server.url_by(proxy.addr()), ENDLESS).await;
    let theirs = registry(&server.url(), ENDLESS).await;
    let watcher = backend(&server.url()).await;
    // From here on an idle connection with the statement prepared exists, so the next request is
    // the attempt.
    ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    let held = match second {
        Second::Busy => Some(theirs.obtain(KEY).lock().await.unwrap()),
        Second::Granted | Second::Refused => None,
    };
    if matches!(second, Second::Refused) {
        proxy.set_mode(Mode::Refuse).await.unwrap();
    }
    proxy.strand_next_request();
    let tried = within(LONG, ours.obtain(KEY).try_lock()).await;
    match (second, tried) {
        (Second::Granted, Ok(Some(guard))) => guard.unlock().await.unwrap(),
        (Second::Busy, Ok(None)) | (Second::Refused, Err(_)) => {}
        (_, tried) => panic!("{second:?}: {tried:?}"),
    }
    if let Some(held) = held {
        held.unlock().await.unwrap();
    }
    assert_eq!(proxy.deliver_stranded().await.unwrap(), 1, "{second:?}");
    proxy.set_mode(Mode::Pass).await.unwrap();
    let key = Key::new(KEY).unwrap();
    eventually(LONG, async || watcher.inspect(&key).await.unwrap().is_none()).await;
    let next = within(LONG, theirs.obtain(KEY).lock()).await.unwrap();
    next.unlock().await.unwrap();
}

async fn a_request_that_arrives_after_the_unlock_leaves_no_lock(kind: Kind) {
    a_request_that_arrives_late_leaves_no_lock(&kind.start().await, Second::Granted).await;
}

async fn a_request_that_arrives_after_a_busy_answer_leaves_no_lock(kind: Kind) {
    a_request_that_arrives_late_leaves_no_lock(&kind.start().await, Second::Busy).await;
}

async fn a_request_that_arrives_after_an_error_leaves_no_lock(kind: Kind) {
    a_request_that_arrives_late_leaves_no_lock(&kind.start().await, Second::Refused).await;
}

/// The engine retries where a backend must not.
async fn a_single_try_succeeds_over_connections_that_broke_while_idle(kind: Kind) {
    let server = kind.start().await;
    let ours = registry(&server.url(), ENDLESS).await;
    for _ in 0..3 {
        let guard = ours.obtain(KEY).try_lock().await.unwrap().unwrap();
        guard.unlock().await.unwrap();
        server.cut_all().await;
    }
}

on_both_servers! {
    a_request_that_arrives_after_the_unlock_leaves_no_lock,
    a_request_that_arrives_after_a_busy_answer_leaves_no_lock,
    a_request_that_arrives_after_an_error_leaves_no_lock,
    a_single_try_succeeds_over_connections_that_broke_while_idle,
}
