//! Leases in the table of a Spring Integration `JdbcLockRegistry`.
//!
//! Spring's table stores no tokens, no label and no key. So each key that this program locks also
//! has a row in the native table. The module `spring` converts keys and owners.

use std::fmt;

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Holder, Key, Release, Renewal,
};

use super::dialect::{
    LeaseStore, SpringDialect, WakeupSource, attempt_from_existing_grant, decode_key,
};
use super::error::client_error;
use super::spring::{client_id, is_client_id_of, lock_key};
use super::statement::{bytes, corrupt, decode_holder, flag, from_micros, number, text};
use super::store::SqlStore;
use super::{
    ConnectionUse, CreateSchema, Resend, RowId, SpringTable, Statement, StatementText, Value,
};

/// The statements that all kinds of servers have. Parameters have the same numbers on all servers.
/// PostgreSQL's additional parameters come last.
#[derive(Debug)]
pub(crate) struct SpringStatements {
    pub(crate) acquire: StatementText,
    pub(crate) current_grant: StatementText,
    pub(crate) list: StatementText,
    pub(crate) release: StatementText,
    pub(crate) force_release: StatementText,
    pub(crate) fence: StatementText,
}

/// The leases of one region, in Spring's table.
pub(crate) struct SpringLeaseTable<D: SpringDialect> {
    pub(crate) store: SqlStore<D>,
    table: SpringTable,
    pub(crate) statements: D::SpringStatements,
    pub(crate) wakeups: D::Wakeups,
    /// A text that is unique for the table and region. See [`SpringDialect::region_scope`].
    region_scope: String,
}

/// A grant as stored in the tables.
#[derive(Debug)]
struct SpringGrant {
    /// The value of the column `CLIENT_ID`.
    client: Option<String>,
    holder: Holder,
}

impl<D: SpringDialect> SpringLeaseTable<D> {
    pub(super) async fn open(config: D::Config, table: SpringTable) -> Result<Self, BackendError> {
        let store = SqlStore::<D>::open(config).await?;
        let quoted_name = find_or_create_table(&store, &table).await?;
        let statements = D::spring_statements(&store, &quoted_name, &table);
        let region_scope = D::region_scope(&quoted_name, &table);
        let wakeups = D::spring_wakeups(&store, &region_scope);
        Ok(Self { store, table, statements, wakeups, region_scope })
    }

    pub(crate) fn statements(&self) -> &SpringStatements {
        self.statements.as_ref()
    }

    /// Returns the id of the native row with the key's tokens.
    pub(crate) fn row_id(&self, lock_key: &str) -> RowId {
        RowId::for_foreign_lock(&self.region_scope, lock_key)
    }

    pub(crate) fn id_value(&self, lock_key: &str) -> Value {
        Value::bytes(self.row_id(lock_key).bytes())
    }

    fn native_namespace(&self) -> Value {
        Value::Bytes(D::native_namespace(&self.region_scope))
    }

    /// Returns the current grant of a lock, if it is held.
    async fn current_grant(&self, lock_key: &str) -> Result<Vec<D::Row>, BackendError> {
        let values = [Value::Text(lock_key.to_owned()), self.id_value(lock_key)];
        self.store.query(&self.statements().current_grant, values).await
    }

    /// Returns whether the claim holds its key. The query may use the connection that is reserved
    /// for releases.
    #[cfg(feature = "mysql")]
    pub(crate) async fn is_held_by(&self, claim: &Claim) -> Result<bool, BackendError> {
        let lock_key = lock_key(claim.key());
        let values = [Value::Text(lock_key.clone()), self.id_value(&lock_key)];
        let statement = Statement::new(&self.statements().current_grant, values);
        let rows = self.store.client.query(ConnectionUse::Release, &statement).await?;
        let client = rows.first().map(|row| text::<D>(row, 0)).transpose()?.flatten();
        Ok(client == Some(client_id(claim.id())))
    }

    /// Grants the key if it is free. Returns the current grant of the key after the attempt.
    async fn acquire(&self, claim: &Claim, lock_key: &str) -> Result<Vec<D::Row>, BackendError> {
        let statement = Statement::new(
            &self.statements().acquire,
            [
                Value::Text(lock_key.to_owned()),
                Value::Text(client_id(claim.id())),
                Value::lease(claim),
                self.id_value(lock_key),
                self.native_namespace(),
                Value::key(claim.key()),
                Value::claim(claim),
                Value::token_block(claim),
                Value::label(claim),
            ],
        );
        // Only the engine retries, for the same reason as in `LeaseTable::acquire`.
        let resend = if D::ATTEMPT_IS_TRANSACTION { Resend::Transaction } else { Resend::Never };
        let sent = self.store.client.send(ConnectionUse::Acquire, resend, &statement).await;
        let answer = sent.map_err(|error| {
            // The statement that the server rejected may follow the commit of the grant, unless it
            // waited for a row.
            let is_rejected = matches!(client_error(&error), Some(sqlx::Error::Database(_)));
            if D::ATTEMPT_IS_TRANSACTION && is_rejected && !D::is_row_lock_error(&error) {
                error.as_unknown()
            } else {
                error
            }
        })?;
        Ok(answer.rows)
    }

