//! Implements `LockBackend`. Each key has a row in a table of the file.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use registry_core::config::{BackendConfig as _, OpenBackend};
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Capabilities, Claim, ClaimMode, FencingToken,
    Finding, Grant, Holder, Key, LockAdmin, LockBackend, LockBatch, Release, Renewal, ValueStore,
    WaiterStore,
};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::clock::{HostClock, StoreClock, duration_between};
use super::config::SqliteConfig;
use super::connection::ReconnectingConnection;
use super::error::{FileMismatch, at_path, explain, fenced_transaction_open, is_blocked_by_writer};
use super::open::{self, OpenedStore};
use super::paths::DatabasePaths;
use super::records::RECORD_MARKER;
use super::release_watcher::ReleaseWatcher;
use super::sql;
use super::statement::{SqliteQuery, SqliteStatementBinder};

/// Locks in a SQLite file. They exclude the processes of one host that open the same file.
///
/// A grant lasts until its lease expires on the host's boot clock, which cannot be set and keeps
/// counting during suspend. A reboot ends all grants. A token is the wall clock's time in
/// microseconds, or larger if an earlier token of the key is not below that time. So tokens always
/// grow, even if the wall clock goes backwards. A release wakes the waiters of all processes within
/// milliseconds, or without inotify within about 250 ms.
///
/// Opening the file permanently switches it to SQLite's write-ahead log. The file may also contain
/// tables of the application. The names of the lock tables begin with `lock_registry_`. The file
/// must be on a local disk: network file systems lack the locks and the shared memory that SQLite
/// needs. Also, each host has its own boot. When a process of another boot opens the file, all
/// grants of the earlier processes end, and their acquisitions return errors.
///
/// Before an operation returns a result, it checks the file, its log (`-wal`) and the log's index
/// (`-shm`). If one of these files was removed or replaced while in use, operations fail and all
/// grants end. A hard link to the file has the same effect. A holder detects the loss only at its
/// next renewal. Until then, a process that opened the new files may be granted the same key.
///
/// A backend uses two connections and three threads, for any number of held or awaited locks. Each
/// connection has a thread. The third thread wakes waiters, and runs calls that are queued or that
/// their callers do not poll. So a dropped call still runs to its end. A backend may be used from
/// several runtimes, and each runtime may end.
///
/// # Examples
/// ```
/// use registry_core::{Attempt, Claim, Key, LockBackend, Release};
/// use registry_jdbc::{SqliteBackend, SqliteConfig};
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # if !cfg!(target_os = "linux") { return Ok(()) }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("locks.db");
/// let backend = SqliteBackend::open(SqliteConfig::new(path)).await?;
/// let claim = Claim::new(Key::new("orders/42")?, Duration::from_secs(30));
/// assert!(matches!(backend.try_acquire(&claim).await?, Attempt::Granted(_)));
/// assert_eq!(backend.release(&claim).await?, Release::Freed);
/// backend.close().await;
/// # Ok(())
/// # }
/// ```
pub struct SqliteBackend {
    pub(super) config: SqliteConfig,
    pub(super) paths: DatabasePaths,
    pub(super) store_id: Vec<u8>,
    pub(super) statements: Arc<SqliteStatementBinder>,
    /// This backend may already have reserved tokens below this number. While the wall clock is
    /// behind this number, [`sql::ACQUIRE_AT`] may refuse the clock's value as a token.
    next_token_min: AtomicI64,
    pub(super) writer: ReconnectingConnection,
    pub(super) reader: Arc<ReconnectingConnection>,
    pub(super) release_watcher: ReleaseWatcher,
}

impl SqliteBackend {
    /// Opens the file, and creates it and its tables if they are missing.
    ///
    /// # Errors
    /// [`BackendError`] with a cause and a remedy:
    /// - `Misconfigured`, for example if the namespace is invalid, the folder is missing, the path
    ///   is a folder, the file has a hard link, the tables have a newer version, the disk is full,
    ///   or the system is not Linux.
    /// - `Denied` without write access.
    /// - `Protocol` for a file that is no database or is damaged.
    /// - `Transient` if other processes keep the file locked.
    ///
    /// # Cancel safety
    /// Dropping the future may leave an empty database or complete tables behind, never incomplete
    /// tables.
    pub async fn open(config: SqliteConfig) -> Result<Self, BackendError> {
        Self::open_with_clock(config, Arc::new(HostClock::new()?)).await
    }

