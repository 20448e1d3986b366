//! Fairness between processes on a store without a queue.
//!
//! A release wakes all waiting processes at once. Without this module, the process with the
//! shortest round trip would acquire the key every time. The releasing process detects its own
//! release without a round trip. A process that polls would hardly ever find the key free. The
//! engine therefore limits the share of the time for which one process holds a key.
//!
//! A *turn* of a process lasts from its first attempt to the release of its claim in the store. The
//! *holding time* of a turn lasts from the grant to this release. A process *meets* another holder
//! when its attempt finds the key held.
//!
//! - Hand-over: a claim of a contended key is handed over within the process for at most
//!   [`CONTENDED_HAND_OVER_MAX`] after its grant.
//! - Pause: after the release of such a claim, the process pauses before its next attempt. The
//!   pause is a quarter of the time for which the process held the claim. If the store does not
//!   wake waiters, the pause is as long as this time. The pause doubles with each consecutive
//!   pause after which the process met no other holder. It lasts from [`PAUSE_MIN`] to
//!   [`FairnessLimits::pause_max`].
//! - Delay: after the pause, the process delays each attempt that follows a wake-up. The delays end
//!   when the process has met as many holders as it usually meets in a turn.
//! - Longer delay: if programs other than this library poll, each delay is a fifth of the holding
//!   time, from [`DELAY`] to [`POLLED_DELAY_MAX`]. These programs can then find the key free. If
//!   the process usually meets [`MANY_HOLDERS_MIN`] or more holders, the delays end only after
//!   [`USUAL_HOLDERS_MAX`] holders.
//! - Pause without contention: a process that has met no other holder pauses each time that it has
//!   held the key for [`FairnessLimits::uncontended_hold_max`] in total. Waiting processes can then
//!   acquire the key.
//!
//! Fairness affects only the order of acquisitions, never safety. A store with its own queue does
//! not use this module.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::capabilities::{Capabilities, GuaranteeClass, Reach};
use crate::clock::Moment;
use crate::key::Key;

/// The time after a grant in which a claim of a contended key may be handed over within a process.
pub(crate) const CONTENDED_HAND_OVER_MAX: Duration = Duration::from_millis(20);

/// The contention for the keys that this registry has released. An entry is valid for
/// [`FairnessLimits::pause_max`] after the release.
pub(crate) struct Fairness {
    /// `None` if the store reaches no other process, or has its own queue.
    limits: Option<FairnessLimits>,
    contention_by_key: Mutex<HashMap<Key, Contention>>,
}

#[derive(Debug, Clone, Copy)]
struct FairnessLimits {
    /// The longest pause. With the default poll interval, every waiting process notices within this
    /// time that the key is free.
    pause_max: Duration,
    /// The holding time of an uncontended key after which the process pauses.
    uncontended_hold_max: Duration,
    /// The length of the pause after `uncontended_hold_max`.
    uncontended_pause: Duration,
    /// The store does not wake waiters, so waiters poll.
    waiters_poll: bool,
    /// The minimum of [`Contention::usual_holders`] once it has reached [`MANY_HOLDERS_MIN`]. Zero
    /// unless programs other than this library poll.
    usual_holders_min: u32,
}

/// The contention for one key between this process and other processes. Each turn passes this value
/// on to the next turn.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Contention {
    /// The process has met another holder. [`Fairness::on_grant`] resets this flag once the process
    /// has met no other holder after two or more consecutive pauses, the last of at least half of
    /// [`FairnessLimits::pause_max`].
    contended: bool,
    /// The number of other holders that the process usually meets in a turn.
    usual_holders: u32,
    /// The number of attempts of this turn that have found another holder.
    holders_met: u32,
    /// The time of this process's last release of the key.
    released_at: Option<Moment>,
    /// The pause after this release.
    pause: Duration,
    /// The delay of an attempt that follows a wake-up, while `holders_met` is less than
    /// `usual_holders`.
    delay: Duration,
    /// The number of consecutive pauses after which the process met no other holder.
    pauses_without_contention: u32,
    /// The time for which this process has held the key since its last pause, or since it last met
    /// another holder.
    held_since_pause: Duration,
}

