//! Time as the engine counts it: tokio's clock plus all the time this host has been suspended.
//!
//! `Instant` stands still while a machine sleeps, so a resumed holder would believe that its lease is young.
//! The kernel knows the difference (boot time minus monotonic time); adding it to tokio's clock counts suspend
//! and still stands still with tokio's paused time in tests. No wall clock is read anywhere.

use std::future::poll_fn;
use std::mem;
use std::pin::pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

/// Returns after `span` on tokio's clock, in whichever runtimes it is polled.
///
/// A caller may leave to the janitor what it has begun in a runtime of its own. A timer that was set there would panic once that runtime has ended, so
/// it is set anew where this goes on.
pub(crate) async fn sleep(span: Duration) {
    let mut timer = pin!(tokio::time::sleep(span));
    let mut runtime = Handle::current().id();
    poll_fn(|cx| {
        let here = Handle::current().id();
        if mem::replace(&mut runtime, here) != here {
            let deadline = timer.deadline();
            timer.set(tokio::time::sleep_until(deadline));
        }
        timer.as_mut().poll(cx)
    })
    .await;
}

/// A moment on the engine's clock, in nanoseconds from an arbitrary origin of this process.
///
/// Follows tokio's clock, paused time in tests included, and counts the time in which the host is suspended. For backends that have to say
/// themselves how long something is certain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Moment(i64);

impl Moment {
    /// A moment that comes before all others. A lease that is valid until then is not valid.
    pub(crate) const PAST: Self = Self(i64::MIN);

    /// A moment that never comes.
    pub(crate) const FUTURE: Self = Self(i64::MAX);

    /// The current moment.
    #[must_use]
    pub fn now() -> Self {
        // In this order: see `suspended`.
        let boot = boot_ns();
        let (running, origin) = running();
        Self(running.saturating_add(suspended(boot, running, origin)))
    }

    /// The current moment, without a look at whether the host has just been suspended: then it is too early by that time.
    /// For moments that may be too early and come soon after an exact one.
    pub(crate) fn about_now() -> Self {
        Self(running().0.saturating_add(SUSPENDED.load(Ordering::Relaxed)))
    }

    /// The current moment, shortly after `recent`, which was exact. Looks for a suspend only if that is a while ago.
    pub(crate) fn now_after(recent: Self) -> Self {
        let now = Self::about_now();
        if now.since(recent) < Duration::from_millis(1) { now } else { Self::now() }
    }

    /// This moment and `span`; saturates some centuries from now.
    #[must_use]
    pub fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }

    /// The time from `earlier` to this moment; zero if it is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// The bits, for an atomic.
    pub(crate) const fn to_bits(self) -> i64 {
        self.0
    }

    /// The moment of these bits.
    pub(crate) const fn from_bits(bits: i64) -> Self {
        Self(bits)
    }

    /// The instant on the user's clock that is as far from now as this moment.
    pub(crate) fn to_instant(self, now: Self) -> Instant {
        let instant = tokio::time::Instant::now().into_std();
        if self > now {
            instant.checked_add(self.since(now)).unwrap_or(instant)
        } else {
            instant.checked_sub(now.since(self)).unwrap_or(instant)
        }
    }
}

fn nanos(span: Duration) -> i64 {
    let secs = i64::try_from(span.as_secs()).unwrap_or(i64::MAX);
    secs.saturating_mul(1_000_000_000).saturating_add(i64::from(span.subsec_nanos()))
}

/// Where all moments are counted from.
struct Origin {
    /// On tokio's clock.
    instant: Instant,
    /// What the clock that counts suspend showed then.
    boot: i64,
    /// How far that clock was ahead of the one that does not.
    ahead: i64,
}

impl Origin {
    #[expect(clippy::disallowed_methods, reason = "tokio's clock may stand still")]
    fn new(instant: Instant) -> Self {
        let mut closest = Duration::MAX;
        let mut boot_then = 0;
        let mut ahead = i64::MIN;
        // Clocks must be read together. A thread that is interrupted in between has other tries.
        for _ in 0..16 {
            let before = Instant::now();
            let boot = boot_ns();
            let apart = before.elapsed();
            if apart < closest {
                closest = apart;
                boot_then = boot.saturating_sub(nanos_between(instant, before));
            }
            ahead = ahead.max(boot_ahead_ns());
        }
        Self { instant, boot: boot_then, ahead }
    }
}

