//! An opened store: its connections and tables. Contains the requests that the native layout and
//! Spring's layout share.

use std::sync::Arc;

use registry_core::config::BackendConfig as _;
use registry_core::{BackendError, ClaimId, Release};

use super::config::ServerSettings;
use super::dialect::Dialect;
use super::statement::{bytes, corrupt, flag};
use super::{Answer, ConnectionUse, Resend, SqlClient, Statement, StatementText, Value, purge};

pub(crate) struct SqlStore<D: Dialect> {
    pub(crate) config: D::Config,
    /// The id that the tables received when they were created.
    pub(crate) id: Vec<u8>,
    pub(crate) client: Arc<SqlClient<D>>,
    pub(crate) statements: Arc<D::Statements>,
}

/// Whether a caller's transaction is in the store's database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransactionDatabase {
    /// The transaction is in another database.
    Other,
    Same {
        /// Whether the transaction keeps the snapshot of its first read. Always false in MariaDB
        /// and MySQL, which do not report it.
        keeps_snapshot: bool,
    },
}

impl<D: Dialect> SqlStore<D> {
    pub(crate) async fn open(config: D::Config) -> Result<Self, BackendError> {
        config.validate().map_err(|error| error.into_backend_error(D::STORE))?;
        let response_timeout = D::settings(&config).response_timeout;
        let client = SqlClient::new(D::pool(&config), response_timeout, D::query_mode(&config));
        let (statements, id) = D::open_tables(&config, &client).await?;
        let (client, statements) = (Arc::new(client), Arc::new(statements));
        Ok(Self { config, id, client, statements })
    }

    pub(crate) fn settings(&self) -> &ServerSettings {
        D::settings(&self.config)
    }

    /// Returns the rows of a query. Queries may be repeated.
    pub(crate) async fn query(
        &self,
        text: &StatementText,
        values: impl Into<Vec<Value>>,
    ) -> Result<Vec<D::Row>, BackendError> {
        self.client.query(ConnectionUse::Acquire, &Statement::new(text, values)).await
    }

    /// Sends a statement that ends a grant. Repeats the statement only if the server rolled it back
    /// because of a conflict.
    ///
    /// After a broken connection, the engine decides about a retry: if the server executed the
    /// first request, a second one reports that the claim held nothing.
    pub(crate) async fn release(
        &self,
        statement: &Statement<'_>,
    ) -> Result<Answer<D::Row>, BackendError> {
        self.client.send(ConnectionUse::Release, Resend::Never, statement).await
    }

    /// Checks the meta row. Without this row, or on a replica, no attempt is ever granted. Called
    /// when requests have no result, for example after too many conflicts on a record.
    pub(crate) async fn check_writable(
        &self,
        connection_use: ConnectionUse,
    ) -> Result<(), BackendError> {
        let meta = Statement::new(&self.statements.as_ref().as_ref().meta, []);
        let rows = self.client.query(connection_use, &meta).await?;
        let missing = || corrupt::<D>("the meta table has no row").as_refused();
        if !flag::<D>(rows.first().ok_or_else(missing)?, 2)? {
            // After a failover, new connections may reach the new primary.
            self.client.close_idle();
            return Err(super::error::read_only(D::STORE));
        }
        Ok(())
    }

    /// Returns the result of a release. If it is `NotHeld`, first checks that the server is
    /// writable: on a replica, the statement has changed nothing.
    pub(crate) async fn not_held_if_writable(
        &self,
        released: Release,
    ) -> Result<Release, BackendError> {
        if released == Release::NotHeld {
            // The release had no effect, whatever the outcome of this check is.
            let checked = self.check_writable(ConnectionUse::Release).await;
            checked.map_err(BackendError::as_refused)?;
        }
        Ok(released)
    }

    /// Returns whether the caller's transaction is in this store's database. Reads the meta row in
    /// the transaction.
    pub(crate) async fn transaction_database(
        &self,
        connection: &mut D::Connection,
    ) -> Result<TransactionDatabase, sqlx::Error> {
        let meta = &self.statements.as_ref().as_ref().meta;
        let rows = D::simple_query(connection, Statement::new(meta, []).inlined::<D>()).await?;
        let Some(row) = rows.first() else { return Ok(TransactionDatabase::Other) };
        // The table may have another id, or may belong to another program.
        if D::bytes(row, 1).ok().flatten().as_ref() != Some(&self.id) {
            return Ok(TransactionDatabase::Other);
        }
        Ok(TransactionDatabase::Same { keeps_snapshot: D::flag(row, 3)? })
    }

    /// Purges a batch of rows for one random id in 256.
    pub(crate) async fn maybe_purge(&self, id: ClaimId) {
        purge::maybe_purge(id, |start| D::purge_batch(self, start)).await;
    }
}

/// Reads the meta row of tables that are being opened. Returns the id of the tables.
pub(crate) fn read_meta<D: Dialect>(rows: &[D::Row]) -> Result<Vec<u8>, BackendError> {
    let missing = || corrupt::<D>("the meta table has no row").as_refused();
    let row = rows.first().ok_or_else(missing)?;
    let version = D::number(row, 0).map_err(D::explain)?;
    if version != Some(VERSION) {
        let version = version.unwrap_or_default();
        return Err(D::misconfigured(&format!(
            "the lock tables are of version {version}, this program knows version {VERSION}; update the older one"
        )));
    }
    Ok(bytes::<D>(row, 1)?.unwrap_or_default())
}

/// The version of the tables that this program reads and writes.
const VERSION: i64 = 1;
