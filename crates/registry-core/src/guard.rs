//! The guard of a held lock: what its holder can ask, and how the lock is let go.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::backend::{Claim, LockBackend, Release, Renewal};
use crate::call::{Call, first_poll};
use crate::clock::Moment;
use crate::contained::shielded;
use crate::engine::{Engine, backoff, lost, trouble};
use crate::error::{BackendError, LockError, LostReason};
use crate::event::LockEvent;
use crate::fencing::FencingToken;
use crate::held::{Ending, HeldClaim};
use crate::hints::NewsMark;
use crate::hold::{Fate, Hold};
use crate::key::Key;
use crate::lease::{covering, drift_margin};
use crate::mutant::{Mutant, mutated};
use crate::options::check_lease;
use crate::release::{GivenBack, GivingBack, give_back};

/// Proof that a lock is held, for as long as [`is_held`](Self::is_held) says so.
///
/// The guard owns everything it needs and may be moved between tasks and threads. While it lives, the lease is renewed in the
/// background. Let go with [`unlock`](Self::unlock), which waits for the store's answer and tells if the lock had been
/// lost. Dropping the guard lets go as well: the release is handed to the registry's janitor and happens soon after;
/// neither does it block nor can it fail loudly, inside or outside a runtime.
///
/// A lease can end under a working holder: the process was paused, the network was down, somebody broke the lock. Watch
/// [`lost`](Self::lost) or wrap the work in [`protect`](Self::protect), and give
/// [`fencing_token`](Self::fencing_token) along with each write: only the token protects data against a holder that
/// does not know yet.
///
/// A guard that is leaked (`mem::forget`) is renewed for ever unless the lock was taken with
/// [`max_hold`](crate::LockOptions::max_hold).
#[must_use = "the lock is let go as soon as the guard is dropped"]
pub struct LockGuard {
    /// Taken out only by whoever consumes the guard.
    hold: Option<Arc<Hold>>,
}

impl LockGuard {
    pub(crate) fn new(hold: Arc<Hold>) -> Self {
        Self { hold: Some(hold) }
    }

    /// The key of the lock.
    #[must_use]
    pub fn key(&self) -> &str {
        self.held().claim().key().as_str()
    }

