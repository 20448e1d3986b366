//! Runs every example program to its end and checks the output that the book promises.

use std::path::Path;
use std::process::Command;

use registry_testkit::etcd::EtcdServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;

/// Defines one test per program: its arguments, environment variables and lines of output. Also
/// defines the list that `every_program_is_run` compares with the folder.
macro_rules! programs {
    ($($name:ident $args:tt $variables:tt prints $lines:tt,)*) => {
        $(
            #[test]
            fn $name() {
                run(env!(concat!("CARGO_BIN_EXE_", stringify!($name))), &$args, &$variables, &$lines);
            }
        )*

        const PROGRAMS: &[&str] = &[$(stringify!($name)),*];
    };
}

programs! {
    hello [] [] prints ["order 42 is locked with token "],
    deadline [] [] prints [
        "busy: another client writes the report",
        "still busy after 50 ms",
        "its lease ends within 30 s: true",
        "acquired",
    ],
    framework ["sqlite:locks.db"] [] prints [
        "sqlite: class durable, excludes this host",
        "node 1: 17 rows written",
        "node 2: another node has run it",
        "node 3: another node has run it",
    ],
    require [] [] prints [
        "sqlite:locks.db is suitable",
        "payments need stronger guarantees than those of memory",
        "payments need fencing tokens, which pass-through does not have",
    ],
    configuration [] [("LOCK_REGISTRY_POLL", "500ms")] prints [
        "lease = 20s (the configuration file)",
        "poll = 500ms (the environment)",
        "label = worker 7 (the code)",
        "busy_timeout = 1s (the configuration file)",
        "lease under 20 s: true",
        "did you mean \"sqlite\"?",
        "did you mean \"lease\"?",
        "which has no unit",
        "contains a path, which etcd does not support",
    ],
    code [] [] prints ["held as Some(\"nightly report\")", "still locked: true", "free: true"],
    modes [] [] prints [
        "a writer is excluded: true",
        "readers are excluded: true",
        "mode: shared",
        "all units are taken: true",
        "holder: permits 2 of 3",
        "holder: permits 1 of 3",
        "keys: accounts/3, accounts/7",
    ],
    once [] [] prints [
        "this host ran it: true",
        "backup 41",
        "ran: true",
        "already done: true",
        "failed: Ran(Err(\"disk full\"))",
        "run 42",
        "run 43",
        "run 44",
        "caught up: true",
    ],
    once_sql [] [] prints ["attempt 1: 110", "attempt 2: 110"],
    election [] [] prints [
        "host 1 leads",
        "the leader is at 10.0.0.1:8080",
        "host 2 led, under a larger token: true",
    ],
    locked_macro [] [] prints [
        "order 42 is shipped",
        "orders/42 is locked",
        "order 43 is shipped",
    ],
    axum_extractor [] [] prints [
        "200 OK: order 42 is shipped",
        "423 Locked: order 43 is in use",
        "400 Bad Request: ",
    ],
    axum_layer [] [] prints [
        "200 OK \"order 42 is shipped under its lock\", retry after None",
        "423 Locked \"\", retry after Some(\"1\")",
        "200 OK \"healthy\", retry after None",
        "400 Bad Request \"\", retry after None",
    ],
    tonic_layer [] [] prints [
        "42 is shipped, fenced: true",
        "Aborted: lock \"orders/42\" was held until the end of the wait",
    ],
    leases [] [] prints [
        "17 rows",
        "lost: its lease ran out before a renewal was confirmed",
        "first guard held: false, second: true",
        "import: its lease ran out before a renewal was confirmed",
        "stopped: lock \"import\" was lost: its lease ran out before a renewal was confirmed",
        "more than a minute left: true",
    ],
    fencing [] [] prints [
        "  server B: redeemed; server A, after its pause: redeemed, but `unlock` returned the loss",
        "without fence: redeemed 2 times",
        "  server B: redeemed; server A, after its pause: stopped by the fence, nothing was written",
        "with guard.fence(&mut tx): redeemed 1 times",
        "  server B: Ok(()); server A, after its pause: Err(StaleToken)",
        "with a resource that checks tokens: 1 of 2 labels printed",
    ],
    reentrancy [] [] prints ["same token: true", "still held: true", "shipped 3", "free: true"],
    cancellation [] [] prints [
        "timed out: true",
        "free: true",
        "released by drop",
        "released from a plain thread: true",
    ],
    shutdown [] [] prints [
        "released: 1, lost: 1, abandoned: 0",
        "free for other processes",
    ],
    sigterm [] [] prints ["clean: true", "jobs finished: "],
    routing [] [] prints ["payments/7 is locked", "metrics/cpu is locked", "anything else is locked", "class none"],
    threads [] [] prints ["worker 0 holds it: true", "worker 3 holds it: true", "clean: true"],
    metrics [] [] prints [
        "lock_registry_held{store=\"memory\",name=\"orders/*\",mode=\"exclusive\"} 1",
        "lock_registry_held{store=\"memory\",name=\"tenants/*/import\",mode=\"exclusive\"} 1",
        "lock_registry_not_acquired_total{store=\"memory\",name=\"orders/*\",mode=\"exclusive\",reason=\"busy\"} 1",
    ],
    observer [] [] prints ["granted orders/42 at attempt 1", "lost orders/42: ", "renewal failed: true, losses counted: 1"],
    custom_backend [] [] prints ["busy: true", "held: true"],
    spring_peer [REDIS] [] prints [
        "invoice sent",
        "a lease of a minute: true",
        "a fencing token: true",
        "labels are stored: false",
        "free for the service: true",
    ],
    fenced_writes [REDIS] [] prints [
        "written",
        "refused, the newest token is the second holder's: true",
        "booked, the balance is 15",
    ],
    zookeeper [ZOOKEEPER] [] prints ["opened under token "],
    fenced_etcd [ETCD] [] prints ["force-released: true", "written atomically: true", "refused: true"],
    fenced_sql [POSTGRES] [] prints ["paid", "late: stopped by the fence, nothing was written", "balance: 15"],
    coupon [REDIS] [] prints [
        "sold: 10",
        "paid without a lock: 5",
        "paid with a lock: 1",
        "the late price was refused",
    ],
    redis_history [REDIS] [] prints [
        include_str!("../output/redis_history/setnx.txt"),
        include_str!("../output/redis_history/getset.txt"),
        include_str!("../output/redis_history/set_px.txt"),
        include_str!("../output/redis_history/redlock.txt"),
        include_str!("../output/redis_history/tokens.txt"),
    ],
    rate [] [] prints ["12 calls, at most 3 at once"],
    batch [] [] prints [
        "left for the second pass: [7]",
        "locked: accounts/3, accounts/7",
    ],
    queue [REDIS] [] prints ["balances: [50, 50]"],
    migrations [POSTGRES] [] prints ["ended well: 10"],
    cron_apalis [] [] prints ["another replica has run it", "each tick ran once: true"],
    cron_tokio [] [] prints ["another replica has run it", "each tick ran once: true"],
    versions [POSTGRES] [] prints [
        "first write succeeded: true",
        "second write succeeded: false",
        "15 + 20 = 35",
    ],
}