    pub(super) async fn open_with_clock(
        config: SqliteConfig,
        clock: Arc<dyn StoreClock>,
    ) -> Result<Self, BackendError> {
        config.validate().map_err(|error| error.into_backend_error(super::STORE.name))?;
        let OpenedStore { writer, reader, worker, paths, store_id } =
            open::open(&config, clock.boot()).await?;
        let reader = Arc::new(reader);
        let statements = Arc::new(SqliteStatementBinder::new(clock, &config.namespace));
        let release_watcher = ReleaseWatcher::new(
            Arc::clone(&reader),
            Arc::clone(&statements),
            paths.wal.clone(),
            worker,
        );
        Ok(Self {
            config,
            paths,
            store_id,
            statements,
            next_token_min: AtomicI64::new(0),
            writer,
            reader,
            release_watcher,
        })
    }

    /// Returns the SQL that creates the tables of this store, for programs that create tables only
    /// in their own migrations.
    #[must_use]
    pub const fn schema() -> &'static str {
        sql::SCHEMA
    }

    /// Returns the path of the database file, with all links resolved.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.paths.path
    }

    /// Returns the namespace of this backend's locks.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Returns the statement that finds the claim's grant and acquires SQLite's write lock.
    pub(crate) fn fence_statement(&self, claim: &Claim, token: FencingToken) -> SqliteQuery {
        self.statements.fence(claim, token)
    }

    pub(crate) fn write_value_statement(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: Vec<u8>,
    ) -> SqliteQuery {
        self.statements.write_value(claim, token, value)
    }

    /// Checks that the open files are still at their paths, where other processes open them.
    pub(crate) fn check_files(&self) -> Result<(), BackendError> {
        self.writer.check()
    }

    /// Returns whether `store_id`, read from a meta table, is the id of this store.
    pub(crate) fn has_store_id(&self, store_id: &[u8]) -> bool {
        self.store_id == store_id
    }

    /// Grants the key if it is free, in one statement. Returns `None` if the key is held, or if a
    /// process of another boot has opened the file. The first try may also return `None` if the
    /// key's tokens are ahead of the wall clock.
    async fn try_grant(
        &self,
        claim: &Claim,
        is_first_try: bool,
    ) -> Result<Option<FencingToken>, BackendError> {
        let wall = self.statements.clock.wall();
        let (statements, owned_claim) = (Arc::clone(&self.statements), claim.clone());
        let token = if is_first_try && self.is_above_granted_tokens(wall) {
            let make_statement = move || statements.acquire(sql::ACQUIRE_AT, &owned_claim, wall);
            if self.writer.execute_low_priority(make_statement).await? == 0 {
                return Ok(None);
            }
            wall
        } else {
            let make_statement = move || statements.acquire(sql::ACQUIRE_ABOVE, &owned_claim, wall);
            match self.writer.fetch_all_low_priority(make_statement).await?.first() {
                None => return Ok(None),
                Some(row) => self.column(row, 0)?,
            }
        };
        let next = token.saturating_add(i64::from(claim.token_block()));
        self.next_token_min.fetch_max(next, Ordering::Relaxed);
        self.fencing_token(token).map(Some)
    }

    /// Returns whether `token` is above all tokens that this backend has granted.
    pub(super) fn is_above_granted_tokens(&self, token: i64) -> bool {
        token >= self.next_token_min.load(Ordering::Relaxed)
    }

    /// Returns the current grant of the key.
    ///
    /// # Errors
    /// `Misconfigured` if a process of another boot has opened the file.
    async fn current_grant(&self, key: &Key) -> Result<Option<SqliteGrant>, BackendError> {
        let (statements, key) = (Arc::clone(&self.statements), key.clone());
        let rows = self.reader.fetch_all(move || statements.current_grant(&key)).await?;
        let row = rows.first().ok_or_else(|| open::corrupt_meta(self.path()))?;
        let boot: Vec<u8> = self.column(row, 0)?;
        if boot != *self.statements.boot {
            return Err(self.other_boot_error());
        }
        let claim: Option<Vec<u8>> = self.column(row, 2)?;
        let Some(claim) = claim else { return Ok(None) };
        let held = self.decode_grant(row, claim)?;
        Ok(held.filter(|held| held.until > self.statements.clock.now()))
    }

    /// Reads the common columns of [`sql::CURRENT_GRANT`] and [`sql::LIST_GRANTS`]. Returns `None`
    /// for a grant of another boot, because it has ended.
    fn decode_grant(
        &self,
        row: &SqliteRow,
        claim: Vec<u8>,
    ) -> Result<Option<SqliteGrant>, BackendError> {
        let boot: Vec<u8> = self.column(row, 7)?;
        if boot != *self.statements.boot {
            return Ok(None);
        }
        Ok(Some(SqliteGrant {
            key: self.decode_key(self.column(row, 1)?)?,
            claim,
            token: self.fencing_token(self.column(row, 3)?)?,
            label: self.column(row, 4)?,
            since: self.column(row, 5)?,
            until: self.column(row, 6)?,
        }))
    }

    pub(super) fn decode_key(&self, key: Vec<u8>) -> Result<Key, BackendError> {
        let key = String::from_utf8(key).ok().and_then(|key| Key::new(&key).ok());
        key.ok_or_else(|| self.corrupt_row("the key of a row is invalid"))
    }

    fn holders_of(&self, held: SqliteGrant) -> Result<Vec<Holder>, BackendError> {
        if held.claim == RECORD_MARKER {
            return self.holders_of_record(&held.key, held.label.as_deref());
        }
        Ok(vec![held.into_holder(self.statements.clock.now())])
    }

    /// Records that this backend has reserved `token`. [`try_grant`](Self::try_grant) chooses its
    /// statement by `next_token_min`.
    pub(super) fn raise_next_token_min(&self, token: i64) {
        self.next_token_min.fetch_max(token.saturating_add(1), Ordering::Relaxed);
    }

    pub(super) fn column<'r, T>(&self, row: &'r SqliteRow, index: usize) -> Result<T, BackendError>
    where
        T: sqlx::Decode<'r, sqlx::Sqlite> + sqlx::Type<sqlx::Sqlite>,
    {
        row.try_get(index).map_err(|error| explain(error, self.path()))
    }

    pub(super) fn fencing_token(&self, token: i64) -> Result<FencingToken, BackendError> {
        FencingToken::try_from(token)
            .map_err(|_| self.corrupt_row("the token of a row is negative"))
    }

    pub(super) fn corrupt_row(&self, message: &str) -> BackendError {
        let message = format!("{message}; the row was changed manually; correct or delete it");
        at_path(BackendErrorKind::Protocol, self.path(), message)
    }

    pub(super) fn other_boot_error(&self) -> BackendError {
        let message = "a process of another host, or of a container with its own boot id, has opened the file; \
                       locks in a file exclude only the processes of one host; use a store that several hosts share";
        at_path(BackendErrorKind::Misconfigured, self.path(), message).as_refused()
    }
}

