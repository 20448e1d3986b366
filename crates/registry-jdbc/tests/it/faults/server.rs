//! The database servers of these tests, PostgreSQL and MariaDB, with operations and faults that
//! apply to both.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{BackendError, LockBackend, Registry};
use registry_jdbc::{
    MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SpringTable, SqlMode,
};
use registry_testkit::clock::ClockShim;
use registry_testkit::eventually;
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use registry_testkit::postgres::{PostgresOptions, PostgresServer};

/// The response timeout of the backends and registries. The engine's default of three seconds would
/// exceed the workload's lease of two.
pub(crate) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Long enough for any machine; reached only by a test that fails.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
pub(crate) enum ServerKind {
    Postgres,
    MariaDb,
}

impl ServerKind {
    pub(crate) async fn start(self) -> Server {
        match self {
            Self::Postgres => Server::Postgres(PostgresServer::start().await.unwrap()),
            Self::MariaDb => Server::MariaDb(MariaDbServer::start().await.unwrap()),
        }
    }

    pub(crate) async fn start_with_clock(self, clock: &ClockShim) -> Server {
        match self {
            Self::Postgres => {
                let options = PostgresOptions::new().clock(clock);
                Server::Postgres(PostgresServer::start_with(options).await.unwrap())
            }
            Self::MariaDb => {
                let options = MariaDbOptions::new().clock(clock);
                Server::MariaDb(MariaDbServer::start_with(options).await.unwrap())
            }
        }
    }
}

/// A server that flushes every write to disk before its reply.
#[derive(Debug)]
pub(crate) enum Server {
    Postgres(PostgresServer),
    MariaDb(MariaDbServer),
}

impl Server {
    pub(crate) fn url(&self) -> String {
        match self {
            Self::Postgres(server) => server.url(),
            Self::MariaDb(server) => server.url(),
        }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        match self {
            Self::Postgres(server) => server.addr(),
            Self::MariaDb(server) => server.addr(),
        }
    }

    /// The URL of the server through another address.
    pub(crate) fn url_via(&self, address: SocketAddr) -> String {
        self.url().replace(&self.addr().to_string(), &address.to_string())
    }

    pub(crate) fn pause(&self) {
        match self {
            Self::Postgres(server) => server.pause().unwrap(),
            Self::MariaDb(server) => server.pause().unwrap(),
        }
    }

    pub(crate) fn resume(&self) {
        match self {
            Self::Postgres(server) => server.resume().unwrap(),
            Self::MariaDb(server) => server.resume().unwrap(),
        }
    }

    pub(crate) fn kill(&mut self) {
        match self {
            Self::Postgres(server) => server.kill(),
            Self::MariaDb(server) => server.kill(),
        }
    }

    pub(crate) async fn restart(&mut self) {
        match self {
            Self::Postgres(server) => server.restart().await.unwrap(),
            Self::MariaDb(server) => server.restart().await.unwrap(),
        }
    }

    pub(crate) async fn sql(&self, statements: &str) -> io::Result<String> {
        match self {
            Self::Postgres(server) => server.sql(statements).await,
            Self::MariaDb(server) => server.sql(statements).await,
        }
    }

    /// Ends all connections of the backends.
    pub(crate) async fn close_all_connections(&self) {
        match self {
            Self::Postgres(server) => {
                let end_all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                    WHERE application_name = 'lock-registry'";
                server.sql(end_all).await.unwrap();
            }
            Self::MariaDb(server) => {
                // The testkit itself connects through a Unix socket.
                let ids =
                    "SELECT id FROM information_schema.processlist WHERE host LIKE '127.0.0.1:%'";
                for id in server.sql(ids).await.unwrap().lines() {
                    // The connection may already have ended.
                    server.sql(&format!("KILL CONNECTION {id}")).await.ok();
                }
            }
        }
    }

    /// Ends the connection of the session that holds the lock of the key `orders/42`.
    pub(crate) async fn close_session_connection(&self) {
        match self {
            Self::Postgres(server) => {
                let holder = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks \
                    WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock'";
                assert_eq!(server.sql(holder).await.unwrap(), "t");
            }
            Self::MariaDb(server) => {
                // The SHA-256 of the namespace's length in eight bytes, the namespace "default",
                // and the key "orders/42".
                let name = "03c4a6d03c53a5b0798ba12d99188f66cdd4889a81a1eee70b87671214fd83ff";
                let holder = server.sql(&format!("SELECT IS_USED_LOCK('{name}')")).await.unwrap();
                server.sql(&format!("KILL CONNECTION {holder}")).await.unwrap();
            }
        }
    }

