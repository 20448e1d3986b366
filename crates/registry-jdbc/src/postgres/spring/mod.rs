//! Locks in the table of a Spring Integration `JdbcLockRegistry`.
//!
//! Contains only the differences from the native layout, which is in `backend`. Names of keys and
//! owners are in `server::spring`.

mod sql;

use std::fmt;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, Busy, Claim, FencingToken, Finding, Grant, Holder, Key, Release, Renewal,
};
use sqlx::Postgres;
use sqlx::postgres::{PgConnection, PgRow};

use super::backend::{
    bytes, check_meta, claim_id, column, fencing_token, from_micros, micros, one_row,
    transaction_store,
};
use super::client::PgClient;
use super::config::{PostgresConfig, misconfigured, quoted};
use super::error::{STORE, corrupt, fenced_transaction_open, is_row_lock_error};
use super::listener::{NotificationChannel, PgReleaseListener};
use super::open::{self, OpenedPgStore};
use super::renew::{CLAIMS_MAX, claim_ids, leases, renew_rows};
use super::statement::{BoundStatement, PgParam};
use crate::server::spring::{client_id, is_claim, lock_key};
use crate::server::{ConnectionUse, LeaseStore, Resend, RowId, SpringTable, TransactionStore};
use sql::PgSpringStatements;

/// Leases in the table of Spring Integration.
pub(crate) struct PgSpring {
    config: PostgresConfig,
    table: SpringTable,
    store: String,
    native: super::sql::PgStatements,
    texts: PgSpringStatements,
    client: PgClient,
    listener: Option<PgReleaseListener>,
    channel: NotificationChannel,
    /// Distinguishes the native rows of this table and region from all others, including those of
    /// native namespaces.
    table_part: String,
}

impl PgSpring {
    pub(super) async fn open(
        config: PostgresConfig,
        table: SpringTable,
    ) -> Result<Self, BackendError> {
        let OpenedPgStore { tables, store } = open::open(&config).await?;
        let client = PgClient::new(&config);
        let lock = find_or_create_table(&config, &table, &client).await?;
        let table_part = format!("{lock} {}", table.region());
        let channel = NotificationChannel::new(RowId::namespace_hash(&table_part));
        let listener =
            config.listener_options().map(|server| PgReleaseListener::new(server, channel.clone()));
        Ok(Self {
            native: super::sql::PgStatements::new(&tables),
            texts: PgSpringStatements::new(&tables, &lock, table.generation),
            config,
            table,
            store,
            client,
            listener,
            channel,
            table_part,
        })
    }

    /// Returns the id of the native row with the token.
    fn row_id(&self, lock_key: &str) -> RowId {
        RowId::for_foreign_lock(&self.table_part, lock_key)
    }

    /// Returns a namespace that no native one can equal: it begins with a byte that is not valid
    /// UTF-8.
    fn native_namespace(&self) -> PgParam {
        PgParam::Bytes([b"\xff", self.table_part.as_bytes()].concat())
    }

    fn region(&self) -> PgParam {
        bytes(self.table.region().as_bytes())
    }

    fn lock_timeout(&self) -> PgParam {
        let millis = self.config.busy_timeout.as_millis().max(1);
        PgParam::Identifier(format!("{millis}ms"))
    }

    fn message(&self, lock_key: &str) -> PgParam {
        bytes(&self.row_id(lock_key).notification_id())
    }
}

impl LeaseStore for PgSpring {
    type Database = Postgres;

    const RENEWALS_MAX: usize = CLAIMS_MAX;
    const RENEWS_ONE_LEASE: bool = false;

    fn namespace(&self) -> &str {
        self.table.region()
    }

    fn has_wakes(&self) -> bool {
        self.listener.is_some()
    }

    fn position(&self) -> u64 {
        self.listener.as_ref().map_or(0, PgReleaseListener::position)
    }

