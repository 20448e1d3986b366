//! The backend of all database servers, in all lock modes. Each server implements its differences
//! in a [`Dialect`]. Session locks are in `session`, row locks in `row_lock_sessions`.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use registry_core::config::BackendConfig as _;
use registry_core::{
    Attempt, BackendError, BatchAttempt, Busy, Capabilities, Claim, Finding, GuaranteeClass,
    Holder, Invalidations, Key, LockAdmin, LockBackend, LockBatch, Reach, Release, Renewal,
    RenewalPolicy, ValueStore, WaiterStore,
};

use super::dialect::{self, Dialect, LeaseStore, SpringDialect, WakeupSource as _};
use super::lease_table::LeaseTable;
use super::spring::PEER_POLL;
use super::spring_rows::SpringLeaseTable;
use super::store::SqlStore;
use super::{RowLockSessions, SessionProtocol as _, SpringTable, SqlSession};

/// What a lock in a database server is, and when it ends.
///
/// `Lease`, `Row` and [`LockIn`](crate::LockIn) use the same rows and exclude each other. Programs
/// that use any of these three may share a namespace. A session lock is not granted while the key
/// has a lease, but a lease is granted even while the key has a session lock. So all programs of a
/// namespace must use `Session` if one program does.
///
/// Locks of the modes `Session` and `Row` end with a connection:
///
/// - When a process dies, the server frees the process's locks at once. If the server cannot notice
///   the end (host lost, process stopped), it ends the connection after
///   [`IDLE_TIMEOUT`](SqlBackend::IDLE_TIMEOUT). No lease is longer than this time, so each lease
///   of the process has ended before the server frees the lock.
/// - If the *server* ends the connection (`pg_terminate_backend`, `KILL`, a restart, a failover, a
///   firewall that cuts connections), the lock is free at once. The backend notifies the holder up
///   to a third of a second later. If no response arrives, the holder is notified after the
///   response time-out, or at the end of the lease if that is earlier. During that time, a second
///   client can hold the lock. So these modes are of class best-effort. Tokens still grow, so
///   fenced writes stay safe, including those of a [`Fence`](crate::Fence).
/// - A MariaDB or MySQL server that is set `read_only` grants nothing. When the server becomes
///   read-only, the backend notifies the holders that their locks are lost.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum SqlMode {
    /// A lock is a row that contains the end of the lease.
    #[default]
    Lease,
    /// A lock ends with the connection that all locks of the backend share. The connection belongs
    /// neither to the application nor to a pool. While a lock is held, the backend checks the
    /// connection several times a second. If the connection is broken, the backend notifies all
    /// holders at once.
    ///
    /// The server's lock contains neither the key nor the holder, so the backend cannot list or
    /// break it. An administrator can only end the session (`pg_terminate_backend`, `KILL`), which
    /// frees all of its locks. A pooler or proxy that gives each transaction or statement another
    /// connection would pass locks to unrelated clients. If the backend detects such a pooler,
    /// opening or locking fails.
    ///
    /// **PostgreSQL**: an advisory lock, `pg_try_advisory_lock(N)`. N is the first eight bytes of a
    /// SHA-256 hash, as a signed number in network byte order. The hash covers the length of the
    /// namespace in eight bytes, the namespace, and the key. If ten thousand keys are held at once,
    /// the probability that any two of them share a number is about 3 in 10^12. The only effect is
    /// that these two keys exclude each other. The lock also excludes every other program in this
    /// database that locks the same number, in any language. [`LockIn`](crate::LockIn) acquires
    /// both the row and the advisory lock.
    ///
    /// **MariaDB and MySQL**: a named lock, `GET_LOCK(NAME, 0)`. NAME is the same hash in 64
    /// lowercase hexadecimal digits, the longest name that MySQL accepts. Named locks belong to the
    /// whole server, not to a database, and exclude programs in any language that lock the same
    /// name. Servers do not replicate them: on Galera or a replication group, write to only one of
    /// the servers. [`LockIn`](crate::LockIn) does not support them, because a transaction cannot
    /// hold one.
    Session,
    /// A lock is a row that a transaction of the backend keeps locked.
    ///
    /// A grant takes two steps on one connection. A crash between the steps loses only a token.
    /// Every token is committed before use, so no two transactions have the same token.
    ///
    /// 1. A separate, committed statement writes the claim and a larger token to the row, unless
    ///    another client holds the row.
    /// 2. A transaction locks the row if it still contains this claim: `FOR NO KEY UPDATE`, or in
    ///    MariaDB and MySQL `LOCK IN SHARE MODE`. The lock is compatible only with the check of a
    ///    [`Fence`](crate::Fence).
    ///
    /// A transaction releases all its row locks at once, when it ends. So each held lock has its
    /// own transaction and its own connection, which belongs neither to the application nor to a
    /// pool. `with_row_locks` of the configuration limits the number of these connections. An
    /// attempt beyond the limit returns a retryable error whose source is
    /// [`RowLocksExhausted`](crate::RowLocksExhausted). Between its attempts, a waiting caller
    /// occupies none of these connections.
    ///
    /// Listings show the holder as in the mode `Lease`, but without the time left. If an
    /// application's transaction holds a key through [`LockIn`](crate::LockIn),
    /// [`inspect`](LockAdmin::inspect) returns only the key, and [`list`](LockAdmin::list) omits
    /// it. [Breaking](LockAdmin::force_release) a lock ends the connection that holds it, but never
    /// an application's transaction. To break a lock, the database user must be the holder's user,
    /// or have the role `pg_signal_backend`, or the privilege `CONNECTION ADMIN`
    /// (`CONNECTION_ADMIN` in MySQL).
    ///
    /// **PostgreSQL**: an open transaction keeps the server from vacuuming dead rows in all tables
    /// of the database that died since the transaction began. So hold these locks for seconds or
    /// minutes only. Row locks work through a pooler in session or transaction mode, because a
    /// transaction keeps its connection. Each held lock also takes one of the pooler's connections.
    ///
    /// **MariaDB and MySQL**: while a row is locked, an attempt to acquire a lease returns a
    /// retryable error after `busy_timeout`. The server does not report why a row is locked. Galera
    /// does not share row locks between nodes, so all clients must use the same node.
    Row,
    /// A lock is a row in the table of a Spring Integration `JdbcLockRegistry`. This program and
    /// Java programs exclude each other. [`SpringTable`] lists what both sides must agree on.
    ///
    /// In all other respects the locks are leases: the server's clock ends grants, tokens only
    /// grow, and each claim is its own owner. In PostgreSQL too, the row lock of a
    /// [`Fence`](crate::Fence) blocks renewals: the lock is not renewed while the fenced
    /// transaction is open. The class is best-effort, because the Java peers decide by their own
    /// hosts' clocks whether a lock has expired.
    ///
    /// Spring sends no notifications, so the registry finds releases by Java programs only by its
    /// [poll](registry_core::RegistryBuilder::poll). In MariaDB and MySQL, this also applies to
    /// releases by other processes of this program. The namespace is ignored: Spring has regions.
    /// In MariaDB and MySQL, the table's name is case-sensitive.
    Spring(SpringTable),
}

