//! `lockreg serve` over each store that has a server.

use std::future::Future;
use std::io;

use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;
use tokio::runtime::Runtime;

use super::Serve;
use crate::support::{TestProcess, TestStore};

#[test]
fn the_locks_of_postgresql_are_served() {
    assert_served(PostgresServer::start(), PostgresServer::url);
}

#[test]
fn the_locks_of_mariadb_are_served() {
    assert_served(MariaDbServer::start(), MariaDbServer::url);
}

#[test]
fn the_locks_of_redis_are_served() {
    assert_served(RedisServer::start(&[] as &[&str]), |server| {
        format!("redis://{}", server.addr())
    });
}

#[test]
fn the_locks_of_zookeeper_are_served() {
    assert_served(ZooKeeperServer::start(), |server| server.url());
}

#[test]
fn the_locks_of_etcd_are_served() {
    assert_served(EtcdServer::start(), |server| format!("etcd://{}", server.addr()));
}

fn assert_served<S>(start: impl Future<Output = io::Result<S>>, url: impl Fn(&S) -> String) {
    let runtime = Runtime::new().unwrap();
    let _inside = runtime.enter();
    let server = runtime.block_on(start).unwrap();
    let (store, url) = (TestStore::new(), url(&server));
    let lockreg = |arguments: &[&str]| {
        let mut command = store.lockreg(["--url", &url]);
        command.args(arguments);
        command
    };
    let serve = Serve::of(&mut lockreg(&["serve", "--listen", "0", "--interval", "50ms"]));
    let holder = TestProcess::start(&mut lockreg(&["hold", "--label", "worker 7", "orders/42"]));
    holder.next_line();
    let waiter = TestProcess::start(&mut lockreg(&["hold", "--label", "worker 8", "orders/42"]));
    let lock = serve.wait_for("api/locks/orders/42", |lock| lock["waiters"][0].is_object());
    assert_eq!(
        (&lock["label"], &lock["waiters"][0]["label"]),
        (&"worker 7".into(), &"worker 8".into())
    );
    let waits = serve.get("api/waits").json();
    assert_eq!(
        (&waits["waits"][0]["waiter"], &waits["waits"][0]["holder"]),
        (&"worker 8".into(), &"worker 7".into())
    );
    assert_eq!(holder.finish(), 0);
    waiter.next_line();
    let lock = serve.wait_for("api/locks/orders/42", |lock| lock["label"] == "worker 8");
    assert_eq!(
        (&lock["history"][0]["label"], lock["history"][0]["ended"].as_bool()),
        (&"worker 7".into(), Some(true))
    );
    assert_eq!(waiter.finish(), 0);
    serve.wait_for("api/locks/orders/42", |lock| lock["held"] == false);
}