    // One statement grants the key or returns its holder.
    async fn attempt(&self, claim: &Claim, mark: u64) -> Result<Option<Attempt>, BackendError> {
        let (lock_key, spring_client) = (lock_key(claim.key()), client_id(claim.id()));
        let statement = BoundStatement::new(
            &self.texts.acquire,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(spring_client.as_bytes()),
                PgParam::Number(micros(claim.lease())),
                bytes(self.row_id(&lock_key).bytes()),
                self.native_namespace(),
                bytes(claim.key().as_str().as_bytes()),
                claim_id(claim),
                PgParam::Number(i64::from(claim.token_block())),
                PgParam::MaybeBytes(claim.label().map(|label| label.as_bytes().to_vec())),
                self.lock_timeout(),
            ],
        );
        // Only the engine may retry, as in the native layout.
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Never).await?;
        let row = one_row(&rows)?;
        if let Some(token) = column::<Option<i64>>(row, 0)? {
            let grant = Grant::new(fencing_token(token)?, claim.lease());
            return Ok(Some(Attempt::Granted(grant)));
        }
        if !column::<bool>(row, 7)? {
            return Ok(None);
        }
        let held = decode_holder(Holder::new(claim.key().clone()), row, 1)?;
        let left = held.lease_left.unwrap_or_default();
        if column::<Option<String>>(row, 1)?.is_some_and(|holder| holder == spring_client) {
            let token = fencing_token(column(row, 3)?)?;
            return Ok(Some(Attempt::Granted(Grant::new(token, left.min(claim.lease())))));
        }
        Ok(Some(Attempt::Busy(
            Busy::new().with_retry_after(left).with_mark(mark).with_holder(held),
        )))
    }

    async fn renew_chunk(
        &self,
        claims: &[&Claim],
    ) -> Result<Vec<Result<Renewal, BackendError>>, BackendError> {
        let keys: Vec<String> = claims.iter().map(|claim| lock_key(claim.key())).collect();
        let ids = keys.iter().map(|key| self.row_id(key).bytes().to_vec()).collect();
        let statement = BoundStatement::new(
            &self.texts.renew,
            [
                self.region(),
                PgParam::ManyBytes(keys.into_iter().map(String::into_bytes).collect()),
                PgParam::ManyBytes(
                    claims.iter().map(|claim| client_id(claim.id()).into_bytes()).collect(),
                ),
                PgParam::ManyBytes(ids),
                claim_ids(claims),
                leases(claims),
            ],
        );
        renew_rows(&self.client, statement, claims).await
    }

    async fn check_meta(&self) -> Result<(), BackendError> {
        check_meta(&self.client, &self.native).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let lock_key = lock_key(claim.key());
        // The fenced transaction locks the row, and the calling code may be what must end that
        // transaction.
        let lock_timeout = if claim.is_fenced() {
            PgParam::Identifier(format!("{}ms", FENCED_ROW_TIMEOUT.as_millis()))
        } else {
            self.lock_timeout()
        };
        let statement = BoundStatement::new(
            &self.texts.release,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(client_id(claim.id()).as_bytes()),
                lock_timeout,
                PgParam::Identifier(self.channel.name().to_owned()),
                self.message(&lock_key),
            ],
        );
        // A repeated release would return `NotHeld`. So the caller decides whether to repeat it.
        let rows = self.client.rows(ConnectionUse::Release, &statement, Resend::Never).await;
        let rows = rows.map_err(|error| {
            let fence_query = claim.is_fenced() && is_row_lock_error(&error);
            if fence_query { fenced_transaction_open(STORE).with_source(error) } else { error }
        })?;
        super::purge::maybe_purge(claim, &self.client, &self.native, self.config.purge_after).await;
        release_outcome(&rows)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        match &self.listener {
            Some(listener) => {
                listener
                    .wait(self.row_id(&lock_key(claim.key())).notification_id(), busy.mark)
                    .await
            }
            None => std::future::pending().await,
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let lock_key = lock_key(key);
        let id = bytes(self.row_id(&lock_key).bytes());
        let values = [self.region(), bytes(lock_key.as_bytes()), id];
        let statement = BoundStatement::new(&self.texts.current_grant, values);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        rows.first().map(|row| decode_holder(Holder::new(key.clone()), row, 0)).transpose()
    }

    /// Returns the holders of the region. A lock of this program is listed by its key, any other
    /// lock by its UUID, which is a key of the same lock.
    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let statement =
            BoundStatement::new(&self.texts.list, [self.region(), self.native_namespace()]);
        let rows = self.client.rows(ConnectionUse::Acquire, &statement, Resend::Allowed).await?;
        rows.iter()
            .map(|row| {
                let key = column::<Option<Vec<u8>>>(row, 7)?;
                let key = key.and_then(|key| String::from_utf8(key).ok());
                let key = match key {
                    Some(key) => key,
                    // `CHAR(36)` pads shorter keys with blanks, and manually written rows may have
                    // such keys.
                    None => column::<String>(row, 6)?.trim_end().to_owned(),
                };
                let key = Key::new(&key).map_err(|_| corrupt("a row's key is invalid"))?;
                decode_holder(Holder::new(key), row, 0)
            })
            .collect()
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let lock_key = lock_key(key);
        let statement = BoundStatement::new(
            &self.texts.force_release,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                self.lock_timeout(),
                PgParam::Identifier(self.channel.name().to_owned()),
                self.message(&lock_key),
            ],
        );
        let rows = self.client.rows(ConnectionUse::Release, &statement, Resend::Never).await?;
        release_outcome(&rows)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        super::diagnose::check_server(&self.client, &self.config).await
    }

    async fn close(&self) {
        if let Some(listener) = &self.listener {
            listener.close();
        }
        self.client.close().await;
    }

    async fn fence(
        &self,
        connection: &mut PgConnection,
        claim: &Claim,
        token: FencingToken,
    ) -> Result<Option<bool>, sqlx::Error> {
        let lock_key = lock_key(claim.key());
        let statement = BoundStatement::new(
            &self.texts.fence,
            [
                self.region(),
                bytes(lock_key.as_bytes()),
                bytes(client_id(claim.id()).as_bytes()),
                bytes(self.row_id(&lock_key).bytes()),
                claim_id(claim),
                PgParam::Number(i64::from(token)),
            ],
        );
        statement.find_in(connection, self.client.is_prepared()).await
    }

    async fn transaction_store(
        &self,
        connection: &mut PgConnection,
    ) -> Result<TransactionStore, sqlx::Error> {
        transaction_store(&self.native, &self.store, connection).await
    }
}