/// Locks in a database server: [`PostgresBackend`](crate::PostgresBackend) or
/// [`MySqlBackend`](crate::MySqlBackend).
#[expect(private_bounds, reason = "only this crate implements dialects")]
pub struct SqlBackend<D: SpringDialect> {
    pub(crate) mode_state: ModeState<D>,
    /// The address of the server, for errors.
    address: Arc<str>,
    capabilities: Capabilities,
}

/// The state of a backend by its lock mode: the tables and connections that the mode needs.
pub(crate) enum ModeState<D: SpringDialect> {
    Lease(LeaseTable<D>),
    Session { table: Arc<LeaseTable<D>>, session: SqlSession<D::Session> },
    Row { table: Arc<LeaseTable<D>>, sessions: RowLockSessions<D::RowLock> },
    Spring(SpringLeaseTable<D>),
}

/// The tables that contain the rows of a backend's locks.
pub(crate) enum BackendTable<'a, D: SpringDialect> {
    /// The tables of this library.
    Native(&'a LeaseTable<D>),
    Spring(&'a SpringLeaseTable<D>),
}

#[expect(private_bounds, reason = "only this crate implements dialects")]
impl<D: SpringDialect> SqlBackend<D> {
    /// The idle time after which the server ends the connection of a session or row lock. It is
    /// also the maximum lease in these modes.
    pub const IDLE_TIMEOUT: Duration = super::IDLE_TIMEOUT;

    /// Connects to the server, and creates missing tables unless the configuration forbids it
    /// ([`CreateSchema::Never`](crate::CreateSchema::Never)). Locks are leases.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do:
    ///
    /// - `Misconfigured` for a missing database, missing or newer tables, an old server or an
    ///   invalid name.
    /// - `Denied` for a wrong user or password, or a missing right.
    /// - `Transient` if the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future may leave some tables created. The next open of the store creates the
    /// missing tables.
    pub async fn open(config: D::Config) -> Result<Self, BackendError> {
        Self::open_mode(config, SqlMode::Lease).await
    }

    /// Like [`open`](Self::open), with locks of this `mode`. With [`SqlMode::Spring`], the tables
    /// include Spring's table.
    ///
    /// # Errors
    /// As for [`open`](Self::open). Also `Misconfigured` for:
    ///
    /// - session locks behind a pooler in transaction mode
    /// - a table that an incompatible version of Spring Integration has created
    /// - in MariaDB and MySQL, a table of Spring Integration that does not store microseconds
    ///
    /// # Cancel safety
    /// As for [`open`](Self::open).
    pub async fn open_mode(mut config: D::Config, mode: SqlMode) -> Result<Self, BackendError> {
        Self::check(&config, &mode)?;
        D::settings_mut(&mut config).encryption.apply_options(D::STORE)?;
        let address: Arc<str> = config.address().into();
        let capabilities = capabilities::<D>(&config, &mode);
        let opened = Self::open_mode_state(config, mode).await;
        let mode_state = opened.map_err(|error| error.with_address(Arc::clone(&address)))?;
        Ok(Self { mode_state, address, capabilities })
    }

    async fn open_mode_state(
        config: D::Config,
        mode: SqlMode,
    ) -> Result<ModeState<D>, BackendError> {
        Ok(match mode {
            SqlMode::Lease => ModeState::Lease(LeaseTable::open(config).await?),
            SqlMode::Session => {
                let table = Arc::new(LeaseTable::open(config).await?);
                let protocol = D::Session::open(Arc::clone(&table)).await?;
                ModeState::Session { table, session: SqlSession::new(protocol) }
            }
            SqlMode::Row => {
                let table = Arc::new(LeaseTable::open(config).await?);
                let sessions = RowLockSessions::new(D::RowLock::open(Arc::clone(&table)).await?);
                ModeState::Row { table, sessions }
            }
            SqlMode::Spring(table) => {
                ModeState::Spring(SpringLeaseTable::open(config, table).await?)
            }
        })
    }

    /// Checks the configuration without I/O. Opening the store calls this first.
    ///
    /// # Errors
    /// [`BackendError`], `Misconfigured`, for the first invalid setting.
    pub fn check(config: &D::Config, mode: &SqlMode) -> Result<(), BackendError> {
        if let SqlMode::Spring(table) = mode {
            table.check().map_err(|message| D::misconfigured(&message))?;
        }
        config.validate().map_err(|error| error.into_backend_error(D::STORE))
    }

    /// Returns the statements that create the tables with the default prefix, for installations
    /// where this program must not create them.
    #[must_use]
    pub const fn schema() -> &'static str {
        D::SCHEMA
    }

    /// Returns the namespace of this backend's locks, or the region in Spring's table.
    #[must_use]
    pub fn namespace(&self) -> &str {
        match self.table() {
            BackendTable::Native(table) => table.namespace(),
            BackendTable::Spring(table) => table.namespace(),
        }
    }

    pub(crate) fn table(&self) -> BackendTable<'_, D> {
        match &self.mode_state {
            ModeState::Lease(table) => BackendTable::Native(table),
            ModeState::Session { table, .. } | ModeState::Row { table, .. } => {
                BackendTable::Native(table)
            }
            ModeState::Spring(spring) => BackendTable::Spring(spring),
        }
    }

    fn wakeups(&self) -> &D::Wakeups {
        match self.table() {
            BackendTable::Native(table) => table.wakeups(),
            BackendTable::Spring(table) => table.wakeups(),
        }
    }

    pub(crate) fn store(&self) -> &SqlStore<D> {
        match self.table() {
            BackendTable::Native(table) => table.store(),
            BackendTable::Spring(table) => table.store(),
        }
    }

    /// Adds the address of the server to an error.
    pub(crate) fn with_address(&self, error: BackendError) -> BackendError {
        error.with_address(Arc::clone(&self.address))
    }

    /// Adds the address of the server to the error of a result.
    fn result_with_address<T>(&self, result: Result<T, BackendError>) -> Result<T, BackendError> {
        result.map_err(|error| self.with_address(error))
    }

    async fn attempt(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let (attempt, position) = match &self.mode_state {
            ModeState::Lease(table) => {
                return dialect::try_acquire(table, claim).await;
            }
            ModeState::Spring(spring) => return dialect::try_acquire(spring, claim).await,
            // The position must be read before the attempt is sent, so that a wait from this
            // position sees every later release.
            ModeState::Session { table, session } => {
                let position = table.wakeups.position();
                (session.try_acquire(claim).await?, position)
            }
            ModeState::Row { table, sessions } => {
                let position = table.wakeups.position();
                (sessions.try_acquire(claim).await?, position)
            }
        };
        Ok(match attempt {
            Attempt::Busy(busy) => Attempt::Busy(busy.with_seen_version(position)),
            other @ (Attempt::Granted(_) | Attempt::Gone) => other,
        })
    }
}

