//! Registries for the tests, and what they are opened with.

use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_testkit::contest::{Contest, Outcome};
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{ZkBackend, ZkConfig};
use zookeeper_client::Client;

/// Short, so that a test of a session that ends does not take long.
pub(crate) const SESSION: Duration = Duration::from_secs(4);
/// So long that no trouble of a moment ends it, on a machine that has other things to do.
pub(crate) const LONG_SESSION: Duration = Duration::from_secs(20);
/// So long that a server may take half a minute to start again without ending a hold, however busy the machine is.
pub(crate) const PATIENT_SESSION: Duration = Duration::from_secs(60);
/// How long a question may stay unanswered.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How many clients there are.
const CLIENTS: usize = 3;

pub(crate) fn config(url: &str, session: Duration) -> ZkConfig {
    let config = ZkConfig::new(url.strip_prefix("zk://").unwrap()).unwrap();
    config.with_session_timeout(session).with_request_timeout(ANSWER_LIMIT)
}

/// The store, with a session of its own.
pub(crate) async fn backend(url: &str, session: Duration) -> Arc<ZkBackend> {
    Arc::new(ZkBackend::open(config(url, session)).await.unwrap())
}

/// A registry over it, with the longest leases that the session allows.
pub(crate) fn over(backend: &Arc<ZkBackend>) -> Registry {
    let lease = backend.session_timeout() / 2;
    let builder = Registry::builder(Arc::clone(backend) as Arc<_>).lease(lease);
    builder.timeout(ANSWER_LIMIT).build().unwrap()
}

/// A registry with a session of its own, as another process would have it.
pub(crate) async fn registry(url: &str, session: Duration) -> Registry {
    over(&backend(url, session).await)
}

/// Lets clients contend that all know the same servers.
pub(crate) async fn contest(url: &str, session: Duration) -> Contest {
    contest_by(&vec![url.to_owned(); CLIENTS], session).await
}

/// The same, with a way to the servers for each.
pub(crate) async fn contest_by(ways: &[String], session: Duration) -> Contest {
    let mut registries = Vec::new();
    for way in ways {
        registries.push(registry(way, session).await);
    }
    Contest::begin(registries).await
}

/// Ends a contest when all is well again.
pub(crate) async fn end(contest: Contest, url: &str) -> Outcome {
    let newcomer = registry(url, SESSION).await;
    // What somebody has left behind lives no longer than its session.
    let outcome =
        contest.end(newcomer, PATIENT_SESSION + Duration::from_secs(20), Vec::new()).await;
    println!("{outcome}");
    outcome
}

/// A client without a registry, which can do what operators and other programs do.
pub(crate) async fn operator(server: &ZooKeeperServer) -> Client {
    let connector = Client::connector().with_session_timeout(LONG_SESSION);
    connector.connect(&server.addr().to_string()).await.unwrap()
}

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
