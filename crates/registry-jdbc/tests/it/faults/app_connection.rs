//! The application's own connections and transactions, for both kinds of servers.

use registry_core::{LockGuard, Registry};
use registry_jdbc::sqlx::mysql::MySqlConnection;
use registry_jdbc::sqlx::postgres::PgConnection;
use registry_jdbc::sqlx::{AssertSqlSafe, Connection, Executor, MySql, Postgres, Row, Transaction};
use registry_jdbc::{Fence, FenceError, LockIn, LockInError, TransactionLock};

use super::server::Server;

/// A connection of the application.
pub(crate) enum AppConnection {
    Postgres(PgConnection),
    MySql(MySqlConnection),
}

/// A transaction on such a connection.
pub(crate) enum AppTransaction<'c> {
    Postgres(Transaction<'c, Postgres>),
    MySql(Transaction<'c, MySql>),
}

impl AppConnection {
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(&server.url()).await
    }

    pub(crate) async fn connect_to(url: &str) -> Self {
        if url.starts_with("postgres") {
            Self::Postgres(PgConnection::connect(url).await.unwrap())
        } else {
            Self::MySql(MySqlConnection::connect(url).await.unwrap())
        }
    }

    pub(crate) async fn begin(&mut self) -> AppTransaction<'_> {
        match self {
            Self::Postgres(connection) => {
                AppTransaction::Postgres(connection.begin().await.unwrap())
            }
            Self::MySql(connection) => AppTransaction::MySql(connection.begin().await.unwrap()),
        }
    }

    /// Begins a transaction with this isolation level.
    pub(crate) async fn begin_at(&mut self, level: &str) -> AppTransaction<'_> {
        match self {
            Self::Postgres(connection) => {
                let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
                AppTransaction::Postgres(connection.begin_with(begin).await.unwrap())
            }
            Self::MySql(connection) => {
                let level = format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}");
                connection.execute(AssertSqlSafe(level)).await.unwrap();
                AppTransaction::MySql(connection.begin().await.unwrap())
            }
        }
    }
}

impl AppTransaction<'_> {
    /// Runs a statement.
    pub(crate) async fn run(&mut self, statement: &'static str) {
        match self {
            Self::Postgres(transaction) => drop(transaction.execute(statement).await.unwrap()),
            Self::MySql(transaction) => drop(transaction.execute(statement).await.unwrap()),
        }
    }

    /// Runs an update, and returns the number of changed rows.
    pub(crate) async fn update(&mut self, statement: String) -> u64 {
        let statement = AssertSqlSafe(statement);
        match self {
            Self::Postgres(transaction) => {
                transaction.execute(statement).await.unwrap().rows_affected()
            }
            Self::MySql(transaction) => {
                transaction.execute(statement).await.unwrap().rows_affected()
            }
        }
    }

    /// Runs a query that returns one number.
    pub(crate) async fn number(&mut self, query: &'static str) -> i64 {
        match self {
            Self::Postgres(transaction) => {
                transaction.fetch_one(query).await.unwrap().get::<i64, _>(0)
            }
            Self::MySql(transaction) => {
                transaction.fetch_one(query).await.unwrap().get::<i64, _>(0)
            }
        }
    }

    pub(crate) async fn fence(&mut self, guard: &LockGuard) -> Result<(), FenceError> {
        match self {
            Self::Postgres(transaction) => guard.fence(transaction).await,
            Self::MySql(transaction) => guard.fence(transaction).await,
        }
    }

    pub(crate) async fn try_lock_in(
        &mut self,
        registry: &Registry,
        key: &str,
    ) -> Result<Option<TransactionLock>, LockInError> {
        match self {
            Self::Postgres(transaction) => registry.try_lock_in(transaction, key).await,
            Self::MySql(transaction) => registry.try_lock_in(transaction, key).await,
        }
    }

    pub(crate) async fn lock_in(
        &mut self,
        registry: &Registry,
        key: &str,
    ) -> Result<TransactionLock, LockInError> {
        match self {
            Self::Postgres(transaction) => registry.lock_in(transaction, key).await,
            Self::MySql(transaction) => registry.lock_in(transaction, key).await,
        }
    }

    pub(crate) async fn commit(self) {
        match self {
            Self::Postgres(transaction) => transaction.commit().await.unwrap(),
            Self::MySql(transaction) => transaction.commit().await.unwrap(),
        }
    }

    pub(crate) async fn rollback(self) {
        match self {
            Self::Postgres(transaction) => transaction.rollback().await.unwrap(),
            Self::MySql(transaction) => transaction.rollback().await.unwrap(),
        }
    }
}