/// Returns the capabilities of a store with this configuration in this mode.
pub(crate) fn capabilities<D: Dialect>(config: &D::Config, mode: &SqlMode) -> Capabilities {
    let class = match mode {
        SqlMode::Lease => GuaranteeClass::Durable,
        SqlMode::Session | SqlMode::Row | SqlMode::Spring(_) => GuaranteeClass::BestEffort,
    };
    let capabilities = Capabilities::new(D::STORE, class, Reach::Network).with_fencing();
    let capabilities = match mode {
        SqlMode::Lease => {
            let renewal = RenewalPolicy::new().with_batch_max(D::RENEWALS_MAX);
            let capabilities = capabilities.with_labels().with_inspect().with_renewal(renewal);
            if D::SUPPORTS_SHARED_CLAIMS {
                capabilities.with_shared().with_upgradable().with_permits().with_fair_on_request()
            } else {
                capabilities
            }
        }
        SqlMode::Session => capabilities.with_invalidations(),
        SqlMode::Row => capabilities.with_invalidations().with_labels().with_inspect(),
        SqlMode::Spring(_) => capabilities.with_peer_poll(PEER_POLL).with_labels().with_inspect(),
    };
    let capabilities = match mode {
        SqlMode::Session | SqlMode::Row => {
            capabilities.with_leases(Capabilities::LEASE_MIN, super::IDLE_TIMEOUT)
        }
        SqlMode::Lease | SqlMode::Spring(_) => capabilities,
    };
    let capabilities = match mode {
        SqlMode::Lease | SqlMode::Session | SqlMode::Row => {
            capabilities.with_values().with_waiters()
        }
        SqlMode::Spring(_) => capabilities,
    };
    if D::has_wakeups(config, mode) { capabilities.with_wakes() } else { capabilities }
}

