//! Acquires several keys together: all of them or none. Holds none of them while it waits for one.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join_all, select_all};

use crate::acquire::{RetryState, try_acquire_all};
use crate::clock::{Moment, sleep};
use crate::engine::backoff;
use crate::error::{InvalidOption, LockError, LostReason};
use crate::fencing::FencingToken;
use crate::guard::{LockGuard, unlock_all};
use crate::local_lock::LocalLock;
use crate::lock::DistributedLock;
use crate::mode::ClaimMode;
use crate::mutant::{Mutant, mutated};
use crate::options::LockOptions;

/// The maximum number of times that the pause between two rounds is doubled.
const PAUSE_DOUBLINGS_MAX: u32 = 2;

/// A lock of several keys, which are acquired together.
///
/// The keys are sorted and de-duplicated. An acquisition holds no key while it waits for another
/// one. If a key is busy, it releases the others, waits for the busy key, and then tries to acquire
/// the others again. Callers that lock the same keys in different orders therefore cannot deadlock.
/// However, an acquisition without a deadline never ends if two of its keys are never free at the
/// same time. Each key is the same lock that [`obtain`](crate::LockRegistry::obtain) returns.
#[derive(Clone)]
pub struct MultiLock {
    locks: Vec<DistributedLock>,
}

impl MultiLock {
    pub(crate) fn new(mut locks: Vec<DistributedLock>) -> Self {
        locks.sort_by(|a, b| a.key().cmp(b.key()));
        locks.dedup_by(|a, b| a.key() == b.key());
        Self { locks }
    }

