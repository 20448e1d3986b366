//! The leases of tombstones, which reveal holders whose lease was ended early.
//!
//! A claim that joins a queue also writes a tombstone next to the queue, under another lease. It
//! deletes both when it leaves. A claim that is first in the queue may find a tombstone whose entry
//! no longer exists. Its holder may not know yet that its lock is lost. The leases of tombstones
//! last longer than those of entries. Otherwise a leader that was suspended could expire both at
//! once when it resumes.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use registry_core::{BackendError, Moment};

use crate::keep_alive::{Asked, KeepAlive, Outcome};
use crate::lease::Lease;
use crate::pool::Pool;

/// One lease for the tombstones of all entries whose leases have the same duration.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    kept: Mutex<HashMap<i64, Kept>>,
    /// The lease requests in progress. All callers that need the same lease await one response.
    awaited: Mutex<HashMap<i64, Awaited>>,
}

type Awaited = Shared<BoxFuture<'static, Result<Lease, BackendError>>>;

#[derive(Debug)]
struct Kept {
    lease: i64,
    /// The lease lasts for its full duration from here on, unless another client ends it.
    refreshed: Moment,
    /// A `LeaseKeepAlive` request whose outcome was not read yet.
    asked: Option<Asked>,
}

impl Traces {
    /// Returns the lease for the tombstone of an entry whose own lease lasts `seconds`.
    pub(crate) async fn lease(
        &self,
        seconds: i64,
        pool: &Pool,
        keep_alive: &KeepAlive,
    ) -> Result<i64, BackendError> {
        if let Some(lease) = self.kept(seconds, keep_alive) {
            return Ok(lease);
        }
        let awaited = {
            let mut all = self.awaited();
            if let Some(lease) = self.kept(seconds, keep_alive) {
                return Ok(lease);
            }
            let ask = || pool.grant(seconds.saturating_mul(TIMES)).boxed().shared();
            all.entry(seconds).or_insert_with(ask).clone()
        };
        let granted = awaited.clone().await;
        let mut all = self.awaited();
        if all.get(&seconds).is_some_and(|present| present.ptr_eq(&awaited)) {
            all.remove(&seconds);
            if let Ok(lease) = &granted {
                let kept = Kept { lease: lease.id, refreshed: lease.latest(), asked: None };
                self.all().insert(seconds, kept);
            }
        }
        granted.map(|lease| lease.id)
    }

    /// Returns the lease for entries of this duration, if it exists. Requests that it is kept alive
    /// if that is due.
    pub(crate) fn kept(&self, seconds: i64, keep_alive: &KeepAlive) -> Option<i64> {
        let period = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let now = Moment::now();
        let mut all = self.all();
        let kept = all.get_mut(&seconds)?;
        let is_over = match kept.asked.as_mut().and_then(Asked::outcome) {
            Some(Outcome::KeptAlive(from)) => {
                kept.refreshed = from;
                kept.asked = None;
                false
            }
            // Another client has ended the lease. The next renewal of each entry writes a new
            // tombstone.
            Some(Outcome::Unknown) => true,
            None => false,
        };
        let age = now.since(kept.refreshed);
        if is_over || age >= period * 2 {
            // The lease has ended or may end at any time.
            all.remove(&seconds);
            return None;
        }
        let asked = kept.asked.as_ref().map_or(kept.refreshed, |asked| asked.at);
        if now.since(asked) >= period / 3 {
            // No caller awaits the outcome: there is time for further attempts.
            let ends = kept.refreshed.after(period * 2);
            kept.asked = Some(keep_alive.ask(kept.lease, ends, period / 6));
        }
        Some(kept.lease)
    }

    /// Forgets this lease, which the members do not know.
    pub(crate) fn forget(&self, lease: i64) {
        self.all().retain(|_, kept| kept.lease != lease);
    }

    /// Revokes all leases, which also deletes the tombstones.
    pub(crate) async fn close(&self, pool: &Pool) {
        let all = std::mem::take(&mut *self.all());
        for kept in all.into_values() {
            if pool.end_now(kept.lease).await.is_err() {
                // The leases expire on their own.
                return;
            }
        }
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<i64, Awaited>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> MutexGuard<'_, HashMap<i64, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The duration of a tombstone's lease, as a multiple of that of the entry's lease.
const TIMES: i64 = 3;
