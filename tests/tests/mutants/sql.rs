//! Mutants of the statements of the PostgreSQL and MariaDB stores: on a real server, each bug
//! violates a property that is checked here.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use registry_core::{
    Attempt, Claim, FencingToken, GuaranteeClass, Key, LockBackend, LockGuard, Registry, Renewal,
};
use registry_jdbc::sqlx::mysql::MySqlConnection;
use registry_jdbc::sqlx::postgres::PgConnection;
use registry_jdbc::sqlx::{AssertSqlSafe, Connection, query_scalar};
use registry_jdbc::{
    Fence, Mutant, MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SqlMode,
    switch_mutant,
};
use registry_testkit::eventually;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;

const LEASE: Duration = Duration::from_secs(30);
/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);
/// Opening a connection may take long on a busy machine.
const CONNECT: Duration = Duration::from_secs(30);
/// After this many pairs of acquire and release in a row, a session reserves tokens.
const PAIRS: u32 = 60;
const ROUNDS: u32 = 10;

type Store = Arc<dyn LockBackend>;

#[derive(Debug)]
enum SqlServer {
    Postgres(PostgresServer),
    MariaDb(MariaDbServer),
}

impl SqlServer {
    async fn open_lease_store(&self) -> Store {
        let timeout = Duration::from_secs(1);
        match self {
            Self::Postgres(server) => {
                let config =
                    PostgresConfig::from_url(&server.url()).unwrap().with_connect_timeout(CONNECT);
                Arc::new(PostgresBackend::open(config.with_busy_timeout(timeout)).await.unwrap())
            }
            Self::MariaDb(server) => {
                let config =
                    MySqlConfig::from_url(&server.url()).unwrap().with_connect_timeout(CONNECT);
                Arc::new(MySqlBackend::open(config.with_busy_timeout(timeout)).await.unwrap())
            }
        }
    }

    async fn open_session_store(&self) -> Store {
        match self {
            Self::Postgres(server) => {
                let config =
                    PostgresConfig::from_url(&server.url()).unwrap().with_connect_timeout(CONNECT);
                Arc::new(PostgresBackend::open_mode(config, SqlMode::Session).await.unwrap())
            }
            Self::MariaDb(server) => {
                let config =
                    MySqlConfig::from_url(&server.url()).unwrap().with_connect_timeout(CONNECT);
                Arc::new(MySqlBackend::open_mode(config, SqlMode::Session).await.unwrap())
            }
        }
    }

    /// Checks all properties. Returns the first violated property as an error.
    async fn check_all(&self) -> Result<(), &'static str> {
        only_its_owner_releases_a_lock(self).await?;
        clients_agree_on_the_time(self).await?;
        a_held_lock_is_not_granted_again(self).await?;
        no_renewal_revives_a_lease(self).await?;
        tokens_grow(self).await?;
        tokens_of_sessions_grow(self).await?;
        a_fence_rejects_other_claims(self, self.open_lease_store().await, "fenced").await?;
        a_fence_rejects_other_claims(self, self.open_session_store().await, "fenced session")
            .await?;
        a_session_renews_before_it_acquires(self).await?;
        a_fence_delays_the_next_caller(self).await
    }

    fn pause(&self) {
        match self {
            Self::Postgres(server) => server.pause().unwrap(),
            Self::MariaDb(server) => server.pause().unwrap(),
        }
    }

    fn resume(&self) {
        match self {
            Self::Postgres(server) => server.resume().unwrap(),
            Self::MariaDb(server) => server.resume().unwrap(),
        }
    }

    /// Deletes all locks and the token floor. Tokens ahead of the clock would affect later checks.
    async fn delete_all_state(&self) {
        self.sql("DELETE FROM lock_registry_locks").await;
        self.sql("UPDATE lock_registry_meta SET floor = 0").await;
    }

    async fn sql(&self, statement: &str) -> String {
        match self {
            Self::Postgres(server) => server.sql(statement).await.unwrap(),
            Self::MariaDb(server) => server.sql(statement).await.unwrap(),
        }
    }
}

