//! The lock store that the engine drives. Passes on to `recipe` with the session that there is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::{
    Attempt, BackendError, Busy, Capabilities, Claim, Finding, GuaranteeClass, Holder, InvalidKey,
    Key, LockBackend, LossHints, Reach, Release, Renewal,
};

use crate::config::ZkConfig;
use crate::path::Paths;
use crate::recipe;
use crate::session::{By, Session, Sessions};

/// Locks in ZooKeeper.
///
/// A grant lives as long as the session of this client, and no longer than it is renewed. The servers end a session that they have heard nothing of
/// for its time-out, and then everybody else may have its locks; holders know before that. When a
/// session is over, all that was held in it is lost for good, and a new one takes its place.
///
/// Tokens are the transactions in which holders' nodes were made. They grow for as long as the servers keep their data.
///
/// One connection belongs to a backend, however many locks are held or awaited. Who waits is woken by the one directly before; who
/// holds hears at once when its node is removed by somebody else. With more than some 1,000 locks the rest of them look from time to time
/// instead.
pub struct ZkBackend {
    sessions: Arc<Sessions>,
    paths: Paths,
    timeout: Duration,
}

impl ZkBackend {
    /// Begins a session.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do: `Misconfigured` for a configuration that cannot work or a chroot that is not there,
    /// `Denied` for a login that the servers do not take, `Transient` when they cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future ends the session, if there is one.
    pub async fn open(config: ZkConfig) -> Result<Self, BackendError> {
        config.check()?;
        let paths = Paths::new(&config);
        let sessions = Sessions::new(config);
        let timeout = sessions.get().await?.timeout();
        Ok(Self { sessions, paths, timeout })
    }

    /// How long the servers keep the session after the last word of this client, as they granted it at first.
    #[must_use]
    pub fn session_timeout(&self) -> Duration {
        self.timeout
    }

    /// The id of the session that there is, as the servers' logs and commands show it; `None` while there is none.
    #[must_use]
    pub fn session_id(&self) -> Option<i64> {
        self.sessions.current().map(|session| session.id())
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    pub(crate) fn paths(&self) -> &Paths {
        &self.paths
    }

    async fn confirm(
        &self,
        session: &Arc<Session>,
        claim: &Claim,
    ) -> Result<Renewal, BackendError> {
        match session.find(claim) {
            Some(place) => recipe::renew(session, &self.sessions, &place, claim).await,
            None => Ok(Renewal::Gone),
        }
    }
}

#[async_trait]
impl LockBackend for ZkBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("zookeeper", GuaranteeClass::A, Reach::Network)
            .with_fencing()
            .with_fair()
            .with_wakes()
            .with_tells_losses()
            .with_labels()
            .with_inspect()
            // What is certain of a session is more than half of its time-out, at any time; see `proof`.
            .with_leases(Capabilities::LEASE_MIN, self.timeout / 2)
    }

    fn check_key(&self, key: &Key) -> Result<(), InvalidKey> {
        self.paths.check(key)
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let session = self.sessions.get().await?;
        if self.sessions.was_displaced(claim.id()) {
            // Told once, so that those hear of it who watch what happens.
            let says = "zookeeper: the session is over, and with it the place in line; the claim goes to the end of the line";
            return Err(BackendError::transient(says).as_refused());
        }
        recipe::try_acquire(&session, claim, || self.paths.of(claim.key())).await
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let session = self.sessions.current();
        let Some(session) = session.filter(|session| {
            // Nothing is asked for claims that have nothing.
            claims.iter().any(|claim| session.find(claim).is_some())
        }) else {
            for claim in claims {
                self.sessions.was_displaced(claim.id());
            }
            return claims.iter().map(|_| Ok(Renewal::Gone)).collect();
        };
        // As long as there is proof of all that a renewal may give, it need only be seen that the nodes are there.
        let is_certain = session.certain_left() > session.timeout() / 2;
        let by = if is_certain { By::Leader } else { By::Majority };
        if let Err(error) = session.round(by).await {
            let answer = |claim| match session.find(claim) {
                Some(_) => Err(error.clone()),
                None => Ok(Renewal::Gone),
            };
            return claims.iter().map(answer).collect();
        }
        join_all(claims.iter().map(|claim| self.confirm(&session, claim))).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let session = self.sessions.get().await?;
        self.sessions.was_displaced(claim.id());
        recipe::release(&session, claim, || self.paths.of(claim.key())).await
    }

    async fn wait(&self, claim: &Claim, _busy: &Busy) {
        let Some(session) = self.sessions.current() else { return };
        match session.find(claim) {
            Some(place) => recipe::wait(&place).await,
            None => recipe::wait_outside(&session, &self.paths.of(claim.key())).await,
        }
    }

    fn first_look(&self) -> Option<Duration> {
        Some(FIRST_LOOK)
    }

    fn renewals_max(&self) -> usize {
        RENEWALS_MAX
    }

    /// It is the session that is renewed.
    fn renews_together(&self) -> bool {
        true
    }

    fn tell_losses(&self, hints: LossHints) {
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
        // Another registry may still use it.
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

/// A watch on the own node is worth its request only for locks that are held for longer than this.
const FIRST_LOOK: Duration = Duration::from_millis(25);

/// They all share one question.
const RENEWALS_MAX: usize = 10_000;
