//! Looking again until servers have settled. As `eventually`, but trouble is an error: the caller knows what it was doing.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long servers may take to agree on something. Usually it takes two seconds.
const LIMIT: Duration = Duration::from_secs(90);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// One wait, from its first look to its last.
#[derive(Debug)]
pub(super) struct Waiting {
    what: &'static str,
    deadline: Instant,
}

impl Waiting {
    /// `what` is what did not come to pass, should it come to that.
    pub(super) fn new(what: &'static str) -> Self {
        Self { what, deadline: Instant::now() + LIMIT }
    }

    /// Pauses before the next look, or gives up and tells why the last one was not to the liking.
    pub(super) async fn again(&self, why: io::Error) -> io::Result<()> {
        if Instant::now() >= self.deadline {
            let text = format!("{} not within {LIMIT:?}: {why}", self.what);
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        sleep(PAUSE).await;
        Ok(())
    }
}

/// Why a look was not to the liking.
pub(super) fn not_yet(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}
