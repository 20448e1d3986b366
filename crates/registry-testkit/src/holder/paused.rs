//! Verifies with two real processes that fencing tokens keep a paused holder from writing.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::time::Duration;

use registry_core::ClaimMode;

use super::LockHolder;

const KEY: &str = "stock/42";

/// The beginning of an error of [`write_refused_by_server`].
const REFUSED_BY_SERVER: &str = "the server refused the write";

/// Returns the error of a [`FencedWriter`](super::FencedWriter) whose request the server refused.
/// `reply` is the server's reply.
#[must_use]
pub fn write_refused_by_server(reply: impl Display) -> Box<dyn Error + Send + Sync> {
    format!("{REFUSED_BY_SERVER}: {reply}").into()
}

/// Proves that a holder that is paused for longer than its lease cannot write after its successor.
/// Both processes write under a lock in `mode`. `read` returns the value in the store.
/// `request_limit` limits each request to a process.
///
/// Starts two processes with [`LockHolder::spawn_test`]. The test `test` must serve them with a
/// [`FencedWriter`](super::FencedWriter). The first one locks and writes, and is stopped with
/// `SIGSTOP`. The second one waits for the end of the lease with an exclusive lock. It then locks
/// in `mode`, and writes. Then the first one continues, and writes with its own token. The server
/// must refuse that write: a refusal by the guard alone, which knows that its lease is over, does
/// not count.
///
/// # Errors
/// If a process does not respond as expected.
///
/// # Panics
/// If the paused holder's write was applied, or not refused by the server. Also if an allowed write
/// was not applied, the second token is not larger than the first, or the second process lost its
/// lock.
pub async fn assert_a_paused_holder_cannot_write(
    test: &str,
    url: &str,
    mode: ClaimMode,
    request_limit: Duration,
    read: impl AsyncFn() -> String,
) -> io::Result<()> {
    let mut paused = LockHolder::spawn_test(test, url).await?;
    let mut successor = LockHolder::spawn_test(test, url).await?;
    let first = paused.lock_in(KEY, mode, request_limit).await?;
    paused.write(KEY, "by the first holder", request_limit).await?;
    assert_eq!(read().await, "by the first holder");

    paused.process().pause().await?;
    // An exclusive lock waits for the end of the paused holder's lease. A shared lock does not.
    successor.lock(KEY, request_limit).await?;
    successor.unlock(KEY, request_limit).await?;
    let next = successor.lock_in(KEY, mode, request_limit).await?;
    assert!(next.token > first.token, "{next:?} after {first:?}");
    successor.write(KEY, "by the successor", request_limit).await?;

    paused.process().resume()?;
    let written = paused.write(KEY, "by the paused holder", request_limit).await;
    let refusal = written.expect_err("the write of the paused holder is refused").to_string();
    assert!(refusal.contains(REFUSED_BY_SERVER), "it did not reach the server: {refusal}");
    assert_eq!(read().await, "by the successor");

    assert!(successor.status(KEY, request_limit).await?.is_some(), "the successor keeps its lock");
    successor.write(KEY, "by the successor again", request_limit).await?;
    assert_eq!(read().await, "by the successor again");
    successor.unlock(KEY, request_limit).await
}
