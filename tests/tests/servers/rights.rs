//! The rights that the book lists for a user of Redis are sufficient, and each of them is
//! necessary. The tests use real users on real servers. `ACL LOG` shows which commands were
//! refused.

#![expect(clippy::unwrap_used, reason = "a test may panic")]
#![expect(clippy::future_not_send, reason = "a test is one task")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use registry_core::{BackendErrorKind, FencingToken, LockGuard, Registry, Severity};
use registry_redis::{FencedScript, FencedWrites, Fsync, Layout, RedisBackend, RedisConfig};
use registry_testkit::redis::{RedisCluster, RedisQuorum, RedisServer, SentinelSetup};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

/// Long enough for any machine; reached only by a test that fails.
const LONG: Duration = Duration::from_secs(240);

/// The number of users that work concurrently; they spend most of their time waiting.
const CONCURRENT_USERS: usize = 12;

/// The rows of the book's table that every registry of this test needs.
const COMMON: &[&str] = &["always", "notifications of losses", "`list`", "`doctor`"];
/// The one row whose rights are for the sentinels. All other rows are for the servers.
const SENTINEL_USER_ROW: &str = "the sentinels' own user";

#[tokio::test]
async fn one_server() {
    let server = server().await;
    let rows =
        ["layout `native`", "`waiters`", "messages by `PUBLISH`", "a `DATABASE` other than 0"];
    let config = RedisConfig::from_url(&server.url()).unwrap().with_database(3);
    assert_rights_are_exact(&rows, &[&server], &[], None, config).await;
}

#[tokio::test]
async fn the_layouts_of_other_libraries() {
    for (row, layout) in
        [("layout `spring`", Layout::Spring), ("layout `redisson`", Layout::Redisson)]
    {
        let server = server().await;
        let config = RedisConfig::from_url(&server.url()).unwrap().with_layout(layout);
        assert_rights_are_exact(&[row, "messages by `PUBLISH`"], &[&server], &[], None, config)
            .await;
    }
}

#[tokio::test]
async fn sentinels_with_users_of_their_own() {
    let setup = SentinelSetup::start().await.unwrap();
    let rows = [
        "layout `native`",
        "`waiters`",
        "messages by `PUBLISH`",
        "under sentinels",
        "`replicas`",
        SENTINEL_USER_ROW,
    ];
    let servers: Vec<_> = setup.servers().iter().collect();
    let sentinels: Vec<_> = setup.sentinels().iter().collect();
    let config = RedisConfig::from_url(&setup.url()).unwrap().with_replicas(1);
    assert_rights_are_exact(&rows, &servers, &sentinels, None, config).await;
}

#[tokio::test]
async fn a_cluster() {
    let redis_keys: RedisKeysOf =
        |key| [format!("shop:{{{key}}}"), format!("shop:{{{key}}}:token")];
    assert_cluster_rights_are_exact(&["layout `native`", "`waiters`"], Layout::Native, redis_keys)
        .await;
}

#[tokio::test]
async fn a_cluster_in_the_layout_of_redisson() {
    let redis_keys: RedisKeysOf =
        |key| [format!("shop:{key}"), format!("lock-registry:token:{{shop:{key}}}")];
    assert_cluster_rights_are_exact(&["layout `redisson`"], Layout::Redisson, redis_keys).await;
}

async fn assert_cluster_rights_are_exact(rows: &[&str], layout: Layout, redis_keys: RedisKeysOf) {
    let cluster = RedisCluster::start().await.unwrap();
    let nodes: Vec<_> = cluster.nodes().into_iter().map(|addr| cluster.node(addr)).collect();
    let config = RedisConfig::from_url(&cluster.url()).unwrap().with_layout(layout);
    let rows = [rows, &["messages by `SPUBLISH`", "a cluster"]].concat();
    assert_rights_are_exact(&rows, &nodes, &[], Some((&cluster, redis_keys)), config).await;
}

#[tokio::test]
async fn a_quorum() {
    let quorum = RedisQuorum::start(3).await.unwrap();
    let servers: Vec<_> = quorum.servers().iter().collect();
    let config = RedisConfig::from_url(&quorum.url()).unwrap();
    let config = config.with_restart_guard(Duration::from_millis(1));
    let rows = ["layout `native`", "messages by `PUBLISH`", "`restart_guard`"];
    assert_rights_are_exact(&rows, &servers, &[], None, config).await;
}

