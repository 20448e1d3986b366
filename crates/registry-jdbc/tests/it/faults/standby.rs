//! An asynchronous standby is promoted. Writes that it had not received are lost. Their holders
//! cannot commit, and exclusion is violated only until the next renewal.

use std::net::SocketAddr;
use std::time::Duration;

use registry_core::LockGuard;
use registry_jdbc::sqlx::mysql::MySqlConnection;
use registry_jdbc::sqlx::postgres::PgConnection;
use registry_jdbc::sqlx::{Connection, Executor};
use registry_jdbc::{Fence, FenceError};
use registry_testkit::mariadb::{MariaDbOptions, MariaDbServer};
use registry_testkit::postgres::PostgresServer;
use registry_testkit::{eventually, within};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::server::{Server, ServerKind, TEST_TIMEOUT, registry};
use super::workload::{LEASE, Workload};

/// A TCP forwarder with a fixed address, through which clients reach the current primary.
struct Forwarder {
    addr: SocketAddr,
    primary: watch::Sender<SocketAddr>,
    _tasks: JoinSet<()>,
}

impl Forwarder {
    async fn start(primary: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let primary = watch::Sender::new(primary);
        let target = primary.subscribe();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *target.borrow();
                connections.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(target).await {
                        drop(copy_bidirectional(&mut client, &mut server).await);
                    }
                });
            }
        });
        Self { addr, primary, _tasks: tasks }
    }
}

/// A primary, its standby, and the forwarder to the current primary.
struct ReplicatedPair {
    primary: Server,
    standby: Server,
    forwarder: Forwarder,
}

impl ReplicatedPair {
    async fn start(kind: ServerKind) -> Self {
        let (primary, standby) = match kind {
            ServerKind::Postgres => {
                let primary = PostgresServer::start().await.unwrap();
                let standby = primary.standby().await.unwrap();
                (Server::Postgres(primary), Server::Postgres(standby))
            }
            ServerKind::MariaDb => {
                let options = MariaDbOptions::new().args(&["--log-bin=log", "--server-id=1"]);
                let primary = MariaDbServer::start_with(options).await.unwrap();
                let options = MariaDbOptions::new().args(&["--server-id=2"]);
                let standby = MariaDbServer::start_with(options).await.unwrap();
                let (file, position) = binlog(&primary).await;
                let port = primary.addr().port();
                let replicate = format!(
                    "CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='root', \
                     MASTER_LOG_FILE='{file}', MASTER_LOG_POS={position}; START SLAVE"
                );
                standby.sql(&replicate).await.unwrap();
                (Server::MariaDb(primary), Server::MariaDb(standby))
            }
        };
        let forwarder = Forwarder::start(primary.addr()).await;
        Self { primary, standby, forwarder }
    }

    fn url(&self) -> String {
        self.primary.url_via(self.forwarder.addr)
    }

    /// Waits until the standby has received everything from the primary.
    async fn wait_for_standby(&self) {
        match &self.primary {
            Server::Postgres(primary) => {
                let query = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()";
                eventually(TEST_TIMEOUT, async || primary.sql(query).await.unwrap() == "1").await;
            }
            Server::MariaDb(primary) => {
                let (file, position) = binlog(primary).await;
                let wait = format!("SELECT MASTER_POS_WAIT('{file}', {position}, 60) >= 0");
                assert_eq!(self.standby.sql(&wait).await.unwrap(), "1");
            }
        }
    }

    /// Stops the replication to the standby.
    async fn stop_replication(&self) {
        match &self.primary {
            Server::Postgres(primary) => {
                let pid = primary.sql("SELECT pid FROM pg_stat_replication").await.unwrap();
                primary.pause_backend(pid.parse().unwrap()).unwrap();
            }
            Server::MariaDb(_) => drop(self.standby.sql("STOP SLAVE").await.unwrap()),
        }
    }

    /// Kills the primary and promotes the standby. Writes that were not replicated are lost.
    async fn fail_over(mut self) -> (Server, Forwarder) {
        self.primary.kill();
        match &self.standby {
            Server::Postgres(standby) => standby.promote().await.unwrap(),
            Server::MariaDb(standby) => drop(standby.sql("RESET SLAVE ALL").await.unwrap()),
        }
        self.forwarder.primary.send_replace(self.standby.addr());
        (self.standby, self.forwarder)
    }
}

