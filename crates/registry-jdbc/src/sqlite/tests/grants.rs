//! Grants, and what each call returns.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use registry_core::{Claim, Key, LockAdmin, LockBackend, Release, Renewal};

use super::{LEASE, TestFolder, busy, claim, grant, key, token};
use crate::sqlite::clock::ManualClock;

#[tokio::test]
async fn two_processes_exclude_each_other() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let (claim_a, claim_b) = (claim("k"), claim("k"));

    let first = token(&a, &claim_a).await;
    assert!(busy(&b, &claim_b).await.retry_after.unwrap() <= LEASE);
    assert_eq!(b.release(&claim_b).await.unwrap(), Release::NotHeld);
    assert_eq!(b.renew(std::slice::from_ref(&claim_b)).await[0].as_ref().unwrap(), &Renewal::Gone);

    assert_eq!(a.release(&claim_a).await.unwrap(), Release::Freed);
    assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
    assert!(token(&b, &claim_b).await > first);
    assert_eq!(a.renew(&[claim_a]).await[0].as_ref().unwrap(), &Renewal::Gone);
}

#[tokio::test]
async fn a_busy_reply_names_the_holder_and_its_lease() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let (a, b) = (folder.process_with_clock(&clock).await, folder.process_with_clock(&clock).await);
    let label = "x'); DROP TABLE lock_registry_locks;--\0\u{202e}\"\n🔒";
    let held = claim("k").with_label(Some(label.into())).with_token_block(8);
    let first = token(&a, &held).await;
    clock.advance(Duration::from_secs(10));

    let renewal = busy(&b, &claim("k")).await;
    assert_eq!(renewal.retry_after, Some(Duration::from_secs(20)));
    assert_eq!(renewal.mark, first);
    let holder = renewal.holder.unwrap();
    assert_eq!(holder.key, key("k"));
    assert_eq!(holder.label.as_deref(), Some(label));
    assert_eq!(holder.token.unwrap().get(), first);
    assert_eq!(holder.held_for, Some(Duration::from_secs(10)));
    assert_eq!(holder.lease_left, Some(Duration::from_secs(20)));

    assert_eq!(b.inspect(&key("k")).await.unwrap().as_ref(), Some(&holder));
    assert_eq!(b.list().await.unwrap(), [holder]);
    assert_eq!(b.inspect(&key("other")).await.unwrap(), None);
}

#[tokio::test]
async fn a_repeated_attempt_of_a_granted_claim_returns_the_same_token() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let claim = claim("k");
    let first = grant(&backend, &claim).await;
    clock.advance(Duration::from_secs(10));
    let again = grant(&backend, &claim).await;
    assert_eq!(again.token, first.token);
    assert_eq!(again.lease, Duration::from_secs(20));
}

#[tokio::test]
async fn a_repeated_attempt_of_an_expired_claim_is_a_new_grant() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let claim = claim("k");
    let first = token(&backend, &claim).await;
    clock.advance(LEASE);
    assert!(token(&backend, &claim).await > first);
}

#[tokio::test]
async fn a_block_of_tokens_is_never_granted_twice() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let mut next = 0;
    for block in [1, 100, 7, u32::MAX, 1, 1] {
        let claim = claim("k").with_token_block(block);
        let first = token(&backend, &claim).await;
        assert!(first >= next, "{first} was reserved before");
        next = first + u64::from(block);
        backend.release(&claim).await.unwrap();
    }
}

#[tokio::test]
async fn a_renewal_never_shortens_the_lease() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let claim = claim("k");
    grant(&backend, &claim).await;
    clock.advance(Duration::from_secs(10));
    let renewal = backend.renew(std::slice::from_ref(&claim)).await.remove(0).unwrap();
    assert_eq!(renewal, Renewal::Renewed(LEASE));
    let short = claim.with_lease(Duration::from_secs(1));
    let renewal = backend.renew(&[short]).await.remove(0).unwrap();
    assert_eq!(renewal, Renewal::Renewed(LEASE));
}