impl Fairness {
    /// Creates the fairness of one registry. `poll` is the interval at which waiters poll if the
    /// store does not wake them.
    pub(crate) fn new(store: &Capabilities, poll: Duration) -> Self {
        let is_unneeded =
            store.fair || store.reach == Reach::Process || store.class == GuaranteeClass::None;
        let limits = (!is_unneeded).then(|| FairnessLimits::new(store, poll));
        Self { limits, contention_by_key: Mutex::default() }
    }

    /// Returns the contention for `key` at the beginning of a turn. `None` if the store reaches no
    /// other process, or has its own queue.
    pub(crate) fn contention(&self, key: &Key) -> Option<Box<Contention>> {
        let limits = self.limits?;
        let contention = self.contention_by_key().get(key).copied().unwrap_or_default();
        // After `limits.pause_max`, the contention is out of date: within this time, every waiting
        // process could acquire the key.
        let is_valid = contention.was_released_within(limits.pause_max, Moment::now_coarse());
        Some(Box::new(if is_valid { contention } else { Contention::default() }))
    }

    /// Updates `contention` when the store has granted the claim of this turn.
    pub(crate) fn on_grant(&self, contention: &mut Contention) {
        let Some(limits) = self.limits else { return };
        if contention.holders_met > 0 {
            contention.contended = true;
            contention.pauses_without_contention = 0;
            contention.held_since_pause = Duration::ZERO;
            if contention.holders_met >= contention.usual_holders {
                let usual_holders = contention.holders_met.min(USUAL_HOLDERS_MAX);
                // Among a few processes, the pauses alone leave the key free often enough for
                // programs that poll.
                let min =
                    if usual_holders < MANY_HOLDERS_MIN { 0 } else { limits.usual_holders_min };
                contention.usual_holders = usual_holders.max(min);
            } else if fastrand::u32(..DECAY_ONE_IN) == 0 {
                contention.usual_holders -= 1;
            }
        } else if !contention.pause.is_zero() {
            contention.held_since_pause = Duration::ZERO;
            contention.pauses_without_contention += 1;
            // Only a long pause gives every waiting process the time to acquire the key.
            if contention.pauses_without_contention > 1 && contention.pause >= limits.pause_max / 2
            {
                *contention = Contention::default();
            }
        }
        contention.holders_met = 0;
        contention.pause = Duration::ZERO;
    }

    /// Records the end of a turn whose claim was granted at `granted_at`.
    pub(crate) fn on_release(&self, key: &Key, mut contention: Contention, granted_at: Moment) {
        let Some(limits) = self.limits else { return };
        let now = Moment::now_coarse();
        let held_for = now.since(granted_at);
        contention.held_since_pause = contention.held_since_pause.saturating_add(held_for);
        contention.pause = limits.pause_of(&contention, held_for);
        contention.released_at = Some(now);
        contention.delay = limits.delay_of(held_for);
        let mut contention_by_key = self.contention_by_key();
        if contention_by_key.len() >= KEYS_MAX {
            contention_by_key
                .retain(|_, contention| contention.was_released_within(limits.pause_max, now));
        }
        if contention_by_key.len() < KEYS_MAX || contention_by_key.contains_key(key) {
            contention_by_key.insert(key.clone(), contention);
        }
    }

