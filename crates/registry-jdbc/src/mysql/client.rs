//! Sends statements to a MariaDB or MySQL server.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use registry_core::BackendError;
use sqlx::mysql::{MySqlQueryResult, MySqlRow};
use sqlx::{MySql, MySqlConnection, RawSql, Row as _};

use super::config::MySqlConfig;
use super::sql;
use super::statement::MySqlQuery;
use crate::server::{
    ConnectionPool, ConnectionUse, PoolLimits, Request, Resend, SessionFailure, SqlClient,
    session_failure,
};

pub(crate) type MySqlClient = SqlClient<MySql>;

/// Creates the client without connecting.
pub(super) fn new_client(config: &MySqlConfig) -> MySqlClient {
    let limits = PoolLimits {
        connections: config.connections,
        connect_timeout: config.connect_timeout,
        acquire_timeout: config.response_timeout,
        response_timeout: config.response_timeout,
        row_lock_timeout: config.busy_timeout,
    };
    let lock_timeout = config.busy_timeout.as_millis().div_ceil(1_000);
    let lock_timeout = u64::try_from(lock_timeout).unwrap_or(u64::MAX);
    let pool = ConnectionPool::new(config.server.clone(), limits).with_after_connect(Box::new(
        move |connection: &mut MySqlConnection| {
            let after_connect = sqlx::raw_sql(sql::session(lock_timeout));
            async move { after_connect.execute(connection).await.map(drop) }.boxed()
        },
    ));
    SqlClient::new(pool, config.response_timeout)
}

type Reply<'c, T> = BoxFuture<'c, Result<T, sqlx::Error>>;

/// A statement that changes rows.
struct Change<'a>(&'a (dyn Fn() -> MySqlQuery + Sync));

impl Request<MySqlConnection> for Change<'_> {
    type Answer = MySqlQueryResult;

    fn send<'c>(&'c self, connection: &'c mut MySqlConnection) -> Reply<'c, Self::Answer> {
        (self.0)().execute(connection).boxed()
    }
}

/// A statement that returns rows.
struct Rows<'a>(&'a (dyn Fn() -> MySqlQuery + Sync));

impl Request<MySqlConnection> for Rows<'_> {
    type Answer = Vec<MySqlRow>;

    fn send<'c>(&'c self, connection: &'c mut MySqlConnection) -> Reply<'c, Self::Answer> {
        (self.0)().fetch_all(connection).boxed()
    }
}

/// Statements that are sent in one packet.
struct Packet<'a>(&'a (dyn Fn() -> RawSql + Sync));

impl Request<MySqlConnection> for Packet<'_> {
    type Answer = Vec<MySqlRow>;

    fn send<'c>(&'c self, connection: &'c mut MySqlConnection) -> Reply<'c, Self::Answer> {
        (self.0)().fetch_all(connection).boxed()
    }
}

impl SqlClient<MySql> {
    /// Sends a statement that changes rows.
    pub(super) async fn execute(
        &self,
        connection_use: ConnectionUse,
        resend: Resend,
        make: impl Fn() -> MySqlQuery + Send + Sync,
    ) -> Result<MySqlQueryResult, BackendError> {
        self.send(connection_use, resend, &Change(&make)).await
    }

    /// Sends a statement that returns rows.
    pub(super) async fn rows(
        &self,
        connection_use: ConnectionUse,
        make: impl Fn() -> MySqlQuery + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        self.send(connection_use, Resend::Allowed, &Rows(&make)).await
    }

    /// Sends several statements as one transaction in one packet. Returns the rows of the queries
    /// after it.
    pub(super) async fn transaction(
        &self,
        connection_use: ConnectionUse,
        make: impl Fn() -> RawSql + Send + Sync,
    ) -> Result<Vec<MySqlRow>, BackendError> {
        self.send(connection_use, Resend::Transaction, &Packet(&make)).await
    }

    /// Returns what an error outside of a transaction means for a session.
    pub(super) fn failure(&self, error: sqlx::Error) -> SessionFailure {
        session_failure::<MySql>(error)
    }

    /// Reads a column of a session's response. An unreadable column ends the session.
    pub(super) fn read<'r, T>(&self, row: &'r MySqlRow, index: usize) -> Result<T, SessionFailure>
    where
        T: sqlx::Decode<'r, MySql> + sqlx::Type<MySql>,
    {
        row.try_get(index).map_err(|error| SessionFailure::Broken(self.explain(error)))
    }
}
