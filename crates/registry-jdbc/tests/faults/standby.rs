//! A standby that follows asynchronously is promoted: what it had not got is lost, and that is all.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use registry_core::LockRegistry;
use registry_jdbc::sqlx::postgres::PgConnection;
use registry_jdbc::sqlx::{Connection, Executor};
use registry_jdbc::{Fence, FenceError};
use registry_testkit::postgres::PostgresServer;
use registry_testkit::{eventually, within};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::contest::{Contest, LEASE};
use crate::server::{LONG, Server, registry};

/// The address by which clients know the primary, whichever server that is.
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

/// Two servers, and the address of the one that counts.
struct Pair {
    primary: PostgresServer,
    standby: PostgresServer,
    address: Address,
}

impl Pair {
    async fn start() -> Self {
        let primary = PostgresServer::start().await.unwrap();
        let standby = primary.standby().await.unwrap();
        let address = Address::of(primary.addr()).await;
        Self { primary, standby, address }
    }

    fn url(&self) -> String {
        self.primary.url().replace(&self.primary.addr().to_string(), &self.address.addr.to_string())
    }

    /// Returns when the standby has everything that the primary has.
    async fn catch_up(&self) {
        let has_all =
            "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn = pg_current_wal_lsn()";
        eventually(LONG, async || self.primary.sql(has_all).await.unwrap() == "1").await;
    }

    /// From here on the standby gets nothing more.
    async fn fall_behind(&self) {
        let pid = self.primary.sql("SELECT pid FROM pg_stat_replication").await.unwrap();
        self.primary.pause_backend(pid.parse().unwrap()).unwrap();
    }

    /// The primary is gone, with all that the standby has not got.
    async fn fail_over(mut self) -> (Server, Address) {
        self.primary.kill();
        self.standby.promote().await.unwrap();
        self.address.primary.send_replace(self.standby.addr());
        (Server::Postgres(self.standby), self.address)
    }
}

/// What a client may be in the middle of at a failover.
async fn data(url: &str) -> PgConnection {
    let connect = async || {
        let connection = PgConnection::connect(url).await;
        connection.map_err(|error| io::Error::other(error.to_string()))
    };
    eventually(LONG, connect).await
}

#[tokio::test]
async fn a_lock_that_the_standby_has_not_got_is_free_and_its_holder_cannot_commit() {
    let pair = Pair::start().await;
    let url = pair.url();
    pair.primary.sql("CREATE TABLE sale (coupon text)").await.unwrap();
    let lease = Duration::from_secs(60);
    let (ours, theirs) = (registry(&url, lease).await, registry(&url, lease).await);
    let older = ours.obtain("older").lock().await.unwrap();
    pair.catch_up().await;
    pair.fall_behind().await;
    let newer = ours.obtain("newer").lock().await.unwrap();
    let (server, _address) = pair.fail_over().await;

    // The one that had reached the standby is still held,
    let next = theirs.obtain("older").try_lock().await.unwrap();
    assert!(next.is_none() && older.is_held());
    // the other one is not, for a while without its holder's knowledge. This is what class C means.
    let successor = within(LONG, theirs.obtain("newer").lock()).await.unwrap();
    assert!(successor.fencing_token() > newer.fencing_token());
    let mut data = data(&url).await;
    for (guard, may) in [(&older, true), (&newer, false), (&successor, true)] {
        let mut transaction = data.begin().await.unwrap();
        let fenced = guard.fence(&mut transaction).await;
        if may {
            fenced.unwrap();
            transaction.execute("INSERT INTO sale VALUES ('7')").await.unwrap();
            transaction.commit().await.unwrap();
        } else {
            assert!(matches!(fenced.unwrap_err(), FenceError::Lost { .. }));
            transaction.rollback().await.unwrap();
        }
    }
    assert_eq!(server.sql("SELECT count(*) FROM sale").await.unwrap(), "2");
    // It is told at its next renewal.
    let told = newer.renew(lease).await;
    assert!(told.is_err() && !newer.is_held(), "{told:?}");
    older.unlock().await.unwrap();
    successor.unlock().await.unwrap();
}

/// There may be two holders until the first one's next renewal; tokens grow on, and no fenced write goes back.
#[tokio::test]
async fn a_failover_costs_exclusion_until_the_next_renewal_and_tokens_grow_on() {
    let pair = Pair::start().await;
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
