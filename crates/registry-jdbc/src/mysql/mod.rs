//! The MariaDB and MySQL store.
//!
//! The modules are listed in the order in which an acquisition of a lease passes through them. The
//! other modes and the housekeeping follow.

// Before the first acquisition.
mod config;
mod open;
// The operations on a lock's row, and their SQL.
mod backend;
mod statement;
mod sql;
// Sending statements to the server.
mod client;
mod error;
// Waiting for a release by any process.
mod release_poller;
// Locks that last as long as a connection: one connection for all locks, or one connection for each
// lock.
mod session;
mod row;
// Locks that last as long as the caller's transaction.
mod lock_in;
// Locks in the table layout of Spring Integration.
mod spring;
// Housekeeping.
mod diagnose;

pub use config::{MySqlConfig, STORE};

use sqlx::MySql;

use crate::server::{SqlBackend, SqlServer};

/// Locks in a MariaDB or MySQL database. Requires MariaDB 10.6, MySQL 8.0, or newer, and InnoDB
/// tables.
///
/// [`SqlMode`](crate::SqlMode) lists the kinds of locks. By default a lock is a lease: it excludes
/// all clients of the database, and lasts until it expires on the server's clock. A token is the
/// server's time in microseconds, or the key's last token plus one if that is larger. Tokens grow
/// across release, expiry, restart, failover and purge. If `innodb_flush_log_at_trx_commit` is 1,
/// grants and renewals are on the server's disk before the response.
///
/// These servers send no notifications. So the backend polls all keys with awaited leases by one
/// small statement. With session and row locks, each waiting caller polls separately. Polling
/// starts milliseconds after the beginning of a wait, and slows down with the length of the wait.
///
/// A promoted replica may lack the last grants, and their keys are then free. Tokens grow even in
/// this case, unless the replica's clock is behind by more than the promotion took. So fenced
/// writes stay safe.
///
/// A server that is set `read_only` grants and renews nothing, even for users that may write to it.
///
/// The backend opens its own connections. Only [`Fence`](crate::Fence), [`LockIn`](crate::LockIn)
/// and [`RunIn`](crate::RunIn) use a transaction of the application. For any number of held or
/// awaited leases, the backend has at most as many connections as
/// [configured](MySqlConfig::with_connections), plus two, and replacements of connections that do
/// not answer.
///
/// # Examples
/// ```no_run
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{MySqlBackend, MySqlConfig};
/// # use std::time::Duration;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = MySqlConfig::from_url("mysql://worker:secret@db.example/shop")?;
/// let backend = MySqlBackend::open(config).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub type MySqlBackend = SqlBackend<MySql>;

impl SqlServer for MySql {
    type Config = MySqlConfig;
}

#[cfg(test)]
#[cfg(all(target_os = "linux", feature = "server-tests"))]
mod tests {
    use std::time::Duration;

    use registry_core::{Attempt, Claim, Key, LockAdmin, LockBackend};
    use registry_testkit::clock::ClockShim;
    use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
    use sqlx::{Connection as _, Executor as _, MySql, MySqlConnection, Row as _};

    use super::statement::send;
    use super::{MySqlBackend, MySqlConfig, session};
    use crate::server::{BackendTable, Dialect as _, QueryMode, Statement};

    const HOUR: i64 = 3_600;

    /// The start of the first batch.
    const START: [u8; 32] = [0; 32];

    async fn lock_and_release(backend: &MySqlBackend, key: &str) -> u64 {
        let claim = Claim::new(Key::new(key).unwrap(), Duration::from_secs(60));
        let Attempt::Granted(grant) = backend.try_acquire(&claim).await.unwrap() else {
            panic!("{key} is held")
        };
        backend.release(&claim).await.unwrap();
        grant.token.get()
    }