#[async_trait]
impl<D: SpringDialect> LockBackend for SqlBackend<D> {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        self.result_with_address(self.attempt(claim).await)
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let renewed = match &self.mode_state {
            ModeState::Lease(table) => dialect::renew(table, claims).await,
            ModeState::Session { session, .. } => session.renew(claims).await,
            ModeState::Row { sessions, .. } => sessions.renew(claims).await,
            ModeState::Spring(spring) => dialect::renew(spring, claims).await,
        };
        renewed.into_iter().map(|renewal| self.result_with_address(renewal)).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let (released, table) = match &self.mode_state {
            ModeState::Lease(table) => return self.result_with_address(table.release(claim).await),
            ModeState::Spring(spring) => {
                return self.result_with_address(spring.release(claim).await);
            }
            ModeState::Session { table, session } => (session.release(claim).await, table),
            ModeState::Row { table, sessions } => (sessions.release(claim).await, table),
        };
        table.store.maybe_purge(claim.id()).await;
        self.result_with_address(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        match &self.mode_state {
            ModeState::Lease(table) => table.wait(claim, busy).await,
            ModeState::Session { session, .. } => {
                session.protocol().wait(claim.key(), busy.seen_version).await
            }
            ModeState::Row { sessions, .. } => {
                sessions.protocol().wait(claim.key(), busy.seen_version).await
            }
            ModeState::Spring(spring) => spring.wait(claim, busy).await,
        }
    }

