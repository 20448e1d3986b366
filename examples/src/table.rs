//! A lock store to copy from: a table behind a queue of messages, as a server behind a socket would be.
//!
//! The part that stands for the server is at the end. Everything before it is a whole backend: the three operations, what the
//! store can do, and what can go wrong. `tests/conformance.rs` runs the promises of all backends against it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lock_registry::{
    Attempt, BackendError, Busy, Capabilities, Claim, ClaimId, FencingToken, Grant, GuaranteeClass,
    Key, LockBackend, Reach, Release, Renewal,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

// ANCHOR: backend
/// A client of a [`Table`]. Clones share the connection.
#[derive(Debug, Clone)]
pub struct TableBackend {
    requests: mpsc::Sender<Request>,
    /// How many grants were released so far, of all keys.
    releases: watch::Receiver<u64>,
}

#[async_trait]
impl LockBackend for TableBackend {
    fn capabilities(&self) -> Capabilities {
        // Say what is true, no more: this one fences and wakes; it keeps no labels and cannot be inspected.
        Capabilities::new("table", GuaranteeClass::A, Reach::Process).with_fencing().with_wakes()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let (key, id) = (claim.key().clone(), claim.id());
        let (lease, block) = (claim.lease(), claim.token_block());
        self.ask(|reply| Request::Acquire { key, id, lease, block, reply }).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        // One message for all of them, and an answer for each, in their order.
        let wanted =
            claims.iter().map(|claim| (claim.key().clone(), claim.id(), claim.lease())).collect();
        match self.ask(|reply| Request::Renew { wanted, reply }).await {
            Ok(renewals) => renewals.into_iter().map(Ok).collect(),
            Err(error) => claims.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let (key, id) = (claim.key().clone(), claim.id());
        self.ask(|reply| Request::Release { key, id, reply }).await
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        // The mark is the count that the table saw when it said "busy", so a release since then ends the wait at once. A release
        // of another key ends it too: a hint may be wrong.
        let mut releases = self.releases.clone();
        if releases.wait_for(|count| *count > busy.mark).await.is_err() {
            // The table is gone. The next attempt tells the caller; waking now would only make it come sooner.
            std::future::pending::<()>().await;
        }
    }
}
// ANCHOR_END: backend

// ANCHOR: errors
impl TableBackend {
    /// Sends a request and waits for its reply. The engine limits the time.
    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, BackendError> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            // It never left: nothing was done, so there is nothing to clean up.
            .map_err(|_| BackendError::transient("the table is gone").as_refused())?;
        // It left, and no reply came: it may have been carried out. The engine finds out.
        answer.await.map_err(|_| BackendError::transient("the table went away before it answered"))
    }
}
// ANCHOR_END: errors

/// The store. Lives as long as a client does.
#[derive(Debug)]
pub struct Table {
    rows: BTreeMap<Key, Row>,
    releases: watch::Sender<u64>,
}

// ANCHOR: row
#[derive(Debug)]
struct Row {
    /// Who holds the key. `None` after a release: the row stays, because its tokens must not be forgotten.
    holder: Option<ClaimId>,
    first: u64,
    last: u64,
    until: Instant,
}
// ANCHOR_END: row

#[derive(Debug)]
enum Request {
    Acquire { key: Key, id: ClaimId, lease: Duration, block: u32, reply: oneshot::Sender<Attempt> },
    Renew { wanted: Vec<(Key, ClaimId, Duration)>, reply: oneshot::Sender<Vec<Renewal>> },
    Release { key: Key, id: ClaimId, reply: oneshot::Sender<Release> },
}

impl Table {
    /// Starts an empty table on the current runtime and connects to it.
    #[must_use]
    pub fn start() -> Arc<TableBackend> {
        let (requests, mut inbox) = mpsc::channel(64);
        let (counter, releases) = watch::channel(0);
        let mut table = Self { rows: BTreeMap::new(), releases: counter };
        // Ends when the last client is dropped.
        tokio::spawn(async move {
            while let Some(request) = inbox.recv().await {
                table.answer(request);
            }
        });
        Arc::new(TableBackend { requests, releases })
    }

    /// One request at a time: what a real store does in one statement or script.
    fn answer(&mut self, request: Request) {
        // The store's clock, and only that, ends grants.
        let now = Instant::now();
        // Whoever does not wait for the reply any more gets none.
        match request {
            Request::Acquire { key, id, lease, block, reply } => {
                let _ = reply.send(self.acquire(key, id, lease, block, now));
            }
            Request::Renew { wanted, reply } => {
                let renewals = wanted
                    .into_iter()
                    .map(|(key, id, lease)| self.renew(&key, id, lease, now))
                    .collect();
                let _ = reply.send(renewals);
            }
            Request::Release { key, id, reply } => {
                let _ = reply.send(self.release(&key, id, now));
            }
        }
    }

    // ANCHOR: rules
    fn acquire(
        &mut self,
        key: Key,
        id: ClaimId,
        lease: Duration,
        block: u32,
        now: Instant,
    ) -> Attempt {
        let row =
            self.rows.entry(key).or_insert(Row { holder: None, first: 0, last: 0, until: now });
        let left = row.until.saturating_duration_since(now);
        if row.holder.is_some() && !left.is_zero() {
            if row.holder != Some(id) {
                return Attempt::Busy(
                    Busy::new().with_retry_after(left).with_mark(*self.releases.borrow()),
                );
            }
            // The same claim asks again, because a reply was lost: the same grant, the same token.
            return Attempt::Granted(Grant::new(FencingToken::new(row.first), left));
        }
        // Larger than every token that this key ever had, whoever had it and however it ended.
        row.first = row.last + 1;
        row.last += u64::from(block);
        row.holder = Some(id);
        row.until = now + lease;
        Attempt::Granted(Grant::new(FencingToken::new(row.first), lease))
    }

    fn renew(&mut self, key: &Key, id: ClaimId, lease: Duration, now: Instant) -> Renewal {
        match self.rows.get_mut(key) {
            // Never brings back what has ended, never shortens.
            Some(row) if row.holder == Some(id) && row.until > now => {
                row.until = row.until.max(now + lease);
                Renewal::Renewed(row.until - now)
            }
            _ => Renewal::Gone,
        }
    }

    fn release(&mut self, key: &Key, id: ClaimId, now: Instant) -> Release {
        match self.rows.get_mut(key) {
            // Only the claim that holds it, and once: a repetition finds nothing.
            Some(row) if row.holder == Some(id) => {
                row.holder = None;
                self.releases.send_modify(|count| *count += 1);
                if row.until > now { Release::Freed } else { Release::NotHeld }
            }
            _ => Release::NotHeld,
        }
    }
    // ANCHOR_END: rules
}
