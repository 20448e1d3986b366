//! The text of the error of an unreachable server contains operation, key, address, cause and hint.

use futures_util::future::join_all;
use registry_core::Registry;
use registry_testkit::{assert_acquire_error, within};

use super::server::{
    LockMode, ServerKind, TEST_TIMEOUT, registry_with_mode, spring_backend_with_long_timeouts,
};
use super::workload::LEASE;

async fn an_error_names_operation_key_and_address(kind: ServerKind) {
    let mut server = kind.start().await;
    let mut registries = Vec::new();
    for mode in [LockMode::Lease, LockMode::Session, LockMode::Row] {
        let registry = registry_with_mode(&server.url(), LEASE, mode).await;
        registries.push((format!("{mode:?}"), registry));
    }
    let spring = spring_backend_with_long_timeouts(&server.url()).await;
    registries.push(("Spring".to_owned(), Registry::builder(spring).lease(LEASE).build().unwrap()));
    server.kill();
    let scheme = match kind {
        ServerKind::Postgres => "postgres",
        ServerKind::MariaDb => "mysql",
    };
    let refused =
        format!("{scheme}: the connection was refused; check that the server runs at this address");
    // Concurrent, because each call retries for the length of a lease.
    let calls = registries.iter().map(async |(mode, registry)| {
        let error = within(TEST_TIMEOUT, registry.obtain("orders/42").lock()).await.unwrap_err();
        let cause = assert_acquire_error(&error, "orders/42", &server.addr().to_string());
        assert_eq!(cause, refused, "{mode}");
    });
    join_all(calls).await;
}

on_both_servers! {
    an_error_names_operation_key_and_address,
}