    /// The number of open transactions.
    pub(crate) async fn open_transactions(&self) -> String {
        let query = match self {
            Self::Postgres(_) => {
                "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            }
            Self::MariaDb(_) => "SELECT count(*) FROM information_schema.innodb_trx",
        };
        self.sql(query).await.unwrap()
    }

    /// The number of connections of the backends.
    pub(crate) async fn connections(&self) -> usize {
        let query = match self {
            Self::Postgres(_) => {
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lock-registry'"
            }
            Self::MariaDb(_) => {
                "SELECT count(*) FROM information_schema.processlist WHERE host LIKE '127.0.0.1:%'"
            }
        };
        self.sql(query).await.unwrap().parse().unwrap()
    }

    /// The number of transactions (PostgreSQL) or statements (MariaDB) that the server has
    /// executed.
    pub(crate) async fn work_done(&self) -> u64 {
        let (query, column) = match self {
            Self::Postgres(_) => {
                ("SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database", 0)
            }
            Self::MariaDb(_) => ("SHOW GLOBAL STATUS LIKE 'Questions'", 1),
        };
        let reply = self.sql(query).await.unwrap();
        reply.split_whitespace().nth(column).unwrap().parse().unwrap()
    }

    /// The number of held keys, according to the table.
    pub(crate) async fn held_keys(&self) -> String {
        let now = match self {
            Self::Postgres(_) => "extract(epoch FROM clock_timestamp()) * 1000000",
            Self::MariaDb(_) => "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
        };
        let query = format!(
            "SELECT count(*) FROM lock_registry_locks WHERE claim IS NOT NULL AND until > {now}"
        );
        self.sql(&query).await.unwrap()
    }
}

/// The options for opening the store behind a URL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenOptions {
    pub(crate) connections: u32,
    pub(crate) busy_timeout: Duration,
    pub(crate) response_timeout: Duration,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            connections: 8,
            busy_timeout: RESPONSE_TIMEOUT / 2,
            response_timeout: RESPONSE_TIMEOUT,
        }
    }
}

/// Opens the store with its own connections, as another process would.
pub(crate) async fn backend_with(url: &str, options: OpenOptions) -> Arc<dyn LockBackend> {
    let OpenOptions { connections, busy_timeout, response_timeout } = options;
    if url.starts_with("postgres") {
        let config = PostgresConfig::from_url(url).unwrap().with_connections(connections);
        let config = config.with_connect_timeout(response_timeout);
        let config = config.with_response_timeout(response_timeout).with_busy_timeout(busy_timeout);
        // On a busy machine the connect timeout may be too short, so opening is retried.
        Arc::new(
            eventually(TEST_TIMEOUT, async || PostgresBackend::open(config.clone()).await).await,
        )
    } else {
        let config = MySqlConfig::from_url(url).unwrap().with_connections(connections);
        let config = config.with_connect_timeout(response_timeout);
        let config = config.with_response_timeout(response_timeout).with_busy_timeout(busy_timeout);
        Arc::new(eventually(TEST_TIMEOUT, async || MySqlBackend::open(config.clone()).await).await)
    }
}

/// What represents a lock in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LockMode {
    Lease,
    Session,
    Row,
}

/// Opens the store for locks of this mode.
pub(crate) async fn backend_with_mode(url: &str, mode: LockMode) -> Arc<dyn LockBackend> {
    if mode == LockMode::Lease {
        return backend(url).await;
    }
    let open =
        async || open_session_or_row(url, mode, RESPONSE_TIMEOUT, RESPONSE_TIMEOUT / 2).await;
    eventually(TEST_TIMEOUT, open).await
}

/// Opens the store with timeouts that only a failing test reaches.
pub(crate) async fn backend_with_long_timeouts(url: &str, mode: LockMode) -> Arc<dyn LockBackend> {
    if mode == LockMode::Lease {
        let options = OpenOptions {
            busy_timeout: TEST_TIMEOUT,
            response_timeout: TEST_TIMEOUT * 2,
            ..OpenOptions::default()
        };
        return backend_with(url, options).await;
    }
    let open = async || open_session_or_row(url, mode, TEST_TIMEOUT * 2, TEST_TIMEOUT).await;
    eventually(TEST_TIMEOUT, open).await
}

