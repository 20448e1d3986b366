//! `lockreg` over ZooKeeper.

use registry_testkit::zookeeper::ZooKeeperServer;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::{Done, Process, Store, contents};

/// A server, and `lockreg` with its URL in its environment.
struct ZooKeeper {
    server: Option<ZooKeeperServer>,
    runtime: Runtime,
    store: Store,
    url: String,
}

impl ZooKeeper {
    fn start(options: &str) -> Self {
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(ZooKeeperServer::start()).unwrap();
        let url = format!("{}?{options}", server.url());
        Self { server: Some(server), runtime, store: Store::new(), url }
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = self.store.lockreg([]);
        command.args(arguments).env("LOCK_REGISTRY_URL", &self.url);
        command
    }

    fn done(&self, arguments: &[&str]) -> Done {
        Done::of(&mut self.command(arguments))
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let done = self.done(arguments);
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
fn a_held_lock_is_shown_listed_and_broken_and_its_holder_is_told() {
    let zookeeper = ZooKeeper::start("");
    let hold = ["--json", "hold", "--label", "worker 7", "--lease", "5s", "orders/42"];
    let mut holder = Process::start(&mut zookeeper.command(&hold));
    let held = holder.says_json();
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
    assert_eq!(holder.says_json()["lost"], "gone");
    assert_eq!(holder.wait(), 76);
    assert_eq!(zookeeper.done(&["show", "orders/42"]).status, 1);
}

#[test]
fn a_program_runs_under_a_lock_and_leaves_it_free() {
    let zookeeper = ZooKeeper::start("layout=curator");
    let script = r#"echo "$LOCKREG_FENCING_TOKEN" >> "$T/tokens""#;
    for _ in 0..3 {
        let done = zookeeper.done(&["run", "nightly", "--", "sh", "-c", script]);
        assert_eq!(done.status, 0, "{done:?}");
    }
    let tokens = contents(&zookeeper.store.path("tokens"));
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    assert!(tokens.len() == 3 && tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
}

#[test]
fn doctor_tells_the_class_and_what_is_set_up_wrong() {
    let zookeeper = ZooKeeper::start("auth=digest:app:canary&acl=creator");
    let report = zookeeper.json(&["doctor", "--json"]);
    assert_eq!((&report["store"], &report["reachable"]), (&json!("zookeeper"), &json!(true)));
    let promises = &report["capabilities"];
    assert_eq!((&promises["class"], &promises["fair"]), (&json!("A"), &json!(true)));
    let findings = report["findings"].to_string();
    assert!(
        findings.contains("in the clear") && !report.to_string().contains("canary"),
        "{report}"
    );
    let bench = zookeeper.json(&["bench", "--for", "100ms", "--json"]);
    assert!(bench["pairs"].as_u64().is_some_and(|pairs| pairs > 0), "{bench}");

    let zookeeper = ZooKeeper::start("auth=digest:app:canary&acl=open");
    let report = zookeeper.json(&["doctor", "--json"]);
    let findings = report["findings"].to_string();
    assert!(findings.contains("in the clear") && findings.contains("acl=creator"), "{report}");
}

#[test]
fn a_server_that_is_gone_is_status_69_without_the_password() {
    let mut zookeeper = ZooKeeper::start("auth=digest:app:canary");
    let inside = zookeeper.runtime.enter();
    zookeeper.server = None;
    drop(inside);
    for arguments in [&["list"][..], &["--json", "doctor"], &["-vvv", "run", "key", "--", "true"]] {
        let done = zookeeper.done(arguments);
        assert_eq!(done.status, 69, "{done:?}");
        let text = format!("{}{}", done.stdout, done.stderr);
        assert!(text.contains("none of the servers") && !text.contains("canary"), "{done:?}");
    }
}