#[tokio::test]
async fn a_batch_renewal_returns_a_result_for_each_claim() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    // More items than the largest statement takes, and not a multiple of it.
    let mut claims = Vec::new();
    for n in 0..300 {
        let claim = claim(&format!("k{n}"));
        match n % 3 {
            0 => drop(grant(&backend, &claim).await),
            1 => {
                grant(&backend, &claim).await;
                backend.release(&claim).await.unwrap();
            }
            _ => {}
        }
        claims.push(claim);
    }
    clock.advance(Duration::from_secs(10));
    for size in [1, 2, 10, 11, 100, 101, 300] {
        let renewal = backend.renew(&claims[..size]).await;
        assert_eq!(renewal.len(), size);
        for (n, renewal) in renewal.into_iter().enumerate() {
            let expected = if n % 3 == 0 { Renewal::Renewed(LEASE) } else { Renewal::Gone };
            assert_eq!(renewal.unwrap(), expected, "claim {n} of {size}");
        }
    }
    assert!(backend.renew(&[]).await.is_empty());
    // The same claim twice in one call is renewed twice.
    let twice = [claims[0].clone(), claims[0].clone()];
    assert!(
        backend
            .renew(&twice)
            .await
            .iter()
            .all(|renewal| renewal.as_ref().unwrap() == &Renewal::Renewed(LEASE))
    );
}

#[tokio::test]
async fn force_release_frees_a_key_of_any_claim() {
    let folder = TestFolder::new();
    let (a, b) = (folder.process().await, folder.process().await);
    let claim = claim("k");
    assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
    grant(&a, &claim).await;
    assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::Freed);
    assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
    assert_eq!(a.renew(std::slice::from_ref(&claim)).await[0].as_ref().unwrap(), &Renewal::Gone);
    assert_eq!(a.release(&claim).await.unwrap(), Release::NotHeld);
}

#[tokio::test]
async fn only_held_keys_of_the_namespace_are_listed() {
    let folder = TestFolder::new();
    let clock = ManualClock::booted(1);
    let backend = folder.process_with_clock(&clock).await;
    let (short, released, held) =
        (claim("short").with_lease(Duration::from_secs(1)), claim("released"), claim("held"));
    for claim in [&short, &released, &held] {
        grant(&backend, claim).await;
    }
    backend.release(&released).await.unwrap();
    clock.advance(Duration::from_secs(1));
    let listed: Vec<Key> = backend.list().await.unwrap().into_iter().map(|h| h.key).collect();
    assert_eq!(listed, [key("held")]);
    assert_eq!(backend.inspect(&key("short")).await.unwrap(), None);
    assert_eq!(backend.inspect(&key("released")).await.unwrap(), None);
}

#[tokio::test]
async fn equal_keys_in_different_namespaces_are_different_locks() {
    let folder = TestFolder::new();
    let namespaces = ["", "a", "A", "a\0", "a ", "ä", "a\u{308}"];
    let mut backends = Vec::new();
    for namespace in namespaces {
        let clock = ManualClock::booted(1);
        backends.push(
            super::SqliteBackend::open_with_clock(folder.config().with_namespace(namespace), clock)
                .await
                .unwrap(),
        );
    }
    for backend in &backends {
        grant(backend, &claim("k")).await;
    }
    for backend in &backends {
        assert_eq!(backend.list().await.unwrap().len(), 1);
    }
}

#[tokio::test]
async fn one_of_many_concurrent_attempts_is_granted() {
    let folder = TestFolder::new();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let backend = Arc::new(folder.process().await);
        for _ in 0..4 {
            let backend = Arc::clone(&backend);
            tasks.spawn(async move {
                let claim = claim("k");
                matches!(
                    backend.try_acquire(&claim).await.unwrap(),
                    registry_core::Attempt::Granted(_)
                )
            });
        }
    }
    let granted = tasks.join_all().await.into_iter().filter(|granted| *granted).count();
    assert_eq!(granted, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn different_keys_are_different_locks(
        keys in prop::collection::hash_set("[a\\x00/'\"% .\u{e4}\u{1F512}\u{202e}]{1,6}|\\PC{1,12}", 1..24)
    ) {
        let keys: HashSet<String> = keys;
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let folder = TestFolder::new();
            let backend = folder.process().await;
            for text in &keys {
                grant(&backend, &claim(text)).await;
            }
            for text in &keys {
                busy(&backend, &claim(text)).await;
            }
            let listed: HashSet<String> =
                backend.list().await.unwrap().iter().map(|h| h.key.as_str().to_owned()).collect();
            assert_eq!(listed, keys);
        });
    }
}

#[tokio::test]
async fn the_longest_key_and_the_longest_lease_are_accepted() {
    let folder = TestFolder::new();
    let backend = folder.process().await;
    let long = "\u{1F512}".repeat(Key::BYTES_MAX / 4);
    let claim = Claim::new(key(&long), Duration::MAX);
    grant(&backend, &claim).await;
    assert_eq!(backend.inspect(&key(&long)).await.unwrap().unwrap().key, key(&long));
    assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
}
