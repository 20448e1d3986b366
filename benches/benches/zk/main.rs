//! Measures a lock in ZooKeeper and its hand-over between processes. The references are the three
//! requests that a lock needs, the lock of the client library, and the lock of Apache Curator.
//!
//! The processes are this program itself with another argument, and `tests/peers/Curator.java`.
//! They may run on all processors: the server and Curator have many threads, and their work for one
//! request overlaps.

mod reference;
mod hand_over;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lock_registry_benches::{compare_in_task, is_full_run, record_server, row, write_results};
use registry_core::Registry;
use registry_testkit::process::HelperProcess;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{ZkBackend, ZkConfig};
use tokio::sync::Mutex;
use zookeeper_client::{Acls, Client, CreateMode, LockOptions, LockPrefix};

use reference::ZkReference;

/// The time limit of every step, on top of the measured time.
const LIMIT: Duration = Duration::from_secs(120);
const SESSION: Duration = Duration::from_secs(30);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        if let ["child", ref rest @ ..] = words[..] {
            hand_over::child(rest).await;
            return;
        }
        let server = ZooKeeperServer::start().await.unwrap();
        record_server("ZooKeeper", &server.send_command("srvr").await.unwrap());
        pairs(&server).await;
        hand_over::bench(&server).await;
        write_results("zk");
    });
}

async fn pairs(server: &ZooKeeperServer) {
    let uncontended = row("pairs", "ZooKeeper: uncontended lock and unlock");
    let registry = open_registry(&server.addr().to_string()).await;
    let lock = registry.obtain("orders/42");
    let lock_and_unlock = move |pairs| {
        let lock = lock.clone();
        async move {
            for _ in 0..pairs {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        }
    };

    let reference = ZkReference::connect(&server.addr().to_string(), "/bare").await;
    let reference = Arc::new(Mutex::new(reference));
    let sequential = {
        let reference = Arc::clone(&reference);
        move |pairs| {
            let reference = Arc::clone(&reference).lock_owned();
            async move {
                let mut reference = reference.await;
                for _ in 0..pairs {
                    reference.lock().await;
                    reference.unlock().await;
                }
            }
        }
    };
    let against = "the three bare requests, one after the other";
    compare_in_task(uncontended.clone(), against, sequential, lock_and_unlock.clone()).await;
    let pipelined = move |pairs| {
        let reference = Arc::clone(&reference).lock_owned();
        async move {
            let mut reference = reference.await;
            for _ in 0..pairs {
                reference.lock_pipelined().await;
                reference.unlock().await;
            }
        }
    };
    let against = "the same, two of them sent at once";
    compare_in_task(uncontended.clone(), against, pipelined, lock_and_unlock.clone()).await;

    let client = connect(&server.addr().to_string()).await;
    let other = move |pairs| lock_with_client_library(client.clone(), pairs);
    let against = "`zookeeper-client`'s lock, deleted explicitly";
    compare_in_task(uncontended.clone(), against, other, lock_and_unlock.clone()).await;

    let warm_up_pairs = if is_full_run() { 3_000 } else { 10 };
    let curator = Arc::new(Mutex::new(curator(&server.url(), warm_up_pairs).await));
    let other = move |pairs: usize| {
        let curator = Arc::clone(&curator).lock_owned();
        async move {
            let mut curator = curator.await;
            curator.write_line(&pairs.to_string()).unwrap();
            let done = curator.expect_line(|line| line.parse::<u64>().is_ok(), LIMIT).await;
            done.unwrap();
        }
    };
    compare_in_task(uncontended, "Curator's `InterProcessMutex`", other, lock_and_unlock).await;
    _ = registry.close(LIMIT).await;
}

async fn lock_with_client_library(client: Client, pairs: usize) {
    let directory = CreateMode::Container.with_acls(Acls::anyone_all());
    for _ in 0..pairs {
        let options = LockOptions::new(Acls::anyone_all());
        let options = options.with_ancestor_options(directory.clone()).unwrap();
        let prefix = LockPrefix::new_curator("/theirs/orders", "lock-").unwrap();
        let lock = client.lock(prefix, b"", options).await.unwrap();
        // Dropping the lock deletes the node too, but in the background, where it cannot be
        // awaited.
        client.delete(lock.lock_path(), None).await.unwrap();
    }
}

/// Starts `tests/peers/Curator.java`, which first runs `warm_up_pairs` pairs.
async fn curator(url: &str, warm_up_pairs: usize) -> HelperProcess {
    const CLASSES: &str = "/usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-nop.jar";
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers/Curator.java");
    let mut java = Command::new("java");
    java.args(["-cp", CLASSES]).arg(program).args(["--url", url, "--path", "/curator/orders"]);
    java.args(["--bench", &warm_up_pairs.to_string()]);
    let mut curator = HelperProcess::spawn(java).unwrap();
    curator.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    curator
}

async fn open_registry(servers: &str) -> Registry {
    let config = ZkConfig::new(servers).unwrap().with_session_timeout(SESSION);
    let backend = ZkBackend::open(config).await.unwrap();
    Registry::builder(Arc::new(backend)).lease(SESSION / 2).build().unwrap()
}

async fn connect(servers: &str) -> Client {
    Client::connector().with_session_timeout(SESSION).connect(servers).await.unwrap()
}