/// `fsync=true` works only on servers with `WAITAOF`: Redis since 7.2, and all versions of
/// Valkey.
#[tokio::test]
async fn a_server_with_fsync() {
    let server = server().await;
    let command_info = server.send_command("COMMAND INFO waitaof").await.unwrap();
    let config = RedisConfig::from_url(&server.url()).unwrap().with_fsync(Fsync::Required);
    if command_info.starts_with("*1\r\n*-1") || command_info.starts_with("*1\r\n$-1") {
        let error = RedisBackend::open(config).await.unwrap_err();
        assert!(error.refused(), "{error:?}");
        return;
    }
    let rows = ["layout `native`", "`waiters`", "messages by `PUBLISH`", "`fsync`"];
    assert_rights_are_exact(&rows, &[&server], &[], None, config).await;
}

#[tokio::test]
async fn fenced_writes() {
    let server = server().await;
    let rights = Rights::of(&["`FencedWrites`"], "account");
    let config = RedisConfig::from_url(&server.url()).unwrap();
    let write = async |user: String| {
        let config = config.clone().with_login(Some(&user), "p");
        let writes = FencedWrites::open(config).await?;
        let token = FencingToken::new(17).unwrap();
        let balance = FencedScript::new("return redis.call('SET', KEYS[1], ARGV[1])");
        writes.run(token, &balance, &[&format!("account:{user}")], &[b"5"]).await?;
        writes.set(token, &format!("account:{user}"), "6").await?;
        Ok(())
    };
    run_as_each_user(&rights, &[&server], &[], write).await;
}

/// The list contains every row of the table. A test for a new row must be added with its name.
#[test]
fn every_right_is_checked() {
    let checked = [
        "always",
        "layout `native`",
        "`waiters`",
        "layout `spring`",
        "layout `redisson`",
        "messages by `PUBLISH`",
        "messages by `SPUBLISH`",
        "notifications of losses",
        "under sentinels",
        SENTINEL_USER_ROW,
        "a cluster",
        "`restart_guard`",
        "`replicas`",
        "`fsync`",
        "`list`",
        "`doctor`",
        "a `DATABASE` other than 0",
        "`FencedWrites`",
    ];
    let book_rights: BTreeSet<String> = book_rights().into_keys().collect();
    assert_eq!(book_rights, checked.into_iter().map(str::to_owned).collect());
}

/// The book's line to copy contains the rights for one server.
#[test]
fn the_line_to_copy_equals_the_table() {
    let rows = [COMMON, &["layout `native`", "`waiters`", "messages by `PUBLISH`"]].concat();
    let rows: BTreeSet<String> = Rights::of(&rows, "lock-registry").servers.into_iter().collect();
    let book = book();
    let line = book.lines().find(|line| line.starts_with("~lock-registry:* ")).unwrap();
    assert_eq!(line.split(' ').map(str::to_owned).collect::<BTreeSet<_>>(), rows);
    let readme = read("crates/registry-redis/README.md");
    assert!(readme.lines().any(|other| other == line), "the README of the crate differs");
}

// ---- The work of the users.

/// Returns the Redis keys of a lock and of its token.
type RedisKeysOf = fn(&str) -> [String; 2];

async fn assert_rights_are_exact(
    rows: &[&str],
    servers: &[&RedisServer],
    sentinels: &[&RedisServer],
    cluster: Option<(&RedisCluster, RedisKeysOf)>,
    config: RedisConfig,
) {
    let rights = Rights::of(&[COMMON, rows].concat(), "shop");
    let config = config.with_namespace("shop");
    let work = async |user: String| {
        let mut config = config.clone().with_login(Some(&user), "p");
        if !sentinels.is_empty() {
            config = config.with_sentinel_login(Some(&user), "p");
        }
        let (local, remote) = (open(&config).await?, open(&config).await?);
        run_all_operations(&user, &local, &remote, cluster).await?;
        let findings = local.diagnose().await?;
        let denied = findings.iter().find(|finding| {
            finding.severity == Severity::Warning && finding.message.contains("may not")
        });
        if denied.is_some() || !local.capabilities().reports_invalidations {
            return Err(format!("{findings:?}").into());
        }
        // Long enough for the background work: channels are unsubscribed after a second, and
        // connections are checked every five seconds.
        sleep(Duration::from_secs(7)).await;
        _ = local.close(Duration::from_secs(5)).await;
        _ = remote.close(Duration::from_secs(5)).await;
        Ok(())
    };
    run_as_each_user(&rights, servers, sentinels, work).await;
}

