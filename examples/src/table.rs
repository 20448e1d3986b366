//! An example lock store: a table behind a queue of statements, as a server is behind a socket. It
//! is a complete backend: `tests/conformance.rs` runs the conformance suite against it.

// ANCHOR: backend
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use lock_registry::{
    Capabilities, FencingToken, GuaranteeClass, Key, Reach,
    backend::{Attempt, BackendError, Busy, Claim, ClaimId, Grant, LockBackend, Release, Renewal},
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

/// The store. It executes one statement at a time, each as one atomic step.
#[derive(Debug)]
pub struct Table {
    rows: BTreeMap<Key, TableRow>,
    /// The number of releases so far, over all keys.
    releases: watch::Sender<u64>,
}

type Statement = Box<dyn FnOnce(&mut Table) + Send>;

#[derive(Debug)]
struct TableRow {
    /// The claim of the last grant; `None` after a release. The row stays: tokens must grow.
    claim: Option<ClaimId>,
    first_token: u64,
    last_token: u64,
    until: Instant,
}

impl TableRow {
    /// Returns the claim that holds the key. Only the store's clock ends a grant.
    fn live_claim(&self) -> Option<ClaimId> {
        self.claim.filter(|_| self.until > Instant::now())
    }
}

impl Table {
    /// Starts an empty table on the current runtime and connects to it.
    #[must_use]
    pub fn start() -> Arc<TableBackend> {
        let (statements, mut received) = mpsc::channel::<Statement>(64);
        let (counter, releases) = watch::channel(0);
        let mut table = Self { rows: BTreeMap::new(), releases: counter };
        // Ends when the last client is dropped.
        tokio::spawn(async move {
            while let Some(statement) = received.recv().await {
                statement(&mut table);
            }
        });
        Arc::new(TableBackend { statements, releases })
    }
}

/// A client of a [`Table`]. Clones share the connection.
#[derive(Debug, Clone)]
pub struct TableBackend {
    statements: mpsc::Sender<Statement>,
    releases: watch::Receiver<u64>,
}

impl TableBackend {
    /// Sends a statement and waits for its result. The engine applies the time limit.
    async fn execute<T: Send + 'static>(
        &self,
        statement: impl FnOnce(&mut Table) -> T + Send + 'static,
    ) -> Result<T, BackendError> {
        let (reply, result) = oneshot::channel();
        let sent = self.statements.send(Box::new(move |table| drop(reply.send(statement(table)))));
        // Not sent, so the table did not change. `as_refused` means: no clean-up is needed.
        sent.await.map_err(|_| BackendError::transient("the table has ended").as_refused())?;
        // The statement was sent but has no result, so the table may have executed it. The engine
        // then repeats the request or releases the claim.
        result.await.map_err(|_| BackendError::transient("the table ended before it replied"))
    }
}

#[async_trait]
impl LockBackend for TableBackend {
    fn capabilities(&self) -> Capabilities {
        // Claim only what is true. This store has no labels and no operations for operators.
        let table = Capabilities::new("table", GuaranteeClass::Durable, Reach::Process);
        table.with_fencing().with_wakes()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let claim = claim.clone();
        let acquire = move |table: &mut Table| {
            let now = Instant::now();
            let free = TableRow { claim: None, first_token: 0, last_token: 0, until: now };
            let row = table.rows.entry(claim.key().clone()).or_insert(free);
            match row.live_claim() {
                // Repeated after a lost reply: the claim gets the same grant and token.
                Some(holder) if holder == claim.id() => {}
                Some(_) => {
                    let busy = Busy::new().with_retry_after(row.until - now);
                    return Attempt::Busy(busy.with_seen_version(*table.releases.borrow()));
                }
                None => {
                    // Larger than every earlier token of this key, whether released or expired.
                    row.first_token = row.last_token + 1;
                    row.last_token += u64::from(claim.token_block());
                    (row.claim, row.until) = (Some(claim.id()), now + claim.lease());
                }
            }
            let token = FencingToken::new(row.first_token).expect("tokens fit into 63 bits");
            Attempt::Granted(Grant::new(token, row.until - now))
        };
        self.execute(acquire).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let wanted = claims.to_vec();
        let renew = move |table: &mut Table, claim: &Claim| match table.rows.get_mut(claim.key()) {
            // Never restores a grant that has ended, and never shortens a lease.
            Some(row) if row.live_claim() == Some(claim.id()) => {
                row.until = row.until.max(Instant::now() + claim.lease());
                Ok(Renewal::Renewed(row.until - Instant::now()))
            }
            _ => Ok(Renewal::Gone),
        };
        // One statement for all claims, and one result for each, in their order.
        let all = move |table: &mut Table| wanted.iter().map(|claim| renew(table, claim)).collect();
        self.execute(all).await.unwrap_or_else(|error| vec![Err(error); claims.len()])
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let claim = claim.clone();
        let release = move |table: &mut Table| match table.rows.get_mut(claim.key()) {
            Some(row) if row.live_claim() == Some(claim.id()) => {
                row.claim = None;
                table.releases.send_modify(|count| *count += 1); // wakes the waiters
                Release::Freed
            }
            _ => Release::NotHeld,
        };
        self.execute(release).await
    }

    async fn wait(&self, _claim: &Claim, busy: &Busy) {
        // The version is the count at the time of the `Busy` reply, so a release since then ends
        // the wait at once. A release of another key ends it too: the next attempt is then `Busy`.
        let mut releases = self.releases.clone();
        if releases.wait_for(|count| *count > busy.seen_version).await.is_err() {
            // The table has ended. The next poll returns that error.
            std::future::pending::<()>().await;
        }
    }
}
// ANCHOR_END: backend