fn origin(now: Instant) -> &'static Origin {
    static ORIGIN: OnceLock<Origin> = OnceLock::new();

    ORIGIN.get_or_init(|| Origin::new(now))
}

/// Tokio's clock, and where it is counted from.
fn running() -> (i64, &'static Origin) {
    let now = tokio::time::Instant::now().into_std();
    let origin = origin(now);
    (nanos_between(origin.instant, now), origin)
}

/// From `earlier` to `later`. A paused runtime may count from an instant before the origin.
fn nanos_between(earlier: Instant, later: Instant) -> i64 {
    match later.checked_duration_since(earlier) {
        Some(after) => nanos(after),
        None => -nanos(earlier.saturating_duration_since(later)),
    }
}

/// How long this host has been suspended since the origin, as far as known, given what the clocks show. Only grows.
fn suspended(boot: i64, running: i64, origin: &Origin) -> i64 {
    let known = SUSPENDED.load(Ordering::Relaxed);
    // Whatever else happens, the clocks do not drift apart. `boot` is the older of the two, so the difference errs
    // towards no suspend, however long this thread is interrupted in between.
    let apart = boot.saturating_sub(origin.boot).saturating_sub(running);
    if apart.saturating_sub(known) <= JITTER {
        return known;
    }
    // Tokio's clock may be paused; the system's tells.
    let seen = boot_ahead_ns().saturating_sub(origin.ahead);
    if seen - known <= JITTER {
        return known;
    }
    SUSPENDED.fetch_max(seen, Ordering::Relaxed).max(seen)
}

/// How far the clock that counts suspend is ahead of the one that does not; at most that far.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_ahead_ns() -> i64 {
    let boot = boot_ns();
    boot.saturating_sub(clock_ns(nix::time::ClockId::CLOCK_MONOTONIC))
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn boot_ns() -> i64 {
    clock_ns(nix::time::ClockId::CLOCK_BOOTTIME)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn clock_ns(clock: nix::time::ClockId) -> i64 {
    nix::time::clock_gettime(clock)
        .map_or(0, |at| at.tv_sec().saturating_mul(1_000_000_000).saturating_add(at.tv_nsec()))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_ahead_ns() -> i64 {
    0
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn boot_ns() -> i64 {
    0
}

/// Clocks that are read one after the other jitter; only a real suspend moves them further apart.
const JITTER: i64 = 1_000_000;

/// The longest time of suspend that was ever seen.
static SUSPENDED: AtomicI64 = AtomicI64::new(0);

#[cfg(test)]
mod tests {
    use futures_util::poll;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().unwrap()
    }

    #[test]
    fn a_sleep_outlives_the_runtime_it_was_begun_in() {
        let mut sleeping = Box::pin(sleep(Duration::from_millis(20)));
        let first = runtime();
        first.block_on(async { assert!(poll!(&mut sleeping).is_pending()) });
        drop(first);
        runtime().block_on(sleeping);
    }

    #[tokio::test(start_paused = true)]
    async fn moments_follow_paused_time() {
        let start = Moment::now();
        tokio::time::advance(Duration::from_secs(3_600)).await;
        let passed = Moment::now().since(start);
        assert!(passed >= Duration::from_secs(3_600) && passed < Duration::from_secs(3_601));
    }

    #[test]
    fn arithmetic_saturates_instead_of_wrapping() {
        let now = Moment::now();
        assert!(now.after(Duration::MAX) > now);
        assert_eq!(now.since(now.after(Duration::from_secs(1))), Duration::ZERO);
        assert!(Moment::PAST.after(Duration::from_secs(1)) < now);
        assert!(now.since(Moment::PAST) > Duration::from_secs(1));
    }
}
