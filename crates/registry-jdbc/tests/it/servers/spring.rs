//! Locks in Spring's table: their rows, and the effects of Spring's own operations on them.

use std::time::Duration;

use registry_core::{Attempt, Claim, LockAdmin, LockBackend, Release, Renewal};
use registry_jdbc::sqlx::{Connection as _, Executor};
use registry_jdbc::{CreateSchema, Fence, FenceError, SpringTable, SqlMode};
use registry_testkit::eventually;

use super::common::{
    LEASE, TEST_TIMEOUT, app_connection, config, error_chain, key, lock, run, server,
};
use super::server::*;

pub(crate) const TTL: Duration = Duration::from_secs(10);

pub(crate) async fn backend(server: &Server, table: SpringTable) -> Backend {
    Backend::open_mode(config(server), SqlMode::Spring(table)).await.unwrap()
}

pub(crate) async fn sql(server: &Server, text: &str) -> String {
    server.sql(text).await.unwrap().trim().replace('\t', "|")
}

pub(crate) async fn token(backend: &Backend, claim: &Claim) -> u64 {
    match backend.try_acquire(claim).await.unwrap() {
        Attempt::Granted(grant) => grant.token.get(),
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) fn claim(text: &str) -> Claim {
    Claim::new(key(text), LEASE)
}

#[tokio::test]
async fn a_row_is_what_spring_7_writes() {
    let server = server().await;
    // The result must not depend on the time zone of a session.
    sql(&server, SET_TIME_ZONE).await;
    let backend = backend(&server, SpringTable::v7()).await;
    let claim = claim("foo");
    token(&backend, &claim).await;
    let expected =
        format!("DEFAULT|acbd18db-4cc2-385c-adef-654fccc4a4d8|{}|60000000|1", claim.id());
    assert_eq!(sql(&server, SPRING_ROW).await, expected);
    assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
    assert_eq!(sql(&server, "SELECT count(*) FROM INT_LOCK").await, "0");
}

/// The date of a row plus the time to live is the end of the lease, for shorter and longer leases
/// too.
#[tokio::test]
async fn a_row_is_what_spring_6_writes_and_ends_with_its_lease() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v6(TTL)).await;
    for (lease, name) in [(TTL, "foo"), (TTL / 5, "shorter"), (TTL * 6, "longer")] {
        let claim = Claim::new(key(name), lease);
        token(&backend, &claim).await;
        let row = SPRING_6_LEASE.replace("{seconds}", &lease.as_secs().to_string());
        assert_eq!(sql(&server, &row).await, "1", "{name}");
        backend.release(&claim).await.unwrap();
    }
}

#[tokio::test]
async fn tokens_increase_although_rows_are_deleted() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v7()).await;
    let mut last = 0;
    for _ in 0..5 {
        let claim = claim("k").with_token_block(1_000_000_000);
        let next = token(&backend, &claim).await;
        assert!(next >= last + 1_000_000_000 || last == 0, "{next} after {last}");
        backend.release(&claim).await.unwrap();
        last = next;
    }
}

#[tokio::test]
async fn an_expired_lease_is_not_renewed_even_if_the_key_is_free() {
    let server = server().await;
    for table in [SpringTable::v7(), SpringTable::v6(TTL).with_prefix("OLD_")] {
        let backend = backend(&server, table).await;
        let short = Claim::new(key("k"), Duration::from_millis(100));
        token(&backend, &short).await;
        eventually(TEST_TIMEOUT, async || backend.inspect(short.key()).await.unwrap().is_empty())
            .await;
        let renewed = backend.renew(std::slice::from_ref(&short)).await;
        assert!(matches!(renewed[..], [Ok(Renewal::Gone)]), "{renewed:?}");
        assert_eq!(backend.inspect(short.key()).await.unwrap(), Vec::new());
        assert_eq!(backend.release(&short).await.unwrap(), Release::NotHeld);
    }
}

