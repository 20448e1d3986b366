//! Drops a future after every possible number of polls, so that cancellation is swept and not sampled.
//! Knows nothing of locks: the caller says what must be true afterwards.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// How long a pending future may go without being woken. Only a future that waits for nothing takes that long.
const WAKE_LIMIT: Duration = Duration::from_secs(60);

/// How one run of a swept future ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Swept<T> {
    /// It was dropped right after this many polls, or before the first one.
    Dropped {
        /// How often it had been polled.
        polls: usize,
    },
    /// It was dropped after this many polls and after it had been woken for the next one: what it waited for
    /// had happened, but it never saw it.
    DroppedWoken {
        /// How often it had been polled.
        polls: usize,
    },
    /// It completed by itself.
    Completed {
        /// How often it had been polled.
        polls: usize,
        /// What it gave.
        output: T,
    },
}

/// Runs fresh futures of `make` and drops each after exactly n polls, for n = 0, 1, … until one completes by itself.
/// For each n the future is dropped twice: right after its n-th poll, and once it has been woken for the next one.
/// `check` runs after every run, the completed one included.
///
/// Between two polls the future's own wake-up is awaited, so it works with real I/O as well as with paused time.
/// Gives the number of polls that the completed run took.
///
/// # Panics
/// When a future is still not complete after `polls_max` polls, or is pending and not woken for a minute.
///
/// # Cancel safety
/// Dropping the sweep drops the future that it is driving.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use registry_conformance::sweep::{Swept, sweep};
///
/// let mut dropped = 0;
/// let polls = sweep(
///     async || async { tokio::task::yield_now().await },
///     10,
///     async |end| if !matches!(end, Swept::Completed { .. }) { dropped += 1 },
/// )
/// .await;
/// assert_eq!(polls, 2);
/// assert_eq!(dropped, 3, "before the first poll, after it, and woken for the second");
/// # }
/// ```
pub async fn sweep<Fut, T>(
    mut make: impl AsyncFnMut() -> Fut,
    polls_max: usize,
    mut check: impl AsyncFnMut(Swept<T>),
) -> usize
where
    Fut: Future<Output = T>,
{
    for polls in 0..=polls_max {
        // Nothing has been polled yet, so nothing can wake: one way to drop is all there is.
        for woken in if polls == 0 { &[false][..] } else { &[false, true][..] } {
            let end = run(make().await, polls, *woken).await;
            let completed = match &end {
                Swept::Completed { polls, .. } => Some(*polls),
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

/// Polls `future` at most `polls_max` times, then drops it; if `woken`, only once it has been woken again.
async fn run<T>(future: impl Future<Output = T>, polls_max: usize, woken: bool) -> Swept<T> {
    let signal = Arc::new(Signal(Notify::new()));
    let waker = Waker::from(Arc::clone(&signal));
    let mut future = pin!(future);
    for polls in 1..=polls_max {
        if polls > 1 {
            signal.woken().await;
        }
        // The future sees its own waker, so that each of its wake-ups is one poll and no other.
        let poll = poll_fn(|_| Poll::Ready(future.as_mut().poll(&mut Context::from_waker(&waker))));
        if let Poll::Ready(output) = poll.await {
            return Swept::Completed { polls, output };
        }
    }
    if woken {
        signal.woken().await;
        Swept::DroppedWoken { polls: polls_max }
    } else {
        Swept::Dropped { polls: polls_max }
    }
}

/// Turns wake-ups into something to await.
struct Signal(Notify);

impl Signal {
    async fn woken(&self) {
        timeout(WAKE_LIMIT, self.0.notified()).await.expect("a pending future is woken some time");
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}
