//! The store's clock: microseconds since the boot of the host. All processes of the host read the
//! same value.
//!
//! Leases expire by `CLOCK_BOOTTIME`. This clock keeps counting during suspend and cannot be set. A
//! row also stores the boot id. A grant of another boot has ended, because a reboot ends all
//! processes. The wall clock may jump, so no lease depends on it. It is used only for token
//! numbers, and for the time that a read of a value block returns.

use std::fmt;
use std::time::Duration;

use registry_core::BackendError;

/// The id of a boot of the host.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct BootId([u8; 16]);

impl BootId {
    /// Parses the id as the kernel prints it, with dashes.
    #[cfg(target_os = "linux")]
    fn parse(text: &str) -> Option<Self> {
        let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
        if digits.len() != 32 {
            return None;
        }
        u128::from_str_radix(&digits, 16).ok().map(|bits| Self(bits.to_be_bytes()))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// The clocks that the store uses. Tests implement this trait to simulate reboots and to set the
/// clocks.
pub(crate) trait StoreClock: fmt::Debug + Send + Sync {
    /// Returns microseconds since the host was booted, including suspend. Never decreases.
    fn now(&self) -> i64;

    /// Returns the id of the boot at which [`now`](Self::now) was zero.
    fn boot(&self) -> BootId;

    /// Returns microseconds since 1970 by the wall clock, or zero if that clock shows an earlier
    /// time. Only for token numbers.
    fn wall(&self) -> i64;
}

/// Converts a duration to microseconds, at most 292,000 years.
pub(crate) fn to_micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Returns the duration from `from` to `to`, or zero if it is negative.
pub(crate) fn duration_between(from: i64, to: i64) -> Duration {
    Duration::from_micros(u64::try_from(to.saturating_sub(from)).unwrap_or(0))
}

/// The clock of this host.
#[derive(Debug)]
pub(crate) struct HostClock {
    boot: BootId,
    /// The offset of this process's time namespace to the boot clock. `now` subtracts it, because
    /// two containers with different offsets may share the file.
    #[cfg(target_os = "linux")]
    offset: i64,
}

impl HostClock {
    /// Reads the boot's id and checks the clock.
    ///
    /// # Errors
    /// `Misconfigured` if the system has no boot clock, if `/proc` is not mounted, or if this
    /// process has unshared its time namespace without entering it. `Protocol` if the offset of the
    /// time namespace cannot be parsed.
    #[cfg(target_os = "linux")]
    pub(crate) fn new() -> Result<Self, BackendError> {
        use registry_core::BackendErrorKind::Misconfigured;

        const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
        let boot = std::fs::read_to_string(BOOT_ID).map_err(|source| {
            BackendError::new(
                Misconfigured,
                format!(
                    "the id of the host's boot cannot be read; mount /proc so that {BOOT_ID} exists"
                ),
            )
            .with_source(source)
            .as_refused()
        })?;
        let boot = BootId::parse(&boot).ok_or_else(|| {
            BackendError::new(Misconfigured, format!("{BOOT_ID} contains no boot id; mount /proc"))
                .as_refused()
        })?;
        boottime().map_err(|source| {
            BackendError::new(
                Misconfigured,
                "this system has no boot clock (CLOCK_BOOTTIME); use another store",
            )
            .with_source(source)
            .as_refused()
        })?;
        Ok(Self { boot, offset: time_namespace_offset()? })
    }

    /// Returns `Misconfigured`: this system has no boot clock that all processes share.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn new() -> Result<Self, BackendError> {
        Err(BackendError::new(
            registry_core::BackendErrorKind::Misconfigured,
            "the SQLite store needs Linux, whose boot clock all processes share; use another store here",
        )
        .as_refused())
    }
}

impl StoreClock for HostClock {
    #[cfg(target_os = "linux")]
    fn now(&self) -> i64 {
        boottime().expect("`HostClock::new` has read this clock") - self.offset
    }

    #[cfg(not(target_os = "linux"))]
    fn now(&self) -> i64 {
        0 // No HostClock can be created here.
    }

    fn boot(&self) -> BootId {
        self.boot
    }

    fn wall(&self) -> i64 {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, to_micros)
    }
}

#[cfg(target_os = "linux")]
fn boottime() -> nix::Result<i64> {
    use nix::sys::time::TimeValLike;
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)?;
    Ok(now.num_microseconds())
}

/// Returns the offset of this process's time namespace to the boot clock.
#[cfg(target_os = "linux")]
fn time_namespace_offset() -> Result<i64, BackendError> {
    use std::fs::{read_link, read_to_string};

    // Kernels before 5.6 have neither the file nor the namespaces.
    let text = match read_to_string("/proc/self/timens_offsets") {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(error) => {
            let message = "/proc/self/timens_offsets cannot be read, so the clock of this process may differ from that of others; allow the read";
            let kind = registry_core::BackendErrorKind::Misconfigured;
            return Err(BackendError::new(kind, message).with_source(error).as_refused());
        }
    };
    // The file contains the offsets of future children. After `unshare`, they may differ from this
    // process's own offsets.
    if let (Ok(own), Ok(children)) =
        (read_link("/proc/self/ns/time"), read_link("/proc/self/ns/time_for_children"))
        && own != children
    {
        return Err(BackendError::new(
            registry_core::BackendErrorKind::Misconfigured,
            "this process has unshared its time namespace without entering it; open the store in the child",
        )
        .as_refused());
    }
    parse_offset(&text).ok_or_else(|| {
        BackendError::new(
            registry_core::BackendErrorKind::Protocol,
            "/proc/self/timens_offsets has no seconds and nanoseconds for the boot clock",
        )
        .as_refused()
    })
}