/// Opens a Spring table with timeouts that only a failing test reaches.
pub(crate) async fn spring_backend_with_long_timeouts(url: &str) -> Arc<dyn LockBackend> {
    let table = SpringTable::v7();
    if url.starts_with("postgres") {
        let config = PostgresConfig::from_url(url).unwrap();
        let config = config.with_response_timeout(TEST_TIMEOUT * 2).with_busy_timeout(TEST_TIMEOUT);
        let open = async || {
            PostgresBackend::open_mode(config.clone(), SqlMode::Spring(table.clone())).await
        };
        return Arc::new(eventually(TEST_TIMEOUT, open).await);
    }
    let config = MySqlConfig::from_url(url).unwrap();
    let config = config.with_response_timeout(TEST_TIMEOUT * 2).with_busy_timeout(TEST_TIMEOUT);
    let open =
        async || MySqlBackend::open_mode(config.clone(), SqlMode::Spring(table.clone())).await;
    Arc::new(eventually(TEST_TIMEOUT, open).await)
}

/// Opens the store for session locks or row locks, once.
async fn open_session_or_row(
    url: &str,
    mode: LockMode,
    response_timeout: Duration,
    busy_timeout: Duration,
) -> Result<Arc<dyn LockBackend>, BackendError> {
    if url.starts_with("postgres") {
        let config = PostgresConfig::from_url(url)?;
        let config = config.with_response_timeout(response_timeout).with_busy_timeout(busy_timeout);
        if mode == LockMode::Session {
            return Ok(Arc::new(PostgresBackend::open_mode(config, SqlMode::Session).await?));
        }
        return Ok(Arc::new(PostgresBackend::open_mode(config, SqlMode::Row).await?));
    }
    let config = MySqlConfig::from_url(url)?;
    let config = config.with_response_timeout(response_timeout).with_busy_timeout(busy_timeout);
    if mode == LockMode::Session {
        return Ok(Arc::new(MySqlBackend::open_mode(config, SqlMode::Session).await?));
    }
    Ok(Arc::new(MySqlBackend::open_mode(config, SqlMode::Row).await?))
}

pub(crate) async fn backend(url: &str) -> Arc<dyn LockBackend> {
    backend_with(url, OpenOptions::default()).await
}

/// The maximum number of consecutive hand-overs between the callers of a client.
pub(crate) const HAND_OVERS_MAX: u32 = 2;

pub(crate) async fn registry(url: &str, lease: Duration) -> Registry {
    registry_with_mode(url, lease, LockMode::Lease).await
}

pub(crate) async fn registry_with_mode(url: &str, lease: Duration, mode: LockMode) -> Registry {
    // A long lease permits a longer timeout, for a loaded machine.
    let response_timeout = (lease / 4).clamp(RESPONSE_TIMEOUT, RESPONSE_TIMEOUT * 5);
    let busy_timeout = response_timeout / 2;
    let backend = if mode == LockMode::Lease {
        let options = OpenOptions { busy_timeout, response_timeout, ..OpenOptions::default() };
        backend_with(url, options).await
    } else {
        let open = async || open_session_or_row(url, mode, response_timeout, busy_timeout).await;
        eventually(TEST_TIMEOUT, open).await
    };
    let builder = Registry::builder(backend).lease(lease).handoff(HAND_OVERS_MAX);
    builder.timeout(response_timeout).build().unwrap()
}

/// Opens a registry with leases, logged in as `user`. The server requires no password.
pub(crate) async fn registry_as_user(url: &str, user: &str, lease: Duration) -> Registry {
    let backend: Arc<dyn LockBackend> = if url.starts_with("postgres") {
        let config = PostgresConfig::from_url(url).unwrap().with_login(user, None);
        Arc::new(
            eventually(TEST_TIMEOUT, async || PostgresBackend::open(config.clone()).await).await,
        )
    } else {
        let config = MySqlConfig::from_url(url).unwrap().with_login(user, None);
        Arc::new(eventually(TEST_TIMEOUT, async || MySqlBackend::open(config.clone()).await).await)
    };
    Registry::builder(backend).lease(lease).build().unwrap()
}
