//! An example lock store: a table behind a message queue, as a server is behind a socket.
//!
//! The simulated server is at the end. Everything before it is a complete backend: the three
//! operations, the capabilities and the errors. `tests/conformance.rs` runs the
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
    requests: mpsc::Sender<TableRequest>,
    /// The number of releases so far, over all keys.
    releases: watch::Receiver<u64>,
}

#[async_trait]
impl LockBackend for TableBackend {
    fn capabilities(&self) -> Capabilities {
        // Declare only what is true: this store fences and wakes waiters. It stores no labels and
        // cannot be inspected.
        Capabilities::new("table", GuaranteeClass::A, Reach::Process).with_fencing().with_wakes()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let (key, id) = (claim.key().clone(), claim.id());
        let (lease, block) = (claim.lease(), claim.token_block());
        self.send_request(|reply| TableRequest::Acquire { key, id, lease, block, reply }).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        // One request for all claims, and one result for each, in the order of the claims.
        let wanted =
            claims.iter().map(|claim| (claim.key().clone(), claim.id(), claim.lease())).collect();
        match self.send_request(|reply| TableRequest::Renew { wanted, reply }).await {
            Ok(renewals) => renewals.into_iter().map(Ok).collect(),
            Err(error) => claims.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let (key, id) = (claim.key().clone(), claim.id());
        self.send_request(|reply| TableRequest::Release { key, id, reply }).await
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        // The mark is the count at the time of the `Busy` reply, so a release since then ends the
        // wait at once. A release of another key ends it too: the next attempt is then `Busy`.
        let mut releases = self.releases.clone();
        if releases.wait_for(|count| *count > busy.mark).await.is_err() {
            // The table was dropped. The next poll of the store returns that error, so no wake-up
            // is needed.
            std::future::pending::<()>().await;
        }
    }
}
// ANCHOR_END: backend

// ANCHOR: errors
impl TableBackend {
    /// Sends a request and waits for its reply. The engine applies the time limit.
    async fn send_request<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> TableRequest,
    ) -> Result<T, BackendError> {
        let (reply, response) = oneshot::channel();
        self.requests
            .send(request(reply))
            .await
            // The request was not sent, so the table did not change. `as_refused` informs the
            // engine that no clean-up is needed.
            .map_err(|_| BackendError::transient("the table was dropped").as_refused())?;
        // The request was sent without a reply, so the table may have executed it. The engine
        // then repeats or releases the claim.
        response
            .await
            .map_err(|_| BackendError::transient("the table was dropped before it replied"))
    }
}
// ANCHOR_END: errors

/// The store. Runs until the last client is dropped.
#[derive(Debug)]
pub struct Table {
    rows: BTreeMap<Key, TableRow>,
    releases: watch::Sender<u64>,
}

// ANCHOR: row
#[derive(Debug)]
struct TableRow {
    /// The claim that holds the key. `None` after a release: the row stays, because later tokens
    /// must be larger.
    holder: Option<ClaimId>,
    first: u64,
    last: u64,
    until: Instant,
}
// ANCHOR_END: row

#[derive(Debug)]
enum TableRequest {
    Acquire { key: Key, id: ClaimId, lease: Duration, block: u32, reply: oneshot::Sender<Attempt> },
    Renew { wanted: Vec<(Key, ClaimId, Duration)>, reply: oneshot::Sender<Vec<Renewal>> },
    Release { key: Key, id: ClaimId, reply: oneshot::Sender<Release> },
}

impl Table {
    /// Starts an empty table on the current runtime and connects to it.
    #[must_use]
    pub fn start() -> Arc<TableBackend> {
        let (requests, mut receiver) = mpsc::channel(64);
        let (counter, releases) = watch::channel(0);
        let mut table = Self { rows: BTreeMap::new(), releases: counter };
        // Ends when the last client is dropped.
        tokio::spawn(async move {
            while let Some(request) = receiver.recv().await {
                table.handle(request);
            }
        });
        Arc::new(TableBackend { requests, releases })
    }

    /// Executes one request at a time, as a real store does in one statement or script.
    fn handle(&mut self, request: TableRequest) {
        // Only the store's clock ends grants.
        let now = Instant::now();
        // `send` fails if the caller was dropped.
        match request {
            TableRequest::Acquire { key, id, lease, block, reply } => {
                let _ = reply.send(self.acquire(key, id, lease, block, now));
            }
            TableRequest::Renew { wanted, reply } => {
                let renewals = wanted
                    .into_iter()
                    .map(|(key, id, lease)| self.renew(&key, id, lease, now))
                    .collect();
                let _ = reply.send(renewals);
            }
            TableRequest::Release { key, id, reply } => {
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
        let row = self.rows.entry(key).or_insert(TableRow {
            holder: None,
            first: 0,
            last: 0,
            until: now,
        });
        let left = row.until.saturating_duration_since(now);
        if row.holder.is_some() && !left.is_zero() {
            if row.holder != Some(id) {
                return Attempt::Busy(
                    Busy::new().with_retry_after(left).with_mark(*self.releases.borrow()),
                );
            }
            // The claim is repeated after a lost reply. It gets the same grant and token.
            return Attempt::Granted(Grant::new(FencingToken::new(row.first), left));
        }
        // Larger than every earlier token of this key, whether released or expired.
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
            // Only the claim that holds the key releases it. A repeated release returns `NotHeld`.
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
