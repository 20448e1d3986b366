//! Verifies with two real processes that fencing tokens keep a paused holder from writing.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use registry_core::ClaimMode;

use super::LockHolder;

const KEY: &str = "stock/42";

/// The beginning of an error of [`rejected_write`].
const REFUSED_BY_SERVER: &str = "the server refused the write";

/// Returns the error of a [`FencedWriter`](super::FencedWriter) whose request the server refused.
/// `reply` is the server's reply.
#[must_use]
pub fn rejected_write(reply: impl Display) -> Box<dyn Error + Send + Sync> {
    format!("{REFUSED_BY_SERVER}: {reply}").into()
}

/// Proves that a holder that is paused for longer than its lease cannot write afterwards. Both
/// holders have `mode`.
///
/// Starts two processes with [`LockHolder::spawn_test`], which must have a
/// [`FencedWriter`](super::FencedWriter). The first one locks and writes, and is stopped with
/// `SIGSTOP`. The second one acquires the lock after the lease, and writes. Then the first one
/// continues, and writes with its own token. The server must refuse that write: a refusal by the
/// guard alone, which knows that its lease is over, does not count. `read` returns the value in the
/// store.
///
/// # Panics
/// If the paused holder's write was applied, or not refused by the server, or an allowed write was
/// not applied.
pub async fn assert_a_paused_holder_cannot_write(
    test: &str,
    url: &str,
    mode: ClaimMode,
    limit: Duration,
    read: impl AsyncFn() -> String,
) -> io::Result<()> {
    let mut paused = LockHolder::spawn_test(test, url).await?;
    let mut successor = LockHolder::spawn_test(test, url).await?;
    let first = paused.lock_in(KEY, mode, limit).await?;
    paused.write(KEY, "by the first holder", limit).await?;
    assert_eq!(read().await, "by the first holder");

    paused.process().pause().await?;
    // An exclusive lock waits for the end of the paused holder's lease. A shared lock would not.
    successor.lock(KEY, limit).await?;
    successor.unlock(KEY, limit).await?;
    let next = successor.lock_in(KEY, mode, limit).await?;
    assert!(next.token > first.token, "{next:?} after {first:?}");
    successor.write(KEY, "by the successor", limit).await?;

    paused.process().resume()?;
    let written = paused.write(KEY, "by the paused holder", limit).await;
    let refusal = written.expect_err("the write of the paused holder is refused").to_string();
    assert!(refusal.contains(REFUSED_BY_SERVER), "it did not reach the server: {refusal}");
    assert_eq!(read().await, "by the successor");

    assert!(successor.status(KEY, limit).await?.is_some(), "the successor keeps its lock");
    successor.write(KEY, "by the successor again", limit).await?;
    assert_eq!(read().await, "by the successor again");
    successor.unlock(KEY, limit).await
}