async fn open(config: &RedisConfig) -> Result<Registry, Box<dyn Error>> {
    let mut backend = RedisBackend::open(config.clone()).await;
    // Sentinels and clusters are queried with a short timeout, which a busy machine may exceed.
    for _ in 0..10 {
        if !backend.as_ref().is_err_and(|error| error.kind() == BackendErrorKind::Transient) {
            break;
        }
        backend = RedisBackend::open(config.clone()).await;
    }
    let builder = Registry::builder(Arc::new(backend?)).lease(Duration::from_secs(300));
    Ok(builder.timeout(Duration::from_secs(30)).build()?)
}

/// Runs the operations of an exclusive lock. Other modes and value blocks use the same commands.
async fn run_all_operations(
    key: &str,
    local: &Registry,
    remote: &Registry,
    cluster: Option<(&RedisCluster, RedisKeysOf)>,
) -> Result<(), Box<dyn Error>> {
    let guard = local.obtain(key).try_lock_for(Duration::from_secs(20)).await?;
    let guard = guard.ok_or_else(|| format!("{key:?} is held by another client"))?;
    if let Some((cluster, redis_keys)) = cluster {
        renew_during_migration(cluster, &redis_keys(key), &guard).await?;
    }
    let lock = remote.obtain(key);
    let listed = async {
        if local.capabilities().waiters {
            timeout(Duration::from_secs(10), wait_until_listed(local, key)).await??;
        } else {
            sleep(Duration::from_millis(500)).await;
        }
        Ok::<_, Box<dyn Error>>(())
    };
    tokio::select! {
        guard = lock.lock() => drop(guard?),
        listed = listed => listed?,
    }
    guard.extend(Duration::from_secs(302)).await?;
    remote.obtain(key).holders().await?.pop().ok_or("`holders` returned no holder")?;
    if !remote.list().await?.iter().any(|holder| holder.key.as_str() == key) {
        return Err(format!("`list` does not contain the holder of {key:?}").into());
    }
    guard.unlock().await?;
    let guard = remote.obtain(key).try_lock_for(Duration::from_secs(20)).await?;
    let guard = guard.ok_or_else(|| format!("{key:?} is still held after its release"))?;
    if !local.force_release(key).await? {
        return Err(format!("`force_release` found {key:?} not held").into());
    }
    drop(guard);
    Ok(())
}

/// Waits until a caller that waits for `key` is listed among the waiters.
async fn wait_until_listed(registry: &Registry, key: &str) -> Result<(), Box<dyn Error>> {
    while registry.obtain(key).waiters().await?.is_empty() {
        sleep(Duration::from_millis(100)).await;
    }
    if !registry.list_waiters().await?.iter().any(|waiting| waiting.key.as_str() == key) {
        return Err(format!("`list_waiters` does not contain the waiter of {key:?}").into());
    }
    Ok(())
}

/// Renews while the slot of the lock migrates to another server.
async fn renew_during_migration(
    cluster: &RedisCluster,
    redis_keys: &[String; 2],
    guard: &LockGuard,
) -> Result<(), Box<dyn Error>> {
    let slot = RedisCluster::slot_of(&redis_keys[0]);
    let from = cluster.master_of(slot).await?;
    let other = if slot < 8_000 { 16_000 } else { 0 };
    let to = cluster.master_of(other).await?;
    assert_ne!(from, to);
    // Two servers that migrate keys to each other at the same time wait for each other.
    static MIGRATING: Mutex<()> = Mutex::const_new(());
    let _serialized = MIGRATING.lock().await;
    let migration = cluster.begin_migration(slot, to).await?;
    for name in redis_keys {
        cluster.migrate_key(&migration, name).await?;
    }
    let renewed = guard.extend(Duration::from_secs(301)).await;
    cluster.finish_migration(migration).await?;
    Ok(renewed?)
}

