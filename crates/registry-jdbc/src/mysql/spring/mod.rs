//! Locks in the table of a Spring Integration `JdbcLockRegistry`.
//!
//! Contains only what differs from the native layout. The rest of the store is in `backend`;
//! `server::spring` maps keys to names in Spring's table.

mod sql;

use std::fmt;
use std::time::{Duration, Instant};

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Grant, Holder, Key, Release, Renewal,
};
use sqlx::mysql::MySqlRow;
use sqlx::{MySql, MySqlConnection, Row, query, raw_sql};

use super::backend::check_meta;
use super::client::{MySqlClient, new_client};
use super::config::{MySqlConfig, misconfigured};
use super::error;
use super::fence::{find_in, transaction_store, wait_for_fence};
use super::inline::{InlineValue, inline};
use super::open::{self, OpenedMySqlStore};
use super::purge;
use super::renew::SentRenewal;
use super::sql::{MySqlStatements, SIZES, quoted};
use super::statement::{MySqlQuery, bind_padded, from_micros};
use crate::server::spring::{client_id, is_claim, lock_key};
use crate::server::{ConnectionUse, LeaseStore, Resend, RowId, SpringTable, TransactionStore};
use sql::{AcquireValues, MySqlSpringStatements, micros};

/// Leases in the table of Spring Integration.
pub(crate) struct MySqlSpring {
    config: MySqlConfig,
    table: SpringTable,
    store: Vec<u8>,
    native: MySqlStatements,
    statements: MySqlSpringStatements,
    client: MySqlClient,
    /// Distinguishes the native rows of this table and region from those of other tables and
    /// regions, and of native namespaces.
    table_part: String,
}

impl MySqlSpring {
    pub(super) async fn open(
        config: MySqlConfig,
        table: SpringTable,
    ) -> Result<Self, BackendError> {
        let client = new_client(&config);
        let OpenedMySqlStore { texts: native, store } = open::open(&config, &client).await?;
        let lock = find_or_create_table(&config, &table, &client).await?;
        let database = config.server.get_database().unwrap_or_default();
        let statements = MySqlSpringStatements::new(
            database,
            &config.table_prefix,
            &lock,
            table.region(),
            table.generation,
        );
        // In most collations, regions that differ only in case are equal.
        let table_part = format!("{lock} {}", table.region().to_ascii_lowercase());
        Ok(Self { config, table, store, native, statements, client, table_part })
    }

    /// Returns the id of the native row with the key's tokens.
    fn row_id(&self, lock_key: &str) -> Vec<u8> {
        RowId::for_foreign_lock(&self.table_part, lock_key).bytes().to_vec()
    }

    /// Returns a namespace that no native namespace equals, because those are UTF-8. A hash,
    /// because a table's name may be too long.
    fn native_namespace(&self) -> Vec<u8> {
        let table_part = RowId::for_foreign_lock(&self.table_part, "");
        [b"\xffspring ", table_part.bytes()].concat()
    }

    async fn has_open_fence(&self, claim: &Claim) -> Result<bool, BackendError> {
        // A fence locks both rows. The native row exists as long as the claim does.
        let id = self.row_id(&lock_key(claim.key()));
        let build = || query(self.native.lock_row.safe()).bind(id.clone());
        if !self.client.rows(ConnectionUse::Release, build).await?.is_empty() {
            return Ok(false);
        }
        let held = self.current_grant(claim.key(), ConnectionUse::Release).await?;
        Ok(held.is_some_and(|held| held.spring_client == Some(client_id(claim.id()))))
    }

    /// Returns the current grant of the key.
    async fn current_grant(
        &self,
        key: &Key,
        connection_use: ConnectionUse,
    ) -> Result<Option<SpringGrant>, BackendError> {
        let lock_key = lock_key(key);
        let create_statement = || {
            query(self.statements.current_grant.safe())
                .bind(self.row_id(&lock_key))
                .bind(lock_key.clone())
        };
        let rows = self.client.rows(connection_use, create_statement).await?;
        rows.first().map(|row| self.decode_grant(Holder::new(key.clone()), row)).transpose()
    }

    /// Grants the key if it is free. Returns the grant that the key has afterwards.
    async fn try_take(&self, claim: &Claim) -> Result<Option<SpringGrant>, BackendError> {
        let (lock_key, spring_client) = (lock_key(claim.key()), client_id(claim.id()));
        let (id, namespace) = (self.row_id(&lock_key), self.native_namespace());
        let create_statement = || {
            raw_sql(self.statements.acquire(&AcquireValues {
                lock_key: &lock_key,
                spring_client: &spring_client,
                lease: claim.lease(),
                id: &id,
                namespace: &namespace,
                key: claim.key().as_str().as_bytes(),
                claim: &claim.id().to_bytes(),
                block: claim.token_block(),
                label: claim.label().map(str::as_bytes),
            }))
        };
        let rows = self.client.transaction(ConnectionUse::Acquire, create_statement).await?;
        rows.first().map(|row| self.decode_grant(Holder::new(claim.key().clone()), row)).transpose()
    }