    /// Reads the columns client, claim, token, label and times. The columns of the native row
    /// describe the holder only if that row contains the holder's claim.
    fn decode(&self, holder: Holder, row: &D::Row) -> Result<SpringGrant, BackendError> {
        let client = text::<D>(row, 0)?;
        let holder = if is_client_id_of(client.as_deref(), bytes::<D>(row, 1)?.as_deref()) {
            decode_holder::<D>(holder, row, 2)?
        } else {
            holder.with_times(None, Some(from_micros(number::<D>(row, 5)?)))
        };
        Ok(SpringGrant { client, holder })
    }
}

impl<D: SpringDialect> LeaseStore for SpringLeaseTable<D> {
    type Database = D;

    fn store(&self) -> &SqlStore<D> {
        &self.store
    }

    fn wakeups(&self) -> &D::Wakeups {
        &self.wakeups
    }

    fn namespace(&self) -> &str {
        self.table.region()
    }

    async fn attempt(&self, claim: &Claim, position: u64) -> Result<Option<Attempt>, BackendError> {
        let lock_key = lock_key(claim.key());
        let mut rows = Vec::new();
        if D::ATTEMPT_IS_TRANSACTION {
            rows = self.current_grant(&lock_key).await?;
        }
        if rows.is_empty() {
            rows = self.acquire(claim, &lock_key).await?;
        }
        let Some(row) = rows.first() else { return Ok(None) };
        let SpringGrant { client, holder } = self.decode(Holder::new(claim.key().clone()), row)?;
        let is_own = client == Some(client_id(claim.id()));
        attempt_from_existing_grant::<D>(claim, is_own, holder, position).map(Some)
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        D::renew_spring(self, claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let released = D::release_spring(self, claim).await?;
        self.store.maybe_purge(claim.id()).await;
        self.store.not_held_if_writable(released).await
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.wakeups.wait(self.row_id(&lock_key(claim.key())), busy.seen_version).await;
    }

    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let rows = self.current_grant(&lock_key(key)).await?;
        let grant =
            rows.first().map(|row| self.decode(Holder::new(key.clone()), row)).transpose()?;
        Ok(grant.into_iter().map(|grant| grant.holder).collect())
    }

    /// Returns the holders of the region. A lock of this program is listed by its key, any other
    /// lock by its UUID, which is also a valid key of that lock.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let rows = self.store.query(&self.statements().list, [self.native_namespace()]).await?;
        let holder = |row: &D::Row| {
            let key = bytes::<D>(row, 7)?.and_then(|key| String::from_utf8(key).ok());
            let key = match key {
                Some(key) => key,
                // `CHAR(36)` pads the shorter keys of manually written rows with blanks.
                None => text::<D>(row, 6)?.unwrap_or_default().trim_end().to_owned(),
            };
            Ok(self.decode(Holder::new(decode_key::<D>(Some(&key))?), row)?.holder)
        };
        rows.iter().map(holder).collect()
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let lock_key = lock_key(key);
        let mut values = vec![Value::Text(lock_key.clone())];
        values.extend(self.wakeups.notification(self.row_id(&lock_key)));
        let statement = Statement::new(&self.statements().force_release, values);
        let released = release_outcome::<D>(&self.store.release(&statement).await?)?;
        self.store.not_held_if_writable(released).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        D::diagnose(&self.store).await
    }

    fn fence(&self, claim: &Claim, token: FencingToken) -> Statement<'_> {
        let lock_key = lock_key(claim.key());
        let id = self.id_value(&lock_key);
        let client = Value::Text(client_id(claim.id()));
        let values = [Value::Text(lock_key), client, id, Value::claim(claim), Value::token(token)];
        Statement::new(&self.statements().fence, values)
    }
}

/// Returns the outcome of a statement that deletes the row of a lock. If the statement returns
/// rows, their first column shows whether the lock was held.
pub(crate) fn release_outcome<D: SpringDialect>(
    answer: &super::Answer<D::Row>,
) -> Result<Release, BackendError> {
    for row in &answer.rows {
        if !flag::<D>(row, 0)? {
            return Ok(Release::NotHeld);
        }
    }
    Ok(answer.release_outcome())
}

/// Finds Spring's table, or creates it. Checks its version. Returns its quoted name.
async fn find_or_create_table<D: SpringDialect>(
    store: &SqlStore<D>,
    table: &SpringTable,
) -> Result<String, BackendError> {
    let name = D::table_name(&store.config, table);
    let mut found = D::find_table(store, table).await?;
    if found.is_none() {
        if store.settings().create_schema == CreateSchema::Never {
            return Err(D::misconfigured(&format!(
                "Spring's table {name} is missing; create it with Spring's {}, or let this program create it",
                D::SCHEMA_FILE
            )));
        }
        let text = D::create_table(&name, table.version);
        let created = store.query(&text, []).await;
        found = D::find_table(store, table).await?;
        if found.is_none() {
            // The error matters only if no other process has created the table meanwhile.
            created.map_err(BackendError::as_refused)?;
        }
    }
    let missing = || corrupt::<D>("a created table does not exist");
    let (quoted_name, has_end_column) = found.ok_or_else(missing)?;
    let checked = table.check_version(&name, has_end_column);
    checked.map_err(|message| D::misconfigured(&message))?;
    Ok(quoted_name)
}

impl<D: SpringDialect> fmt::Debug for SpringLeaseTable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(D::BACKEND)
            .field("config", &self.store.config)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