/// A grant as stored in a row.
#[derive(Debug)]
struct SqliteGrant {
    key: Key,
    claim: Vec<u8>,
    token: FencingToken,
    label: Option<String>,
    since: i64,
    until: i64,
}

impl SqliteGrant {
    fn into_holder(self, now: i64) -> Holder {
        Holder::new(self.key).with_label(self.label).with_token(Some(self.token)).with_times(
            Some(duration_between(self.since, now)),
            Some(duration_between(now, self.until)),
        )
    }
}

#[async_trait]
impl LockBackend for SqliteBackend {
    fn capabilities(&self) -> Capabilities {
        self.config.capabilities()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        if claim.mode() != ClaimMode::Exclusive || claim.is_conversion() {
            return self.attempt_on_record(claim).await;
        }
        // Another process may release the key between the failed statement and the query. After
        // this many tries, this function returns `Busy` without a holder, and the engine sends the
        // next attempt.
        const TRIES_MAX: u32 = 3;
        for number in 0..TRIES_MAX {
            if let Some(token) = self.try_grant(claim, number == 0).await? {
                return Ok(Attempt::Granted(Grant::new(token, claim.lease())));
            }
            if let Some(held) = self.current_grant(claim.key()).await? {
                let now = self.statements.clock.now();
                let lease_left = duration_between(now, held.until);
                if held.claim == RECORD_MARKER
                    || claim.joins_queue() && held.claim != claim.id().to_bytes()
                {
                    return self.attempt_on_record(claim).await;
                }
                if held.claim == claim.id().to_bytes() {
                    return Ok(Attempt::Granted(Grant::new(held.token, lease_left)));
                }
                return Ok(Attempt::Busy(
                    Busy::new()
                        .with_retry_after(lease_left)
                        .with_seen_version(held.token.get())
                        .with_holder(held.into_holder(now))
                        .with_wake_check(self.release_watcher.wake_check()),
                ));
            }
        }
        let busy = Busy::new().with_retry_after(Duration::ZERO);
        Ok(Attempt::Busy(busy.with_wake_check(self.release_watcher.wake_check())))
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        self.renew_in_chunks(claims).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let statements = Arc::clone(&self.statements);
        let owned_claim = claim.clone();
        let make_statement = move || statements.release(&owned_claim);
        let release = async {
            if claim.mode() == ClaimMode::Exclusive
                && self.writer.execute_within(busy_limit(claim), make_statement).await? > 0
            {
                return Ok(Release::Freed);
            }
            self.release_in_record(claim).await
        };
        let released = match release.await {
            Err(error) if claim.is_fenced() && is_blocked_by_writer(&error) => {
                return Err(fenced_transaction_open(error, self.path()));
            }
            // The release must be repeated once the second name is removed: other processes still
            // see this grant.
            Err(error) if FileMismatch::from_error(&error) == Some(FileMismatch::HardLink) => {
                return Err(BackendError::transient(error.message().to_owned()).with_source(error));
            }
            // If the file was replaced, other processes no longer see this grant, so it has ended.
            // A renewal treats this error in the same way.
            Err(error) if FileMismatch::from_error(&error).is_some() => {
                return Ok(Release::NotHeld);
            }
            answer => answer?,
        };
        self.purge_at_random(claim).await;
        Ok(released)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.release_watcher.wait(claim.key(), busy.seen_version).await;
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    fn batch(&self) -> Option<&dyn LockBatch> {
        Some(self)
    }

    fn values(&self) -> Option<&dyn ValueStore> {
        Some(self)
    }

    fn waiters(&self) -> Option<&dyn WaiterStore> {
        Some(self)
    }

    async fn close(&self) {
        self.release_watcher.close();
        self.reader.close().await;
        self.writer.close().await;
    }
}

#[async_trait]
impl LockAdmin for SqliteBackend {
    async fn inspect(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        match self.current_grant(key).await? {
            Some(held) => self.holders_of(held),
            None => Ok(Vec::new()),
        }
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let statements = Arc::clone(&self.statements);
        let rows = self.reader.fetch_all(move || statements.list()).await?;
        let mut holders = Vec::with_capacity(rows.len());
        for row in &rows {
            let claim = self.column(row, 2)?;
            if let Some(held) = self.decode_grant(row, claim)? {
                holders.extend(self.holders_of(held)?);
            }
        }
        Ok(holders)
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let (statements, key) = (Arc::clone(&self.statements), key.clone());
        let owned_key = key.clone();
        let changes = self.writer.execute(move || statements.force_release(&owned_key)).await?;
        if changes > 0 {
            return Ok(Release::Freed);
        }
        self.force_release_in_record(&key).await
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.collect_findings().await
    }
}

/// How long a release of a fenced claim, or a write of its record, waits for other writers. The
/// claim's own fenced transaction may be such a writer.
const FENCED_BUSY_LIMIT: Duration = Duration::from_millis(500);

/// Returns how long a release of `claim`, or a write of its record, waits for other writers, unless
/// `busy_timeout` is shorter.
pub(super) fn busy_limit(claim: &Claim) -> Duration {
    if claim.is_fenced() { FENCED_BUSY_LIMIT } else { Duration::MAX }
}

impl fmt::Debug for SqliteBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

#[async_trait]
impl OpenBackend for SqliteConfig {
    async fn open(&self) -> Result<Arc<dyn LockBackend>, BackendError> {
        Ok(Arc::new(SqliteBackend::open(self.clone()).await?))
    }
}

#[cfg(test)]
mod tests {
    //! Grants, and what each call returns.

