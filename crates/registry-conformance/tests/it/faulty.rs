//! Checks that `FaultyBackend` injects the faults of its plan and no others.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::poll;
use registry_conformance::{Fault, Faults, FaultyBackend, Operation};
use registry_core::{
    Attempt, BackendErrorKind, Busy, Claim, Key, LockAdmin, LockBackend, MemoryBackend, Release,
    Renewal,
};
use tokio::time::{Instant, timeout};

const LEASE: Duration = Duration::from_secs(30);

fn claim(key: &str) -> Claim {
    Claim::new(Key::new(key).expect("a valid key"), LEASE)
}

fn faulty_backend(store: &MemoryBackend, faults: Faults) -> FaultyBackend {
    FaultyBackend::new(Arc::new(store.clone()), faults)
}

async fn is_held(store: &MemoryBackend, key: &str) -> bool {
    !store.inspect(claim(key).key()).await.expect("the in-process store responds").is_empty()
}

#[tokio::test(start_paused = true)]
async fn a_request_with_a_lost_reply_is_executed_and_a_lost_request_is_not() {
    let store = MemoryBackend::new();
    let faults = Faults::none()
        .at_call(Operation::Acquire, 1, Fault::LoseReply)
        .at_call(Operation::Acquire, 2, Fault::LoseRequest)
        .at_call(Operation::Acquire, 3, Fault::Refuse)
        .at_call(Operation::Acquire, 4, Fault::Deny);
    let faulty = faulty_backend(&store, faults);
    let mut outcomes = Vec::new();
    for key in ["a", "b", "c", "d", "e"] {
        let answer = faulty.try_acquire(&claim(key)).await;
        let error = answer.err().map(|error| (error.kind(), error.refused()));
        outcomes.push((error, is_held(&store, key).await));
    }
    assert_eq!(
        outcomes,
        [
            (Some((BackendErrorKind::Transient, false)), true),
            (Some((BackendErrorKind::Transient, false)), false),
            (Some((BackendErrorKind::Transient, true)), false),
            (Some((BackendErrorKind::Denied, true)), false),
            (None, true),
        ]
    );
    assert_eq!((faulty.calls(Operation::Acquire), faulty.injected_faults()), (5, 4));
}

#[tokio::test(start_paused = true)]
async fn a_repetition_is_executed_twice_and_answered_once() {
    let store = MemoryBackend::new();
    let faulty = faulty_backend(&store, Faults::none().always(Operation::Release, Fault::Repeat));
    let held = claim("a");
    faulty.try_acquire(&held).await.unwrap();
    assert_eq!(faulty.release(&held).await.unwrap(), Release::Freed, "the first answer counts");
    assert_eq!(faulty.calls(Operation::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn a_late_repetition_takes_effect_after_everything_else() {
    let store = MemoryBackend::new();
    let late = Fault::RepeatLate(Duration::from_secs(5));
    let faulty = faulty_backend(&store, Faults::none().at_call(Operation::Acquire, 1, late));
    let held = claim("a");
    faulty.try_acquire(&held).await.unwrap();
    assert_eq!(faulty.release(&held).await.unwrap(), Release::Freed);
    assert!(!is_held(&store, "a").await);
    faulty.wait_for_late_repetitions().await;
    assert!(is_held(&store, "a").await, "the repeated acquire took effect after the release");
}

#[tokio::test(start_paused = true)]
async fn delays_take_their_stated_time_and_a_new_plan_ends_them() {
    let store = MemoryBackend::new();
    let faults = Faults::none()
        .at_call(Operation::Acquire, 1, Fault::DelayRequest(Duration::from_secs(2)))
        .at_call(Operation::Acquire, 1, Fault::DelayReply(Duration::from_secs(3)))
        .at_call(Operation::Acquire, 2, Fault::DelayRequest(Duration::from_secs(86_400)));
    let faulty = faulty_backend(&store, faults);
    let started = Instant::now();
    let (first, other) = (claim("a"), claim("b"));
    {
        let mut acquiring = pin!(faulty.try_acquire(&first));
        assert!(timeout(Duration::from_secs(1), acquiring.as_mut()).await.is_err());
        assert!(!is_held(&store, "a").await, "the request is still on its way");
        assert!(timeout(Duration::from_secs(2), acquiring.as_mut()).await.is_err());
        assert!(is_held(&store, "a").await, "the reply is still on its way");
        acquiring.await.unwrap();
    }
    assert_eq!(started.elapsed().as_secs(), 5);
    let mut hanging = pin!(faulty.try_acquire(&other));
    assert!(poll!(hanging.as_mut()).is_pending());
    faulty.clear_faults();
    assert!(matches!(hanging.await, Ok(Attempt::Granted(_))));
    assert_eq!(started.elapsed().as_secs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_fails_has_an_answer_for_each_claim() {
    let store = MemoryBackend::new();
    let faulty =
        faulty_backend(&store, Faults::none().at_call(Operation::Renew, 1, Fault::LoseReply));
    let claims = [claim("a"), claim("b"), claim("c")];
    for claim in &claims {
        faulty.try_acquire(claim).await.unwrap();
    }
    assert!(faulty.renew(&claims).await.iter().all(Result::is_err));
    let answers = faulty.renew(&claims).await;
    assert_eq!(answers.len(), 3);
    assert!(answers.iter().all(|answer| matches!(answer, Ok(Renewal::Renewed(_)))));
}

#[tokio::test(start_paused = true)]
async fn wake_ups_are_lost_or_premature() {
    let store = MemoryBackend::new();
    let faulty = faulty_backend(&store, Faults::none());
    let (holder, waiter) = (claim("a"), claim("a"));
    faulty.try_acquire(&holder).await.unwrap();
    let Attempt::Busy(busy) = faulty.try_acquire(&waiter).await.unwrap() else {
        panic!("two claims hold")
    };
    faulty.apply(Faults::none().always(Operation::Wait, Fault::WakeEarly(Duration::from_secs(1))));
    timeout(Duration::from_secs(2), faulty.wait(&waiter, &busy)).await.expect("no early wake-up");
    faulty.apply(Faults::none().always(Operation::Wait, Fault::LoseWake));
    let mut waiting = pin!(faulty.wait(&waiter, &busy));
    assert!(poll!(waiting.as_mut()).is_pending());
    store.release(&holder).await.unwrap();
    assert!(
        timeout(Duration::from_secs(3_600), waiting).await.is_err(),
        "the wake-up was not lost"
    );
    faulty.clear_faults();
    timeout(Duration::from_secs(1), faulty.wait(&waiter, &Busy::new()))
        .await
        .expect("the key is free");
}

#[tokio::test(start_paused = true)]
async fn an_outage_refuses_every_request_until_the_faults_are_cleared() {
    let store = MemoryBackend::new();
    let faulty = faulty_backend(&store, Faults::outage());
    let claim = claim("a");
    assert!(faulty.try_acquire(&claim).await.unwrap_err().refused());
    assert!(faulty.release(&claim).await.unwrap_err().refused());
    assert!(faulty.inspect(claim.key()).await.unwrap_err().refused());
    assert!(faulty.force_release(claim.key()).await.unwrap_err().refused());
    assert!(faulty.list().await.is_err() && faulty.diagnose().await.is_err());
    assert_eq!(faulty.requests(), 6);
    faulty.clear_faults();
    assert!(matches!(faulty.try_acquire(&claim).await, Ok(Attempt::Granted(_))));
}