/// Parses the line `boottime SECONDS NANOSECONDS`. Without that line the offset is zero.
#[cfg(target_os = "linux")]
fn parse_offset(text: &str) -> Option<i64> {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        // Newer kernels print the clock's name, older ones its number.
        if matches!(words.next(), Some("boottime" | "7")) {
            let seconds: i64 = words.next()?.parse().ok()?;
            let nanos: i64 = words.next()?.parse().ok()?;
            return seconds.checked_mul(1_000_000)?.checked_add(nanos / 1_000);
        }
    }
    Some(0)
}

/// A clock for tests.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct ManualClock {
    now: std::sync::atomic::AtomicI64,
    wall: std::sync::atomic::AtomicI64,
    read_count: std::sync::atomic::AtomicU64,
    boot: BootId,
}

#[cfg(test)]
impl ManualClock {
    /// Returns the clock of a host that was booted one minute ago, in the year 2001. Clocks with
    /// different ids belong to different boots.
    pub(crate) fn with_boot_id(boot: u8) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self {
            now: 60_000_000.into(),
            wall: 1_000_000_000_000_000.into(),
            read_count: 0.into(),
            boot: BootId([boot; 16]),
        })
    }

    pub(crate) fn advance(&self, duration: Duration) {
        self.now.fetch_add(to_micros(duration), std::sync::atomic::Ordering::SeqCst);
    }

    /// Returns how often the time was read.
    pub(crate) fn read_count(&self) -> u64 {
        self.read_count.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) fn set_wall(&self, wall: i64) {
        self.wall.store(wall, std::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(test)]
impl StoreClock for ManualClock {
    fn now(&self) -> i64 {
        self.read_count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        self.now.load(std::sync::atomic::Ordering::SeqCst)
    }

    fn boot(&self) -> BootId {
        self.boot
    }

    fn wall(&self) -> i64 {
        self.wall.load(std::sync::atomic::Ordering::SeqCst)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Release, Renewal};

    use super::*;
    use crate::sqlite::tests::{
        LEASE, TestFolder, acquire, acquire_token, begin_write, claim, expect_busy, key, rollback,
    };

    #[test]
    fn the_offset_of_a_time_namespace_is_parsed_by_clock_name_and_by_number() {
        assert_eq!(parse_offset("monotonic  5  0\nboottime  -3  500000000\n"), Some(-2_500_000));
        assert_eq!(parse_offset("1 5 0\n7 86400 0\n"), Some(86_400_000_000));
        assert_eq!(parse_offset("monotonic 5 0\n"), Some(0));
        assert_eq!(parse_offset(""), Some(0));
        assert_eq!(parse_offset("boottime x 0"), None);
        assert_eq!(parse_offset("boottime 1"), None);
    }

    #[test]
    fn a_boot_id_is_32_digits() {
        let id = BootId::parse("d75ff53a-a2b4-4d3c-9271-5ad0bb5c5b3f\n").unwrap();
        assert_eq!(format!("{id:?}"), "d75ff53aa2b44d3c92715ad0bb5c5b3f");
        assert_eq!(BootId::parse(""), None);
        assert_eq!(BootId::parse("d75ff53a"), None);
        assert_eq!(BootId::parse("+75ff53aa2b44d3c92715ad0bb5c5b3fz"), None);
    }

    #[test]
    fn the_clock_of_this_host_moves_forward() {
        let clock = HostClock::new().unwrap();
        let before = clock.now();
        assert!(before > 0);
        assert!(clock.now() >= before);
        assert_eq!(clock.boot(), HostClock::new().unwrap().boot());
        assert!(clock.wall() > 1_500_000_000_000_000);
    }

    #[test]
    fn durations_saturate_and_never_wrap() {
        assert_eq!(to_micros(Duration::MAX), i64::MAX);
        assert_eq!(duration_between(5, 3), Duration::ZERO);
        assert_eq!(duration_between(i64::MIN, i64::MAX), Duration::from_micros(i64::MAX as u64));
    }

    const YEAR: i64 = 365 * 24 * 60 * 60 * 1_000_000;

    #[tokio::test]
    async fn a_lease_expires_by_the_boot_clock() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let (a, b) = (
            folder.open_backend_with_clock(&clock).await,
            folder.open_backend_with_clock(&clock).await,
        );
        let (claim_a, claim_b) = (claim("k"), claim("k"));
        let first = acquire_token(&a, &claim_a).await;

        clock.advance(LEASE - Duration::from_micros(1));
        expect_busy(&b, &claim_b).await;
        clock.advance(Duration::from_micros(1));
        assert_eq!(
            a.renew(std::slice::from_ref(&claim_a)).await[0].as_ref().unwrap(),
            &Renewal::Gone
        );
        assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
        assert!(acquire_token(&b, &claim_b).await > first);
        assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
        assert_eq!(b.inspect(&key("k")).await.unwrap().remove(0).lease_left, Some(LEASE));
    }

    #[tokio::test]
    async fn a_jump_of_the_wall_clock_neither_shortens_nor_prolongs_a_lease() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let start = clock.wall();
        let mut last = 0;
        for wall in [start, start + 50 * YEAR, start, 0, start - YEAR, i64::MAX / 2, start, 0] {
            clock.set_wall(wall);
            let held = claim("k");
            let first = acquire_token(&backend, &held).await;
            assert!(first > last, "a token went backwards");
            last = first;
            for other_wall in [0, wall + 50 * YEAR, wall] {
                clock.set_wall(other_wall);
                let busy_reply = expect_busy(&backend, &claim("k")).await;
                assert_eq!(busy_reply.retry_after, Some(LEASE));
            }
            clock.advance(LEASE);
        }
    }

    #[tokio::test]
    async fn a_token_is_not_zero_even_if_the_wall_clock_is() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        clock.set_wall(0);
        let backend = folder.open_backend_with_clock(&clock).await;
        assert_eq!(acquire_token(&backend, &claim("k")).await, 1);
    }

    #[tokio::test]
    async fn after_the_largest_token_an_attempt_fails() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        clock.set_wall(i64::MAX);
        let backend = folder.open_backend_with_clock(&clock).await;
        let last = claim("k");
        assert_eq!(acquire_token(&backend, &last).await, i64::MAX as u64);
        backend.release(&last).await.unwrap();
        let error = backend.try_acquire(&claim("k")).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Protocol, "{error:?}");
    }

    #[tokio::test]
    async fn a_reboot_frees_all_locks_and_tokens_still_grow() {
        let folder = TestFolder::new();
        let before = ManualClock::with_boot_id(1);
        let a = folder.open_backend_with_clock(&before).await;
        before.advance(Duration::from_secs(60 * 60 * 24 * 365));
        let lost = claim("k");
        let first = acquire_token(&a, &lost).await;
        a.close().await;

        // The boot clock of the new boot is far behind the old one, and the wall clock starts at
        // zero.
        let after = ManualClock::with_boot_id(2);
        after.set_wall(0);
        let b = folder.open_backend_with_clock(&after).await;
        assert_eq!(b.inspect(&key("k")).await.unwrap(), Vec::new());
        assert!(b.list().await.unwrap().is_empty());
        assert_eq!(b.renew(std::slice::from_ref(&lost)).await[0].as_ref().unwrap(), &Renewal::Gone);
        assert_eq!(b.release(&lost).await.unwrap(), Release::NotHeld);
        assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
        let claim_a = claim("k");
        assert!(acquire_token(&b, &claim_a).await > first);
        expect_busy(&b, &claim("k")).await;
    }

    #[tokio::test]
    async fn a_process_of_another_boot_makes_earlier_processes_fail() {
        let folder = TestFolder::new();
        let (boot_1, boot_2) = (ManualClock::with_boot_id(1), ManualClock::with_boot_id(2));
        let a = folder.open_backend_with_clock(&boot_1).await;
        let (held, other) = (claim("k"), claim("other"));
        acquire(&a, &held).await;

        let b = folder.open_backend_with_clock(&boot_2).await;
        // The holder gets `Gone`, whether or not the key was granted again.
        assert_eq!(a.renew(std::slice::from_ref(&held)).await[0].as_ref().unwrap(), &Renewal::Gone);
        let error = a.try_acquire(&other).await.unwrap_err();
        assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
        assert!(error.refused() && error.to_string().contains("boot"), "{error}");
        assert_eq!(a.inspect(&key("k")).await.unwrap_err().kind(), BackendErrorKind::Misconfigured);
        acquire(&b, &claim("k")).await;
    }

    #[tokio::test]
    async fn a_statement_that_waited_for_another_writer_reads_the_clock_again() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let held = claim("k");
        acquire(&backend, &held).await;

        // Another process writes for longer than the lease. The renewal that waits for it must not
        // revive the grant.
        let mut other = begin_write(&folder.file()).await;
        let renewal = backend.renew(std::slice::from_ref(&held));
        let wait_for_clock_read = async || {
            let before = clock.read_count();
            while clock.read_count() == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let unblock = async {
            wait_for_clock_read().await;
            clock.advance(LEASE);
            // Another read of the clock means that the attempt with the old time has ended.
            wait_for_clock_read().await;
            rollback(&mut other).await;
        };
        let (renewed, ()) = tokio::join!(renewal, unblock);
        assert_eq!(renewed[0].as_ref().unwrap(), &Renewal::Gone);
    }
}