    #[tokio::test]
    async fn tokens_increase_after_a_purge_even_if_the_clock_is_set_back() {
        let clock = ClockShim::new().unwrap();
        let options = MariaDbOptions::new().without_fsync().clock(&clock);
        let server = MariaDbServer::start_with(options).await.unwrap();
        let config = MySqlConfig::from_url(&server.url()).unwrap();
        let backend =
            MySqlBackend::open(config.with_purge_after(Duration::from_secs(60))).await.unwrap();
        let held = Claim::new(Key::new("held").unwrap(), Duration::from_secs(86_400));
        assert!(matches!(backend.try_acquire(&held).await.unwrap(), Attempt::Granted(_)));
        let mut last = 0;
        for _ in 0..3 {
            let token = lock_and_release(&backend, "k").await;
            assert!(token > last, "{token} is not above {last}");
            last = token;
            lock_and_release(&backend, "other").await;
            let purge = || MySql::purge_batch(backend.store(), START);
            assert_eq!(purge().await.unwrap(), 0, "the rows are not old enough");
            clock.jump_wall(HOUR).unwrap();
            assert_eq!(purge().await.unwrap(), 2);
            assert_eq!(backend.list().await.unwrap().len(), 1, "the held row is kept");
            clock.jump_wall(-3 * HOUR).unwrap();
        }
    }

    /// In this test the statement waits for the lock, so that the row can change before the grant.
    #[tokio::test]
    async fn a_session_reads_the_row_after_it_has_the_lock() {
        let server =
            MariaDbServer::start_with(MariaDbOptions::new().without_fsync()).await.unwrap();
        let config = MySqlConfig::from_url(&server.url()).unwrap();
        let backend = MySqlBackend::open(config.clone()).await.unwrap();
        let row_claim = Claim::new(Key::new("orders/42").unwrap(), Duration::from_secs(60));
        // With many rows, the server might choose another query plan.
        for n in 0..200 {
            lock_and_release(&backend, &format!("other/{n}")).await;
        }
        lock_and_release(&backend, "orders/42").await;
        let BackendTable::Native(table) = backend.table() else { panic!("the mode is `Lease`") };
        let id: String = table.row_id(row_claim.key()).hex();
        let mut others = MySqlConnection::connect_with(&config.connect_options()).await.unwrap();
        let mut connection = session::connect(&config, Duration::from_secs(60)).await.unwrap();
        let mut query_number = async |text: String| {
            let rows = others.fetch_all(sqlx::raw_sql(sqlx::AssertSqlSafe(text))).await.unwrap();
            rows.first().map(|row| row.get::<i64, _>(0))
        };
        for (final_claim, is_mine) in [
            (row_claim.id(), true),
            (Claim::new(row_claim.key().clone(), Duration::from_secs(1)).id(), false),
            (row_claim.id(), true),
        ] {
            // A premature read would find the opposite.
            let before = if is_mine { "NULL".to_owned() } else { format!("x'{}'", row_claim.id()) };
            query_number(format!(
                "UPDATE lock_registry_locks SET claim = {before} WHERE id = x'{id}'"
            ))
            .await;
            assert_eq!(
                query_number(format!("SELECT CAST(GET_LOCK('{id}', 0) AS SIGNED)")).await,
                Some(1)
            );
            let values = session::try_lock_values(table, row_claim.key(), row_claim.id(), 60);
            let statement = Statement::new(&table.store.statements.session_try_lock, values);
            let reading = async {
                let answer = send(&mut connection, &statement, QueryMode::Prepared).await.unwrap();
                let row = &answer.rows[0];
                (row.get::<i64, _>(1), row.get::<Option<i64>, _>(2).is_some())
            };
            let changing = async {
                let waits =
                    "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'User lock'";
                while query_number(waits.to_owned()).await != Some(1) {}
                query_number(format!(
                    "UPDATE lock_registry_locks SET claim = x'{final_claim}' WHERE id = x'{id}'"
                ))
                .await;
                query_number(format!("SELECT CAST(RELEASE_LOCK('{id}') AS SIGNED)")).await;
            };
            let (result, ()) = tokio::join!(reading, changing);
            assert_eq!(result, (1, is_mine));
            // The session acquired the lock only once, although the query uses the result several
            // times.
            let unlock = sqlx::query("SELECT CAST(RELEASE_LOCK(?) AS SIGNED)").bind(&id);
            assert_eq!(unlock.fetch_one(&mut connection).await.unwrap().get::<i64, _>(0), 1);
            let free = format!("SELECT CAST(IS_FREE_LOCK('{id}') AS SIGNED)");
            assert_eq!(query_number(free).await, Some(1));
        }
    }
}
