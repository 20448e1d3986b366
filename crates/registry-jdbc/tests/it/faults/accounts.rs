//! Eight processes update one account by reading, waiting and writing under a lock. Holders of the
//! lock are suspended for longer than their lease. With a fenced transaction no update is lost.
//! Without the fence some are lost, although every process has acquired the lock.

use std::env;
use std::io::BufRead;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use registry_core::{Key, LockGuard, LockOptions, Registry};
use registry_jdbc::sqlx::mysql::MySqlConnection;
use registry_jdbc::sqlx::postgres::PgConnection;
use registry_jdbc::sqlx::{self, AssertSqlSafe, Connection};
use registry_jdbc::{Fence, FenceError};
use registry_testkit::eventually;
use registry_testkit::process::HelperProcess;
use tokio::time::{Instant, sleep};

use super::server::{
    LockMode, OpenOptions, Server, ServerKind, TEST_TIMEOUT, backend, backend_with,
    backend_with_long_timeouts,
};

const WRITERS: usize = 8;
/// Short, because each suspension exceeds the lease.
const LEASE: Duration = Duration::from_millis(600);
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(300);
/// The number of suspended holders per round.
const PAUSES_PER_ROUND: usize = 4;
/// The number of rounds of a test. The measurement runs [more](MANY_ROUNDS).
const ROUNDS: usize = 3;
const MANY_ROUNDS: usize = 20;
const KEY: &str = "account/1";

const URL_VARIABLE: &str = "LOCK_REGISTRY_TEST_ACCOUNTS";
const NAME_VARIABLE: &str = "LOCK_REGISTRY_TEST_CLERK";
const FENCE_VARIABLE: &str = "LOCK_REGISTRY_TEST_FENCE";

/// The result of one round.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Round {
    /// The number of transactions whose commit the database confirmed. Each adds one.
    committed: i64,
    /// The number of transactions that the fence stopped.
    stopped: i64,
    balance: i64,
}

#[test]
#[ignore = "started by the other tests, as another process"]
fn a_writer_process() {
    let Ok(url) = env::var(URL_VARIABLE) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let round = runtime.block_on(async {
        let open_options = OpenOptions {
            connections: 2,
            busy_timeout: RESPONSE_TIMEOUT / 2,
            response_timeout: RESPONSE_TIMEOUT,
        };
        let builder = Registry::builder(backend_with(&url, open_options).await).lease(LEASE);
        let registry = builder.timeout(RESPONSE_TIMEOUT).build().unwrap();
        run_writer(&registry, AccountConnection::connect(&url).await).await
    });
    println!("\ncounted {} {}", round.committed, round.stopped);
    std::process::exit(0);
}

async fn run_writer(registry: &Registry, mut account: AccountConnection) -> Round {
    let is_fenced = env::var(FENCE_VARIABLE).unwrap() == "yes";
    let name = env::var(NAME_VARIABLE).unwrap();
    let is_stopped = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&is_stopped);
    // A line of input or its end stops the writer.
    std::thread::spawn(move || {
        drop(std::io::stdin().lock().read_line(&mut String::new()));
        stop.store(true, Ordering::Relaxed);
    });
    let lock = registry.obtain(KEY);
    let mut round = Round::default();
    while !is_stopped.load(Ordering::Relaxed) {
        let options = LockOptions::new().wait(LEASE).label(&*name);
        // While a fenced transaction is suspended, no caller is granted the lock, and calls return
        // errors.
        let Ok(Some(guard)) = lock.try_lock_with(options).await else { continue };
        match account.add_one(&guard, is_fenced).await {
            Ok(()) => round.committed += 1,
            Err(FenceError::Lost { .. } | FenceError::Busy { .. }) => round.stopped += 1,
            Err(error) => panic!("{error:?}"),
        }
        drop(guard.unlock().await);
    }
    round
}

/// The writer's connection to the account's database.
enum AccountConnection {
    Postgres(PgConnection),
    MySql(MySqlConnection),
}

impl AccountConnection {
    async fn connect(url: &str) -> Self {
        if url.starts_with("postgres") {
            Self::Postgres(PgConnection::connect(url).await.unwrap())
        } else {
            Self::MySql(MySqlConnection::connect(url).await.unwrap())
        }
    }

    async fn add_one(&mut self, guard: &LockGuard, is_fenced: bool) -> Result<(), FenceError> {
        // A macro, because no common trait of the two connection types permits these calls.
        macro_rules! add_one {
            ($connection:expr) => {{
                let connection = $connection;
                let balance: i64 = sqlx::query_scalar("SELECT balance FROM account")
                    .fetch_one(&mut *connection)
                    .await
                    .unwrap();
                // Most suspensions happen here.
                sleep_randomly(20).await;
                let mut transaction = connection.begin().await.unwrap();
                if is_fenced && let Err(error) = guard.fence(&mut transaction).await {
                    transaction.rollback().await.unwrap();
                    return Err(error);
                }
                sleep_randomly(5).await;
                let update = format!("UPDATE account SET balance = {}", balance + 1);
                let update = sqlx::query(AssertSqlSafe(update)).persistent(false);
                update.execute(&mut *transaction).await.unwrap();
                sleep_randomly(5).await;
                transaction.commit().await.unwrap();
            }};
        }
        match self {
            Self::Postgres(connection) => add_one!(connection),
            Self::MySql(connection) => add_one!(connection),
        }
        Ok(())
    }
}

