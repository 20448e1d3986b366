//! Waits in tests, for a condition or for a future. Each wait has a limit; no wait is a bare sleep.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

/// The first pause between two checks of the condition. It doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The result of a condition of [`eventually`]: `bool`, `Option` or `Result`.
pub trait ConditionResult {
    /// The value that is returned once the condition holds.
    type Value;

    /// Returns the value if the condition holds.
    ///
    /// # Errors
    /// Returns the reason why the condition does not hold yet, for the message of a failing test.
    fn into_result(self) -> Result<Self::Value, String>;
}

impl ConditionResult for bool {
    type Value = ();

    fn into_result(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("it is still false".into()) }
    }
}

impl<T> ConditionResult for Option<T> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        self.ok_or_else(|| "it is still None".into())
    }
}

impl<T, E: fmt::Display> ConditionResult for Result<T, E> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        self.map_err(|error| error.to_string())
    }
}

/// Checks `condition` until it holds, and returns its value.
///
/// Use it for states that emit no event; wait for an event where one exists. Choose `limit` for the
/// slowest machine, because it costs time only when the test fails. On paused time, the pauses
/// between checks take no time.
///
/// # Panics
/// Panics if `limit` expires, with the caller's line and the last result. The condition is checked
/// once more after the limit, so that a test that was not scheduled in time does not fail.
#[track_caller]
pub fn eventually<S: ConditionResult>(
    limit: Duration,
    mut condition: impl AsyncFnMut() -> S,
) -> impl Future<Output = S::Value> {
    // Captured here because the future is polled from another location.
    let caller = Location::caller();
    async move {
        let deadline = Instant::now() + limit;
        let mut pause = PAUSE_MIN;
        loop {
            let is_last_check = Instant::now() >= deadline;
            match condition().await.into_result() {
                Ok(value) => return value,
                Err(why) if is_last_check => panic!("{caller}: not within {limit:?}: {why}"),
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Awaits `future` for at most `limit`.
///
/// # Panics
/// Panics with the caller's line if `limit` expires.
#[track_caller]
pub fn within<F: Future>(limit: Duration, future: F) -> impl Future<Output = F::Output> {
    let caller = Location::caller();
    async move {
        match timeout(limit, future).await {
            Ok(output) => output,
            Err(_) => panic!("{caller}: not within {limit:?}"),
        }
    }
}

/// An expected event did not occur in time, or can no longer occur. Displays as its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeoutError {
    message: String,
}

impl TimeoutError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

impl fmt::Display for TimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TimeoutError {}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn a_condition_is_checked_until_it_holds() {
        let mut checks = 0;
        let value = eventually(LONG, async || {
            checks += 1;
            (checks == 20).then_some("done")
        })
        .await;
        assert_eq!((value, checks), ("done", 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_condition_is_checked_once_with_a_limit_of_zero() {
        eventually(Duration::ZERO, async || true).await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "not within 1s: the last reason")]
    async fn a_condition_that_never_holds_panics_with_its_last_answer() {
        eventually(Duration::from_secs(1), async || Err::<(), _>("the last reason")).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_panic_names_the_line_of_the_test() {
        let waiting = tokio::task::JoinSet::from_iter([within(LONG, pending::<()>())]);
        let panic = waiting.join_next_panic().await;
        assert!(panic.contains(file!()), "{panic}");
    }

    trait PanicText {
        async fn join_next_panic(self) -> String;
    }

    impl PanicText for tokio::task::JoinSet<()> {
        async fn join_next_panic(mut self) -> String {
            let failed = self.join_next().await.unwrap().unwrap_err();
            *failed.into_panic().downcast::<String>().unwrap()
        }
    }
}
