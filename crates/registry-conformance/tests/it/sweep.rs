//! Checks that `sweep` drops a future after each possible number of polls, so that a test can
//! detect what the dropped future leaks.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use registry_conformance::sweep::{SweepOutcome, sweep};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::yield_now;
use tokio::time::sleep;

async fn three_steps() -> &'static str {
    yield_now().await;
    sleep(Duration::from_secs(5)).await;
    yield_now().await;
    "done"
}

#[tokio::test(start_paused = true)]
async fn every_number_of_polls_is_swept_with_and_without_a_wake_up() {
    let mut outcomes = Vec::new();
    let polls = sweep(async || three_steps(), 10, async |outcome| outcomes.push(outcome)).await;
    assert_eq!(polls, 4);
    let (dropped, woken) =
        (|polls| SweepOutcome::Dropped { polls }, |polls| SweepOutcome::DroppedWoken { polls });
    assert_eq!(
        outcomes,
        [
            dropped(0),
            dropped(1),
            woken(1),
            dropped(2),
            woken(2),
            dropped(3),
            woken(3),
            SweepOutcome::Completed { polls: 4, output: "done" },
        ]
    );
}

#[tokio::test]
async fn sweep_works_with_real_input_and_output() {
    let polls = sweep(
        async || async {
            let (sender, receiver) = oneshot::channel();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                sender.send("from a thread")
            });
            receiver.await
        },
        10,
        async |_| {},
    )
    .await;
    assert!(polls >= 1);
}

/// Takes a permit at its first poll, and returns it when the answer arrives. The permit leaks if
/// the future is dropped before that.
async fn leaky(permits: &Semaphore, answer: oneshot::Receiver<()>) {
    permits.forget_permits(1);
    // If the future is dropped here, even with the answer already available, the permit is never
    // added back.
    if answer.await.is_ok() {
        permits.add_permits(1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_leak_on_drop_is_found() {
    let leaks = AtomicUsize::new(0);
    let permits = Semaphore::new(1);
    #[expect(
        clippy::async_yields_async,
        reason = "the sweep polls the created future; creating it must not"
    )]
    let make = async || {
        let (answer_sender, answer) = oneshot::channel();
        let permits = &permits;
        async move {
            let answering = async move {
                yield_now().await;
                answer_sender.send(())
            };
            futures_util::future::join(leaky(permits, answer), answering).await.0
        }
    };
    sweep(make, 10, async |_| {
        if permits.available_permits() == 0 {
            leaks.fetch_add(1, Ordering::Relaxed);
            permits.add_permits(1);
        }
    })
    .await;
    assert!(leaks.into_inner() > 0, "the leak was not found");
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_never_woken_is_a_failure() {
    let swept = AssertUnwindSafe(sweep(async || std::future::pending::<()>(), 10, async |_| {}));
    assert!(swept.catch_unwind().await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_future_that_does_not_complete_in_time_is_a_failure() {
    let endless = async || async {
        loop {
            yield_now().await;
        }
    };
    let swept = AssertUnwindSafe(sweep::<_, ()>(endless, 10, async |_| {}));
    assert!(swept.catch_unwind().await.is_err());
}