fn claim(key: &str, lease: Duration) -> Claim {
    Claim::new(Key::new(key).unwrap(), lease)
}

async fn granted(store: &Store, claim: &Claim) -> Option<FencingToken> {
    match store.try_acquire(claim).await {
        Ok(Attempt::Granted(grant)) => Some(grant.token),
        _ => None,
    }
}

/// Returns `promise` as an error unless it `is_kept`.
fn check_property(promise: &'static str, is_kept: bool) -> Result<(), &'static str> {
    if is_kept { Ok(()) } else { Err(promise) }
}

async fn only_its_owner_releases_a_lock(server: &SqlServer) -> Result<(), &'static str> {
    let store = server.open_lease_store().await;
    let (local, other) = (claim("owned", LEASE), claim("owned", LEASE));
    granted(&store, &local).await.unwrap();
    let _ = store.release(&other).await.unwrap();
    let taken = granted(&store, &other).await;
    check_property("only its owner releases a lock", taken.is_none())
}

async fn clients_agree_on_the_time(server: &SqlServer) -> Result<(), &'static str> {
    let (first, second) = (server.open_lease_store().await, server.open_lease_store().await);
    granted(&first, &claim("timed", LEASE)).await.unwrap();
    let taken = granted(&second, &claim("timed", LEASE)).await;
    check_property("clients agree on the time", taken.is_none())
}

async fn a_held_lock_is_not_granted_again(server: &SqlServer) -> Result<(), &'static str> {
    let (first, second) = (server.open_lease_store().await, server.open_lease_store().await);
    let before = claim("released", LEASE);
    granted(&first, &before).await.unwrap();
    first.release(&before).await.unwrap();
    granted(&second, &claim("released", LEASE)).await.unwrap();
    let taken = granted(&first, &claim("released", LEASE)).await;
    check_property("a held lock is not granted again", taken.is_none())
}

async fn no_renewal_revives_a_lease(server: &SqlServer) -> Result<(), &'static str> {
    let store = server.open_lease_store().await;
    let short = claim("short", Duration::from_millis(100));
    granted(&store, &short).await.unwrap();
    eventually(LONG, async || {
        store.admin().unwrap().inspect(short.key()).await.unwrap().is_empty()
    })
    .await;
    let renewed = store.renew(&[short.with_lease(LEASE)]).await.remove(0);
    check_property("no renewal revives a lease", matches!(renewed, Ok(Renewal::Gone)))
}

async fn tokens_grow(server: &SqlServer) -> Result<(), &'static str> {
    let (first, second) = (server.open_lease_store().await, server.open_lease_store().await);
    let mut last = None;
    // The process that released the key last reacquires it with a different statement than another
    // process uses.
    for store in [&first, &first, &second, &second, &first] {
        let claim = claim("counted", LEASE);
        let token = granted(store, &claim).await;
        store.release(&claim).await.unwrap();
        check_property("tokens grow", last < token)?;
        last = token;
    }
    Ok(())
}

async fn tokens_of_sessions_grow(server: &SqlServer) -> Result<(), &'static str> {
    let (first, second) = (server.open_session_store().await, server.open_session_store().await);
    let mut last = None;
    for round in 0..ROUNDS {
        // The second session is granted the lock while the first still has reserved tokens.
        for (session, pairs) in [(&first, PAIRS + round), (&second, 1), (&first, 1)] {
            for _ in 0..pairs {
                let claim = claim("alternating", LEASE).with_token_block(16);
                let token = granted(session, &claim).await;
                session.release(&claim).await.unwrap();
                check_property("tokens of sessions grow", last < token)?;
                last = token;
            }
        }
    }
    Ok(())
}