/// Finds Spring's table, or creates it. Returns its qualified, quoted name.
async fn find_or_create_table(
    config: &PostgresConfig,
    table: &SpringTable,
    client: &PgClient,
) -> Result<String, BackendError> {
    let (schema, name) = table.name();
    let schema = schema.map(str::to_owned).or_else(|| config.tables.schema.clone());
    // Unquoted as in Spring's statements, so that the server converts the letters to lower case.
    let named = match &schema {
        Some(schema) => format!("{schema}.{name}"),
        None => name,
    };
    let text = sql::find_table(&named);
    let find = BoundStatement::new(&text, []);
    let mut rows = client.rows(ConnectionUse::Acquire, &find, Resend::Allowed).await?;
    if rows.is_empty() {
        if !config.tables.create {
            return Err(misconfigured(&format!(
                "Spring's table {named} is missing; create it with Spring's schema-postgresql.sql, or let this program create it"
            )));
        }
        let text = sql::create_table(&named, table.generation);
        let create_statement = BoundStatement::new(&text, []);
        let created = client.rows(ConnectionUse::Acquire, &create_statement, Resend::Allowed).await;
        rows = client.rows(ConnectionUse::Acquire, &find, Resend::Allowed).await?;
        if rows.is_empty() {
            // The error is only the cause if no other process has created the table meanwhile.
            created.map_err(BackendError::as_refused)?;
        }
    }
    let row = rows.first().ok_or_else(|| corrupt("a created table does not exist"))?;
    let checked = table.check_generation(&named, column(row, 2)?);
    checked.map_err(|message| misconfigured(&message))?;
    let (schema, name): (String, String) = (column(row, 0)?, column(row, 1)?);
    Ok(format!("{}.{}", quoted(&schema), quoted(&name)))
}

/// Reads client, claim, token, label and times from adjacent columns, beginning at `first`. The
/// native row's columns belong to the holder only if its claim matches the client.
fn decode_holder(holder: Holder, row: &PgRow, first: usize) -> Result<Holder, BackendError> {
    let spring_client: Option<String> = column(row, first)?;
    let claim: Option<Vec<u8>> = column(row, first + 1)?;
    let left = Some(from_micros(column(row, first + 5)?));
    if !is_claim(spring_client.as_deref(), claim.as_deref()) {
        return Ok(holder.with_times(None, left));
    }
    let label: Option<Vec<u8>> = column(row, first + 3)?;
    let label = label.map(|label| String::from_utf8_lossy(&label).into_owned());
    Ok(holder
        .with_label(label)
        .with_token(Some(fencing_token(column(row, first + 2)?)?))
        .with_times(Some(from_micros(column(row, first + 4)?)), left))
}

fn release_outcome(rows: &[PgRow]) -> Result<Release, BackendError> {
    for row in rows {
        if column(row, 0)? {
            return Ok(Release::Freed);
        }
    }
    Ok(Release::NotHeld)
}

/// How long the release of a fenced claim waits for the row. Other statements that read the row
/// lock it for a shorter time.
const FENCED_ROW_TIMEOUT: Duration = Duration::from_millis(100);

impl fmt::Debug for PgSpring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend")
            .field("config", &self.config)
            .field("table", &self.table)
            .finish_non_exhaustive()
    }
}