    use std::collections::HashSet;
    use std::sync::Arc;
    use std::time::Duration;

    use proptest::prelude::*;
    use registry_core::{Claim, Key, LockAdmin, LockBackend, Release, Renewal};

    use crate::sqlite::clock::ManualClock;
    use crate::sqlite::tests::{
        LEASE, TestFolder, acquire, acquire_token, claim, expect_busy, key,
    };

    #[tokio::test]
    async fn two_processes_exclude_each_other() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let (claim_a, claim_b) = (claim("k"), claim("k"));

        let first = acquire_token(&a, &claim_a).await;
        assert!(expect_busy(&b, &claim_b).await.retry_after.unwrap() <= LEASE);
        assert_eq!(b.release(&claim_b).await.unwrap(), Release::NotHeld);
        assert_eq!(
            b.renew(std::slice::from_ref(&claim_b)).await[0].as_ref().unwrap(),
            &Renewal::Gone
        );

        assert_eq!(a.release(&claim_a).await.unwrap(), Release::Freed);
        assert_eq!(a.release(&claim_a).await.unwrap(), Release::NotHeld);
        assert!(acquire_token(&b, &claim_b).await > first);
        assert_eq!(a.renew(&[claim_a]).await[0].as_ref().unwrap(), &Renewal::Gone);
    }

