//! Implements `LockBackend`. Finds the session of each claim and calls `recipe`, or `conversion`
//! for a change of the mode.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::config::{BackendConfig as _, OpenBackend, format_time};
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, Holder, InvalidKey, Invalidations,
    Key, LockAdmin, LockBackend, Release, Renewal, ValueStore, WaiterStore, WaitingClaim,
    WakeCheck,
};

use crate::config::{ZkConfig, lease_max, misconfigured};
use crate::conversion;
use crate::path::Paths;
use crate::recipe;
use crate::session::{ConfirmedBy, SessionPool, ZkSession};

/// A lock store in ZooKeeper.
///
/// A grant ends with the session of this client, or earlier if its lease is not renewed. The
/// servers expire a session if they receive nothing from its client for the session time-out. Other
/// clients can then acquire the locks of the session. Holders treat their locks as lost before the
/// servers expire the session. When a session ends, all its locks are lost permanently. The backend
/// opens a new session when a request needs one.
///
/// The token is the id of the transaction that created the holder's node. An upgraded claim has the
/// id of the upgrade's transaction. The nodes of claims that waited during the upgrade are older
/// than it, so each of these claims gets the id of a later transaction when it is granted. In
/// Curator's semaphore, the token is the id of the
/// transaction that granted the claim. Tokens grow as long as the servers keep their data.
///
/// A backend has one connection and one session until the paths of its nodes take 96 KiB, about
/// 1,000 keys of 10 bytes. Then the backend opens further sessions, up to
/// [`ZkConfig::with_sessions_max`]. At this limit, and while no further session can be opened,
/// sessions contain more nodes than they can watch. A watch wakes a waiter when the predecessor's
/// node is deleted. A watch also notifies a holder at once when another client deletes the holder's
/// node. Without a watch, a waiter polls, and a holder detects the deletion at its next renewal.
pub struct ZkBackend {
    /// The addresses of all configured servers. The client library does not report the connected
    /// server.
    addresses: Arc<str>,
    sessions: Arc<SessionPool>,
    paths: Paths,
    timeout: Duration,
    capabilities: Capabilities,
}

impl ZkBackend {
    /// Opens a session.
    ///
    /// # Errors
    /// [`BackendError`] with a message that contains a hint:
    /// - `Misconfigured` if the configuration is invalid or the chroot does not exist,
    /// - `Denied` if the servers reject the login,
    /// - `Transient` if no server can be reached.
    ///
    /// # Cancel safety
    /// Dropping the future ends the session if one was opened.
    pub async fn open(config: ZkConfig) -> Result<Self, BackendError> {
        config.check()?;
        #[cfg(feature = "tls")]
        let config = config.with_pem_files()?;
        let paths = config.paths();
        let addresses: Arc<str> = config.servers().into();
        let capabilities = config.capabilities();
        let sessions = SessionPool::new(config, recipe::release_abandoned);
        let session = sessions.get_or_open().await;
        let session = session.map_err(|error| error.with_address(Arc::clone(&addresses)))?;
        let timeout = session.timeout();
        let capabilities = capabilities.with_leases(Capabilities::LEASE_MIN, lease_max(timeout));
        Ok(Self { addresses, sessions, paths, timeout, capabilities })
    }

    /// Adds the addresses of the servers to an error.
    pub(crate) fn with_address(&self, error: BackendError) -> BackendError {
        error.with_address(Arc::clone(&self.addresses))
    }

    /// Returns how long the servers keep the session after the last message of this client. The
    /// value is the time-out that the servers granted to the first session.
    #[must_use]
    pub fn session_timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the id of the oldest session, as in the servers' logs and commands. Returns `None`
    /// if no session exists.
    #[must_use]
    pub fn session_id(&self) -> Option<i64> {
        self.session_ids().first().copied()
    }

    /// Returns the ids of all sessions, oldest first. A backend has one session until the paths of
    /// its nodes take 96 KiB. See [`with_sessions_max`](ZkConfig::with_sessions_max).
    #[must_use]
    pub fn session_ids(&self) -> Vec<i64> {
        self.sessions.live_sessions().iter().map(|session| session.id()).collect()
    }

    pub(crate) fn sessions(&self) -> &Arc<SessionPool> {
        &self.sessions
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.paths
    }

    async fn release_claim(&self, claim: &Claim) -> Result<Release, BackendError> {
        let session = match self.sessions.find_entry(claim.id()) {
            Some((session, _)) => {
                session.wait_until_connected().await?;
                session
            }
            None => self.sessions.get_or_open().await?,
        };
        self.sessions.remove_claim_of_ended_session(claim.id());
        recipe::release(&session, claim, || self.paths.queue_path(claim.key())).await
    }

    /// Adds to a `Busy` response the check whether wake-ups arrive. Adds the addresses of the
    /// servers to an error.
    fn with_wake_check(
        &self,
        attempt: Result<Attempt, BackendError>,
    ) -> Result<Attempt, BackendError> {
        Ok(match attempt.map_err(|error| self.with_address(error))? {
            Attempt::Busy(busy) => {
                Attempt::Busy(busy.with_wake_check(Arc::clone(&self.sessions) as _))
            }
            attempt => attempt,
        })
    }