/// Sleeps for a random time, so that suspensions occur at every step.
async fn sleep_randomly(millis_max: u64) {
    sleep(Duration::from_millis(fastrand::u64(1..=millis_max))).await;
}

async fn start_server(kind: ServerKind) -> Server {
    let server = kind.start().await;
    // The first backend creates the tables.
    drop(backend(&server.url()).await);
    server.sql("CREATE TABLE account (balance bigint)").await.unwrap();
    server.sql("INSERT INTO account VALUES (0)").await.unwrap();
    server
}

/// Runs the writers, and suspends one after the other while it holds the lock.
async fn run_round(server: &Server, is_fenced: bool) -> Round {
    server.sql("UPDATE account SET balance = 0").await.unwrap();
    let watcher = backend_with_long_timeouts(&server.url(), LockMode::Lease).await;
    let key = Key::new(KEY).unwrap();
    let spawn_writer = |number: usize| {
        let mut program = Command::new(env::current_exe().unwrap());
        program.args(["faults::accounts::a_writer_process", "--exact", "--ignored", "--nocapture"]);
        program.env(URL_VARIABLE, server.url()).env(NAME_VARIABLE, number.to_string());
        program.env(FENCE_VARIABLE, if is_fenced { "yes" } else { "no" });
        HelperProcess::spawn(program).unwrap()
    };
    let mut writers: Vec<HelperProcess> = (0..WRITERS).map(spawn_writer).collect();
    for _ in 0..PAUSES_PER_ROUND {
        let before = balance(server).await;
        eventually(TEST_TIMEOUT, async || balance(server).await > before).await;
        let current_holder = async || -> Option<usize> {
            watcher.admin().unwrap().inspect(&key).await.unwrap().pop()?.label?.parse().ok()
        };
        // The holder may have released the lock before it was suspended. Then the test suspends the
        // next holder.
        let holder = eventually(TEST_TIMEOUT, async || {
            let number = current_holder().await?;
            sleep(Duration::from_millis(fastrand::u64(0..10))).await;
            writers[number].pause().await.unwrap();
            if current_holder().await == Some(number) {
                return Some(number);
            }
            writers[number].resume().unwrap();
            None
        })
        .await;
        let before = balance(server).await;
        sleep(LEASE + Duration::from_millis(fastrand::u64(100..600))).await;
        // Only an update by another holder can be lost. There is none if the suspended transaction
        // has locked the row.
        let until = Instant::now() + LEASE * 10;
        while !is_fenced && balance(server).await == before && Instant::now() < until {
            sleep(Duration::from_millis(10)).await;
        }
        writers[holder].resume().unwrap();
    }
    let mut round = Round::default();
    for writer in &mut writers {
        // A closed input stops the writer.
        writer.close_stdin();
    }
    for mut writer in writers {
        let parse_counts = |line: &str| {
            let mut numbers = line.strip_prefix("counted ")?.split(' ').map(str::parse::<i64>);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        };
        let (committed, stopped) = writer.expect_map(parse_counts, TEST_TIMEOUT).await.unwrap();
        round.committed += committed;
        round.stopped += stopped;
    }
    round.balance = balance(server).await;
    round
}

async fn balance(server: &Server) -> i64 {
    server.sql("SELECT balance FROM account").await.unwrap().parse().unwrap()
}

async fn assert_fence_loses_no_update(kind: ServerKind, rounds: usize) {
    let server = start_server(kind).await;
    let mut stopped = 0;
    // On a loaded machine, more rounds may pass until a holder is suspended after it has read the
    // balance.
    for number in 1..=rounds * 5 {
        if number > rounds && stopped > 0 {
            break;
        }
        let round = run_round(&server, true).await;
        println!("round {number}: {round:?}");
        assert_eq!(round.balance, round.committed, "updates were lost");
        assert!(round.committed >= 5, "too few events: {round:?}");
        stopped += round.stopped;
    }
    println!("{kind:?}: the fence stopped {stopped}");
    assert!(stopped > 0, "no pause suspended a holder");
}

async fn with_the_fence_no_update_is_lost(kind: ServerKind) {
    assert_fence_loses_no_update(kind, ROUNDS).await;
}

async fn with_the_fence_no_update_is_lost_in_many_rounds(kind: ServerKind) {
    assert_fence_loses_no_update(kind, MANY_ROUNDS).await;
}

async fn without_the_fence_updates_are_lost(kind: ServerKind) {
    let server = start_server(kind).await;
    // On a loaded machine, more rounds may pass until a holder is suspended after it has read the
    // balance.
    for _ in 0..ROUNDS * 5 {
        let round = run_round(&server, false).await;
        println!("{kind:?}: {round:?}, {} lost", round.committed - round.balance);
        if round.balance < round.committed {
            return;
        }
    }
    panic!("no round without the fence lost an update");
}

on_both_servers! {
    with_the_fence_no_update_is_lost,
    without_the_fence_updates_are_lost,
    #[ignore = "a measurement, which takes minutes: cargo test -p registry-jdbc --all-features --test it -- --ignored --nocapture many_rounds"]
    with_the_fence_no_update_is_lost_in_many_rounds,
}