    fn contention_by_key(&self) -> MutexGuard<'_, HashMap<Key, Contention>> {
        self.contention_by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FairnessLimits {
    fn new(store: &Capabilities, poll: Duration) -> Self {
        // A poll interval is lengthened at random by up to a quarter.
        let polled_pause = (poll + poll / 4).clamp(PAUSE_MAX, POLLED_PAUSE_MAX);
        let (pause_max, uncontended_pause, hold_to_pause_ratio) =
            if store.wakes { (PAUSE_MAX, PAUSE_MIN, 50) } else { (polled_pause, polled_pause, 40) };
        let usual_holders_min = if store.peer_poll.is_some() { USUAL_HOLDERS_MAX } else { 0 };
        Self {
            pause_max,
            uncontended_pause,
            uncontended_hold_max: uncontended_pause * hold_to_pause_ratio,
            waiters_poll: !store.wakes,
            usual_holders_min,
        }
    }

    /// Returns the delay of attempts after a turn that held the claim for `held_for`. During the
    /// delay, polls of programs other than this library find the key free.
    fn delay_of(&self, held_for: Duration) -> Duration {
        if self.usual_holders_min == 0 {
            DELAY
        } else {
            (held_for / 5).clamp(DELAY, POLLED_DELAY_MAX)
        }
    }

    /// Returns the pause after a turn that held the claim for `held_for`.
    fn pause_of(&self, contention: &Contention, held_for: Duration) -> Duration {
        if contention.contended {
            // If no other process acquired the key during a pause, the pause may have been too
            // short.
            let factor = 1_u32 << contention.pauses_without_contention.min(8);
            let share = if self.waiters_poll { held_for } else { held_for / 4 };
            let pause = share.max(PAUSE_MIN).saturating_mul(factor);
            pause.min(self.pause_max)
        } else if contention.held_since_pause >= self.uncontended_hold_max {
            self.uncontended_pause
        } else {
            Duration::ZERO
        }
    }
}

impl Contention {
    /// Returns whether other processes compete for the key.
    pub(crate) fn is_contended(&self) -> bool {
        self.contended
    }

    /// Returns the end of the pause before the first attempt of a turn. `None` if the attempt may
    /// be made at once.
    pub(crate) fn pause_end(&self) -> Option<Moment> {
        if self.pause.is_zero() {
            return None;
        }
        let end = self.released_at?.after(self.pause);
        (Moment::now() < end).then_some(end)
    }

    fn was_released_within(&self, span: Duration, now: Moment) -> bool {
        self.released_at.is_some_and(|released_at| now.since(released_at) < span)
    }

    /// Skips the pause, because the caller's deadline comes before its end.
    pub(crate) fn skip_pause(&mut self) {
        self.pause = Duration::ZERO;
    }

    /// Records that an attempt has found another holder.
    pub(crate) fn on_busy(&mut self) {
        self.holders_met = self.holders_met.saturating_add(1);
    }

    /// Returns the time to wait between a wake-up and the attempt that follows it.
    pub(crate) fn delay_after_wake(&self) -> Duration {
        if self.holders_met < self.usual_holders { self.delay } else { Duration::ZERO }
    }
}

impl fmt::Debug for Fairness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fairness").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// The longest pause if the store wakes waiters: several times the time between a release and the
/// arrival of a waiter's attempt.
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The shortest pause after a contended turn.
const PAUSE_MIN: Duration = Duration::from_millis(2);
/// The longest pause if waiters poll. Longer poll intervals do not lengthen the pause beyond it.
const POLLED_PAUSE_MAX: Duration = Duration::from_millis(312);
/// The shortest delay of an attempt that follows a wake-up.
const DELAY: Duration = Duration::from_millis(1);
/// The longest delay if programs other than this library poll.
const POLLED_DELAY_MAX: Duration = Duration::from_millis(10);
/// The maximum of [`Contention::usual_holders`]. Without a maximum, if many processes compete,
/// nearly all of them would delay all their attempts.
const USUAL_HOLDERS_MAX: u32 = 16;
/// If [`Contention::usual_holders`] reaches this value and programs other than this library poll,
/// the delays last for [`USUAL_HOLDERS_MAX`] holders.
const MANY_HOLDERS_MIN: u32 = 4;
/// If a turn meets at least one other holder, but fewer than usual, it lowers
/// [`Contention::usual_holders`] by one, with a probability of one in this number.
const DECAY_ONE_IN: u32 = 8;
/// The maximum number of keys in [`Fairness::contention_by_key`].
const KEYS_MAX: usize = 4_096;

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn store() -> Capabilities {
        Capabilities::new("test", GuaranteeClass::Durable, Reach::Network).with_wakes()
    }

    fn fairness(store: &Capabilities) -> Fairness {
        Fairness::new(store, 250 * MS)
    }

    fn key() -> Key {
        Key::new("orders/42").unwrap()
    }

    fn contention(fairness: &Fairness) -> Box<Contention> {
        fairness.contention(&key()).expect("this store needs fairness between processes")
    }