    /// Renews the claims among `claims` that belong to `session`. Returns each result with the
    /// index of its claim.
    async fn renew_in(
        &self,
        session: &Arc<ZkSession>,
        claims: &[Claim],
    ) -> Vec<(usize, Result<Renewal, BackendError>)> {
        let find_entry = |(index, claim): (usize, _)| {
            let entry =
                session.find_entry(Claim::id(claim)).filter(|entry| entry.key == *claim.key());
            Some((index, claim, entry?))
        };
        let entries: Vec<_> = claims.iter().enumerate().filter_map(find_entry).collect();
        if entries.is_empty() {
            return Vec::new();
        }
        // If the session's validity covers the longest lease, the confirmation only has to show
        // that the nodes exist. A response of the leader suffices for this.
        let covers_longest_lease = session.remaining_validity() > session.timeout() / 2;
        let by = if covers_longest_lease { ConfirmedBy::Leader } else { ConfirmedBy::Majority };
        if let Err(error) = session.confirm(by).await {
            let failed = |(index, claim, _): (_, &Claim, _)| match session.find_entry(claim.id()) {
                Some(_) => (index, Err(error.clone())),
                None => (index, Ok(Renewal::Gone)),
            };
            return entries.into_iter().map(failed).collect();
        }
        let renewals = entries.iter().map(async |(index, claim, entry)| {
            (*index, recipe::renew(session, &self.sessions, entry, claim).await)
        });
        join_all(renewals).await
    }
}

#[async_trait]
impl LockBackend for ZkBackend {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.paths.check_key(key)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if claim.is_conversion() {
            self.sessions.remove_claim_of_ended_session(claim.id());
            let attempt = conversion::convert(&self.sessions, claim).await;
            return self.with_wake_check(attempt);
        }
        if self.sessions.remove_claim_of_ended_session(claim.id()) {
            // The error is returned once, so the engine emits an event for the end of the session.
            let message = "zookeeper: the session has ended, and with it the queue position; the claim is enqueued again at the end of the queue";
            return Err(self.with_address(BackendError::transient(message).as_refused()));
        }
        let dir = || self.paths.queue_path(claim.key());
        self.with_wake_check(recipe::try_acquire(&self.sessions, claim, dir).await)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let sessions = self.sessions.live_sessions();
        let results = sessions.iter().map(|session| self.renew_in(session, claims));
        let results = join_all(results).await;
        // A claim without an entry in any session is gone.
        let mut renewals: Vec<_> = claims.iter().map(|_| None).collect();
        for (index, renewal) in results.into_iter().flatten() {
            renewals[index] = Some(renewal.map_err(|error| self.with_address(error)));
        }
        let to_result = |(renewal, claim): (Option<_>, &Claim)| {
            renewal.unwrap_or_else(|| {
                self.sessions.remove_claim_of_ended_session(claim.id());
                Ok(Renewal::Gone)
            })
        };
        renewals.into_iter().zip(claims).map(to_result).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        self.release_claim(claim).await.map_err(|error| self.with_address(error))
    }

    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        if let Some((_, entry)) = self.sessions.find_entry(claim.id()) {
            recipe::wait_for_blockers(&entry, claim).await;
        } else if let Some(session) =
            self.sessions.first_usable().filter(|_| !claim.is_conversion())
        {
            let dir = self.paths.queue_path(claim.key());
            recipe::wait_without_entry(&session, &dir, claim).await;
        }
    }

    fn subscribe(&self, invalidations: Invalidations) {
        self.sessions.subscribers().subscribe(invalidations);
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        Some(self)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.capabilities().values.then_some(self)
    }

    async fn close(&self) {
        // If another registry uses the backend, the sessions stay open.
        if self.sessions.subscribers().is_empty() {
            self.sessions.close().await;
        }
    }
}

#[async_trait]
impl LockAdmin for ZkBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        self.holders_of(key).await.map_err(|error| self.with_address(error))
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.holders().await.map_err(|error| self.with_address(error))
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.force_release_key(key).await.map_err(|error| self.with_address(error))
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.run_diagnostics().await.map_err(|error| self.with_address(error))
    }
}

/// Waiting claims are in the stored queues, so `register` and `unregister` do nothing.
#[async_trait]
impl WaiterStore for ZkBackend {
    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        self.waiting_claims(key).await.map_err(|error| self.with_address(error))
    }
}

impl WakeCheck for SessionPool {
    fn confirms_wake_ups(&self, claim: &Claim, _busy: &Busy) -> bool {
        let found = self.find_entry(claim.id());
        found.is_some_and(|(session, entry)| recipe::are_blockers_watched(&session, &entry, claim))
    }
}

impl fmt::Debug for ZkBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkBackend")
            .field("base", &self.paths.base())
            .field("sessions", &self.sessions)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl OpenBackend for ZkConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        let backend = ZkBackend::open(self.clone()).await?;
        let lease_max = lease_max(backend.session_timeout());
        match self.lease_option {
            // The backend returns this error, because the message must state the session time-out
            // that the servers granted. The engine has only the maximum lease.
            Some(lease) if lease > lease_max => Err(misconfigured(format!(
                "the lease is {}, more than the maximum {}, which is half of the session time-out of {} that the servers \
                 granted; set a shorter `lease`, or raise `maxSessionTimeout` on the servers",
                format_time(lease),
                format_time(lease_max),
                format_time(backend.session_timeout())
            ))),
            _ => Ok(Arc::new(backend)),
        }
    }
}
