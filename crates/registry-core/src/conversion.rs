//! Changes the mode of a held lock: upgrade and downgrade. The lock stays held.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::wait_for_attempt;
use crate::backend::Attempt;
use crate::clock::Moment;
use crate::engine::{backoff, lost_error, store_error};
use crate::error::{LockError, LostReason};
use crate::event::LockEvent;
use crate::guard::{Hold, LockGuard};
use crate::mode::ClaimMode;
use crate::registration::WaiterRegistration;
use crate::release::{PendingRelease, release_in_background};

impl LockGuard {
    /// Makes this lock exclusive. Waits without a time limit until all shared holders have released
    /// the key. This wait blocks new shared holders. The lock stays held during the wait.
    ///
    /// The new token is larger than those of all earlier readers.
    ///
    /// # Errors
    /// [`LockError::InvalidConversion`] if the lock is not
    /// [upgradable](crate::DistributedLock::upgradable), if it has other guards, or if its
    /// [owner](crate::Owner) also holds a shared lock of the key, or acquires one during the wait.
    /// [`LockError::Unsupported`] if the store has no upgradable locks. [`LockError::Lost`] if the
    /// lock was lost. [`LockError::Backend`] for a store error that a retry cannot resolve. Other
    /// store errors are retried while the lock is held. [`LockError::Closed`] if the registry is
    /// closed during the wait. After an error, this guard is dropped, which releases the lock
    /// unless it has other guards.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lock is released in the background.
    pub async fn upgrade(self) -> Result<Self, LockError> {
        let key = self.key().to_owned();
        let upgraded = self.convert_until(ClaimMode::Exclusive, None).await?;
        // Unreachable: without a deadline, the upgrade is never withdrawn.
        upgraded.map_err(|_| LockError::Lost { key, reason: LostReason::Gone })
    }

    /// As [`upgrade`](Self::upgrade), but waits at most `wait`. Returns `Ok(Err(guard))` with the
    /// upgradable guard if other clients held the lock until the deadline.
    ///
    /// # Errors
    /// As [`upgrade`](Self::upgrade), and [`LockError::Backend`] for a store error that lasts until
    /// the deadline.
    ///
    /// # Cancel safety
    /// As [`upgrade`](Self::upgrade).
    pub async fn try_upgrade_for(self, wait: Duration) -> Result<Result<Self, Self>, LockError> {
        self.convert_until(ClaimMode::Exclusive, Some(Moment::now().after(wait))).await
    }

    /// Makes this lock shared. The lock stays held, and the token stays the same.
    ///
    /// # Errors
    /// [`LockError::InvalidConversion`] if the lock is neither exclusive nor upgradable, or if it
    /// has other guards. Otherwise as [`upgrade`](Self::upgrade).
    ///
    /// # Cancel safety
    /// As [`upgrade`](Self::upgrade).
    pub async fn downgrade(self) -> Result<Self, LockError> {
        self.downgrade_to(ClaimMode::Shared).await
    }

    /// Makes this exclusive lock upgradable. The lock stays held, and the token stays the same.
    ///
    /// # Errors
    /// [`LockError::InvalidConversion`] if the lock is not exclusive, or if it has other guards.
    /// Otherwise as [`upgrade`](Self::upgrade).
    ///
    /// # Cancel safety
    /// As [`upgrade`](Self::upgrade).
    pub async fn downgrade_to_upgradable(self) -> Result<Self, LockError> {
        self.downgrade_to(ClaimMode::Upgradable).await
    }

    async fn downgrade_to(self, to: ClaimMode) -> Result<Self, LockError> {
        match self.convert_until(to, None).await? {
            // `Err` is unreachable: without a deadline, the conversion is never withdrawn.
            Ok(guard) | Err(guard) => Ok(guard),
        }
    }