/// A placeholder for the URL of a Redis server that is started for the program.
const REDIS: &str = "a Redis server";
/// A placeholder for the URL of a PostgreSQL server.
const POSTGRES: &str = "a PostgreSQL server";
/// A placeholder for the URL of an etcd server.
const ETCD: &str = "an etcd server";
/// A placeholder for the URL of a ZooKeeper server.
const ZOOKEEPER: &str = "a ZooKeeper server";

/// Runs a program in a temporary folder, and checks that its output contains `lines`.
fn run(program: &str, args: &[&str], variables: &[(&str, &str)], lines: &[&str]) {
    let folder = tempfile::tempdir().expect("a temporary folder can be created");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be built");
    let wants_redis = args.contains(&REDIS);
    let redis = wants_redis.then(|| runtime.block_on(RedisServer::start(&[])));
    let redis = redis.transpose().expect("a Redis server can be started");
    let wants_postgres = args.contains(&POSTGRES);
    let postgres = wants_postgres.then(|| runtime.block_on(PostgresServer::start()));
    let postgres = postgres.transpose().expect("a PostgreSQL server can be started");
    let wants_zookeeper = args.contains(&ZOOKEEPER);
    let zookeeper = wants_zookeeper.then(|| runtime.block_on(ZooKeeperServer::start()));
    let zookeeper = zookeeper.transpose().expect("a ZooKeeper server can be started");
    let wants_etcd = args.contains(&ETCD);
    let etcd = wants_etcd.then(|| runtime.block_on(EtcdServer::start()));
    let etcd = etcd.transpose().expect("an etcd server can be started");
    let etcd_url = etcd.as_ref().map(|etcd| etcd.url().replace("http:", "etcd:"));
    let etcd_url = etcd_url.unwrap_or_default();
    let redis_url = redis.as_ref().map(RedisServer::url).unwrap_or_default();
    let postgres_url = postgres.as_ref().map(PostgresServer::url).unwrap_or_default();
    let zookeeper_url = zookeeper.as_ref().map(ZooKeeperServer::url).unwrap_or_default();
    let args = args.iter().map(|arg| match *arg {
        REDIS => &*redis_url,
        POSTGRES => &*postgres_url,
        ETCD => &*etcd_url,
        ZOOKEEPER => &*zookeeper_url,
        arg => arg,
    });
    let mut command = Command::new(program);
    command.args(args).current_dir(folder.path());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("LOCK_REGISTRY_") {
            command.env_remove(name);
        }
    }
    let output =
        command.envs(variables.iter().copied()).output().expect("the program can be started");
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    for line in lines {
        assert!(stdout.contains(line), "no {line:?} in:\n{stdout}{stderr}");
    }
    assert!(!stdout.contains("secret"), "a password was shown:\n{stdout}");
}

#[test]
fn every_program_is_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("the folder src/bin exists")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    found.sort();
    let mut tested: Vec<&str> = PROGRAMS.to_vec();
    tested.sort_unstable();
    assert_eq!(found, tested);
}
