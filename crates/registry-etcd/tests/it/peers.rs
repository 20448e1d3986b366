//! Locks that are shared with other programs: `etcdctl lock`, and etcd's lock service through the
//! JSON gateway. Both sides exclude each other, and a release on one side wakes waiters on the
//! other.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may unwrap")]

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use registry_core::Registry;
use registry_etcd::{EtcdBackend, EtcdConfig, Layout};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::process::HelperProcess;
use registry_testkit::{eventually, within};

/// Sufficient on any machine; reached only by a failing test.
const LONG: Duration = Duration::from_secs(240);
/// How many times each client acquires the lock.
const SECTIONS: usize = 200;
/// How long opening a connection may take. Long enough for any machine.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a request may take. Long enough for any machine, and shorter than the lease.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The critical section of `peer.py` as a shell script. It reads the creation revision of the key,
/// because etcdctl reports a later revision if it had to wait.
const SECTION: &str = r#"
set -e
mkdir "$FOLDER/inside"
count=$(cat "$FOLDER/counter")
revision=$(etcdctl get "$ETCD_LOCK_KEY" -w fields | sed -n 's/^"CreateRevision" : //p')
echo "etcdctl $revision" >> "$FOLDER/journal"
echo $((count + 1)) > "$FOLDER/counter"
rmdir "$FOLDER/inside"
"#;

async fn registry(server: &EtcdServer) -> Registry {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    let config = config.with_connect_timeout(CONNECT_TIMEOUT).with_response_timeout(TIMEOUT);
    let backend = EtcdBackend::open(config.with_layout(Layout::Etcdctl)).await.unwrap();
    Registry::builder(Arc::new(backend)).timeout(TIMEOUT).build().unwrap()
}

/// The same critical section in this process.
fn critical_section(folder: &Path, token: u64) {
    fs::create_dir(folder.join("inside")).expect("another client is in the section");
    let count: usize = fs::read_to_string(folder.join("counter")).unwrap().trim().parse().unwrap();
    let mut journal = OpenOptions::new().append(true).open(folder.join("journal")).unwrap();
    writeln!(journal, "registry {token}").unwrap();
    fs::write(folder.join("counter"), (count + 1).to_string()).unwrap();
    fs::remove_dir(folder.join("inside")).unwrap();
}

fn etcdctl(server: &EtcdServer, args: &[&str]) -> Command {
    let mut command = server.ctl_command();
    command.args(args);
    command
}

#[tokio::test]
async fn etcdctl_the_gateway_and_this_store_exclude_each_other() {
    let server = EtcdServer::start().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("counter"), "0").unwrap();
    fs::write(folder.join("journal"), "").unwrap();

    let mut gateway = Command::new("python3");
    gateway.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/peer.py"));
    gateway.args([&server.addr().to_string(), "orders", &SECTIONS.to_string()]).arg(folder);
    let mut gateway = HelperProcess::spawn(gateway).unwrap();

    let mut shell = Command::new("sh");
    let sections =
        r#"set -e; for n in $(seq "$SECTIONS"); do etcdctl lock orders -- sh -c "$SECTION"; done"#;
    shell.args(["-c", sections]).env("ETCDCTL_API", "3").env("ETCDCTL_ENDPOINTS", server.url());
    shell.env("ETCDCTL_DIAL_TIMEOUT", "30s").env("ETCDCTL_COMMAND_TIMEOUT", "60s");
    shell.env("SECTIONS", SECTIONS.to_string()).env("SECTION", SECTION).env("FOLDER", folder);
    let mut shell = HelperProcess::spawn(shell).unwrap();

    let read_journal = || fs::read_to_string(folder.join("journal")).unwrap();
    // Both other programs have held the lock before this store competes for it.
    eventually(LONG, async || {
        let journal = read_journal();
        let clients: BTreeSet<_> =
            journal.lines().filter_map(|line| line.split(' ').next()).collect();
        clients.len() == 2
    })
    .await;
    let registry = registry(&server).await;
    let sections = async {
        for _ in 0..SECTIONS {
            let guard = registry.obtain("orders").lock().await.unwrap();
            critical_section(folder, guard.fencing_token().get());
            guard.unlock().await.unwrap();
        }
    };
    within(LONG, sections).await;
    for peer in [&mut gateway, &mut shell] {
        let status = peer.wait_exit(LONG).await.unwrap();
        assert!(status.success(), "{status}: {}", peer.stderr());
    }
    let count = fs::read_to_string(folder.join("counter")).unwrap();
    assert_eq!(count.trim(), (3 * SECTIONS).to_string());
    let journal = read_journal();
    let lines: Vec<(&str, u64)> = journal
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(client, revision)| (client, revision.parse().unwrap()))
        .collect();
    assert_eq!(lines.len(), 3 * SECTIONS);
    assert!(lines.is_sorted_by(|one, next| one.1 < next.1), "revisions do not increase");
    let changes = lines.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
    assert!(changes > SECTIONS / 10, "the clients rarely alternate: {changes} changes");
}

