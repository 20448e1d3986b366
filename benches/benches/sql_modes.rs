//! Measures locks that end with a connection next to the server's own: an advisory or named lock,
//! or a row lock.
//!
//! The references have no token, no lease and no loss notification, and they notify no waiter. A
//! grant of the row store writes a token. A grant of the session store reads the row to decide
//! whether it must write one. The last reference of a session consists of that read alone, so its
//! ratio is the cost of the client.

use std::sync::Arc;
use std::time::Duration;

use lock_registry_benches::in_turns;
use registry_core::{DistributedLock, LockBackend, LockRegistry, Registry};
use registry_jdbc::{
    MySqlConfig, MySqlRowBackend, MySqlSessionBackend, PostgresConfig, PostgresRowBackend,
    PostgresSessionBackend,
};
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection};
use sqlx::postgres::{PgAdvisoryLock, PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Executor as _, Row as _};
use tokio::sync::Mutex;

fn main() {
    lock_registry_benches::stay_on_one_processor();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        postgres().await;
        mariadb().await;
    });
}

const OURS: &str = "lock and unlock";

async fn postgres() {
    let server = PostgresServer::start().await.unwrap();
    let config = PostgresConfig::from_url(&server.url()).unwrap();
    let session = Ours::new(PostgresSessionBackend::open(config.clone()).await.unwrap());
    let row = Ours::new(PostgresRowBackend::open(config.with_namespace("rows")).await.unwrap());
    let options: PgConnectOptions = server.url().parse().unwrap();
    let bare = Mutex::new(options.connect().await.unwrap());
    let advisory = PgAdvisoryLock::new("orders/42");

    let same = || async {
        let mut connection = bare.lock().await;
        let held = advisory.acquire(&mut *connection).await.unwrap();
        held.release_now().await.unwrap();
    };
    let group = "uncontended pair of a session on PostgreSQL, against sqlx's PgAdvisoryLock";
    in_turns(group, same, OURS, || async { session.once().await }).await;
    prepare(&bare).await;
    let group = "uncontended pair of a session on PostgreSQL, against one that writes a token";
    in_turns(group, || async { with_token(&bare).await }, OURS, || async { session.once().await })
        .await;
    let group = "uncontended pair of a session on PostgreSQL, against one that looks at the row";
    in_turns(group, || async { with_look(&bare).await }, OURS, || async { session.once().await })
        .await;
    let same = || async {
        let mut connection = bare.lock().await;
        connection.execute("BEGIN; SELECT FROM lock_row WHERE id = 1 FOR UPDATE").await.unwrap();
        connection.execute("COMMIT").await.unwrap();
    };
    let group = "uncontended pair of a row on PostgreSQL, against BEGIN, SELECT FOR UPDATE, COMMIT";
    in_turns(group, same, OURS, || async { row.once().await }).await;
    session.registry.close(Duration::from_secs(1)).await;
    row.registry.close(Duration::from_secs(1)).await;
}

async fn prepare(bare: &Mutex<PgConnection>) {
    let table = "CREATE TABLE lock_row (id int PRIMARY KEY, token bigint); INSERT INTO lock_row VALUES (1, 0)";
    bare.lock().await.execute(table).await.unwrap();
    bare.lock().await.execute("SET synchronous_commit = off").await.unwrap();
    let statements = "\
        PREPARE take (bigint) AS SELECT pg_backend_pid(), pg_try_advisory_lock($1); \
        PREPARE look (bytea, bytea) AS SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint \
            FROM lock_registry_locks WHERE id = $1 AND claim = $2";
    bare.lock().await.execute(sqlx::raw_sql(statements)).await.unwrap();
}

/// The minimum for a token that is committed before the grant: one statement to acquire and write,
/// one to release.
async fn with_token(bare: &Mutex<PgConnection>) {
    const TAKE: &str = "\
        INSERT INTO lock_registry_locks AS l (id, namespace, key, claim, token, block, label, since, until) \
        SELECT $1, $1, $1, $1, now, 1, NULL, now, now \
        FROM (SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS now \
            FROM pg_try_advisory_lock($2) AS got WHERE got) AS clock \
        ON CONFLICT (id) DO UPDATE SET claim = excluded.claim, token = greatest(excluded.token, l.token + l.block), \
            since = excluded.since, until = excluded.until \
        RETURNING token";
    let mut connection = bare.lock().await;
    let take = sqlx::query_scalar(TAKE).bind([7_u8; 32].as_slice()).bind(7_i64);
    let token: i64 = take.fetch_one(&mut *connection).await.unwrap();
    assert!(token > 0);
    let give_back = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(7_i64);
    let was_held: bool = give_back.fetch_one(&mut *connection).await.unwrap();
    assert!(was_held);
}