    /// The token of this grant: larger than all that were given for this key before. `None` if the store
    /// [does not fence](crate::Capabilities::fencing).
    #[must_use]
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.hold().token()
    }

    /// The instant until which the lock is surely held if no further renewal succeeds. In the past once the lock is lost.
    ///
    /// Counted from before the request was sent, less a margin of 1 % and 2 ms for clocks that run at different rates, on a clock
    /// that counts the time that this host is suspended.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        let now = Moment::now();
        self.held().valid_until().max(now).to_instant(now)
    }

    /// How long the lock is surely held if no further renewal succeeds. Zero once it is lost.
    #[must_use]
    pub fn valid_for(&self) -> Duration {
        self.held().valid_until().since(Moment::now())
    }

    /// Whether the lock is surely held now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        Moment::now() < self.held().valid_until()
    }

    /// Waits until the lock is lost, and tells why. Never resolves if the lock is let go properly.
    ///
    /// The future does not borrow the guard, so it can be watched elsewhere, and tells of a loss even if it is looked at only
    /// after the guard is gone. It resolves no later than
    /// [`valid_until`](Self::valid_until), whatever the network does; on a process that was paused, at its first poll.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing; a later call tells again.
    pub fn lost(&self) -> impl Future<Output = LostReason> + Send + 'static + use<> {
        let hold = Arc::clone(self.hold());
        async move {
            loop {
                let hint = hold.held().lost_hint();
                tokio::pin!(hint);
                // Listening starts before the look, or a loss could slip through in between.
                hint.as_mut().enable();
                hold.held().announce_watcher();
                match hold.fate() {
                    Fate::Held => {}
                    Fate::Lost(reason) => return reason,
                    Fate::LetGo => break,
                }
                // The keeper tells of a loss, but the deadline holds even if the keeper's runtime is gone.
                let deadline = hold.held().valid_until();
                // Whoever ends the lease wakes this task, and must not suffer from a waker that panics.
                shielded(async {
                    tokio::select! {
                        biased;
                        () = &mut hint => {}
                        () = hold.held().engine().sleep_until(deadline) => {}
                    }
                })
                .await;
            }
            // A watcher that stays must not keep the slot of a lock that was let go.
            drop(hold);
            std::future::pending().await
        }
    }

    /// Runs `work` for as long as the lock is held. If the lock is lost first, `work` is dropped at its current `.await`.
    ///
    /// This stops the work; it does not undo it. What was sent before may still take effect later: give the
    /// [`fencing_token`](Self::fencing_token) along with it.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock was lost before `work` was done.
    ///
    /// # Cancel safety
    /// Dropping the future drops `work`; the guard stays.
    pub async fn protect<F: Future>(&self, work: F) -> Result<F::Output, LockError> {
        let key = self.held().claim().key();
        tokio::select! {
            biased;
            // First, so that a process that wakes from a long pause does not take one more step.
            reason = self.lost() => Err(lost(key, reason)),
            done = work => Ok(done),
        }
    }

    /// Makes the lease end `lease` from now, or later, and renewals from here on ask for `lease`.
    ///
    /// # Errors
    /// [`LockError::InvalidOption`] for a lease that the store does not take, before any I/O; [`LockError::Lost`] if the lock
    /// is not held any more; [`LockError::Backend`] if the store did not confirm: then the lease goes on as it was.
    ///
    /// # Cancel safety
    /// Dropping the future may or may not have prolonged the lease in the store; the guard trusts only what was confirmed.
    pub async fn renew(&self, lease: Duration) -> Result<(), LockError> {
        let held = self.held();
        let engine = held.engine();
        check_lease("lease", lease, &engine.capabilities)?;
        if let Some(reason) = held.loss() {
            return Err(lost(held.claim().key(), reason));
        }
        let sent_at = Moment::now();
        let key = held.claim().key();
        let claim = held.claim().clone().with_lease(lease);
        let limit = engine.defaults.answer_limit;
        let answer = engine.renew(claim).answer_to_caller_within(limit, lease).await;
        match answer.unwrap_or_else(|| Err(engine.unanswered())) {
            Ok(Renewal::Renewed(granted)) => {
                held.set_lease_length(lease);
                held.renewed(sent_at, granted);
            }
            Ok(Renewal::Gone) => _ = held.lose(LostReason::Gone),
            Err(error) => return Err(trouble("renew", key.as_str(), error)),
        }
        match held.loss() {
            Some(reason) => Err(lost(key, reason)),
            None => Ok(()),
        }
    }

    /// A further guard of the same hold: same token, same lease, no call to the store. The lock is let go with the last one.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn reenter(&self) -> Result<Self, LockError> {
        let held = self.held();
        let again = self
            .hold()
            .enter_again()
            .ok_or_else(|| lost(held.claim().key(), held.loss().unwrap_or(LostReason::Expired)))?;
        held.engine()
            .tell(|| LockEvent::Reentered { key: self.key(), token: self.fencing_token() });
        Ok(again)
    }

    /// Lets go, and waits until the store has freed the key or the next local caller has it.
    ///
    /// With guards from [`reenter`](Self::reenter) left, only this one ends. With a
    /// [`min_hold`](crate::LockOptions::min_hold) that is not over, this does not wait: the key is freed when it is over. A lease
    /// that ends before is made longer first.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock had been lost: what was done since was not protected. [`LockError::Backend`] if the store
    /// did not confirm in time: if that can help, the release is repeated in the background, and the lease ends in any case.
    /// A store that cannot free the key next to an open fenced transaction says so at once by [`LockError::Backend`]; the
    /// background frees the key after the transaction.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the release to the background, as dropping the guard does.
    pub async fn unlock(mut self) -> Result<(), LockError> {
        let Some(hold) = self.hold.take() else {
            return Ok(());
        };
        let Some(ended) = hold.leave() else {
            return match hold.fate() {
                Fate::Lost(reason) => Err(lost(hold.held().claim().key(), reason)),
                Fate::Held | Fate::LetGo => Ok(()),
            };
        };
        let ending = ended.map_err(|reason| lost(hold.held().claim().key(), reason))?;
        drop(hold);
        let Some(mut ending) = ending.hand_over() else {
            yield_at_times().await;
            return Ok(());
        };
        let engine = ending.held().engine();
        if !ending.held().min_hold_left().is_zero() {
            let (engine, key) = (Arc::clone(engine), ending.held().claim().key().clone());
            return keep(ending, &engine).await.map_err(|reason| lost(&key, reason));
        }
        // Most of the time of an in-process unlock would go into preparing for an answer that takes its time.
        let claim = ending.claim();
        let first = match engine.backend.release_at_once(&claim) {
            Some(answer) => Ok(answer),
            None => first_poll(engine.releasing(&claim)).await,
        };
        if let Ok(Ok(Release::Freed)) = first
            && ending.held().stray_attempts_at_release() == 0
        {
            tell_released(ending.held());
            ending.settle();
            drop(ending);
            yield_at_times().await;
            return Ok(());
        }
        let (engine, key, fenced) = (Arc::clone(engine), claim.key().clone(), claim.is_fenced());
        let release = match first {
            Ok(answer) => Call::answered(&engine.janitor, answer),
            Err(release) => Call::polled(&engine.janitor, release),
        };
        let patience = ending.held().lease_length();
        if !fenced {
            let job = letting_go(&engine, give_held_back(ending, Some(release), None, None));
            return outcome(job, &engine, &key, patience).await;
        }
        // This task may have to end its transaction before the store can free the key.
        let (blocked, refusal) = oneshot::channel();
        let job = letting_go(&engine, give_held_back(ending, Some(release), None, Some(blocked)));
        tokio::select! {
            biased;
            outcome = outcome(job, &engine, &key, patience) => outcome,
            Ok(error) = refusal => Err(trouble("release", key.as_str(), error)),
        }
    }

    /// Returns the claim for a fenced write, which compares it inside the store, and excludes the claim from hand-over.
    ///
    /// A store knows the claim, and not which of its local holders sends a request. Without the exclusion, a fenced write
    /// that is still open could take effect after the write of the next local holder. After this call, the end of the lock
    /// releases the claim in the store, so the next local caller acquires a claim of its own. The exclusion lasts as long as
    /// the claim, also if the write is dropped.
    ///
    /// A backend calls this before it sends the first request of the write.
    ///
    /// # Errors
    /// [`LockError::Lost`] if the lock is not held any more.
    pub fn claim_for_fence(&self) -> Result<&Claim, LockError> {
        let held = self.held();
        let excluded = held.exclude_from_hand_over();
        excluded.map(|()| held.claim()).map_err(|reason| lost(held.claim().key(), reason))
    }

    /// Returns the claim under which the store knows this hold. For tests and diagnosis.
    ///
    /// A fenced write uses [`claim_for_fence`](Self::claim_for_fence) instead: this claim may pass to the next local caller.
    #[must_use]
    pub fn claim(&self) -> &Claim {
        self.held().claim()
    }

    /// The backend of the registry that this lock is from, if it is a `B`. For fenced writes, with
    /// [`claim_for_fence`](Self::claim_for_fence).
    #[must_use]
    pub fn backend<B: LockBackend>(&self) -> Option<&B> {
        let backend: &dyn std::any::Any = &*self.held().engine().backend;
        backend.downcast_ref()
    }

    pub(crate) fn hold(&self) -> &Arc<Hold> {
        self.hold.as_ref().expect("a guard has its hold until it is consumed")
    }

    fn held(&self) -> &Arc<HeldClaim> {
        self.hold().held()
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut guard = f.debug_struct("LockGuard");
        if let Some(hold) = &self.hold {
            guard
                .field("key", hold.held().claim().key())
                .field("token", &hold.token())
                .field("valid_for", &self.valid_for());
        }
        guard.finish_non_exhaustive()
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some(hold) = self.hold.take() else { return };
        // A claim that was lost has been dealt with by whoever noticed.
        if let Some(Ok(ending)) = hold.leave() {
            let engine = Arc::clone(hold.held().engine());
            drop(hold);
            drop(letting_go(&engine, let_go(ending)));
        }
    }
}

