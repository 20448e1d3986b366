//! Waiting in tests: for a condition, and for a future that must end. Always with a limit, never with a bare sleep.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

/// The first pause between two looks at the condition; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// What a condition of [`eventually`] answers: `bool`, `Option` or `Result`.
pub trait Settled {
    /// What is left when the condition holds.
    type Value;

    /// The value, or why the condition does not hold yet.
    ///
    /// # Errors
    /// Why not, as text for the message that a failing test prints.
    fn settled(self) -> Result<Self::Value, String>;
}

impl Settled for bool {
    type Value = ();

    fn settled(self) -> Result<(), String> {
        if self { Ok(()) } else { Err("it is still false".into()) }
    }
}

impl<T> Settled for Option<T> {
    type Value = T;

    fn settled(self) -> Result<T, String> {
        self.ok_or_else(|| "it is still None".into())
    }
}

impl<T, E: fmt::Display> Settled for Result<T, E> {
    type Value = T;

    fn settled(self) -> Result<T, String> {
        self.map_err(|error| error.to_string())
    }
}

/// Looks at `condition` until it is settled, and gives its value.
///
/// For states that nothing announces; prefer an event where there is one. Choose `limit` for the slowest machine:
/// it costs time only when the test fails. On paused time the pauses between two looks cost nothing at all.
///
/// # Panics
/// When `limit` is over, naming the caller's line and the last answer. A last look is taken after the limit, so that
/// a test that was not scheduled for a while does not fail for it.
#[track_caller]
pub fn eventually<S: Settled>(
    limit: Duration,
    mut condition: impl AsyncFnMut() -> S,
) -> impl Future<Output = S::Value> {
    // Taken here because the future is polled from elsewhere.
    let caller = Location::caller();
    async move {
        let deadline = Instant::now() + limit;
        let mut pause = PAUSE_MIN;
        loop {
            let last_look = Instant::now() >= deadline;
            match condition().await.settled() {
                Ok(value) => return value,
                Err(why) if last_look => panic!("{caller}: not within {limit:?}: {why}"),
                Err(_) => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Awaits `future`, but no longer than `limit`.
///
/// # Panics
/// When `limit` is over, naming the caller's line.
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

/// Something that was waited for did not happen in time, or can no longer happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotInTime {
    what: String,
}

impl NotInTime {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into() }
    }
}

impl fmt::Display for NotInTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for NotInTime {}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn a_condition_is_looked_at_until_it_holds() {
        let mut looks = 0;
        let value = eventually(LONG, async || {
            looks += 1;
            (looks == 20).then_some("done")
        })
        .await;
        assert_eq!((value, looks), ("done", 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_condition_is_looked_at_once_even_without_time() {
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