    /// Returns the keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.locks.iter().map(DistributedLock::key)
    }

    /// Acquires all keys, waiting without a time limit.
    ///
    /// # Errors
    /// As [`DistributedLock::lock`], for any of the keys. [`LockError::InvalidOption`] if there are
    /// no keys.
    ///
    /// # Cancel safety
    /// As [`DistributedLock::lock`]: the keys acquired so far are released in the background.
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    ///
    /// # Examples
    /// ```
    /// # use registry_core::{LockRegistryExt, Registry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::in_memory()?;
    /// let guard = registry.obtain_all(["accounts/7", "accounts/3"]).lock().await?;
    /// // … move money from one account to the other …
    /// guard.unlock().await?;
    /// # Ok(()) }
    /// ```
    pub async fn lock(&self) -> Result<MultiGuard, LockError> {
        self.lock_with(LockOptions::new()).await
    }

    /// Acquires all keys if all of them are free. Returns `Ok(None)` otherwise.
    ///
    /// # Errors
    /// As [`lock`](Self::lock) and [`DistributedLock::try_lock`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_lock(&self) -> Result<Option<MultiGuard>, LockError> {
        self.try_lock_with(LockOptions::new()).await
    }

    /// Acquires all keys, waiting at most `wait`. Returns `Ok(None)` if it could not acquire all of
    /// them before the deadline.
    ///
    /// # Errors
    /// As [`lock`](Self::lock) and [`DistributedLock::try_lock_for`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<MultiGuard>, LockError> {
        self.try_lock_with(LockOptions::new().wait(wait)).await
    }

    /// Acquires all keys with `options`, which apply to each key. One deadline covers all keys.
    /// Without [`LockOptions::wait`], waits without a time limit.
    ///
    /// # Errors
    /// As [`lock`](Self::lock) and [`DistributedLock::lock_with`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn lock_with(&self, options: LockOptions) -> Result<MultiGuard, LockError> {
        match (self.acquire(&options).await?, options.wait) {
            (Some(guard), _) => Ok(guard),
            (None, Some(wait)) => {
                let key = self.keys().collect::<Vec<_>>().join(", ");
                Err(LockError::WaitElapsed { key, wait })
            }
            // Without a deadline, the wait ends only with a guard or an error.
            (None, None) => Err(LockError::Closed),
        }
    }

    /// Acquires all keys with `options`. Without [`LockOptions::wait`], tries once. Returns
    /// `Ok(None)` if it could not acquire all of them before the deadline.
    ///
    /// # Errors
    /// As [`lock`](Self::lock) and [`DistributedLock::try_lock_with`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    /// As [`DistributedLock::lock`].
    pub async fn try_lock_with(
        &self,
        mut options: LockOptions,
    ) -> Result<Option<MultiGuard>, LockError> {
        options.wait.get_or_insert(Duration::ZERO);
        self.acquire(&options).await
    }

    async fn acquire(&self, options: &LockOptions) -> Result<Option<MultiGuard>, LockError> {
        let Some(first) = self.locks.first() else {
            return Err(InvalidOption::no_keys().into());
        };
        let engine = first.local_lock()?.engine();
        let claim_options = engine.claim_options(options, ClaimMode::Exclusive)?;
        let lease = claim_options.as_ref().unwrap_or(&engine.default_options).lease.length;
        // A failed round must release its keys at once, so the `min_hold` begins only when all keys
        // are held.
        let min_hold = options.min_hold;
        let options = &LockOptions { min_hold: None, ..options.clone() };
        let deadline = options.limited_wait().map(|wait| Moment::now().after(wait));
        // The guard of the busy key for which the previous round waited.
        let mut kept_guards: Vec<LockGuard> = Vec::new();
        let mut rounds = 0;
        let mut failures = RetryState::default();
        // Ends when all keys are held, at the deadline, or with an error.
        loop {
            let mut guards = std::mem::take(&mut kept_guards);
            let busy = match self.try_missing_keys(options, &mut guards).await {
                Ok(busy) => busy,
                Err(error) => {
                    drop(guards);
                    failures.pause_or_fail(engine, error, deadline, lease).await?;
                    continue;
                }
            };
            failures = RetryState::default();
            // A key may be lost while the others are acquired.
            let is_lost = |lock: &&DistributedLock| {
                guards.iter().any(|guard| guard.key() == lock.key() && !guard.is_held())
            };
            let Some(busy) = busy.or_else(|| self.locks.iter().find(is_lost)) else {
                guards.sort_by(|a, b| a.key().cmp(b.key()));
                if let Some(min_hold) = min_hold {
                    guards.iter().for_each(|guard| guard.hold().grant().begin_min_hold(min_hold));
                }
                return Ok(Some(MultiGuard { guards }));
            };
            if mutated(Mutant::HalfOfKeysKept) {
                kept_guards.extend(guards.pop());
            }
            // The lock holds no key while it waits.
            _ = unlock_all(guards).await;
            let left = match deadline {
                None => None,
                Some(deadline) => {
                    let left = deadline.since(Moment::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    Some(left)
                }
            };
            if rounds > 0 {
                // Two callers may have made each other's attempts fail. The random pause makes them
                // retry at different times. The pause is limited: during a longer one, other
                // callers would overtake this caller repeatedly.
                let pause = backoff((rounds - 1).min(PAUSE_DOUBLINGS_MAX));
                sleep(pause.min(left.unwrap_or(Duration::MAX))).await;
            }
            rounds += 1;
            let mut wait_options = options.clone();
            wait_options.wait = deadline.map(|deadline| deadline.since(Moment::now()));
            let guard = match wait_options.wait {
                None => Some(busy.lock_with(wait_options).await?),
                Some(_) => busy.try_lock_with(wait_options).await?,
            };
            let Some(guard) = guard else { return Ok(None) };
            kept_guards.push(guard);
        }
    }

    /// Tries to acquire all keys that are not in `guards`. Keys of one registry share a request if
    /// the store supports batches and their claims are in one shard. Adds the new guards to
    /// `guards`. Returns a key that was busy, if there is one.
    async fn try_missing_keys(
        &self,
        options: &LockOptions,
        guards: &mut Vec<LockGuard>,
    ) -> Result<Option<&DistributedLock>, LockError> {
        let mut options = options.clone();
        options.wait = Some(Duration::ZERO);
        // The keys of a routing registry may belong to several registries.
        let mut by_registry: Vec<(Vec<&DistributedLock>, Vec<&Arc<LocalLock>>)> = Vec::new();
        for lock in &self.locks {
            if guards.iter().any(|guard| guard.key() == lock.key()) {
                continue;
            }
            let local_lock = lock.local_lock()?;
            let same = by_registry.iter_mut().find(|(_, local_locks)| {
                local_locks.iter().any(|it| Arc::ptr_eq(it.engine(), local_lock.engine()))
            });
            match same {
                Some((locks, local_locks)) => {
                    locks.push(lock);
                    local_locks.push(local_lock);
                }
                None => by_registry.push((vec![lock], vec![local_lock])),
            }
        }
        let attempts =
            by_registry.iter().map(|(_, local_locks)| try_acquire_all(local_locks, &options));
        let attempts = join_all(attempts).await;
        let mut busy = None;
        for ((locks, _), attempt) in by_registry.iter().zip(attempts) {
            let (granted, busy_index) = attempt?;
            guards.extend(granted);
            busy = busy.or_else(|| locks.get(busy_index?).copied());
        }
        Ok(busy)
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLock").field("keys", &self.keys().collect::<Vec<_>>()).finish()
    }
}