    /// Tries to convert the lock until `deadline`. If other clients still hold the key at the
    /// deadline, returns the unchanged guard in the inner error.
    async fn convert_until(
        self,
        to: ClaimMode,
        deadline: Option<Moment>,
    ) -> Result<Result<Self, Self>, LockError> {
        let conversion = Conversion::begin(self, to)?;
        conversion.run(deadline).await
    }
}

/// A guard whose lock is being converted. No caller can re-enter the lock meanwhile. Dropping this
/// value releases the lock.
struct Conversion {
    hold: Option<Arc<Hold>>,
    to: ClaimMode,
}

impl Conversion {
    fn begin(guard: LockGuard, to: ClaimMode) -> Result<Self, LockError> {
        use ClaimMode::{Exclusive, Shared, Upgradable};
        let from = guard.mode();
        let engine = guard.hold().grant().engine();
        // A store converts claims only if it has upgradable claims. This also applies to a
        // downgrade from exclusive to shared.
        engine.require_mode(Upgradable)?;
        engine.require_mode(to)?;
        let problem = match (from, to) {
            (Upgradable, Exclusive)
            | (Exclusive, Upgradable)
            | (Exclusive | Upgradable, Shared) => {
                let hold = guard.into_hold();
                if hold.try_forbid_reentry() {
                    return Ok(Self { hold: Some(hold), to });
                }
                let guard = LockGuard::new(hold);
                let problem = "the lock has other guards; drop them first";
                return Err(invalid_conversion(&guard, to, problem));
            }
            (Shared, Exclusive) => {
                "two shared holders would deadlock; acquire the lock as upgradable"
            }
            _ => "no such conversion exists; check `mode()`",
        };
        Err(invalid_conversion(&guard, to, problem))
    }

    fn hold(&self) -> &Arc<Hold> {
        self.hold.as_ref().expect("the hold is present until the conversion ends")
    }

    /// Ends this conversion without a change, and returns the guard. Callers of the same owner that
    /// have queued meanwhile re-enter the lock.
    fn into_guard(mut self) -> LockGuard {
        let hold = self.hold.take().expect("the hold is present until the conversion ends");
        hold.allow_reentry();
        let guard = LockGuard::new(hold);
        guard.hold().grant().local_lock().record_hold(guard.hold());
        guard
    }