    /// Reads a grant. The columns of the native row are valid only if that row has the same claim.
    fn decode_grant(&self, holder: Holder, row: &MySqlRow) -> Result<SpringGrant, BackendError> {
        let spring_client: Option<String> = self.column(row, 0)?;
        let claim: Option<Vec<u8>> = self.column(row, 1)?;
        let lease_left = from_micros(self.column(row, 5)?);
        let holder = if is_claim(spring_client.as_deref(), claim.as_deref()) {
            let label: Option<Vec<u8>> = self.column(row, 3)?;
            let token: i64 = self.column(row, 2)?;
            let token = FencingToken::try_from(token)
                .map_err(|_| self.corrupt("a row's token is negative"))?;
            holder
                .with_label(label.map(|label| String::from_utf8_lossy(&label).into_owned()))
                .with_token(Some(token))
                .with_times(Some(from_micros(self.column(row, 4)?)), Some(lease_left))
        } else {
            holder.with_times(None, Some(lease_left))
        };
        Ok(SpringGrant { spring_client, lease_left, holder })
    }

    fn column<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, BackendError>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| self.client.explain(error))
    }

    fn corrupt(&self, message: &str) -> BackendError {
        error::corrupt(error::STORE, message)
    }

    fn key_and_client(text: &super::sql::MySqlStatementText, claim: &Claim) -> MySqlQuery {
        query(text.safe()).bind(lock_key(claim.key())).bind(client_id(claim.id()))
    }
}

/// A grant as stored in the tables.
#[derive(Debug)]
struct SpringGrant {
    spring_client: Option<String>,
    lease_left: Duration,
    holder: Holder,
}

impl LeaseStore for MySqlSpring {
    type Database = MySql;

    const RENEWALS_MAX: usize = SIZES[SIZES.len() - 1];
    const RENEWS_ONE_LEASE: bool = true;

    fn namespace(&self) -> &str {
        self.table.region()
    }

    fn has_wakes(&self) -> bool {
        false
    }

    async fn attempt(&self, claim: &Claim, _: u64) -> Result<Option<Attempt>, BackendError> {
        let held = match self.current_grant(claim.key(), ConnectionUse::Acquire).await? {
            None => self.try_take(claim).await?,
            held => held,
        };
        let Some(held) = held else { return Ok(None) };
        if held.spring_client == Some(client_id(claim.id())) {
            let Some(token) = held.holder.token else {
                return Err(self.corrupt("a grant has no row with a token"));
            };
            let lease = held.lease_left.min(claim.lease());
            return Ok(Some(Attempt::Granted(Grant::new(token, lease))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new().with_retry_after(held.lease_left).with_holder(held.holder),
        )))
    }

    async fn check_meta(&self) -> Result<(), BackendError> {
        check_meta(&self.client, &self.native).await
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let (lease, requested_at) = (claims[0].lease(), Instant::now());
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let clients: Vec<String> = claims.iter().map(|claim| client_id(claim.id())).collect();
        let limit = i64::try_from(claims.len()).unwrap_or(i64::MAX);
        let (connection_use, sized) = (ConnectionUse::Renew(lease), MySqlStatements::sized);
        // A repeated renewal has no further effect.
        let create_statement = || {
            let statement = query(sized(&self.statements.renew, claims.len()).safe());
            let statement = bind_padded(statement, keys.iter().cloned());
            let statement = bind_padded(statement, clients.iter().cloned());
            statement.bind(limit).bind(self.statements.stored_offset(lease))
        };
        let done = self.client.execute(connection_use, Resend::Allowed, create_statement).await?;
        let create_statement = || {
            let statement = query(sized(&self.statements.renew_native, claims.len()).safe());
            let statement = bind_padded(statement, keys.iter().map(|key| self.row_id(key)));
            let ids = claims.iter().map(|claim| claim.id().to_bytes().to_vec());
            bind_padded(statement, ids).bind(limit).bind(micros(lease))
        };
        // The grants are renewed. The native rows matter only for the purge, so an error is
        // ignored.
        let _ = self.client.execute(connection_use, Resend::Allowed, create_statement).await;
        let create_statement = || {
            let statement = query(sized(&self.statements.unexpired, claims.len()).safe());
            bind_padded(statement, keys.iter().cloned())
        };
        let renewal = SentRenewal { client: &self.client, claims, requested_at, done };
        renewal.answers(|claim| client_id(claim.id()), create_statement).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        if claim.is_fenced() {
            wait_for_fence(|| self.has_open_fence(claim)).await?;
        }
        // Not repeated: the second result would be that the claim held nothing. The caller decides
        // about a retry.
        let create_statement = || Self::key_and_client(&self.statements.release, claim);
        let done =
            self.client.execute(ConnectionUse::Release, Resend::Never, create_statement).await?;
        let release_outcome = done.rows_affected() > 0;
        if !release_outcome {
            // The grant has expired. Its row is deleted so that peers do not find it.
            let create_statement = || Self::key_and_client(&self.statements.clear, claim);
            self.client.execute(ConnectionUse::Release, Resend::Allowed, create_statement).await?;
        }
        purge::maybe_purge(claim, &self.client, &self.native, self.config.purge_after).await;
        Ok(if release_outcome { Release::Freed } else { Release::NotHeld })
    }