async fn a_fence_rejects_other_claims(
    server: &SqlServer,
    store: Store,
    key: &str,
) -> Result<(), &'static str> {
    match server {
        SqlServer::Postgres(postgres) => {
            let mut data = PgConnection::connect(&postgres.url()).await.unwrap();
            let mut watcher = PgConnection::connect(&postgres.url()).await.unwrap();
            let is_reserved = async |token| {
                let count = query_scalar(reserve_query(token)).fetch_one(&mut watcher).await;
                count.is_ok_and(|count: i64| count == 1)
            };
            check_fence_rejects(is_reserved, store, key, &mut data).await
        }
        SqlServer::MariaDb(mariadb) => {
            let mut data = MySqlConnection::connect(&mariadb.url()).await.unwrap();
            let mut watcher = MySqlConnection::connect(&mariadb.url()).await.unwrap();
            let is_reserved = async |token| {
                let count = query_scalar(reserve_query(token)).fetch_one(&mut watcher).await;
                count.is_ok_and(|count: i64| count == 1)
            };
            check_fence_rejects(is_reserved, store, key, &mut data).await
        }
    }
}

/// The minimum time that the reserved tokens of a session cover, one for each microsecond.
const RESERVED_MIN: Duration = Duration::from_millis(400);

/// Returns a query that counts the rows that have this token and whose reserved tokens cover more
/// than [`RESERVED_MIN`].
fn reserve_query(token: FencingToken) -> AssertSqlSafe<String> {
    let min = RESERVED_MIN.as_micros();
    AssertSqlSafe(format!(
        "SELECT count(*) FROM lock_registry_locks WHERE token = {token} AND block > {min}"
    ))
}

/// Checks that no client is granted the key while the transaction with the fence is open, even
/// after a release and a forced release. In session mode, the fenced grant is one that reserved
/// tokens: the next grant of that session could otherwise skip the write of the row.
async fn check_fence_rejects<C>(
    mut is_reserved: impl AsyncFnMut(FencingToken) -> bool,
    store: Store,
    key: &str,
    data: &mut C,
) -> Result<(), &'static str>
where
    C: Connection,
    LockGuard: Fence<C::Database>,
{
    let registry = Registry::builder(Arc::clone(&store)).build().unwrap();
    let lock = registry.obtain(key);
    let is_session = store.capabilities().class == GuaranteeClass::BestEffort;
    // On a loaded machine, the reserved time may be over before the other claim is sent. The check
    // is then repeated. It proves nothing if this happens five times.
    for _ in 0..5 {
        let (guard, reserved_at) = eventually(LONG, async || {
            let reserved_at = Instant::now();
            let guard = lock.lock().await.unwrap();
            if is_session && !is_reserved(guard.fencing_token()).await {
                guard.unlock().await.unwrap();
                return None;
            }
            Some((guard, reserved_at))
        })
        .await;
        let mut transaction = data.begin().await.unwrap();
        guard.fence(&mut transaction).await.unwrap();
        // On MariaDB not even the holder can release a fenced lease.
        let _ = guard.unlock().await;
        let _ = store.admin().unwrap().force_release(&Key::new(key).unwrap()).await;
        let taken = granted(&store, &claim(key, LEASE)).await;
        transaction.rollback().await.unwrap();
        check_property("a fence rejects other claims", taken.is_none())?;
        if !is_session || reserved_at.elapsed() < RESERVED_MIN {
            break;
        }
    }
    Ok(())
}

async fn a_session_renews_before_it_acquires(server: &SqlServer) -> Result<(), &'static str> {
    // On a busy machine all replies may arrive before the first of them is processed.
    for _ in 0..10 {
        if answered_before_a_renewal(server).await < QUEUED / 2 {
            return Ok(());
        }
    }
    Err("a session renews before it acquires")
}

const QUEUED: usize = 40;

