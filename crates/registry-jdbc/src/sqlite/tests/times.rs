//! Clock jumps, reboots, and delayed statements.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockBackend, Release, Renewal};

use super::{Folder, LEASE, busy, claim, grant, key, token};
use crate::sqlite::clock::{Clock, ManualClock};

const YEAR: i64 = 365 * 24 * 60 * 60 * 1_000_000;

#[tokio::test]
async fn a_lease_ends_on_the_boot_clock() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    let (a, b) = (folder.process_at(&clock).await, folder.process_at(&clock).await);
    let (mine, yours) = (claim("k"), claim("k"));
    let first = token(&a, &mine).await;

    clock.advance(LEASE - Duration::from_micros(1));
    busy(&b, &yours).await;
    clock.advance(Duration::from_micros(1));
    assert_eq!(a.renew(std::slice::from_ref(&mine)).await[0].as_ref().unwrap(), &Renewal::Gone);
    assert_eq!(a.release(&mine).await.unwrap(), Release::NotHeld);
    assert!(token(&b, &yours).await > first);
    assert_eq!(a.release(&mine).await.unwrap(), Release::NotHeld);
    assert_eq!(b.inspect(&key("k")).await.unwrap().unwrap().lease_left, Some(LEASE));
}

#[tokio::test]
async fn a_jump_of_the_wall_clock_neither_frees_nor_freezes() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_at(&clock).await;
    let start = clock.wall();
    let mut last = 0;
    for wall in [start, start + 50 * YEAR, start, 0, start - YEAR, i64::MAX / 2, start, 0] {
        clock.set_wall(wall);
        let held = claim("k");
        let first = token(&backend, &held).await;
        assert!(first > last, "a token went backwards");
        last = first;
        for elsewhere in [0, wall + 50 * YEAR, wall] {
            clock.set_wall(elsewhere);
            let told = busy(&backend, &claim("k")).await;
            assert_eq!(told.retry_after, Some(LEASE));
        }
        clock.advance(LEASE);
    }
}

#[tokio::test]
async fn a_token_is_not_zero_even_if_the_wall_clock_is() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    clock.set_wall(0);
    let backend = folder.process_at(&clock).await;
    assert_eq!(token(&backend, &claim("k")).await, 1);
}

#[tokio::test]
async fn the_last_token_is_an_error_and_not_a_smaller_one() {
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    clock.set_wall(i64::MAX);
    let backend = folder.process_at(&clock).await;
    let last = claim("k");
    assert_eq!(token(&backend, &last).await, i64::MAX as u64);
    backend.release(&last).await.unwrap();
    let error = backend.try_acquire(&claim("k")).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{error:?}");
}

#[tokio::test]
async fn a_reboot_frees_all_locks_and_tokens_still_grow() {
    let folder = Folder::new();
    let before = ManualClock::booted(1);
    let a = folder.process_at(&before).await;
    before.advance(Duration::from_secs(60 * 60 * 24 * 365));
    let lost = claim("k");
    let first = token(&a, &lost).await;
    a.close().await;

    // The clock of the new boot is far behind the old one, and the wall clock starts at zero.
    let after = ManualClock::booted(2);
    after.set_wall(0);
    let b = folder.process_at(&after).await;
    assert_eq!(b.inspect(&key("k")).await.unwrap(), None);
    assert!(b.list().await.unwrap().is_empty());
    assert_eq!(b.renew(std::slice::from_ref(&lost)).await[0].as_ref().unwrap(), &Renewal::Gone);
    assert_eq!(b.release(&lost).await.unwrap(), Release::NotHeld);
    assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
    let mine = claim("k");
    assert!(token(&b, &mine).await > first);
    busy(&b, &claim("k")).await;
}

#[tokio::test]
async fn a_process_of_another_boot_is_noticed_by_those_who_are_there() {
    let folder = Folder::new();
    let (here, elsewhere) = (ManualClock::booted(1), ManualClock::booted(2));
    let a = folder.process_at(&here).await;
    let (held, other) = (claim("k"), claim("other"));
    grant(&a, &held).await;

    let b = folder.process_at(&elsewhere).await;
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
    let folder = Folder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_at(&clock).await;
    let held = claim("k");
    grant(&backend, &held).await;

    // Another process writes for longer than the lease. The renewal that waits for it must not
    // revive the grant.
    let mut other = super::troubles::write_lock(&folder.file()).await;
    let renewal = backend.renew(std::slice::from_ref(&held));
    let refused_again = async || {
        let before = clock.reads();
        while clock.reads() == before {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let unblock = async {
        refused_again().await;
        clock.advance(LEASE);
        // Another read of the clock means that the try with the old time is over.
        refused_again().await;
        super::troubles::unlock(&mut other).await;
    };
    let (told, ()) = tokio::join!(renewal, unblock);
    assert_eq!(told[0].as_ref().unwrap(), &Renewal::Gone);
}