/// Lets the other tasks of this thread run now and then. Called when nothing is left to do, so that dropping or parking it keeps nothing.
async fn yield_at_times() {
    tokio::task::coop::consume_budget().await;
}

/// A claim between its last guard and the store's answer. Whoever drops it leaves the rest to the janitor.
fn letting_go(
    engine: &Engine,
    job: impl Future<Output = GivenBack> + Send + 'static,
) -> Call<GivenBack> {
    Call::giving_back(&engine.janitor, Box::pin(job))
}

/// Waits for the outcome, as long as a caller can be expected to.
async fn outcome(
    job: Call<GivenBack>,
    engine: &Engine,
    key: &Key,
    patience: Duration,
) -> Result<(), LockError> {
    let limit = engine.defaults.answer_limit;
    match job.answer_to_caller_within(limit, patience).await {
        Some(GivenBack::Freed) => Ok(()),
        _ if mutated(Mutant::ReleaseErrorSwallowed) => Ok(()),
        Some(GivenBack::NotHeld) => Err(lost(key, LostReason::Gone)),
        Some(GivenBack::Unknown(error)) => Err(trouble("release", key.as_str(), error)),
        None => Err(trouble("release", key.as_str(), engine.unanswered())),
    }
}

/// Leaves the claim to the background for the rest of its `min_hold`, after the first renewal that this takes: the key must stay
/// taken even if this process ends right after.
async fn keep(ending: Ending, engine: &Engine) -> Result<(), LostReason> {
    let (secured, is_secured) = oneshot::channel();
    let (limit, patience) = (engine.defaults.answer_limit, ending.held().lease_length());
    let job = letting_go(engine, give_held_back(ending, None, Some(secured), None));
    tokio::select! {
        biased;
        _ = job.answer_to_caller_within(limit, patience) => Ok(()),
        // A failure is not the caller's: the renewal is tried again while the lease lasts.
        secured = is_secured => secured.unwrap_or(Ok(())),
    }
}

