//! Polls servers until they reach a state. Unlike `eventually`, it returns an error at the limit,
//! because the caller knows the context.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The maximum time for servers to agree on a state. Typically they need two seconds.
const LIMIT: Duration = Duration::from_secs(90);
/// The pause between two polls.
const PAUSE: Duration = Duration::from_millis(10);

/// One wait, from its first poll to its last.
#[derive(Debug)]
pub(super) struct RetryDeadline {
    what: &'static str,
    deadline: Instant,
}

impl RetryDeadline {
    /// Starts a wait. `what` describes the expected state in the error.
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, deadline: Instant::now() + LIMIT }
    }

    /// Pauses before the next poll. Returns an error with the reason `why` once the limit has
    /// passed.
    pub(super) async fn pause_or_fail(&self, why: io::Error) -> io::Result<()> {
        if Instant::now() >= self.deadline {
            let text = format!("{} not within {LIMIT:?}: {why}", self.what);
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        sleep(PAUSE).await;
        Ok(())
    }
}

/// Creates the reason why a poll did not find the expected state.
pub(super) fn not_yet(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}
