//! Requests that the server executed but whose replies were lost.

use std::time::Duration;

use registry_core::{Attempt, Claim, Key, LockError, LockRegistry, Release};
use registry_testkit::proxy::{FaultProxy, Mode};
use registry_testkit::{error_text, eventually, within};

use crate::contest::{Contest, LEASE};
use crate::server::{Kind, LONG, backend, registry};

/// So long that only a release can free the key in time.
const ENDLESS: Duration = Duration::from_secs(600);
const ROUNDS: u32 = 10;

async fn a_grant_whose_reply_was_lost_is_taken_up_or_given_back(kind: Kind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let theirs = registry(&server.url(), ENDLESS).await;
    let watcher = backend(&server.url()).await;
    for round in 0..ROUNDS {
        let key = format!("reply/{round}");
        // A new registry in each round: pending releases of the previous one have replies of their
        // own, which the proxy would cut off instead.
        let ours = registry(&server.url_by(proxy.addr()), ENDLESS).await;
        // From here on a connection exists, with the statement prepared.
        ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let lock = ours.obtain(&key);
        let taking = tokio::spawn(async move { lock.lock().await });
        // The server has granted the claim, but the reply was lost.
        let key = Key::new(&key).unwrap();
        eventually(LONG, async || watcher.inspect(&key).await.unwrap().is_some()).await;
        if round % 2 == 0 {
            proxy.set_mode(Mode::Pass).await.unwrap();
            let guard = within(LONG, taking).await.unwrap().unwrap();
            guard.unlock().await.unwrap();
        } else {
            taking.abort();
            proxy.set_mode(Mode::Pass).await.unwrap();
        }
        let next = within(LONG, theirs.obtain(key.as_str()).lock()).await.unwrap();
        next.unlock().await.unwrap();
    }
}

/// The engine retries over a new connection, which breaks before the request is sent. That alone
/// would count as refused.
async fn an_attempt_that_may_have_got_through_is_never_called_refused(kind: Kind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let far = backend(&server.url_by(proxy.addr())).await;
    let claim = |key: &str| Claim::new(Key::new(key).unwrap(), ENDLESS);
    // Prepares the statement, so that the next request is the attempt itself.
    assert!(matches!(far.try_acquire(&claim("other")).await.unwrap(), Attempt::Granted(_)));
    proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
    let held = claim("k");
    let error = far.try_acquire(&held).await.unwrap_err();
    assert!(error.is_retryable() && !error.refused(), "{}", error_text(&error));
    proxy.set_mode(Mode::Pass).await.unwrap();
    assert!(far.inspect(held.key()).await.unwrap().is_some(), "the attempt had arrived");
    assert_eq!(far.release(&held).await.unwrap(), Release::Freed);
}

async fn a_release_whose_reply_was_lost_frees_the_key_and_is_no_loss(kind: Kind) {
    let server = kind.start().await;
    let proxy = FaultProxy::start(server.addr()).unwrap();
    let ours = registry(&server.url_by(proxy.addr()), ENDLESS).await;
    let theirs = registry(&server.url(), ENDLESS).await;
    ours.obtain("before").lock().await.unwrap().unlock().await.unwrap();
    for round in 0..ROUNDS {
        let key = format!("reply/{round}");
        let guard = ours.obtain(&key).lock().await.unwrap();
        let token = guard.fencing_token();
        proxy.set_mode(Mode::ResetAfterRequest).await.unwrap();
        let releasing = tokio::spawn(async move { guard.unlock().await });
        let next = within(LONG, theirs.obtain(&key).lock()).await.unwrap();
        assert!(next.fencing_token() > token);
        proxy.set_mode(Mode::Pass).await.unwrap();
        // Either the store has verified that the key is free, or the outcome is unknown. It never
        // reports a loss.
        let released = within(LONG, releasing).await.unwrap();
        assert!(!matches!(released, Err(LockError::Lost { .. })), "{released:?}");
        ours.idle().await;
        assert!(next.is_held());
        next.renew(ENDLESS).await.unwrap();
        next.unlock().await.unwrap();
    }
}

async fn replies_that_are_lost_cut_or_late_break_no_promise(kind: Kind) {
    let server = kind.start().await;
    let proxies: Vec<_> = (0..3).map(|_| FaultProxy::start(server.addr()).unwrap()).collect();
    let ways: Vec<_> = proxies.iter().map(|proxy| server.url_by(proxy.addr())).collect();
    let contest = Contest::begin_by(&ways, LEASE).await;
    let faults = [
        Mode::ResetAfterRequest,
        Mode::CutAfter { reply_bytes: 40 },
        Mode::DropReplies,
        Mode::HoldReplies,
        Mode::BlackHole,
        Mode::HalfClose,
        Mode::Refuse,
        Mode::Delay(Duration::from_millis(100)),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let proxy = &proxies[number % proxies.len()];
        proxy.set_mode(fault).await.unwrap();
        if fault == Mode::Refuse {
            proxy.cut_all().await;
        }
        contest.goes_on().await;
        proxy.set_mode(Mode::Pass).await.unwrap();
        contest.goes_on().await;
    }
    contest.end(&server).await.assert_flawless();
}

on_both_servers! {
    a_grant_whose_reply_was_lost_is_taken_up_or_given_back,
    an_attempt_that_may_have_got_through_is_never_called_refused,
    a_release_whose_reply_was_lost_frees_the_key_and_is_no_loss,
    replies_that_are_lost_cut_or_late_break_no_promise,
}