#[tokio::test]
async fn keys_of_one_uuid_are_one_lock() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v7()).await;
    let held = claim("foo");
    token(&backend, &held).await;
    for same in ["acbd18db-4cc2-385c-adef-654fccc4a4d8", "ACBD18DB-4CC2-385C-ADEF-654FCCC4A4D8"] {
        let other = claim(same);
        assert!(matches!(backend.try_acquire(&other).await.unwrap(), Attempt::Busy(_)), "{same}");
    }
}

/// A row of Spring contains only the UUID of its key. The UUID is also a key of the same lock.
#[tokio::test]
async fn locks_of_spring_are_listed_and_can_be_broken() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v7()).await;
    sql(&server, SPRING_INSERT).await;
    let own_claim = claim("bar").with_label(Some("us".into()));
    let granted = token(&backend, &own_claim).await;
    let mut listed = backend.list().await.unwrap();
    listed.sort_by(|a, b| a.key.as_str().cmp(b.key.as_str()));
    let [spring_holder, own_holder] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!(spring_holder.key.as_str(), "acbd18db-4cc2-385c-adef-654fccc4a4d8");
    assert_eq!((spring_holder.token, &spring_holder.label), (None, &None));
    assert_eq!((own_holder.key.as_str(), own_holder.token.unwrap().get()), ("bar", granted));
    assert_eq!(own_holder.label.as_deref(), Some("us"));
    assert!(backend.inspect(&key("foo")).await.unwrap().remove(0).lease_left.is_some());
    assert_eq!(backend.force_release(&spring_holder.key).await.unwrap(), Release::Freed);
    assert_eq!(backend.inspect(&key("foo")).await.unwrap(), Vec::new());
    assert_eq!(sql(&server, "SELECT count(*) FROM INT_LOCK WHERE REGION = 'OTHER'").await, "1");
}

#[tokio::test]
async fn a_table_of_another_generation_is_refused() {
    let server = server().await;
    backend(&server, SpringTable::v7()).await;
    backend(&server, SpringTable::v6(TTL).with_prefix(format!("{SCHEMA}.OLD_"))).await;
    for (table, fragment) in [
        (SpringTable::v6(TTL), "has a column EXPIRED_AFTER"),
        (SpringTable::v7().with_prefix("OLD_"), "has no column EXPIRED_AFTER"),
        (SpringTable::v7().with_prefix("a b"), "the prefix"),
        (SpringTable::v7().with_region(""), "the region"),
    ] {
        let error = Backend::open_mode(config(&server), SqlMode::Spring(table)).await.unwrap_err();
        assert!(error_chain(&error).contains(fragment), "{error}");
    }
    let absent = SpringTable::v7().with_prefix("ABSENT_");
    let strict = config(&server).with_create_schema(CreateSchema::Never);
    let error = Backend::open_mode(strict, SqlMode::Spring(absent)).await.unwrap_err();
    let text = error_chain(&error);
    assert!(text.contains("ABSENT_LOCK") && text.contains("is missing"), "{text}");
}

/// Without the fence, Spring's own statement would take over the row while the transaction is open.
#[tokio::test]
async fn a_fenced_transaction_excludes_spring_until_it_ends() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v7()).await;
    let registry = registry_core::Registry::builder(std::sync::Arc::new(backend)).build().unwrap();
    let guard = lock(&registry, "k").await;
    let mut connection = app_connection(&server).await;
    let mut transaction = connection.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    let mut peer = app_connection(&server).await;
    let refused = peer.execute(SPRING_STEAL).await.unwrap_err();
    assert!(refused.to_string().contains("timeout"), "{refused}");
    transaction.commit().await.unwrap();
    run(&mut peer, SPRING_STEAL).await;
    let mut transaction = connection.begin().await.unwrap();
    let error = guard.fence(&mut transaction).await.unwrap_err();
    assert!(matches!(error, FenceError::Lost { .. }), "{error:?}");
}
