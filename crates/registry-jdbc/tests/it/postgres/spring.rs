//! Locks in Spring's table: their rows, and the effects of Spring's own operations on them.

use registry_core::{LockAdmin, LockBackend, Release, Renewal};
use registry_jdbc::{PostgresBackend, SpringTable, SqlMode, StatementMode};

use super::common::{config, server};
use super::servers::spring::*;

#[tokio::test]
async fn unprepared_statements_have_the_same_effect() {
    let server = server().await;
    for (table, prefix) in [(SpringTable::v7(), "INT_"), (SpringTable::v6(TTL), "OLD_")] {
        let table = table.with_prefix(prefix).with_region("eu/west-1");
        let config = config(&server).with_statements(StatementMode::Unprepared);
        let backend = PostgresBackend::open_mode(config, SqlMode::Spring(table)).await.unwrap();
        let claim = claim("it's a $1 {key}").with_label(Some("x'; --".into()));
        let granted = token(&backend, &claim).await;
        assert_eq!(token(&backend, &claim).await, granted);
        let renewed = backend.renew(std::slice::from_ref(&claim)).await;
        assert!(matches!(renewed[..], [Ok(Renewal::Renewed(_))]), "{renewed:?}");
        let listed = backend.list().await.unwrap();
        let [holder] = &listed[..] else { panic!("{listed:?}") };
        assert_eq!((&holder.key, holder.label.as_deref()), (claim.key(), claim.label()));
        assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
    }
}
