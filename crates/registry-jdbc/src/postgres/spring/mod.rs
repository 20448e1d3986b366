//! Implements `SpringDialect` for PostgreSQL: locks in the table of a Spring Integration
//! `JdbcLockRegistry`.

mod sql;

use std::time::Duration;

use registry_core::{BackendError, Claim, Release, Renewal};
use sqlx::Postgres;

use super::backend::{self, PgWakeups};
use super::config::{PostgresConfig, quoted};
use super::error::{STORE, fenced_transaction_open};
use crate::server::spring::{SpringVersion, client_id, lock_key};
use crate::server::spring_rows::release_outcome;
use crate::server::statement::{flag, text};
use crate::server::{
    ServerErrors as _, SpringDialect, SpringLeaseTable, SpringTable, SqlStore, Statement,
    StatementText, Value, WakeupSource as _,
};
use sql::PgSpringStatements;

impl SpringDialect for Postgres {
    const SCHEMA_FILE: &'static str = "schema-postgresql.sql";
    const ATTEMPT_IS_TRANSACTION: bool = false;

    type SpringStatements = PgSpringStatements;

    /// Returns the unquoted name, as in Spring's statements: the server converts its letters to
    /// lower case. Only a schema of the configuration is quoted, as for the native tables.
    fn table_name(config: &PostgresConfig, table: &SpringTable) -> String {
        match (table.schema_and_name(), &config.schema) {
            ((Some(schema), name), _) => format!("{schema}.{name}"),
            ((None, name), Some(schema)) => format!("{}.{name}", quoted(schema)),
            ((None, name), None) => name,
        }
    }

    async fn find_table(
        store: &SqlStore<Self>,
        table: &SpringTable,
    ) -> Result<Option<(String, bool)>, BackendError> {
        let find = sql::find_table(&Self::table_name(&store.config, table));
        let rows = store.query(&find, []).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let name = |index| Ok(quoted(&text::<Self>(row, index)?.unwrap_or_default()));
        Ok(Some((format!("{}.{}", name(0)?, name(1)?), flag::<Self>(row, 2)?)))
    }

    fn create_table(name: &str, version: SpringVersion) -> StatementText {
        sql::create_table(name, version)
    }

    fn spring_statements(
        store: &SqlStore<Self>,
        quoted_name: &str,
        table: &SpringTable,
    ) -> PgSpringStatements {
        PgSpringStatements::new(&store.statements.tables, quoted_name, table)
    }

    fn spring_wakeups(store: &SqlStore<Self>, region_scope: &str) -> PgWakeups {
        PgWakeups::new(&store.config, region_scope)
    }

    fn region_scope(quoted_name: &str, table: &SpringTable) -> String {
        format!("{quoted_name} {}", table.region())
    }

    fn native_namespace(region_scope: &str) -> Vec<u8> {
        [b"\xff", region_scope.as_bytes()].concat()
    }

    async fn renew_spring(
        spring: &SpringLeaseTable<Self>,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let ids = keys.iter().map(|key| spring.row_id(key).bytes().to_vec()).collect();
        let clients = claims.iter().map(|claim| client_id(claim.id())).collect();
        let values = [
            Value::ManyTexts(keys),
            Value::ManyTexts(clients),
            Value::ManyBytes(ids),
            Value::claims(claims),
            backend::leases(claims),
        ];
        backend::renew(&spring.store, &spring.statements.renew, values, claims).await
    }

    async fn release_spring(
        spring: &SpringLeaseTable<Self>,
        claim: &Claim,
    ) -> Result<Release, BackendError> {
        let lock_key = lock_key(claim.key());
        // The fenced transaction locks the row. If the caller of this release must end that
        // transaction, a longer wait is useless.
        let lock_timeout = match claim.is_fenced() {
            true => FENCED_ROW_TIMEOUT,
            false => spring.store.settings().busy_timeout,
        };
        let mut values = vec![
            Value::Text(lock_key.clone()),
            Value::Text(client_id(claim.id())),
            Value::Text(format!("{}ms", lock_timeout.as_millis().max(1))),
        ];
        values.extend(spring.wakeups.notification(spring.row_id(&lock_key)));
        let statement = Statement::new(&spring.statements().release, values);
        let answer = spring.store.release(&statement).await.map_err(|error| {
            let is_fence = claim.is_fenced() && Self::is_row_lock_error(&error);
            if is_fence { fenced_transaction_open(STORE).with_source(error) } else { error }
        })?;
        release_outcome::<Self>(&answer)
    }
}

/// How long the release of a fenced claim waits for the row. Statements of other clients lock the
/// row for a shorter time.
const FENCED_ROW_TIMEOUT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_schema_keeps_its_capital_letters() {
        let config = PostgresConfig::new("db", 5432, "shop").with_schema("Elsewhere");
        let name =
            |prefix: &str| Postgres::table_name(&config, &SpringTable::v7().with_prefix(prefix));
        assert_eq!(name("INT_"), "\"Elsewhere\".INT_LOCK");
        assert_eq!(name("App.INT_"), "App.INT_LOCK");
    }
}