    /// There are no notifications.
    async fn wait(&self, _: &Claim, _: &Busy) {
        std::future::pending().await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(self.current_grant(key, ConnectionUse::Acquire).await?.map(|held| held.holder))
    }

    /// Lists the grants of this program by key, and those of peers by UUID, which is a key of the
    /// same lock.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let create_statement = || query(self.statements.list.safe()).bind(self.native_namespace());
        let rows = self.client.rows(ConnectionUse::Acquire, create_statement).await?;
        rows.iter()
            .map(|row| {
                let key = self.column::<Option<Vec<u8>>>(row, 7)?;
                let key = key.and_then(|key| String::from_utf8(key).ok());
                let key = match key {
                    Some(key) => key,
                    None => self.column(row, 6)?,
                };
                let key = Key::new(&key).map_err(|_| self.corrupt("a row's key is invalid"))?;
                Ok(self.decode_grant(Holder::new(key), row)?.holder)
            })
            .collect()
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let create_statement = || query(self.statements.force_release.safe()).bind(lock_key(key));
        let done =
            self.client.execute(ConnectionUse::Release, Resend::Never, create_statement).await?;
        Ok(if done.rows_affected() > 0 { Release::Freed } else { Release::NotHeld })
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        super::diagnose::check_server(&self.client).await
    }

    async fn close(&self) {
        self.client.close().await;
    }

    async fn fence(
        &self,
        connection: &mut MySqlConnection,
        claim: &Claim,
        token: FencingToken,
    ) -> Result<Option<bool>, sqlx::Error> {
        let (lock_key, token) = (lock_key(claim.key()), i64::from(token));
        let values = [
            InlineValue::Bytes(self.row_id(&lock_key)),
            InlineValue::Bytes(claim.id().to_bytes().to_vec()),
            InlineValue::Number(token),
            InlineValue::Number(token),
            InlineValue::Identifier(lock_key),
            InlineValue::Identifier(client_id(claim.id())),
        ];
        find_in(connection, inline(&self.statements.fence, &values)).await
    }

    async fn transaction_store(
        &self,
        connection: &mut MySqlConnection,
    ) -> Result<TransactionStore, sqlx::Error> {
        transaction_store(&self.native, &self.store, connection).await
    }
}

/// Finds or creates Spring's table. Returns its quoted name.
async fn find_or_create_table(
    config: &MySqlConfig,
    table: &SpringTable,
    client: &MySqlClient,
) -> Result<String, BackendError> {
    let (database, name) = table.name();
    let database = database.or_else(|| config.server.get_database()).unwrap_or_default().to_owned();
    let lock = format!("{}.{}", quoted(&database), quoted(&name));
    let columns = async || {
        let create_statement = || query(sql::COLUMNS).bind(database.clone()).bind(name.clone());
        let rows = client.rows(ConnectionUse::Acquire, create_statement).await?;
        let columns = rows.iter().map(|row| row.try_get::<String, _>(0));
        columns.collect::<Result<Vec<_>, _>>().map_err(|error| client.explain(error))
    };
    let mut found = columns().await?;
    if found.is_empty() {
        if !config.create_schema {
            return Err(misconfigured(&format!(
                "Spring's table {lock} is missing; create it with Spring's schema-mysql.sql, or let this program create it"
            )));
        }
        let create_statement = || query(sql::create_table(&lock, table.generation));
        let created =
            client.execute(ConnectionUse::Acquire, Resend::Allowed, create_statement).await;
        found = columns().await?;
        if found.is_empty() {
            // Only if the table is still missing: another process may have created it.
            created.map_err(BackendError::as_refused)?;
        }
    }
    let has_end_column = found.iter().any(|column| column == "EXPIRED_AFTER");
    let checked = table.check_generation(&lock, has_end_column);
    checked.map_err(|message| misconfigured(&message))?;
    Ok(lock)
}

impl fmt::Debug for MySqlSpring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend")
            .field("config", &self.config)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
