//! A lock store to copy from: a table behind a message queue, as a server is behind a socket.
//!
//! The part that stands for the server is at the end. Everything before it is a complete backend:
//! the three operations, the capabilities and the errors. `tests/conformance.rs` runs the
//! conformance suite of all backends against it.

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
    /// The number of releases so far, over all keys.
    releases: watch::Receiver<u64>,
}

#[async_trait]
impl LockBackend for TableBackend {
    fn capabilities(&self) -> Capabilities {
        // Declare only what is true: this store fences and wakes waiters. It keeps no labels and
        // cannot be inspected.
        Capabilities::new("table", GuaranteeClass::A, Reach::Process).with_fencing().with_wakes()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let (key, id) = (claim.key().clone(), claim.id());
        let (lease, block) = (claim.lease(), claim.token_block());
        self.ask(|reply| Request::Acquire { key, id, lease, block, reply }).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        // One message for all claims, and one answer for each, in the order of the claims.
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
        // The mark is the count at the time of the `Busy` answer, so a release since then ends the
        // wait at once. A release of another key ends it too: a hint may be wrong.
        let mut releases = self.releases.clone();
        if releases.wait_for(|count| *count > busy.mark).await.is_err() {
            // The table is gone. The next attempt returns that error; a wake-up now would only make
            // that attempt come sooner.
            std::future::pending::<()>().await;
        }
    }
}
// ANCHOR_END: backend

// ANCHOR: errors
impl TableBackend {
    /// Sends a request and waits for its reply. The engine applies the time limit.
    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, BackendError> {
        let (reply, answer) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            // The request was never sent: nothing was done, so nothing needs cleaning up.
            .map_err(|_| BackendError::transient("the table is gone").as_refused())?;
        // The request was sent, but no reply came: it may have been carried out. The engine finds
        // out.
        answer.await.map_err(|_| BackendError::transient("the table went away before it answered"))
    }
}
// ANCHOR_END: errors

/// The store. Runs until the last client is dropped.
#[derive(Debug)]
pub struct Table {
    rows: BTreeMap<Key, Row>,
    releases: watch::Sender<u64>,
}

// ANCHOR: row
#[derive(Debug)]
struct Row {
    /// The claim that holds the key. `None` after a release: the row stays, because its tokens must
    /// not be forgotten.
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

    /// Handles one request at a time, as a real store does in one statement or script.
    fn answer(&mut self, request: Request) {
        // Only the store's clock ends grants.
        let now = Instant::now();
        // A send fails if the caller no longer waits for the reply.
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
            // The same claim asks again, because a reply was lost: it receives the same grant and
            // token.
            return Attempt::Granted(Grant::new(FencingToken::new(row.first), left));
        }
        // Larger than every earlier token of this key, of any claim, and however that claim ended.
        row.first = row.last + 1;
        row.last += u64::from(block);
        row.holder = Some(id);
        row.until = now + lease;
        Attempt::Granted(Grant::new(FencingToken::new(row.first), lease))
    }

    fn renew(&mut self, key: &Key, id: ClaimId, lease: Duration, now: Instant) -> Renewal {
        match self.rows.get_mut(key) {
            // Never restores an expired grant, and never shortens a lease.
            Some(row) if row.holder == Some(id) && row.until > now => {
                row.until = row.until.max(now + lease);
                Renewal::Renewed(row.until - now)
            }
            _ => Renewal::Gone,
        }
    }

    fn release(&mut self, key: &Key, id: ClaimId, now: Instant) -> Release {
        match self.rows.get_mut(key) {
            // Only the claim that holds the key releases it, and only once: a repetition finds
            // nothing.
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
