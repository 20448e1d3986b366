//! Polls servers until they reach a state. Unlike `eventually`, `retry` returns an error at the
//! limit instead of panicking.

use std::io;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The maximum time for servers to agree on a state. Typically they need two seconds; after a
/// failover by sentinels, they need up to twenty.
const LIMIT: Duration = Duration::from_secs(90);
/// The pause between two polls.
const PAUSE: Duration = Duration::from_millis(10);

/// Calls `check` until it returns a value. Once the limit has passed, returns an error with the
/// expected state `what` and the last error of `check`.
///
/// Not generic over `AsyncFnMut`, because callers need futures that are `Send`.
pub(crate) async fn retry<T, F: Future<Output = io::Result<T>>>(
    what: &str,
    mut check: impl FnMut() -> F,
) -> io::Result<T> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match check().await {
            Ok(value) => return Ok(value),
            Err(why) if Instant::now() >= deadline => {
                let text = format!("not within {LIMIT:?}: {what}: {why}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            Err(_) => sleep(PAUSE).await,
        }
    }
}