/// Returns how many acquisitions that were queued before a renewal complete before it.
async fn answered_before_a_renewal(server: &SqlServer) -> usize {
    let session = server.open_session_store().await;
    let held = claim("renewed", LEASE);
    granted(&session, &held).await.unwrap();
    server.pause();
    let done = AtomicUsize::new(0);
    let mut queued = Vec::new();
    for number in 0..QUEUED {
        let (session, done) = (&session, &done);
        let mut acquiring = Box::pin(async move {
            let claim = claim(&format!("queued/{number}"), LEASE);
            let token = granted(session, &claim).await;
            done.fetch_add(1, Ordering::SeqCst);
            token.map(|_| claim)
        });
        assert!(futures_util::poll!(&mut acquiring).is_pending(), "the server is paused");
        queued.push(acquiring);
    }
    let renewing = session.renew(std::slice::from_ref(&held));
    let renewing = async { (renewing.await.remove(0), done.load(Ordering::SeqCst)) };
    let mut renewing = Box::pin(renewing);
    assert!(futures_util::poll!(&mut renewing).is_pending(), "the server is paused");
    server.resume();
    // `join` polls the acquisitions first, so those that complete before the renewal are counted
    // when it completes.
    let (acquired, (renewed, before)) = join(join_all(queued), renewing).await;
    for claim in acquired.into_iter().flatten().chain([held]) {
        session.release(&claim).await.unwrap();
    }
    assert!(matches!(renewed, Ok(Renewal::Renewed(_))), "{renewed:?}");
    before
}

async fn a_fence_delays_the_next_caller(server: &SqlServer) -> Result<(), &'static str> {
    match server {
        SqlServer::Postgres(postgres) => {
            let mut data = PgConnection::connect(&postgres.url()).await.unwrap();
            check_fence_delays(server, &mut data).await
        }
        SqlServer::MariaDb(mariadb) => {
            let mut data = MySqlConnection::connect(&mariadb.url()).await.unwrap();
            check_fence_delays(server, &mut data).await
        }
    }
}

/// Checks that the next caller of the same process is not granted the key while the transaction
/// with the fence is open.
async fn check_fence_delays<C>(server: &SqlServer, data: &mut C) -> Result<(), &'static str>
where
    C: Connection,
    LockGuard: Fence<C::Database>,
{
    let registry = Registry::builder(server.open_session_store().await).build().unwrap();
    let lock = registry.obtain("fenced before a caller");
    let guard = lock.lock().await.unwrap();
    let mut transaction = data.begin().await.unwrap();
    guard.fence(&mut transaction).await.unwrap();
    let mut next = std::pin::pin!(lock.try_lock_for(LONG));
    assert!(futures_util::poll!(next.as_mut()).is_pending());
    guard.unlock().await.unwrap();
    let granted = tokio::time::timeout(Duration::from_secs(1), next.as_mut()).await.is_ok();
    transaction.rollback().await.unwrap();
    if !granted {
        next.await.unwrap().unwrap().unlock().await.unwrap();
    }
    check_property("a fence delays the next caller", !granted)
}

#[test]
fn every_bug_of_the_statements_is_found_and_nothing_else() {
    let _serialized = super::serialized();
    tokio::runtime::Runtime::new().unwrap().block_on(every_bug_is_found());
}

async fn every_bug_is_found() {
    let postgres = SqlServer::Postgres(PostgresServer::start().await.unwrap());
    let mariadb = SqlServer::MariaDb(MariaDbServer::start().await.unwrap());
    for server in [postgres, mariadb] {
        assert_eq!(server.check_all().await, Ok(()), "without a bug, nothing is found");
        let mut missed = Vec::new();
        for mutant in Mutant::ALL {
            server.delete_all_state().await;
            switch_mutant(Some(mutant));
            match server.check_all().await {
                Ok(()) => missed.push(mutant),
                Err(promise) => println!("{mutant:?}: found by: {promise}"),
            }
        }
        switch_mutant(None);
        assert!(missed.is_empty(), "{missed:#?}");
        server.delete_all_state().await;
        assert_eq!(server.check_all().await, Ok(()), "without a bug, nothing is found");
    }
}