/// The guard of several keys, from a [`MultiLock`]. Each key has its own lease and token.
#[must_use = "the locks are released as soon as the guard is dropped"]
#[derive(Debug)]
pub struct MultiGuard {
    guards: Vec<LockGuard>,
}

/// Creates a `MultiGuard` with one key.
impl From<LockGuard> for MultiGuard {
    fn from(guard: LockGuard) -> Self {
        Self { guards: vec![guard] }
    }
}

impl MultiGuard {
    /// Returns the guards of the keys, sorted by key.
    pub fn guards(&self) -> &[LockGuard] {
        &self.guards
    }

    /// Returns the keys with their fencing tokens, sorted by key.
    pub fn fencing_tokens(&self) -> impl Iterator<Item = (&str, FencingToken)> {
        self.guards.iter().map(|guard| (guard.key(), guard.fencing_token()))
    }

    /// Returns the instant until which all keys are certainly held without a further renewal.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        let ends = self.guards.iter().map(LockGuard::valid_until);
        ends.min().unwrap_or_else(|| tokio::time::Instant::now().into_std())
    }

    /// Returns how long all keys are certainly held without a further renewal.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.guards.iter().map(LockGuard::valid_for).min().unwrap_or_default()
    }

    /// Returns whether all keys are certainly held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(LockGuard::is_held)
    }

    /// Waits until one of the keys is lost, and returns the key and the reason. Never resolves if
    /// all locks are released before one is lost.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub fn lost(&self) -> impl Future<Output = (String, LostReason)> + Send + 'static + use<> {
        let lost = self.guards.iter().map(|guard| {
            let (key, lost) = (guard.key().to_owned(), guard.lost());
            Box::pin(async move { (key, lost.await) })
        });
        let lost = select_all(lost.collect::<Vec<_>>());
        async move { lost.await.0 }
    }

    /// Runs `work` while all keys are held. If one of them is lost first, drops `work` at its
    /// current `.await`. See [`LockGuard::protect`].
    ///
    /// # Errors
    /// [`LockError::Lost`] with the key that was lost.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`. The guard remains.
    pub async fn protect<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        tokio::select! {
            biased;
            (key, reason) = self.lost() => Err(LockError::Lost { key, reason }),
            output = work => Ok(output),
        }
    }

    /// Releases all keys, and waits for the outcome of each.
    ///
    /// # Errors
    /// One of the errors of [`LockGuard::unlock`]. The other keys are released too.
    ///
    /// # Cancel safety
    /// As [`LockGuard::unlock`].
    pub async fn unlock(self) -> Result<(), LockError> {
        unlock_all(self.guards).await
    }
}
