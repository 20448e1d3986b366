//! `lockreg` over a real ZooKeeper server, whose URL is in the environment.

use registry_testkit::zookeeper::ZooKeeperServer;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::{CommandOutput, TestProcess, TestStore, contents};

/// A server, and `lockreg` with its URL in its environment.
struct ZooKeeper {
    server: Option<ZooKeeperServer>,
    runtime: Runtime,
    store: TestStore,
    url: String,
}

impl ZooKeeper {
    fn start(options: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(ZooKeeperServer::start()).unwrap();
        let url = format!("{}?{options}", server.url());
        Self { server: Some(server), runtime, store: TestStore::new(), url }
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = self.store.lockreg([]);
        command.args(arguments).env("LOCK_REGISTRY_URL", &self.url);
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        CommandOutput::of(&mut self.command(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let done = self.run(arguments);
        serde_json::from_str(&done.stdout).unwrap_or_else(|_| panic!("{done:?}"))
    }
}

impl Drop for ZooKeeper {
    fn drop(&mut self) {
        let _inside = self.runtime.enter();
        self.server = None;
    }
}

#[test]
fn a_held_lock_is_shown_listed_and_broken_and_its_holder_is_notified() {
    let zookeeper = ZooKeeper::start("");
    let hold = ["--json", "hold", "--label", "worker 7", "--lease", "5s", "orders/42"];
    let mut holder = TestProcess::start(&mut zookeeper.command(&hold));
    let held = holder.next_json();
    assert_eq!(held["key"], "orders/42");

    let shown = zookeeper.json(&["--json", "show", "orders/42"]);
    assert_eq!((&shown["held"], &shown["token"]), (&json!(true), &held["token"]));
    assert_eq!(shown["label"], "worker 7");
    let list = zookeeper.json(&["--json", "list"]);
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    assert_eq!(list[0]["key"], "orders/42");
    assert_eq!(zookeeper.json(&["--json", "--namespace", "shop", "list"]), json!([]));

    let broken = zookeeper.json(&["--json", "break", "orders/42", "--yes"]);
    assert_eq!(broken["broken"], json!(true));
    assert_eq!(holder.next_json()["lost"], "gone");
    assert_eq!(holder.wait(), 76);
    assert_eq!(zookeeper.run(&["show", "orders/42"]).status, 1);
}

#[test]
fn run_releases_its_lock_after_the_command() {
    let zookeeper = ZooKeeper::start("layout=curator");
    let script = r#"echo "$LOCKREG_FENCING_TOKEN" >> "$T/tokens""#;
    for _ in 0..3 {
        let done = zookeeper.run(&["run", "nightly", "--", "sh", "-c", script]);
        assert_eq!(done.status, 0, "{done:?}");
    }
    let tokens = contents(&zookeeper.store.path("tokens"));
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    assert!(tokens.len() == 3 && tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

#[test]
fn doctor_prints_the_class_and_the_configuration_faults() {
    let zookeeper = ZooKeeper::start("auth=digest:app:canary&acl=creator");
    let report = zookeeper.json(&["doctor", "--json"]);
    assert_eq!((&report["store"], &report["reachable"]), (&json!("zookeeper"), &json!(true)));
    let promises = &report["capabilities"];
    assert_eq!((&promises["class"], &promises["fair"]), (&json!("durable"), &json!(true)));
    let findings = report["findings"].to_string();
    assert!(
        findings.contains("sent unencrypted") && !report.to_string().contains("canary"),
        "{report}"
    );
    let bench = zookeeper.json(&["bench", "--for", "100ms", "--json"]);
    assert!(bench["pairs"].as_u64().is_some_and(|pairs| pairs > 0), "{bench}");

    let zookeeper = ZooKeeper::start("auth=digest:app:canary&acl=open");
    let report = zookeeper.json(&["doctor", "--json"]);
    let findings = report["findings"].to_string();
    assert!(findings.contains("sent unencrypted") && findings.contains("acl=creator"), "{report}");
}

#[test]
fn a_stopped_server_is_status_69_and_the_password_is_redacted() {
    let mut zookeeper = ZooKeeper::start("auth=digest:app:canary");
    let inside = zookeeper.runtime.enter();
    zookeeper.server = None;
    drop(inside);
    for arguments in [&["list"][..], &["--json", "doctor"], &["-vvv", "run", "key", "--", "true"]] {
        let done = zookeeper.run(arguments);
        assert_eq!(done.status, 69, "{done:?}");
        let text = format!("{}{}", done.stdout, done.stderr);
        assert!(text.contains("none of the servers") && !text.contains("canary"), "{done:?}");
    }
}