/// Returns the number of entries in the queue of `name`.
async fn entry_count(server: &EtcdServer, name: &str) -> usize {
    let queue = format!("{name}/");
    let names = server.ctl(&["get", &queue, "--prefix", "--keys-only"]).await.unwrap();
    names.lines().filter(|line| !line.is_empty()).count()
}

async fn wait_until_queued(server: &EtcdServer, count: usize) {
    let queued = async || match entry_count(server, "orders").await {
        found if found == count => Ok(()),
        found => Err(format!("{found} entries")),
    };
    eventually(LONG, queued).await;
}

#[tokio::test]
async fn a_release_wakes_waiters_of_the_other_program() {
    let server = EtcdServer::start().await.unwrap();
    let registry = registry(&server).await;
    let mut peer = HelperProcess::spawn(etcdctl(&server, &["lock", "orders"])).unwrap();
    peer.expect_line(|line| line.starts_with("orders/"), LONG).await.unwrap();
    assert!(registry.obtain("orders").try_lock().await.unwrap().is_none());
    let holder = registry.obtain("orders").holders().await.unwrap().remove(0);
    assert_eq!((holder.label, holder.token.is_some()), (None, true));
    let lock = registry.obtain("orders");
    let waiting = tokio::spawn(async move { lock.lock().await });
    wait_until_queued(&server, 2).await;
    peer.terminate().unwrap();
    let guard = within(LONG, waiting).await.unwrap().unwrap();
    let mut peer =
        HelperProcess::spawn(etcdctl(&server, &["lock", "orders", "echo", "in"])).unwrap();
    wait_until_queued(&server, 2).await;
    assert!(peer.lines().is_empty());
    guard.unlock().await.unwrap();
    peer.expect_line(|line| line == "in", LONG).await.unwrap();
    assert!(peer.wait_exit(LONG).await.unwrap().success());
    assert!(registry.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_lock_of_another_program_can_be_released_by_force() {
    let server = EtcdServer::start().await.unwrap();
    let registry = registry(&server).await;
    let mut peer = HelperProcess::spawn(etcdctl(&server, &["lock", "orders"])).unwrap();
    peer.expect_line(|line| line.starts_with("orders/"), LONG).await.unwrap();
    assert_eq!(registry.list().await.unwrap().len(), 1);
    assert!(registry.force_release("orders").await.unwrap());
    registry.obtain("orders").try_lock().await.unwrap().unwrap().unlock().await.unwrap();
}

/// Demonstrates the gap in etcdctl's recipe: a waiter that was suspended beyond its lease enters
/// the critical section when it resumes, although another client holds the lock. A test in `faults`
/// verifies that waiters of this store do not.
#[tokio::test]
async fn an_etcdctl_waiter_paused_beyond_its_lease_runs_while_another_client_holds_the_lock() {
    let server = EtcdServer::start().await.unwrap();
    let registry = registry(&server).await;
    let first = registry.obtain("orders").lock().await.unwrap();
    let waiter = etcdctl(&server, &["lock", "orders", "--ttl", "10", "echo", "in"]);
    let mut waiter = HelperProcess::spawn(waiter).unwrap();
    wait_until_queued(&server, 2).await;
    waiter.pause().await.unwrap();
    wait_until_queued(&server, 1).await;
    first.unlock().await.unwrap();
    let second = registry.obtain("orders").lock().await.unwrap();
    waiter.resume().unwrap();
    waiter.expect_line(|line| line == "in", LONG).await.unwrap();
    assert!(second.is_held(), "etcdctl is in the section while this guard is valid");
    second.unlock().await.unwrap();
}