    async fn run(
        mut self,
        deadline: Option<Moment>,
    ) -> Result<Result<LockGuard, LockGuard>, LockError> {
        let grant = Arc::clone(self.hold().grant());
        let engine = Arc::clone(grant.engine());
        let claim = grant
            .claim_with_current_lease()
            .converted_to(self.to)
            .restricted_to_grant(grant.first_token());
        let key = claim.key().clone();
        let mut failures = 0;
        let mut may_repeat_at_once = true;
        let waiting_since = Moment::now();
        let mut registration = WaiterRegistration::new(&engine, &claim, waiting_since);
        // Ends when the lock is converted or lost, at the deadline, after a permanent error, or
        // when the registry closes.
        loop {
            if let Some(reason) = grant.loss() {
                return Err(lost_error(&key, reason));
            }
            // Checked before each attempt: the owner may acquire a shared lock while the upgrade
            // waits. Downgrades do not wait.
            if self.to == ClaimMode::Exclusive
                && grant.local_lock().upgrade_would_wait_for_own_owner(self.hold())
            {
                return Err(LockError::InvalidConversion {
                    key: key.as_str().to_owned(),
                    from: grant.claim().mode(),
                    to: self.to,
                    problem: "this owner also holds a shared lock of the key and would wait for \
                              itself; release the shared lock first",
                });
            }
            let sent_at = Moment::now();
            let epoch_at_send = grant.local_lock().invalidation_epoch();
            let limit = engine.defaults.operation_timeout;
            let call = engine.try_acquire(claim.clone());
            let response = call.monitored_response_within(limit, grant.lease_length()).await;
            let error = match response.unwrap_or_else(|| Err(engine.no_response_error())) {
                Ok(Attempt::Granted(granted)) => {
                    let converted = grant.convert(claim, granted, sent_at, epoch_at_send);
                    let converted = converted.map_err(|reason| lost_error(&key, reason))?;
                    let old_hold = self.hold.take().expect("the hold is present until now");
                    // After a hand-over, the token of the hold is not the first of its grant.
                    let keeps_token = granted.token == grant.first_token();
                    let token = if keeps_token { old_hold.token() } else { granted.token };
                    let guard = Hold::first_guard(converted, token, old_hold.owner().cloned());
                    grant.local_lock().record_hold(guard.hold());
                    old_hold.end_by_conversion(guard.hold());
                    guard.hold().grant().pass_on_permit();
                    engine.emit(|| LockEvent::Converted {
                        key: key.as_str(),
                        from: grant.claim().mode(),
                        mode: self.to,
                        token,
                    });
                    return Ok(Ok(guard));
                }
                Ok(Attempt::Busy(busy)) => {
                    failures = 0;
                    may_repeat_at_once = true;
                    if deadline.is_some_and(|deadline| deadline <= Moment::now()) {
                        return self.withdraw_upgrade().await;
                    }
                    let wait = wait_for_attempt(
                        &engine,
                        deadline,
                        claim.clone(),
                        busy,
                        waiting_since,
                        &mut registration,
                    );
                    tokio::select! {
                        biased;
                        reason = grant.lost() => return Err(lost_error(&key, reason)),
                        woken = wait => { woken?; }
                    }
                    continue;
                }
                Ok(Attempt::Gone) => {
                    grant.lose(LostReason::Gone);
                    // The store has no grant with this first token. A late request of a withdrawn
                    // upgrade may have changed the token; that grant must be released.
                    let claim = grant.claim_to_release();
                    release_in_background(PendingRelease::new(engine, claim));
                    return Err(lost_error(&key, LostReason::Gone));
                }
                Err(error) if error.is_stale_connection() && may_repeat_at_once => {
                    may_repeat_at_once = false;
                    continue;
                }
                Err(error) => error,
            };
            let now = Moment::now();
            if !error.is_retryable() || deadline.is_some_and(|deadline| deadline <= now) {
                return Err(store_error("convert", key.as_str(), error));
            }
            let retry_at = now.after(backoff(failures)).min(deadline.unwrap_or(Moment::FUTURE));
            failures += 1;
            tokio::select! {
                biased;
                reason = grant.lost() => return Err(lost_error(&key, reason)),
                () = engine.closing.wait() => return Err(LockError::Closed),
                () = engine.sleep_until(retry_at) => {}
            }
        }
    }

    /// Withdraws the waiting upgrade in the store, so that it no longer blocks new readers. Returns
    /// the unchanged guard in the inner error.
    async fn withdraw_upgrade(self) -> Result<Result<LockGuard, LockGuard>, LockError> {
        let grant = Arc::clone(self.hold().grant());
        let engine = grant.engine();
        let claim = grant.claim_with_current_lease();
        // A conversion to the mode that the claim already has.
        let withdrawal =
            claim.clone().converted_to(claim.mode()).restricted_to_grant(grant.first_token());
        let limit = engine.defaults.operation_timeout;
        // If this call gets no response, the upgrade expires in the store.
        let call = engine.try_acquire(withdrawal);
        drop(call.monitored_response_within(limit, grant.lease_length()).await);
        Ok(Err(self.into_guard()))
    }
}

impl Drop for Conversion {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            // A request in flight may still convert the claim to a weaker mode. After a hand-over,
            // the store would then let other clients share the lock of the next holder.
            let _ = hold.grant().exclude_from_hand_over();
            hold.allow_reentry();
            drop(LockGuard::new(hold));
        }
    }
}

fn invalid_conversion(guard: &LockGuard, to: ClaimMode, problem: &'static str) -> LockError {
    LockError::InvalidConversion { key: guard.key().to_owned(), from: guard.mode(), to, problem }
}
