//! The lock store that the engine drives. Selects the session of each claim and calls `recipe`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, GuaranteeClass, Holder, InvalidKey,
    Invalidations, Key, LockBackend, Reach, Release, Renewal,
};

use crate::config::ZkConfig;
use crate::path::Paths;
use crate::recipe;
use crate::session::{By, Session, Sessions};

/// Locks in ZooKeeper.
///
/// A grant ends with the session of this client, or earlier if its lease is not renewed. The
/// servers expire a session after receiving nothing from it for its time-out, and then other
/// clients can acquire its locks. Holders treat their locks as lost before that. When a session
/// ends, all its locks are lost permanently, and a new session replaces it.
///
/// The token is the transaction that created the holder's node. Tokens grow as long as the servers
/// keep their data.
///
/// A backend has one connection and one session until the paths of its nodes take 96 KiB, about
/// 1,000 keys of 10 bytes. Then it opens further sessions, up to [`ZkConfig::with_sessions_max`].
/// At that limit, sessions take more nodes than they can watch. A waiter is woken by the end of the
/// preceding node. A holder is notified at once when another client deletes its node. Both need a
/// watch: nodes above the 96 KiB are polled.
pub struct ZkBackend {
    sessions: Arc<Sessions>,
    paths: Paths,
    timeout: Duration,
}

impl ZkBackend {
    /// Opens a session.
    ///
    /// # Errors
    /// [`BackendError`] with a message that names the remedy:
    /// - `Misconfigured` if the configuration is invalid or the chroot does not exist,
    /// - `Denied` if the servers reject the login,
    /// - `Transient` if no server can be reached.
    ///
    /// # Cancel safety
    /// Dropping the future ends the session if one was opened.
    pub async fn open(config: ZkConfig) -> Result<Self, BackendError> {
        config.check()?;
        let paths = Paths::new(&config);
        let sessions = Sessions::new(config);
        let timeout = sessions.get().await?.timeout();
        Ok(Self { sessions, paths, timeout })
    }

    /// Returns how long the servers keep the session after the last message of this client. This is
    /// the value granted to the first session.
    #[must_use]
    pub fn session_timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the id of the first session, as in the servers' logs and commands. `None` if there
    /// is no session.
    #[must_use]
    pub fn session_id(&self) -> Option<i64> {
        self.session_ids().first().copied()
    }

    /// Returns the ids of all sessions, oldest first. There is one until the paths of its nodes
    /// take 96 KiB; see [`with_sessions_max`](ZkConfig::with_sessions_max).
    #[must_use]
    pub fn session_ids(&self) -> Vec<i64> {
        self.sessions.live().iter().map(|session| session.id()).collect()
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Renews those of `claims` that belong to `session`. Returns each answer with the index of its
    /// claim.
    async fn renew_in(
        &self,
        session: &Arc<Session>,
        claims: &[Claim],
    ) -> Vec<(usize, Result<Renewal, BackendError>)> {
        let ours = |(number, claim): (usize, _)| {
            let place = session.find(Claim::id(claim)).filter(|place| place.key == *claim.key());
            Some((number, claim, place?))
        };
        let ours: Vec<_> = claims.iter().enumerate().filter_map(ours).collect();
        if ours.is_empty() {
            return Vec::new();
        }
        // While the session's validity covers the longest lease, the round only has to show that
        // the nodes exist, which the leader can answer.
        let is_certain = session.certain_left() > session.timeout() / 2;
        let by = if is_certain { By::Leader } else { By::Majority };
        if let Err(error) = session.round(by).await {
            let answer = |(number, claim, _): (_, &Claim, _)| match session.find(claim.id()) {
                Some(_) => (number, Err(error.clone())),
                None => (number, Ok(Renewal::Gone)),
            };
            return ours.into_iter().map(answer).collect();
        }
        let confirmed = ours.iter().map(async |(number, claim, place)| {
            (*number, recipe::renew(session, &self.sessions, place, claim).await)
        });
        join_all(confirmed).await
    }
}

#[async_trait]
impl LockBackend for ZkBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("zookeeper", GuaranteeClass::A, Reach::Network)
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_invalidations()
            .with_labels()
            .with_inspect()
            // With regular proofs, more than half of a session's time-out is certain at any time;
            // see `proof`.
            .with_leases(Capabilities::LEASE_MIN, self.timeout / 2)
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.paths.check(key)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if self.sessions.was_displaced(claim.id()) {
            // Returned once, so that the engine emits an event for it.
            let says = "zookeeper: the session is over, and with it the place in line; the claim goes to the end of the line";
            return Err(BackendError::transient(says).as_refused());
        }
        recipe::try_acquire(&self.sessions, claim, || self.paths.of(claim.key())).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let sessions = self.sessions.live();
        let answers = sessions.iter().map(|session| self.renew_in(session, claims));
        let answers = join_all(answers).await;
        // Claims that no session knows are gone.
        let mut renewals: Vec<_> = claims.iter().map(|_| None).collect();
        for (number, renewal) in answers.into_iter().flatten() {
            renewals[number] = Some(renewal);
        }
        let answer = |(renewal, claim): (Option<_>, &Claim)| {
            renewal.unwrap_or_else(|| {
                self.sessions.was_displaced(claim.id());
                Ok(Renewal::Gone)
            })
        };
        renewals.into_iter().zip(claims).map(answer).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let session = match self.sessions.find(claim.id()) {
            Some((session, _)) => {
                session.connected().await?;
                session
            }
            None => self.sessions.get().await?,
        };
        self.sessions.was_displaced(claim.id());
        recipe::release(&session, claim, || self.paths.of(claim.key())).await
    }

    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        if let Some((_, place)) = self.sessions.find(claim.id()) {
            recipe::wait(&place).await;
        } else if let Some(session) = self.sessions.current() {
            recipe::wait_outside(&session, &self.paths.of(claim.key())).await;
        }
    }

    fn wakes_confirmed(&self, claim: &Claim, _busy: &Busy) -> bool {
        let found = self.sessions.find(claim.id());
        found.is_some_and(|(session, place)| recipe::is_watched(&session, &place))
    }

    fn verify_after(&self) -> Option<Duration> {
        Some(FIRST_LOOK)
    }

    fn renewals_max(&self) -> usize {
        RENEWALS_MAX
    }

    /// One request renews the session, and so all its claims.
    fn renews_together(&self) -> bool {
        true
    }

    fn subscribe_invalidations(&self, hints: Invalidations) {
        self.sessions.hints().add(hints);
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        self.holder(key).await
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        self.holders().await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        self.break_lock(key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.look_for_trouble().await
    }

    async fn close(&self) {
        // The backend stays open while another registry uses it.
        if !self.sessions.hints().are_wanted() {
            self.sessions.close().await;
        }
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

/// Only locks held longer than this are worth a request that sets a watch on their own node.
const FIRST_LOOK: Duration = Duration::from_millis(25);

/// All renewals of a session share one request.
const RENEWALS_MAX: usize = 10_000;
