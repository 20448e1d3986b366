//! A holder in another process that is suspended for longer than its lease, during a workload.

use std::io;

use registry_core::{LockOptions, LostReason, Registry};

use super::{LONG, Workload};
use crate::eventually;
use crate::history::HistoryEvent;
use crate::holder::LockHolder;
use crate::recording_client::RecordingClient;

/// The key that no client of the workload uses.
const KEY: &str = "paused";
/// The client number of the registry that acquires the lock of the suspended process.
const SUCCESSOR: u32 = 7_000;
/// The client number of the writes of the suspended process.
const SUSPENDED: u32 = 7_001;

/// Suspends `holder` three times, each time for longer than its lease. Returns the events of
/// `holder`, for [`Workload::end`]. Proves that:
///
/// - `successor` acquires the lock.
/// - The suspended process notices the loss after it resumes.
/// - The suspended process affects its successor by neither a write nor a release.
///
/// # Panics
/// Panics if one of these promises is broken.
pub async fn assert_a_suspended_holder_is_replaced(
    workload: &Workload,
    mut holder: LockHolder,
    successor: Registry,
) -> io::Result<Vec<HistoryEvent>> {
    let recording_client = RecordingClient::new(workload.recorder(), SUCCESSOR);
    let lock = successor.obtain(KEY);
    for _ in 0..3 {
        let held = holder.lock(KEY, LONG).await?;
        holder.process().pause().await?;
        let next = recording_client.lock_with(&lock, LockOptions::new().wait(LONG)).await;
        let next = next.map_err(io::Error::other)?.expect("the lease of the holder has ended");
        let (next_token, held_token) = (next.fencing_token(), held.token);
        assert!(next_token > held_token);
        assert!(workload.write_as(SUCCESSOR, KEY, next_token));
        holder.process().resume()?;
        assert_eq!(holder.lost(KEY, LONG).await?, LostReason::Expired);
        assert_eq!(holder.status(KEY, LONG).await?, None);
        assert!(!workload.write_as(SUSPENDED, KEY, held_token), "a newer token has written");
        assert!(holder.unlock(KEY, LONG).await.is_err(), "it was lost");
        assert!(next.is_held(), "the release of the former holder must not affect the successor");
        next.unlock().await.map_err(io::Error::other)?;
    }
    workload.wait_for_progress().await;
    let try_lock = async || holder.try_lock(KEY, LONG).await.expect("the attempt succeeds");
    let held = eventually(LONG, try_lock).await;
    assert!(workload.write_as(SUSPENDED, KEY, held.token));
    holder.unlock(KEY, LONG).await?;
    let events = holder.events();
    holder.quit(LONG).await?;
    Ok(events)
}
