//! Locks in Spring's table: their rows, and the effects of Spring's own operations on them.

use registry_core::{Attempt, LockBackend};
use registry_jdbc::{SpringTable, SqlMode};

use super::common::{config, error_chain, server};
use super::server::*;
use super::servers::spring::*;

/// A grant consists of two rows. Wherever the connection breaks, both rows exist or neither does,
/// and a retry finds its token.
#[tokio::test]
async fn a_grant_whose_connection_broke_is_complete_or_absent() {
    let server = server().await;
    let backend = backend(&server, SpringTable::v7()).await;
    let client_calls = async {
        let (mut last, mut failures) = (0, 0);
        while failures < 40 {
            let claim = claim("k");
            // The outcome of a broken attempt is unknown, so the same claim retries.
            let granted = loop {
                match backend.try_acquire(&claim).await {
                    Ok(Attempt::Granted(grant)) => break grant.token.get(),
                    Ok(other) => panic!("no other client exists: {other:?}"),
                    Err(_) => failures += 1,
                }
            };
            assert!(granted > last, "{granted} after {last}");
            last = granted;
            let again = loop {
                match backend.try_acquire(&claim).await {
                    Ok(Attempt::Granted(grant)) => break grant.token.get(),
                    Ok(other) => panic!("no other client exists: {other:?}"),
                    Err(_) => failures += 1,
                }
            };
            assert_eq!(again, granted);
            while backend.release(&claim).await.is_err() {
                failures += 1;
            }
        }
    };
    let disconnects = async {
        loop {
            end_connections(&server).await;
        }
    };
    tokio::select! {
        () = client_calls => {}
        () = disconnects => {}
    }
}

/// Spring's own table had this column type in 2017.
#[tokio::test]
async fn a_table_that_truncates_the_ends_of_leases_is_refused() {
    let server = server().await;
    for (table, name, column) in [
        (SpringTable::v7(), "INT_LOCK", "EXPIRED_AFTER"),
        (SpringTable::v6(TTL).with_prefix("OLD_"), "OLD_LOCK", "CREATED_DATE"),
    ] {
        backend(&server, table.clone()).await;
        sql(&server, &format!("ALTER TABLE {name} MODIFY {column} DATETIME NOT NULL")).await;
        let mode = SqlMode::Spring(table.clone());
        let error = Backend::open_mode(config(&server), mode).await.unwrap_err();
        let widen = format!("ALTER TABLE {name} MODIFY {column} DATETIME(6) NOT NULL");
        assert!(error.to_string().contains(&widen), "{}", error_chain(&error));
        sql(&server, &widen).await;
        backend(&server, table).await;
    }
}
