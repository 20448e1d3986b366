//! What stays of those whose lease was ended before its time.
//!
//! Whoever joins a queue leaves a trace beside it, under another lease, and takes both away when it leaves. So whoever comes first into a
//! queue and finds a trace of somebody who does not stand there any more knows that this one may not have heard of its loss yet. The
//! leases of traces last longer than those of places, so that a leader that stood still does not take both for ended when it goes on.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _, Shared};
use registry_core::{BackendError, Moment};

use crate::keep_alive::{Asked, KeepAlive, Outcome};
use crate::lease::Lease;
use crate::pool::Pool;

/// One lease for the traces of all places whose leases last for the same time.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    kept: Mutex<HashMap<i64, Kept>>,
    /// Those that are asked for just now. All who need one wait for the same answer.
    awaited: Mutex<HashMap<i64, Awaited>>,
}

type Awaited = Shared<BoxFuture<'static, Result<Lease, BackendError>>>;

#[derive(Debug)]
struct Kept {
    lease: i64,
    /// It lasts for its whole time from here on, unless somebody ends it.
    refreshed: Moment,
    /// It was asked to be kept alive, and what came of that has not been looked at.
    asked: Option<Asked>,
}

impl Traces {
    /// The lease for the trace of a place whose own lasts for `seconds`.
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

    /// The lease for places of this time, if there is one. Has it kept alive if it is due.
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
            // Somebody has ended it. Places that have a trace there get another one when they are renewed.
            Some(Outcome::Unknown) => true,
            None => false,
        };
        let age = now.since(kept.refreshed);
        if is_over || age >= period * 2 {
            // Or it may end any time.
            all.remove(&seconds);
            return None;
        }
        let asked = kept.asked.as_ref().map_or(kept.refreshed, |asked| asked.at);
        if now.since(asked) >= period / 3 {
            // Nobody waits for what comes of it: there is time for more attempts.
            let ends = kept.refreshed.after(period * 2);
            kept.asked = Some(keep_alive.ask(kept.lease, ends, period / 6));
        }
        Some(kept.lease)
    }

    /// Forgets this lease: the servers do not know it.
    pub(crate) fn forget(&self, lease: i64) {
        self.all().retain(|_, kept| kept.lease != lease);
    }

    /// Ends all leases, and with them what they keep.
    pub(crate) async fn close(&self, pool: &Pool) {
        let all = std::mem::take(&mut *self.all());
        for kept in all.into_values() {
            if pool.end_now(kept.lease).await.is_err() {
                // They end by themselves.
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

/// How many times longer than a place's lease that of its trace lasts.
const TIMES: i64 = 3;