    #[tokio::test]
    async fn a_busy_reply_names_the_holder_and_its_lease() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let (a, b) = (
            folder.open_backend_with_clock(&clock).await,
            folder.open_backend_with_clock(&clock).await,
        );
        let label = "x'); DROP TABLE lock_registry_locks;--\0\u{202e}\"\n🔒";
        let held = claim("k").with_label(Some(label.into())).with_token_block(8);
        let first = acquire_token(&a, &held).await;
        clock.advance(Duration::from_secs(10));

        let reply = expect_busy(&b, &claim("k")).await;
        assert_eq!(reply.retry_after, Some(Duration::from_secs(20)));
        assert_eq!(reply.seen_version, first);
        let holder = reply.holder.unwrap();
        assert_eq!(holder.key, key("k"));
        assert_eq!(holder.label.as_deref(), Some(label));
        assert_eq!(holder.token.unwrap().get(), first);
        assert_eq!(holder.held_for, Some(Duration::from_secs(10)));
        assert_eq!(holder.lease_left, Some(Duration::from_secs(20)));

        assert_eq!(b.inspect(&key("k")).await.unwrap().first(), Some(&holder));
        assert_eq!(b.list().await.unwrap(), [holder]);
        assert_eq!(b.inspect(&key("other")).await.unwrap(), Vec::new());
    }

    #[tokio::test]
    async fn a_repeated_attempt_of_a_granted_claim_returns_the_same_token() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let claim = claim("k");
        let first = acquire(&backend, &claim).await;
        clock.advance(Duration::from_secs(10));
        let again = acquire(&backend, &claim).await;
        assert_eq!(again.token, first.token);
        assert_eq!(again.lease, Duration::from_secs(20));
    }

    #[tokio::test]
    async fn a_repeated_attempt_of_an_expired_claim_is_a_new_grant() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let claim = claim("k");
        let first = acquire_token(&backend, &claim).await;
        clock.advance(LEASE);
        assert!(acquire_token(&backend, &claim).await > first);
    }

    #[tokio::test]
    async fn a_block_of_tokens_is_never_granted_twice() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let mut next = 0;
        for block in [1, 100, 7, u32::MAX, 1, 1] {
            let claim = claim("k").with_token_block(block);
            let first = acquire_token(&backend, &claim).await;
            assert!(first >= next, "{first} was reserved before");
            next = first + u64::from(block);
            backend.release(&claim).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_renewal_never_shortens_the_lease() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let claim = claim("k");
        acquire(&backend, &claim).await;
        clock.advance(Duration::from_secs(10));
        let renewal = backend.renew(std::slice::from_ref(&claim)).await.remove(0).unwrap();
        assert_eq!(renewal, Renewal::Renewed(LEASE));
        let short = claim.with_lease(Duration::from_secs(1));
        let renewal = backend.renew(&[short]).await.remove(0).unwrap();
        assert_eq!(renewal, Renewal::Renewed(LEASE));
    }

    #[tokio::test]
    async fn a_batch_renewal_returns_a_result_for_each_claim() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        // Some of the batches below exceed the largest statement, and one is no multiple of it.
        let mut claims = Vec::new();
        for n in 0..300 {
            let claim = claim(&format!("k{n}"));
            match n % 3 {
                0 => drop(acquire(&backend, &claim).await),
                1 => {
                    acquire(&backend, &claim).await;
                    backend.release(&claim).await.unwrap();
                }
                _ => {}
            }
            claims.push(claim);
        }
        clock.advance(Duration::from_secs(10));
        for size in [1, 2, 10, 11, 100, 101, 300] {
            let renewal = backend.renew(&claims[..size]).await;
            assert_eq!(renewal.len(), size);
            for (n, renewal) in renewal.into_iter().enumerate() {
                let expected = if n % 3 == 0 { Renewal::Renewed(LEASE) } else { Renewal::Gone };
                assert_eq!(renewal.unwrap(), expected, "claim {n} of {size}");
            }
        }
        assert!(backend.renew(&[]).await.is_empty());
        // The same claim twice in one call is renewed twice.
        let twice = [claims[0].clone(), claims[0].clone()];
        assert!(
            backend
                .renew(&twice)
                .await
                .iter()
                .all(|renewal| renewal.as_ref().unwrap() == &Renewal::Renewed(LEASE))
        );
    }

    #[tokio::test]
    async fn force_release_frees_a_key_of_any_claim() {
        let folder = TestFolder::new();
        let (a, b) = (folder.open_backend().await, folder.open_backend().await);
        let claim = claim("k");
        assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
        acquire(&a, &claim).await;
        assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::Freed);
        assert_eq!(b.force_release(&key("k")).await.unwrap(), Release::NotHeld);
        assert_eq!(
            a.renew(std::slice::from_ref(&claim)).await[0].as_ref().unwrap(),
            &Renewal::Gone
        );
        assert_eq!(a.release(&claim).await.unwrap(), Release::NotHeld);
    }

    #[tokio::test]
    async fn only_held_keys_of_the_namespace_are_listed() {
        let folder = TestFolder::new();
        let clock = ManualClock::with_boot_id(1);
        let backend = folder.open_backend_with_clock(&clock).await;
        let (short, released, held) =
            (claim("short").with_lease(Duration::from_secs(1)), claim("released"), claim("held"));
        for claim in [&short, &released, &held] {
            acquire(&backend, claim).await;
        }
        backend.release(&released).await.unwrap();
        clock.advance(Duration::from_secs(1));
        let listed: Vec<Key> = backend.list().await.unwrap().into_iter().map(|h| h.key).collect();
        assert_eq!(listed, [key("held")]);
        assert_eq!(backend.inspect(&key("short")).await.unwrap(), Vec::new());
        assert_eq!(backend.inspect(&key("released")).await.unwrap(), Vec::new());
    }

    #[tokio::test]
    async fn equal_keys_in_different_namespaces_are_different_locks() {
        let folder = TestFolder::new();
        let namespaces = ["b", "a", "A", "a\0", "a ", "ä", "a\u{308}"];
        let mut backends = Vec::new();
        for namespace in namespaces {
            let clock = ManualClock::with_boot_id(1);
            backends.push(
                super::SqliteBackend::open_with_clock(
                    folder.config().with_namespace(namespace),
                    clock,
                )
                .await
                .unwrap(),
            );
        }
        for backend in &backends {
            acquire(backend, &claim("k")).await;
        }
        for backend in &backends {
            assert_eq!(backend.list().await.unwrap().len(), 1);
        }
    }

    #[tokio::test]
    async fn one_of_many_concurrent_attempts_is_granted() {
        let folder = TestFolder::new();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let backend = Arc::new(folder.open_backend().await);
            for _ in 0..4 {
                let backend = Arc::clone(&backend);
                tasks.spawn(async move {
                    let claim = claim("k");
                    matches!(
                        backend.try_acquire(&claim).await.unwrap(),
                        registry_core::Attempt::Granted(_)
                    )
                });
            }
        }
        let granted = tasks.join_all().await.into_iter().filter(|granted| *granted).count();
        assert_eq!(granted, 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn different_keys_are_different_locks(
            keys in prop::collection::hash_set("[a\\x00/'\"% .\u{e4}\u{1F512}\u{202e}]{1,6}|\\PC{1,12}", 1..24)
        ) {
            let keys: HashSet<String> = keys;
            tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
                let folder = TestFolder::new();
                let backend = folder.open_backend().await;
                for text in &keys {
                    acquire(&backend, &claim(text)).await;
                }
                for text in &keys {
                    expect_busy(&backend, &claim(text)).await;
                }
                let listed: HashSet<String> =
                    backend.list().await.unwrap().iter().map(|h| h.key.as_str().to_owned()).collect();
                assert_eq!(listed, keys);
            });
        }
    }

    #[tokio::test]
    async fn the_longest_key_and_the_longest_lease_are_accepted() {
        let folder = TestFolder::new();
        let backend = folder.open_backend().await;
        let long = "\u{1F512}".repeat(Key::BYTES_MAX / 4);
        let claim = Claim::new(key(&long), Duration::MAX);
        acquire(&backend, &claim).await;
        assert_eq!(backend.inspect(&key(&long)).await.unwrap().remove(0).key, key(&long));
        assert_eq!(backend.release(&claim).await.unwrap(), Release::Freed);
    }
}
