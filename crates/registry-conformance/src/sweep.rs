//! Drops a future after every possible number of polls, so that every cancellation point is tested.
//! Does not depend on locks: the caller checks the state after each drop.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// How long a pending future may stay without a wake-up. After this limit, the sweep panics,
/// because probably no event will ever wake the future.
const WAKE_LIMIT: Duration = Duration::from_secs(60);

/// How one run of a swept future ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SweepOutcome<T> {
    /// The future was dropped right after this many polls, or before the first one.
    Dropped {
        /// The number of polls.
        polls: usize,
    },
    /// The future was dropped after this many polls and after the wake-up for the next poll. The
    /// awaited event had occurred, but the future had not observed it.
    DroppedWoken {
        /// The number of polls.
        polls: usize,
    },
    /// The future completed.
    Completed {
        /// The number of polls.
        polls: usize,
        /// The output of the future.
        output: T,
    },
}

/// Drops futures of `make` after each number of polls, until one of them completes. Returns the
/// number of polls of the completed future.
///
/// For n = 0, 1, …, one future is dropped right after its n-th poll. For n > 0, another one is
/// dropped after the wake-up that follows this poll. `check` runs after every drop and after the
/// completion.
///
/// Between two polls, the sweep waits for the future's own wake-up. It therefore works with real
/// I/O and with paused time.
///
/// # Cancel safety
/// Dropping the sweep drops the future that it polls.
///
/// # Panics
/// If a future is not complete after `polls_max` polls, or is pending for a minute without a
/// wake-up.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use registry_conformance::sweep::{SweepOutcome, sweep};
///
/// let mut dropped = 0;
/// let polls = sweep(
///     async || async { tokio::task::yield_now().await },
///     10,
///     async |end| if !matches!(end, SweepOutcome::Completed { .. }) { dropped += 1 },
/// )
/// .await;
/// assert_eq!(polls, 2);
/// assert_eq!(dropped, 3, "before the first poll, after it, and after the wake-up for the second");
/// # }
/// ```
pub async fn sweep<Fut, T>(
    mut make: impl AsyncFnMut() -> Fut,
    polls_max: usize,
    mut check: impl AsyncFnMut(SweepOutcome<T>),
) -> usize
where
    Fut: Future<Output = T>,
{
    for polls in 0..=polls_max {
        // A future that was never polled is never woken, so it is dropped only once.
        for woken in if polls == 0 { &[false][..] } else { &[false, true][..] } {
            let end = run(make().await, polls, *woken).await;
            let completed = match &end {
                SweepOutcome::Completed { polls, .. } => Some(*polls),
                _ => None,
            };
            check(end).await;
            if let Some(polls) = completed {
                return polls;
            }
        }
    }
    panic!("the future does not complete within {polls_max} polls");
}

/// Polls `future` at most `polls_max` times, then drops it. If `woken`, waits for the next wake-up
/// first.
async fn run<T>(future: impl Future<Output = T>, polls_max: usize, woken: bool) -> SweepOutcome<T> {
    let signal = Arc::new(TestWaker(Notify::new()));
    let waker = Waker::from(Arc::clone(&signal));
    // Without `unconstrained`, tokio's cooperative budget would add polls that depend on other
    // futures of the task.
    let mut future = pin!(tokio::task::unconstrained(future));
    for polls in 1..=polls_max {
        if polls > 1 {
            signal.woken().await;
        }
        // The future has its own waker, so that wake-ups of the sweep's task cause no polls.
        let poll = poll_fn(|_| Poll::Ready(future.as_mut().poll(&mut Context::from_waker(&waker))));
        if let Poll::Ready(output) = poll.await {
            return SweepOutcome::Completed { polls, output };
        }
    }
    if woken {
        signal.woken().await;
        SweepOutcome::DroppedWoken { polls: polls_max }
    } else {
        SweepOutcome::Dropped { polls: polls_max }
    }
}

/// A waker whose wake-ups can be awaited.
struct TestWaker(Notify);

impl TestWaker {
    async fn woken(&self) {
        timeout(WAKE_LIMIT, self.0.notified())
            .await
            .expect("a pending future is woken within `WAKE_LIMIT`");
    }
}

impl Wake for TestWaker {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}
