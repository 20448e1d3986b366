//! What stays of those whose lease was ended before its time.
//!
//! Whoever joins a queue leaves a trace beside it, under another lease, and takes both away when it leaves. So whoever comes first into a
//! queue and finds a trace of somebody who does not stand there any more knows that this one may not have heard of its loss yet. The
//! leases of traces last longer than those of places, so that a leader that stood still does not take both for ended when it goes on.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use registry_core::{BackendError, Moment};

use crate::heart::Heart;
use crate::pool::Pool;

/// One lease for the traces of all places whose leases last for the same time.
#[derive(Debug, Default)]
pub(crate) struct Traces(Mutex<HashMap<i64, Kept>>);

#[derive(Debug, Clone, Copy)]
struct Kept {
    lease: i64,
    /// When it was last asked to be kept alive.
    at: Moment,
}

impl Traces {
    /// The lease for the trace of a place whose own lasts for `seconds`.
    pub(crate) async fn lease(
        &self,
        seconds: i64,
        pool: &Pool,
        heart: &Heart,
    ) -> Result<i64, BackendError> {
        if let Some(lease) = self.kept(seconds, heart) {
            return Ok(lease);
        }
        let granted = pool.grant(seconds.saturating_mul(TIMES)).await?;
        if let Some(lease) = self.kept(seconds, heart) {
            // Somebody was faster.
            pool.end(granted.id);
            return Ok(lease);
        }
        self.all().insert(seconds, Kept { lease: granted.id, at: Moment::now() });
        Ok(granted.id)
    }

    /// The lease for places of this time, if there is one. Has it kept alive if it is due.
    pub(crate) fn kept(&self, seconds: i64, heart: &Heart) -> Option<i64> {
        let period = Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let mut all = self.all();
        let kept = all.get_mut(&seconds)?;
        let age = Moment::now().since(kept.at);
        if age >= period * 2 {
            // It may end any time.
            all.remove(&seconds);
            return None;
        }
        if age >= period {
            // Nobody waits for what comes of it: there is time for another attempt.
            kept.at = Moment::now();
            heart.remind(kept.lease);
        }
        Some(kept.lease)
    }

    /// Forgets all leases: the servers have ended one that should have lasted.
    pub(crate) fn distrust(&self) {
        self.all().clear();
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

    fn all(&self) -> MutexGuard<'_, HashMap<i64, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many times longer than a place's lease that of its trace lasts.
const TIMES: i64 = 3;
