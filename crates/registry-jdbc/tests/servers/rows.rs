//! The writes of each operation, and their results.

use std::time::Duration;

use registry_core::{BackendErrorKind, LockBackend, Release, Renewal};

use super::common::{backend, busy, claim, config, error_chain, grant, key, server};
use crate::server::*;

#[tokio::test]
async fn a_busy_attempt_writes_nothing() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    grant(&backend, &claim("k")).await;
    let before = writes(&server).await;
    for _ in 0..20 {
        busy(&backend, &claim("k")).await;
        assert_eq!(backend.release(&claim("k")).await.unwrap(), Release::NotHeld);
        backend.inspect(&key("k")).await.unwrap();
    }
    assert_eq!(writes(&server).await, before);
}

#[tokio::test]
async fn a_batch_is_renewed_claim_by_claim() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    // More claims than one statement renews.
    let mut claims = Vec::new();
    for n in 0..1200 {
        claims.push(claim(&format!("k{n}")));
    }
    for (n, claim) in claims.iter().enumerate() {
        if n % 100 != 0 {
            grant(&backend, claim).await;
        }
    }
    claims.push(claims[1].clone());
    claims.push(claims[2].clone().with_lease(Duration::from_secs(90)));
    let renewals = backend.renew(&claims).await;
    assert_eq!(renewals.len(), claims.len());
    for (n, renewal) in renewals.into_iter().enumerate() {
        let is_there = matches!(renewal.unwrap(), Renewal::Renewed(_));
        assert_eq!(is_there, n >= 1200 || n % 100 != 0, "claim {n}");
    }
    assert!(backend.renew(&[]).await.is_empty());
}

#[tokio::test]
async fn a_token_at_its_limit_is_an_error_and_no_smaller_token() {
    let server = server().await;
    let backend = backend(config(&server)).await;
    let claim = claim("k");
    grant(&backend, &claim).await;
    backend.release(&claim).await.unwrap();
    server.sql("UPDATE lock_registry_locks SET token = 9223372036854775807").await.unwrap();
    let error = backend.try_acquire(&claim).await.unwrap_err();
    assert_eq!(error.kind(), BackendErrorKind::Protocol, "{}", error_chain(&error));
}
