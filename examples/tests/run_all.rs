//! Runs every example program to its end and checks the output that the book promises.

use std::path::Path;
use std::process::Command;

use registry_testkit::etcd::EtcdServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;

/// One test per program, and the list that `every_program_is_run` compares with the folder.
macro_rules! programs {
    ($($name:ident $args:tt $variables:tt says $lines:tt,)*) => {
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
    hello [] [] says ["order 42 is ours: Some(FencingToken("],
    deadline [] [] says [
        "busy, so somebody else writes the report",
        "still busy after 50 ms",
        "its lease ends within 30 s: true",
        "ours",
    ],
    framework ["sqlite:locks.db"] [] says [
        "sqlite: class A, excludes this host",
        "node 1: 17 rows written",
        "node 2: another node has run it",
        "node 3: another node has run it",
    ],
    require [] [] says [
        "sqlite:locks.db will do",
        "payments need more than memory promises",
        "payments need fencing tokens, which pass-through does not give",
    ],
    configuration [] [("LOCK_REGISTRY_POLL", "500ms")] says [
        "lease = 20s (the configuration file)",
        "poll = 500ms (the environment)",
        "label = worker 7 (the code)",
        "busy_timeout = 1s (the configuration file)",
        "lease under 20 s: true",
        "did you mean \"sqlite\"?",
        "did you mean \"lease\"?",
        "which has no unit",
        "has a path, which means nothing in etcd",
    ],
    code [] [] says ["held as Some(\"nightly report\")", "still taken: true", "free: true"],
    leases [] [] says [
        "17 rows",
        "told of the loss: its lease ran out before a renewal was confirmed",
        "held by us: false, by them: true",
        "import: its lease ran out before a renewal was confirmed",
        "stopped: lock \"import\" was lost: its lease ran out before a renewal was confirmed",
        "more than a minute left: true",
    ],
    fencing [] [] says [
        "  server B: redeemed; server A, after its pause: redeemed, and told afterwards that the lock had been lost",
        "without fence: redeemed 2 times",
        "  server B: redeemed; server A, after its pause: stopped by the fence, nothing was written",
        "with guard.fence(&mut tx): redeemed 1 times",
        "  server B: Ok(()); server A, after its pause: Err(Refused)",
        "with a resource that checks tokens: 1 of 2 labels printed",
    ],
    reentrancy [] [] says ["same token: true", "still held: true", "shipped 3", "free: true"],
    cancellation [] [] says [
        "gave up: true",
        "free: true",
        "released by drop",
        "released from a plain thread: true",
    ],
    shutdown [] [] says [
        "let go in time: 1, told that they lost: 1, left to their lease: 0",
        "free for others",
    ],
    routing [] [] says ["payments/7: token yes", "metrics/cpu: token no", "anything else: token yes", "class none"],
    threads [] [] says ["worker 0 holds it: true", "worker 3 holds it: true", "clean: true"],
    observer [] [] says ["granted orders/42 at attempt 1", "lost orders/42: ", "told: true, losses counted: 1"],
    custom_backend [] [] says ["busy: true", "held: true"],
    spring_peer [REDIS] [] says [
        "invoice sent",
        "a lease of a minute: true",
        "a fencing token: true",
        "labels are kept: false",
        "free for the service: true",
    ],
    fenced_writes [REDIS] [] says [
        "written",
        "refused, the newest is that of the other: true",
        "booked, 15 are left",
    ],
    zookeeper [ZOOKEEPER] [] says ["opened under token Some(FencingToken("],
    fenced_etcd [ETCD] [] says ["broken: true", "written in one step: true", "refused: true"],
    fenced_sql [POSTGRES] [] says ["paid", "late: stopped by the fence, nothing was written", "15 are left"],
    versions [POSTGRES] [] says [
        "theirs was written: true",
        "ours was written: false",
        "15 and 20 are 35",
    ],
}

/// Stands for the URL of a Redis server that is started for the program.
const REDIS: &str = "a Redis server";
/// Stands for the URL of a PostgreSQL server.
const POSTGRES: &str = "a PostgreSQL server";
/// Stands for the URL of an etcd server.
const ETCD: &str = "an etcd server";
/// Stands for the URL of a ZooKeeper server.
const ZOOKEEPER: &str = "a ZooKeeper server";

/// Runs a program in its own folder and checks that its output contains `lines`.
fn run(program: &str, args: &[&str], variables: &[(&str, &str)], lines: &[&str]) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
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
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}{complaints}", output.status);
    for line in lines {
        assert!(said.contains(line), "no {line:?} in:\n{said}{complaints}");
    }
    assert!(!said.contains("secret"), "a password was shown:\n{said}");
}

#[test]
fn every_program_is_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("the programs are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .collect();
    found.sort();
    let mut tested: Vec<&str> = PROGRAMS.to_vec();
    tested.sort_unstable();
    assert_eq!(found, tested);
}
