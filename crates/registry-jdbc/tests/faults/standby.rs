//! An asynchronous standby is promoted: only the writes that it had not received are lost.

use std::net::SocketAddr;
use std::time::Duration;

use registry_core::{LockGuard, LockRegistry};
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

use crate::contest::{Contest, LEASE};
use crate::server::{Kind, LONG, Server, registry};

/// The address under which clients reach the current primary.
struct Address {
    addr: SocketAddr,
    primary: watch::Sender<SocketAddr>,
    _tasks: JoinSet<()>,
}

impl Address {
    async fn of(primary: SocketAddr) -> Self {
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

/// Two servers, and the address of the current primary.
struct Pair {
    primary: Server,
    standby: Server,
    address: Address,
}

impl Pair {
    async fn start(kind: Kind) -> Self {
        let (primary, standby) = match kind {
            Kind::Postgres => {
                let primary = PostgresServer::start().await.unwrap();
                let standby = primary.standby().await.unwrap();
                (Server::Postgres(primary), Server::Postgres(standby))
            }
            Kind::MariaDb => {
                let options = MariaDbOptions::new().args(&["--log-bin=log", "--server-id=1"]);
                let primary = MariaDbServer::start_with(options).await.unwrap();
                let options = MariaDbOptions::new().args(&["--server-id=2"]);
                let standby = MariaDbServer::start_with(options).await.unwrap();
                let (file, position) = binlog(&primary).await;
                let port = primary.addr().port();
                let follow = format!(
                    "CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='root', \
                     MASTER_LOG_FILE='{file}', MASTER_LOG_POS={position}; START SLAVE"
                );
                standby.sql(&follow).await.unwrap();
                (Server::MariaDb(primary), Server::MariaDb(standby))
            }
        };
        let address = Address::of(primary.addr()).await;
        Self { primary, standby, address }
    }

    fn url(&self) -> String {
        self.primary.url_by(self.address.addr)
    }

    /// Waits until the standby has received everything from the primary.
    async fn catch_up(&self) {
        match &self.primary {
            Server::Postgres(primary) => {
                let has_all = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()";
                eventually(LONG, async || primary.sql(has_all).await.unwrap() == "1").await;
            }
            Server::MariaDb(primary) => {
                let (file, position) = binlog(primary).await;
                let wait = format!("SELECT MASTER_POS_WAIT('{file}', {position}, 60) >= 0");
                assert_eq!(self.standby.sql(&wait).await.unwrap(), "1");
            }
        }
    }

    /// Stops the replication to the standby.
    async fn fall_behind(&self) {
        match &self.primary {
            Server::Postgres(primary) => {
                let pid = primary.sql("SELECT pid FROM pg_stat_replication").await.unwrap();
                primary.pause_backend(pid.parse().unwrap()).unwrap();
            }
            Server::MariaDb(_) => drop(self.standby.sql("STOP SLAVE").await.unwrap()),
        }
    }

    /// Kills the primary and promotes the standby. Writes that were not replicated are lost.
    async fn fail_over(mut self) -> (Server, Address) {
        self.primary.kill();
        match &self.standby {
            Server::Postgres(standby) => standby.promote().await.unwrap(),
            Server::MariaDb(standby) => drop(standby.sql("RESET SLAVE ALL").await.unwrap()),
        }
        self.address.primary.send_replace(self.standby.addr());
        (self.standby, self.address)
    }
}

/// The position up to which the primary has written its log.
async fn binlog(primary: &MariaDbServer) -> (String, String) {
    let status = primary.sql("SHOW MASTER STATUS").await.unwrap();
    let mut columns = status.split('\t').map(str::to_owned);
    (columns.next().unwrap(), columns.next().unwrap())
}

/// Whether a fenced transaction of `guard` on the server of `url` commits.
async fn sells(guard: &LockGuard, url: &str) -> bool {
    macro_rules! sells {
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
    if url.starts_with("postgres") { sells!(PgConnection) } else { sells!(MySqlConnection) }
}

/// A failover to an asynchronous standby has the guarantees of class C.
async fn a_lock_that_the_standby_has_not_got_is_free_and_its_holder_cannot_commit(kind: Kind) {
    let pair = Pair::start(kind).await;
    let url = pair.url();
    pair.primary.sql("CREATE TABLE sale (coupon text)").await.unwrap();
    let lease = Duration::from_secs(60);
    let (ours, theirs) = (registry(&url, lease).await, registry(&url, lease).await);
    let older = ours.obtain("older").lock().await.unwrap();
    pair.catch_up().await;
    pair.fall_behind().await;
    let newer = ours.obtain("newer").lock().await.unwrap();
    let (server, _address) = pair.fail_over().await;

    // The lock that had reached the standby is still held. The other one is free, and its holder
    // does not know it yet.
    let lock = theirs.obtain("older");
    let taken = eventually(LONG, async || lock.try_lock().await).await;
    assert!(taken.is_none() && older.is_held());
    let successor = within(LONG, theirs.obtain("newer").lock()).await.unwrap();
    assert!(successor.fencing_token() > newer.fencing_token());
    assert!(newer.is_held(), "it cannot know yet");
    assert!(!sells(&newer, &url).await);
    assert!(sells(&older, &url).await && sells(&successor, &url).await);
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "2");
    // The holder is notified at its next renewal.
    let told = async || newer.renew(lease).await.is_err() && !newer.is_held();
    eventually(LONG, told).await;
    older.unlock().await.unwrap();
    successor.unlock().await.unwrap();
}

/// Two holders may exist until the first one's next renewal. Tokens keep growing, and no fenced
/// write is undone.
async fn a_failover_costs_exclusion_until_the_next_renewal_and_tokens_grow_on(kind: Kind) {
    let pair = Pair::start(kind).await;
    let contest = Contest::begin_by(&vec![pair.url(); 3], LEASE).await;
    contest.goes_on().await;
    pair.fall_behind().await;
    contest.goes_on().await;
    let begin = contest.now();
    let (server, _address) = pair.fail_over().await;
    contest.goes_on().await;
    let window = (begin, contest.after(LEASE));
    contest.goes_on().await;
    let outcome = contest.end(&server).await;
    outcome.with_releases_taken_back(&[window]).assert_flawless_but_between(&[window]);
}

on_both_servers! {
    a_lock_that_the_standby_has_not_got_is_free_and_its_holder_cannot_commit,
    a_failover_costs_exclusion_until_the_next_renewal_and_tokens_grow_on,
}