    /// Runs one turn that meets `holders_met` other holders and holds the claim for `hold`. Returns
    /// the pause before the turn.
    async fn turn(fairness: &Fairness, holders_met: u32, hold: Duration) -> Duration {
        let mut contention = contention(fairness);
        let pause = contention.pause_end().map_or(Duration::ZERO, |end| end.since(Moment::now()));
        advance(pause).await;
        (0..holders_met).for_each(|_| contention.on_busy());
        fairness.on_grant(&mut contention);
        let granted_at = Moment::now();
        advance(hold).await;
        fairness.on_release(&key(), *contention, granted_at);
        pause
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_met_another_holder_pauses_for_a_quarter_of_its_holding_time() {
        let fairness = fairness(&store());
        assert_eq!(turn(&fairness, 1, 20 * MS).await, Duration::ZERO, "the first turn");
        assert_eq!(turn(&fairness, 1, 60 * MS).await, 5 * MS);
        assert_eq!(turn(&fairness, 1, Duration::ZERO).await, PAUSE_MAX);
        assert_eq!(turn(&fairness, 1, Duration::ZERO).await, PAUSE_MIN);
    }

    #[tokio::test(start_paused = true)]
    async fn if_waiters_poll_a_process_pauses_for_all_of_its_holding_time() {
        let fairness =
            fairness(&Capabilities::new("test", GuaranteeClass::Durable, Reach::Network));
        turn(&fairness, 1, 50 * MS).await;
        assert_eq!(turn(&fairness, 1, Duration::from_secs(1)).await, 50 * MS);
        assert_eq!(turn(&fairness, 1, MS).await, POLLED_PAUSE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_meets_no_other_holder_any_more_stops_pausing() {
        let fairness = fairness(&store());
        turn(&fairness, 1, MS).await;
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pauses.push(turn(&fairness, 0, MS).await);
        }
        assert_eq!(pauses[..3], [2 * MS, 4 * MS, 8 * MS]);
        assert_eq!(pauses[3..], [Duration::ZERO; 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_that_is_over_before_the_next_turn_counts_too() {
        let fairness = fairness(&store());
        turn(&fairness, 1, MS).await;
        for _ in 0..3 {
            assert!(contention(&fairness).is_contended());
            advance(9 * MS).await;
            assert_eq!(turn(&fairness, 0, MS).await, Duration::ZERO);
        }
        assert!(!contention(&fairness).is_contended());
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_has_met_no_other_holder_pauses_once_per_100_ms_of_holding() {
        let fairness = fairness(&store());
        let mut pauses = Vec::new();
        for _ in 0..25 {
            pauses.push(turn(&fairness, 0, 10 * MS).await);
        }
        pauses.retain(|pause| !pause.is_zero());
        assert_eq!(pauses, [PAUSE_MIN, PAUSE_MIN]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_contention_of_a_key_that_was_free_for_a_pause_is_dropped() {
        let fairness = fairness(&store());
        turn(&fairness, 1, 20 * MS).await;
        advance(PAUSE_MAX).await;
        assert_eq!(turn(&fairness, 0, 20 * MS).await, Duration::ZERO);
        assert!(!contention(&fairness).is_contended());
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_delayed_until_the_usual_number_of_holders_was_met() {
        let fairness = fairness(&store());
        turn(&fairness, 3, MS).await;
        let mut contention = contention(&fairness);
        let mut delays = 0;
        while !contention.delay_after_wake().is_zero() {
            contention.on_busy();
            delays += 1;
        }
        assert_eq!(delays, 3);
    }

    #[test]
    fn stores_that_queue_and_stores_of_one_process_need_no_fairness() {
        let in_process = Capabilities::new("test", GuaranteeClass::Durable, Reach::Process);
        for store in [store().with_fair(), in_process] {
            let fairness = fairness(&store);
            assert!(fairness.contention(&key()).is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_recorded_keys_is_bounded() {
        let fairness = fairness(&store());
        let now = Moment::now();
        for n in 0..2 * KEYS_MAX {
            fairness.on_release(&Key::new(&n.to_string()).unwrap(), Contention::default(), now);
        }
        assert_eq!(fairness.contention_by_key().len(), KEYS_MAX);
        advance(PAUSE_MAX).await;
        fairness.on_release(&key(), Contention::default(), now);
        assert_eq!(fairness.contention_by_key().len(), 1);
    }
}