    fn subscribe(&self, invalidations: Invalidations) {
        match &self.mode_state {
            ModeState::Session { session, .. } => session.subscribe_invalidations(invalidations),
            ModeState::Row { sessions, .. } => sessions.subscribe_invalidations(invalidations),
            ModeState::Lease(_) | ModeState::Spring(_) => {}
        }
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        (D::HAS_BATCHES && matches!(self.mode_state, ModeState::Lease(_))).then_some(self)
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        match self.table() {
            BackendTable::Native(_) => Some(self),
            BackendTable::Spring(_) => None,
        }
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        self.capabilities.values.then_some(self)
    }

    async fn close(&self) {
        match &self.mode_state {
            ModeState::Session { session, .. } => session.close().await,
            ModeState::Row { sessions, .. } => sessions.protocol().close_idle(),
            ModeState::Lease(_) | ModeState::Spring(_) => {}
        }
        self.wakeups().close();
        self.store().client.close().await;
    }
}

#[async_trait]
impl<D: SpringDialect> LockBatch for SqlBackend<D> {
    async fn try_acquire_all(&self, claims: &[Claim]) -> Result<BatchAttempt, BackendError> {
        let ModeState::Lease(table) = &self.mode_state else { return Ok(BatchAttempt::Declined) };
        self.result_with_address(table.try_acquire_all(claims).await)
    }

    async fn release_all(&self, claims: &[Claim]) -> Vec<Result<Release, BackendError>> {
        let released = match &self.mode_state {
            ModeState::Lease(table) => table.release_all(claims).await,
            _ => join_all(claims.iter().map(|claim| self.release(claim))).await,
        };
        released.into_iter().map(|released| self.result_with_address(released)).collect()
    }
}

#[async_trait]
impl<D: SpringDialect> LockAdmin for SqlBackend<D> {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        match self.table() {
            _ if matches!(self.mode_state, ModeState::Session { .. }) => Ok(Vec::new()),
            BackendTable::Native(table) => self.result_with_address(table.inspect(key).await),
            BackendTable::Spring(table) => self.result_with_address(table.inspect(key).await),
        }
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        match self.table() {
            _ if matches!(self.mode_state, ModeState::Session { .. }) => Ok(Vec::new()),
            BackendTable::Native(table) => self.result_with_address(table.list().await),
            BackendTable::Spring(table) => self.result_with_address(table.list().await),
        }
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        match self.table() {
            _ if matches!(self.mode_state, ModeState::Session { .. }) => Ok(Release::NotHeld),
            BackendTable::Native(table) => self.result_with_address(table.force_release(key).await),
            BackendTable::Spring(table) => self.result_with_address(table.force_release(key).await),
        }
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        let mut findings = match self.table() {
            BackendTable::Native(table) => self.result_with_address(table.diagnose().await)?,
            BackendTable::Spring(table) => self.result_with_address(table.diagnose().await)?,
        };
        match &self.mode_state {
            ModeState::Row { table, .. } => {
                findings.extend(self.result_with_address(D::diagnose_row_locks(table).await)?);
            }
            ModeState::Spring(_) => findings.push(Finding::note(super::spring::CLOCK_WARNING)),
            ModeState::Lease(_) | ModeState::Session { .. } => {}
        }
        Ok(findings)
    }
}

impl<D: SpringDialect> fmt::Debug for SqlBackend<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mode_state {
            ModeState::Lease(table) => f.debug_tuple("Lease").field(table).finish(),
            ModeState::Session { table, .. } => f.debug_tuple("Session").field(table).finish(),
            ModeState::Row { table, sessions } => {
                f.debug_tuple("Row").field(table).field(sessions).finish()
            }
            ModeState::Spring(spring) => f.debug_tuple("Spring").field(spring).finish(),
        }
    }
}
