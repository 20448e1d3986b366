//! Time as the engine counts it: tokio's clock plus all the time this host has been suspended.
//!
//! `Instant` stands still while a machine sleeps, so a resumed holder would believe that its lease is young.
//! The kernel knows the difference (boot time minus monotonic time); adding it to tokio's clock counts suspend
//! and still stands still with tokio's paused time in tests. No wall clock is read anywhere.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// A moment on the engine's clock, in nanoseconds from an arbitrary origin of this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Moment(i64);

impl Moment {
    /// A moment that comes before all others. A lease that is valid until then is not valid.
    pub(crate) const PAST: Self = Self(i64::MIN);

    /// A moment that never comes.
    pub(crate) const FUTURE: Self = Self(i64::MAX);

    /// The current moment.
    pub(crate) fn now() -> Self {
        Self::running(suspended_ns())
    }

    /// The current moment, without a look at whether the host has just been suspended: then it is too early by that time.
    /// For moments that may be too early and come soon after an exact one.
    pub(crate) fn about_now() -> Self {
        Self::running(SUSPENDED.load(Ordering::Relaxed))
    }

    /// The current moment, shortly after `recent`, which was exact. Looks for a suspend only if that is a while ago.
    pub(crate) fn now_after(recent: Self) -> Self {
        let now = Self::about_now();
        if now.since(recent) < Duration::from_millis(1) { now } else { Self::now() }
    }

    fn running(suspended: i64) -> Self {
        let now = tokio::time::Instant::now().into_std();
        let origin = *ORIGIN.get_or_init(|| now);
        // A paused runtime may count from an instant before the origin.
        let running = match now.checked_duration_since(origin) {
            Some(after) => nanos(after),
            None => -nanos(origin.saturating_duration_since(now)),
        };
        Self(running.saturating_add(suspended))
    }

    /// This moment and `span`; saturates some centuries from now.
    pub(crate) fn after(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }

    /// The time from `earlier` to this moment; zero if it is not earlier.
    pub(crate) fn since(self, earlier: Self) -> Duration {
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
    i64::try_from(span.as_nanos()).unwrap_or(i64::MAX)
}

/// How long this host has been suspended, as far as known. Only grows.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn suspended_ns() -> i64 {
    use nix::time::{ClockId, clock_gettime};

    let read = |clock| {
        clock_gettime(clock)
            .map(|at| at.tv_sec().saturating_mul(1_000_000_000).saturating_add(at.tv_nsec()))
    };
    // Read in this order the difference is a lower bound of the truth, however long this thread is
    // interrupted in between; so the largest difference ever seen is the best estimate, and it never errs
    // towards a lease that ends too early.
    let (Ok(boot), Ok(monotonic)) = (read(ClockId::CLOCK_BOOTTIME), read(ClockId::CLOCK_MONOTONIC))
    else {
        return SUSPENDED.load(Ordering::Relaxed);
    };
    let seen = boot.saturating_sub(monotonic);
    let known = SUSPENDED.load(Ordering::Relaxed);
    if seen > known {
        // Two clock reads a few nanoseconds apart jitter by as much; only a real suspend moves the clock.
        if seen - known > 1_000_000 {
            SUSPENDED.fetch_max(seen, Ordering::Relaxed);
            return seen.max(known);
        }
    }
    known
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn suspended_ns() -> i64 {
    0
}

static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// The longest time of suspend that was ever seen.
static SUSPENDED: AtomicI64 = AtomicI64::new(0);

#[cfg(test)]
mod tests {
    use super::*;

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