/// Runs the work as a user with all rights, and as one user for each right, who lacks only that
/// right. Asserts that `ACL LOG` shows no refused command of the user with all rights, and at least
/// one of each other user.
async fn run_as_each_user(
    rights: &Rights,
    servers: &[&RedisServer],
    sentinels: &[&RedisServer],
    work: impl AsyncFn(String) -> Result<(), Box<dyn Error>>,
) {
    let all: Vec<(bool, &String)> = (rights.servers.iter().map(|right| (true, right)))
        .chain(rights.sentinels.iter().map(|right| (false, right)))
        .collect();
    let mut users: Vec<(String, Option<(bool, &String)>)> = vec![("all-rights".into(), None)];
    users.extend(all.iter().enumerate().map(|(nth, right)| (format!("lacks-{nth}"), Some(*right))));
    for (user, lacks) in &users {
        for (nodes_of_kind, rights, is_server) in
            [(servers, &rights.servers, true), (sentinels, &rights.sentinels, false)]
        {
            let rights = rights.iter().filter(|right| *lacks != Some((is_server, *right)));
            let words: Vec<&str> = ["ACL", "SETUSER", user, "on", ">p"]
                .into_iter()
                .chain(rights.map(String::as_str))
                .collect();
            for server in nodes_of_kind {
                server.send_command_args(&words).await.unwrap().into_result().unwrap();
            }
        }
    }
    for server in servers {
        server.send_command("CONFIG SET acllog-max-len 100000").await.unwrap();
    }
    // A script that one user has loaded is available to all. The user without `+eval` therefore
    // runs first, and alone.
    users.sort_by_key(|(_, lacks)| lacks.is_none_or(|(_, right)| right != "+eval"));
    let run_with_limit = async |(user, _): &(String, _)| {
        let results = timeout(LONG, work(user.clone())).await;
        results.unwrap_or_else(|_| {
            Err(format!("the work of {user} is not complete after {LONG:?}").into())
        })
    };
    let (first, others) = users.split_first().unwrap();
    let mut results: Vec<Result<(), Box<dyn Error>>> = vec![run_with_limit(first).await];
    let others = stream::iter(others).map(&run_with_limit).buffered(CONCURRENT_USERS);
    results.extend(others.collect::<Vec<_>>().await);
    let mut refused: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for server in servers.iter().chain(sentinels) {
        let log = server
            .send_command_args(&["ACL", "LOG", "100000"])
            .await
            .unwrap()
            .into_result()
            .unwrap();
        for entry in log.items() {
            let entry: Vec<String> =
                entry.items().iter().map(|part| part.text().unwrap_or_default()).collect();
            let field = |name: &str| {
                let at = entry.iter().position(|field| field == name).unwrap();
                entry[at + 1].clone()
            };
            // A refused `CLIENT SETINFO` has no effect.
            if field("object") != "client|setinfo" {
                refused.entry(field("username")).or_default().insert(field("object"));
            }
        }
    }
    assert_eq!(refused.get("all-rights"), None, "the rights are too few");
    for ((_, lacks), results) in users.iter().zip(&results) {
        if lacks.is_none() {
            results.as_ref().unwrap();
        }
    }
    let lacking = users.iter().filter(|(_, lacks)| lacks.is_some());
    let needless: Vec<_> = lacking.filter(|(user, _)| !refused.contains_key(user)).collect();
    assert!(needless.is_empty(), "these rights are not necessary: {needless:?}");
}

// ---- The content of the book.

struct Rights {
    servers: Vec<String>,
    sentinels: Vec<String>,
}

impl Rights {
    /// Returns the rights of these rows of the book's table, for a namespace, without duplicates.
    fn of(rows: &[&str], namespace: &str) -> Self {
        let book_rights = book_rights();
        let mut rights = Self { servers: Vec::new(), sentinels: Vec::new() };
        for row in rows {
            let list =
                if *row == SENTINEL_USER_ROW { &mut rights.sentinels } else { &mut rights.servers };
            for right in
                book_rights.get(*row).unwrap_or_else(|| panic!("the book has no row {row:?}"))
            {
                let right = right.replace("NAMESPACE", namespace).replace("RESOURCE", namespace);
                if !list.contains(&right) {
                    list.push(right);
                }
            }
        }
        rights
    }
}

/// Returns the book's table of rights by purpose.
fn book_rights() -> BTreeMap<String, Vec<String>> {
    let book = book();
    let (_, table) = book.split_once("| for | rights |").unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let rows = rows.map(|row| {
        // In a table, a `|` inside a cell is escaped.
        let row = row.replace("\\|", "\u{0}");
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, what, rights, _] = cells[..] else { panic!("{row}") };
        (what.to_owned(), rights.trim_matches('`').replace('\u{0}', "|"))
    });
    rows.map(|(what, rights)| (what, rights.split(' ').map(str::to_owned).collect())).collect()
}

fn book() -> String {
    read("book/src/stores/redis.md")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap()
}

async fn server() -> RedisServer {
    RedisServer::start(&[]).await.unwrap()
}