/// Hands the claim to the next local caller, or gives it back.
async fn let_go(ending: Ending) -> GivenBack {
    match ending.hand_over() {
        None => GivenBack::Freed,
        Some(ending) => give_held_back(ending, None, None, None).await,
    }
}

/// Gives the claim back to the store, when its `min_hold` is over.
async fn give_held_back(
    mut ending: Ending,
    under_way: Option<Call<Result<Release, BackendError>>>,
    secured: Option<Secured>,
    blocked: Option<oneshot::Sender<BackendError>>,
) -> GivenBack {
    let held = Arc::clone(ending.held());
    let engine = Arc::clone(held.engine());
    let min_hold_left = held.min_hold_left();
    if !min_hold_left.is_zero() && !keep_for(&held, &engine, min_hold_left, secured).await {
        ending.left_to_lease();
        engine.leave_to_lease(held.claim().key());
        return GivenBack::Unknown(BackendError::transient(
            "the registry was closed before the end of min_hold",
        ));
    }
    let outcome = give_back(GivingBack {
        engine: Arc::clone(&engine),
        claim: ending.claim(),
        turn: ending.take_turn(),
        lease: held.lease_length(),
        stray_attempts: held.stray_attempts_at_release(),
        under_way,
        blocked,
    })
    .await;
    match &outcome {
        GivenBack::Freed => {
            tell_released(&held);
            ending.settle();
        }
        GivenBack::NotHeld => ending.settle(),
        GivenBack::Unknown(_) => ending.left_to_lease(),
    }
    outcome
}

fn tell_released(held: &HeldClaim) {
    held.engine().tell(|| LockEvent::Released {
        key: held.claim().key().as_str(),
        held_for: Moment::now().since(held.granted_at()),
    });
}

/// Is told once the store was asked to keep a claim, with the reason if the claim is lost.
type Secured = oneshot::Sender<Result<(), LostReason>>;

/// Keeps a claim that nobody uses any more until its `min_hold` is over. False if closing could not wait for that.
async fn keep_for(
    held: &HeldClaim,
    engine: &Engine,
    left: Duration,
    secured: Option<Secured>,
) -> bool {
    let end = Moment::now().after(left);
    tokio::select! {
        biased;
        () = keep_until(held, engine, end, secured) => true,
        () = engine.out_of_time.given() => false,
    }
}

/// Renews the lease until `end`, as long as it lasts, and waits until then. Returns early if the claim is lost, for which it also
/// looks when there is news of the key: local callers must not be kept from a key that was broken.
async fn keep_until(held: &HeldClaim, engine: &Engine, end: Moment, secured: Option<Secured>) {
    let store = &engine.capabilities;
    let mut secured = secured;
    let mut tell = |outcome| secured.take().map(|secured| secured.send(outcome));
    let mut until = held.valid_until();
    let mut failures = 0;
    let mut news = held.slot().news();
    let mut renews = until < end;
    loop {
        let mut again_at = end;
        if renews {
            news = held.slot().news();
            let now = Moment::now();
            // A store takes leases of limited length: one renewal may not be enough.
            let lease = covering(end.since(now)).clamp(store.lease_min, store.lease_max);
            let mut renewal = engine.renew(held.claim().clone().with_lease(lease));
            let pause = match renewal.answer_within(engine.defaults.answer_limit).await {
                Some(Ok(Renewal::Renewed(granted))) => {
                    failures = 0;
                    until = until.max(now.after(granted.saturating_sub(drift_margin(granted))));
                    renews = until < end;
                    granted / 3
                }
                Some(Ok(Renewal::Gone)) => {
                    tell(Err(LostReason::Gone));
                    return;
                }
                Some(Err(error)) if !error.is_retryable() => {
                    renews = false;
                    Duration::ZERO
                }
                Some(Err(_)) | None => {
                    failures += 1;
                    Duration::ZERO
                }
            };
            let next = Moment::now().after(pause.max(backoff(failures)));
            // What is over by then cannot be renewed.
            renews &= until >= end || next < until;
            if renews {
                again_at = next.min(end);
            }
        }
        tell(Ok(()));
        if hears_until(held, engine, news, again_at).await {
            renews = true;
        } else if again_at >= end {
            return;
        }
    }
}

/// Waits until `at`, or until there is other news of the key than `before`. Returns whether there is.
async fn hears_until(held: &HeldClaim, engine: &Engine, before: NewsMark, at: Moment) -> bool {
    loop {
        // Not at once: a renewal may be news itself.
        engine.sleep_until(Moment::now().after(engine.defaults.poll).min(at)).await;
        if Moment::now() >= at {
            return false;
        }
        if held.slot().news() != before {
            return true;
        }
    }
}
