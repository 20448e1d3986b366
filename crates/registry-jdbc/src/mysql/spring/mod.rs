//! Implements `SpringDialect` for MariaDB and MySQL: locks in the table of a Spring Integration
//! `JdbcLockRegistry`.

mod sql;

use registry_core::{BackendError, Claim, Release, Renewal};
use sqlx::MySql;
use tokio::time::Instant;

use super::backend::{ExecutedRenewal, MySqlWakeups, claim_count, wait_for_fence};
use super::config::MySqlConfig;
use super::sql::quoted;
use crate::server::spring::{SpringVersion, client_id, lock_key};
use crate::server::statement::{maybe_number, micros, text};
use crate::server::{
    ConnectionUse, Resend, RowId, ServerErrors as _, SpringDialect, SpringLeaseTable, SpringTable,
    SqlStore, Statement, StatementText, Value,
};
use sql::{DATE_DIGITS, MySqlSpringStatements};

impl SpringDialect for MySql {
    const SCHEMA_FILE: &'static str = "schema-mysql.sql";
    const ATTEMPT_IS_TRANSACTION: bool = true;

    type SpringStatements = MySqlSpringStatements;

    /// Returns the quoted name.
    fn table_name(config: &MySqlConfig, table: &SpringTable) -> String {
        let (database, name) = table.schema_and_name();
        let database = database.or_else(|| config.server.get_database()).unwrap_or_default();
        format!("{}.{}", quoted(database), quoted(&name))
    }

    async fn find_table(
        store: &SqlStore<Self>,
        table: &SpringTable,
    ) -> Result<Option<(String, bool)>, BackendError> {
        let (database, name) = table.schema_and_name();
        let database = database.or_else(|| store.config.server.get_database()).unwrap_or_default();
        let values = [Value::Text(database.to_owned()), Value::Text(name)];
        let columns = store.query(&StatementText::positional(sql::COLUMNS, &[]), values).await?;
        let end_column = match table.version {
            SpringVersion::V6 { .. } => "CREATED_DATE",
            SpringVersion::V7 => "EXPIRED_AFTER",
        };
        let mut has_end_column = false;
        for column in &columns {
            let column_name = text::<Self>(column, 0)?.unwrap_or_default();
            has_end_column |= column_name == "EXPIRED_AFTER";
            let digits = maybe_number::<Self>(column, 1)?.unwrap_or_default();
            // The server could store an earlier end of a lease than its holder assumes.
            if column_name == end_column && digits < DATE_DIGITS {
                let (_, name) = table.schema_and_name();
                return Err(Self::misconfigured(&format!(
                    "the column {end_column} of Spring's table {name} stores only {digits} digits of a second's fraction; run `ALTER TABLE {name} MODIFY {end_column} DATETIME({DATE_DIGITS}) NOT NULL`"
                )));
            }
        }
        let quoted_name = Self::table_name(&store.config, table);
        Ok((!columns.is_empty()).then_some((quoted_name, has_end_column)))
    }

    fn create_table(name: &str, version: SpringVersion) -> StatementText {
        sql::create_table(name, version)
    }

    fn spring_statements(
        store: &SqlStore<Self>,
        quoted_name: &str,
        table: &SpringTable,
    ) -> MySqlSpringStatements {
        MySqlSpringStatements::new(&store.config, quoted_name, table)
    }

    fn spring_wakeups(_: &SqlStore<Self>, _: &str) -> MySqlWakeups {
        MySqlWakeups(None)
    }

    fn region_scope(quoted_name: &str, table: &SpringTable) -> String {
        // In most collations, regions that differ only in case are equal, so the scope contains the
        // region in lower case.
        format!("{quoted_name} {}", table.region().to_ascii_lowercase())
    }

    fn native_namespace(region_scope: &str) -> Vec<u8> {
        // The scope is hashed, because a table's name may be too long for the column.
        [b"\xffspring ", RowId::for_foreign_lock(region_scope, "").bytes()].concat()
    }

    async fn renew_spring(
        spring: &SpringLeaseTable<Self>,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let (lease, requested_at) = (claims[0].lease(), Instant::now());
        let (store, statements) = (&spring.store, &spring.statements);
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let clients = claims.iter().map(|claim| client_id(claim.id())).collect();
        let ids = keys.iter().map(|key| spring.row_id(key).bytes().to_vec()).collect();
        let change = async |text, values: [Value; 4]| {
            // A repeated renewal has the same effect as a single renewal, so it may be sent again.
            let statement = Statement::new(text, values);
            store.client.send(ConnectionUse::Renew(lease), Resend::Allowed, &statement).await
        };
        let offset = Value::Number(statements.stored_offset(lease));
        let keys = Value::ManyTexts(keys);
        let values = [keys.clone(), Value::ManyTexts(clients), claim_count(claims), offset];
        let answer = change(&statements.renew, values).await?;
        // The grants are renewed already. The times in native rows matter only for the purge, so an
        // error is ignored.
        let lease_value = Value::Number(micros(lease));
        let values =
            [Value::ManyBytes(ids), Value::claims(claims), claim_count(claims), lease_value];
        let _ = change(&statements.renew_native, values).await;
        let renewal =
            ExecutedRenewal { store, claims, requested_at, changed: answer.affected_rows };
        let unexpired = Statement::new(&statements.unexpired, [keys]);
        renewal.answers(|claim| client_id(claim.id()), unexpired).await
    }

    async fn release_spring(
        spring: &SpringLeaseTable<Self>,
        claim: &Claim,
    ) -> Result<Release, BackendError> {
        let lock_key = lock_key(claim.key());
        let client = &spring.store.client;
        if claim.is_fenced() {
            // A fence locks both rows. The native row of a held key always exists, so an empty
            // result means that the row is locked.
            wait_for_fence(claim, async || {
                let text = &spring.store.statements.lock_row;
                let lock_row = Statement::new(text, [spring.id_value(&lock_key)]);
                Ok(client.query(ConnectionUse::Release, &lock_row).await?.is_empty()
                    && spring.is_held_by(claim).await?)
            })
            .await?;
        }
        let values = [Value::Text(lock_key.clone()), Value::Text(client_id(claim.id()))];
        let release = Statement::new(&spring.statements().release, values.clone());
        let released = spring.store.release(&release).await?.release_outcome();
        if released == Release::NotHeld {
            // The grant may have expired. The statement deletes its row, so that peers do not find
            // the row.
            let clear = Statement::new(&spring.statements.clear, values);
            client.send(ConnectionUse::Release, Resend::Allowed, &clear).await?;
        }
        Ok(released)
    }
}