/// The minimum that verifies that the row is unchanged: one message to acquire and read, one
/// statement to release. The read is a second statement, because its snapshot must include the
/// writes made before the lock was acquired. The previous pair's row is used.
async fn with_look(bare: &Mutex<PgConnection>) {
    let bytes = "07".repeat(32);
    let take = format!("EXECUTE take (7); EXECUTE look ('\\x{bytes}', '\\x{bytes}')");
    let mut connection = bare.lock().await;
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(take))).await.unwrap();
    assert!(rows[0].get::<bool, _>(1) && rows[1].get::<i64, _>(0) > 0);
    let give_back = sqlx::query("SELECT pg_backend_pid(), pg_advisory_unlock($1)").bind(7_i64);
    assert!(give_back.fetch_one(&mut *connection).await.unwrap().get::<bool, _>(1));
}

async fn mariadb() {
    let server = MariaDbServer::start().await.unwrap();
    let config = MySqlConfig::from_url(&server.url()).unwrap();
    let session = Ours::new(MySqlSessionBackend::open(config.clone()).await.unwrap());
    let row = Ours::new(MySqlRowBackend::open(config.with_namespace("rows")).await.unwrap());
    let options: MySqlConnectOptions = server.url().parse().unwrap();
    let bare = Mutex::new(options.connect().await.unwrap());

    let same = || async {
        let mut connection = bare.lock().await;
        assert_eq!(named(&mut connection, "SELECT GET_LOCK(?, 0)").await, 1);
        assert_eq!(named(&mut connection, "SELECT RELEASE_LOCK(?)").await, 1);
    };
    let group = "uncontended pair of a session on MariaDB, against GET_LOCK and RELEASE_LOCK";
    in_turns(group, same, OURS, || async { session.once().await }).await;
    let noted = "\
        INSERT INTO lock_registry_locks (id, namespace, lock_key, claim, token, block, label, since, until) \
        VALUES (REPEAT(x'07', 32), 'bare', 'bare', REPEAT(x'07', 16), 1, 1, NULL, 0, 9000000000000000)";
    bare.lock().await.execute(noted).await.unwrap();
    let group = "uncontended pair of a session on MariaDB, against one that looks at the row";
    in_turns(
        group,
        || async { named_with_look(&bare).await },
        OURS,
        || async {
            session.once().await;
        },
    )
    .await;
    let table = "CREATE TABLE lock_row (id INT PRIMARY KEY, token BIGINT) ENGINE = InnoDB";
    bare.lock().await.execute(table).await.unwrap();
    bare.lock().await.execute("INSERT INTO lock_row VALUES (1, 0)").await.unwrap();
    let same = || async {
        let mut connection = bare.lock().await;
        connection.execute(sqlx::raw_sql("START TRANSACTION")).await.unwrap();
        connection.execute("SELECT id FROM lock_row WHERE id = 1 FOR UPDATE").await.unwrap();
        connection.execute(sqlx::raw_sql("COMMIT")).await.unwrap();
    };
    let group = "uncontended pair of a row on MariaDB, against START TRANSACTION, SELECT FOR UPDATE, COMMIT";
    in_turns(group, same, OURS, || async { row.once().await }).await;
    session.registry.close(Duration::from_secs(1)).await;
    row.registry.close(Duration::from_secs(1)).await;
}

/// The minimum that verifies that the row is unchanged: one statement that acquires the lock and
/// then reads, one that releases it.
async fn named_with_look(bare: &Mutex<MySqlConnection>) {
    const TAKE: &str = "\
        SELECT CONNECTION_ID(), tried.got, \
            (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) FROM lock_registry_locks AS l \
            WHERE l.id = IF(tried.got = 1, CAST(? AS BINARY(32)), NULL) AND l.claim = ? LIMIT 1) \
        FROM (SELECT CAST(GET_LOCK(?, 0) AS SIGNED) AS got) AS tried";
    const GIVE_BACK: &str = "SELECT CONNECTION_ID(), CAST(RELEASE_LOCK(?) AS SIGNED)";
    let mut connection = bare.lock().await;
    let take = sqlx::query(TAKE).bind([7_u8; 32].as_slice()).bind([7_u8; 16].as_slice());
    let row = take.bind("orders/42").fetch_one(&mut *connection).await.unwrap();
    assert!(row.get::<i64, _>(1) == 1 && row.get::<Option<i64>, _>(2) > Some(0));
    let row = sqlx::query(GIVE_BACK).bind("orders/42").fetch_one(&mut *connection).await.unwrap();
    assert_eq!(row.get::<i64, _>(1), 1);
}

async fn named(connection: &mut MySqlConnection, text: &'static str) -> i64 {
    let asked = sqlx::query_scalar(text).bind("03c4a6d03c53a5b0798ba12d99188f66");
    asked.fetch_one(connection).await.unwrap()
}

/// The engine over a store.
struct Ours {
    registry: Registry,
    lock: DistributedLock,
}

impl Ours {
    fn new(backend: impl LockBackend + 'static) -> Self {
        let registry = Registry::builder(Arc::new(backend)).build().unwrap();
        let lock = registry.obtain("orders/42");
        Self { registry, lock }
    }

    async fn once(&self) {
        self.lock.lock().await.unwrap().unlock().await.unwrap();
    }
}
