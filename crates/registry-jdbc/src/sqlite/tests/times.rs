//! Clock jumps, reboots, and delayed statements.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockAdmin, LockBackend, Release, Renewal};

use super::{LEASE, TestFolder, busy, claim, grant, key, token};
use crate::sqlite::clock::{ManualClock, StoreClock};

const YEAR: i64 = 365 * 24 * 60 * 60 * 1_000_000;

#[tokio::test]
async fn a_lease_expires_by_the_boot_clock() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let (a, b) = (folder.process_with_clock(&clock).await, folder.process_with_clock(&clock).await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));
    let first = token(&a, &claim_a).await;

    clock.advance(LEASE - Duration::from_micros(1));
    busy(&b, &claim_b).await;
    clock.advance(Duration::from_micros(1));
    assert_eq!(a.renew(std::slice::from_ref(&claim_a)).await[0].as_ref().unwrap(), &Renewal::Gone);
    assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
    assert!(token(&b, &claim_b).await > first);
    assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
    assert_eq!(b.inspect(&key("k")).await.unwrap().unwrap().lease_left, Some(LEASE));
}

#[tokio::test]
async fn a_jump_of_the_wall_clock_neither_shortens_nor_prolongs_a_lease() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let start = clock.wall();
    let mut last = 0;
    for wall in [start, start + 50 * YEAR, start, 0, start - YEAR, i64::MAX / 2, start, 0] {
        clock.set_wall(wall);
        let held = claim("k");
        let first = token(&backend, &held).await;
        assert!(first > last, "a token went backwards");
        last = first;
        for other_wall in [0, wall + 50 * YEAR, wall] {
            clock.set_wall(other_wall);
            let busy_reply = busy(&backend, &claim("k")).await;
            assert_eq!(busy_reply.retry_after, Some(LEASE));
        }
        clock.advance(LEASE);
    }
}

#[tokio::test]
async fn a_token_is_not_zero_even_if_the_wall_clock_is() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    clock.set_wall(0);
    let backend = folder.process_with_clock(&clock).await;
    assert_eq!(token(&backend, &claim("k")).await, 1);
}

#[tokio::test]
async fn after_the_largest_token_an_attempt_fails() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    clock.set_wall(i64::MAX);
    let backend = folder.process_with_clock(&clock).await;
    let last = claim("k");
    assert_eq!(token(&backend, &last).await, i64::MAX as u64);
    backend.release(&last).await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{error:?}");
}

#[tokio::test]
async fn a_reboot_frees_all_locks_and_tokens_still_grow() {
    let folder = TestFolder::new();
    let before = ManualClock::booted(1);
    let a = folder.process_with_clock(&before).await;
    before.advance(Duration::from_secs(60 * 60 * 24 * 365));
    let lost = claim("k");
    let first = token(&a, &lost).await;
    a.close().await;

    // The boot clock of the new boot is far behind the old one, and the wall clock starts at zero.
    let after = ManualClock::booted(2);
    after.set_wall(0);
    let b = folder.process_with_clock(&after).await;
    assert_eq!(b.inspect(&key("k")).await.unwrap(), None);
    assert!(b.list().await.unwrap().is_empty());
    assert_eq!(b.renew(std::slice::from_ref(&lost)).await[0].as_ref().unwrap(), &Renewal::Gone);
    assert_eq!(b.release(&lost).await.unwrap(), Release::NotHeld);
    assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
    let claim_a = claim("k");
    assert!(token(&b, &claim_a).await > first);
    busy(&b, &claim("k")).await;
}

#[tokio::test]
async fn a_process_of_another_boot_makes_earlier_processes_fail() {
    let folder = TestFolder::new();
    let (boot_1, boot_2) = (ManualClock::booted(1), ManualClock::booted(2));
    let a = folder.process_with_clock(&boot_1).await;
    let (held, other) = (claim("k"), claim("other"));
    grant(&a, &held).await;

    let b = folder.process_with_clock(&boot_2).await;
    // The holder gets `Gone`, whether or not the key was granted again.
    assert_eq!(a.renew(std::slice::from_ref(&held)).await[0].as_ref().unwrap(), &Renewal::Gone);
    let error = a.try_acquire(&other).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Misconfigured);
    assert!(error.refused() && error.to_string().contains("boot"), "{error}");
    assert_eq!(a.inspect(&key("k")).await.unwrap_err().kind(), BackendErrorKind::Misconfigured);
    grant(&b, &claim("k")).await;
}

#[tokio::test]
async fn a_statement_that_waited_for_another_writer_reads_the_clock_again() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let held = claim("k");
    grant(&backend, &held).await;

    // Another process writes for longer than the lease. The renewal that waits for it must not
    // revive the grant.
    let mut other = super::faults::begin_write(&folder.file()).await;
    let renewal = backend.renew(std::slice::from_ref(&held));
    let wait_for_retry = async || {
        let before = clock.reads();
        while clock.reads() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let unblock = async {
        wait_for_retry().await;
        clock.advance(LEASE);
        // Another read of the clock means that the try with the old time is over.
        wait_for_retry().await;
        super::faults::rollback(&mut other).await;
    };
    let (busy_reply, ()) = tokio::join!(renewal, unblock);
    assert_eq!(busy_reply[0].as_ref().unwrap(), &Renewal::Gone);
}