/// Returns the file and the position up to which the primary has written its binary log.
async fn binlog(primary: &MariaDbServer) -> (String, String) {
    let status = primary.sql("SHOW MASTER STATUS").await.unwrap();
    let mut columns = status.split('\t').map(str::to_owned);
    (columns.next().unwrap(), columns.next().unwrap())
}

/// Inserts a sale in a transaction that `guard` fences, on the server of `url`. Returns whether it
/// committed.
async fn try_sell(guard: &LockGuard, url: &str) -> bool {
    macro_rules! try_sell {
        ($connection:ty) => {{
            let mut connection = <$connection>::connect(url).await.unwrap();
            let mut transaction = connection.begin().await.unwrap();
            match guard.fence(&mut transaction).await {
                Ok(()) => {
                    transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
                    transaction.commit().await.unwrap();
                    true
                }
                Err(FenceError::Lost { .. }) => {
                    transaction.rollback().await.unwrap();
                    false
                }
                Err(error) => panic!("{error:?}"),
            }
        }};
    }
    if url.starts_with("postgres") { try_sell!(PgConnection) } else { try_sell!(MySqlConnection) }
}

/// A failover to an asynchronous standby has the guarantees of class best-effort.
async fn an_unreplicated_lock_is_free_after_a_failover_and_its_holder_cannot_commit(
    kind: ServerKind,
) {
    let pair = ReplicatedPair::start(kind).await;
    let url = pair.url();
    pair.primary.sql("CREATE TABLE sale (coupon text)").await.unwrap();
    let lease = Duration::from_secs(60);
    let (first_registry, second_registry) =
        (registry(&url, lease).await, registry(&url, lease).await);
    let older = first_registry.obtain("older").lock().await.unwrap();
    pair.wait_for_standby().await;
    pair.stop_replication().await;
    let newer = first_registry.obtain("newer").lock().await.unwrap();
    let (server, _forwarder) = pair.fail_over().await;

    // The lock that had reached the standby is still held. The other one is free, and its holder
    // does not know it yet.
    let lock = second_registry.obtain("older");
    let taken = eventually(TEST_TIMEOUT, async || lock.try_lock().await).await;
    assert!(taken.is_none() && older.is_held());
    let successor = within(TEST_TIMEOUT, second_registry.obtain("newer").lock()).await.unwrap();
    assert!(successor.fencing_token() > newer.fencing_token());
    assert!(newer.is_held(), "it has received no notification yet");
    assert!(!try_sell(&newer, &url).await);
    assert!(try_sell(&older, &url).await && try_sell(&successor, &url).await);
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "2");
    // The holder is notified at its next renewal.
    let is_notified = async || newer.extend(lease).await.is_err() && !newer.is_held();
    eventually(TEST_TIMEOUT, is_notified).await;
    older.unlock().await.unwrap();
    successor.unlock().await.unwrap();
}

/// Two holders may exist until the first one's next renewal. Tokens keep growing, and no fenced
/// write is undone.
async fn a_failover_costs_exclusion_until_the_next_renewal_and_tokens_increase(kind: ServerKind) {
    let pair = ReplicatedPair::start(kind).await;
    let workload = Workload::begin_with_urls(&vec![pair.url(); 3], LEASE).await;
    workload.wait_for_progress().await;
    pair.stop_replication().await;
    workload.wait_for_progress().await;
    let begin = workload.now();
    let (server, _forwarder) = pair.fail_over().await;
    workload.wait_for_progress().await;
    let window = workload.window(begin, LEASE);
    workload.wait_for_progress().await;
    let outcome = workload.end(&server).await;
    outcome.without_busy_answers_in(&[window]).assert_guarantees_except_in(&[window]);
}

on_both_servers! {
    an_unreplicated_lock_is_free_after_a_failover_and_its_holder_cannot_commit,
    a_failover_costs_exclusion_until_the_next_renewal_and_tokens_increase,
}
