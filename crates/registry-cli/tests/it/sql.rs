//! `lockreg` over PostgreSQL and MariaDB: row locks can be inspected and broken, session locks
//! cannot.

#[cfg(feature = "mysql")]
use registry_testkit::mariadb::MariaDbServer;
#[cfg(feature = "postgres")]
use registry_testkit::postgres::PostgresServer;
use serde_json::{Value, json};

use crate::support::{CommandOutput, TestProcess, TestStore};

struct Sql {
    store: TestStore,
    url: String,
}

impl Sql {
    /// Returns `lockreg` with `mode` in the URL of the store.
    fn command(&self, mode: &str, arguments: &[&str]) -> std::process::Command {
        let mut command = self.store.lockreg([]);
        let join = if self.url.contains('?') { '&' } else { '?' };
        let url = format!("{}{join}mode={mode}", self.url);
        command.args(arguments).env("LOCK_REGISTRY_URL", url);
        command
    }

    fn run(&self, mode: &str, arguments: &[&str]) -> CommandOutput {
        CommandOutput::of(&mut self.command(mode, arguments))
    }

    fn json(&self, mode: &str, arguments: &[&str]) -> Value {
        let done = self.run(mode, arguments);
        serde_json::from_str(&done.stdout).unwrap_or_else(|_| panic!("{done:?}"))
    }
}

#[cfg(feature = "postgres")]
#[test]
fn rows_are_shown_listed_and_broken_on_postgresql_and_sessions_are_not() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let server = runtime.block_on(PostgresServer::start()).unwrap();
    assert_row_locks_are_inspectable_and_session_locks_are_not(server.url());
}

#[cfg(feature = "mysql")]
#[test]
fn rows_are_shown_listed_and_broken_on_mariadb_and_sessions_are_not() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let server = runtime.block_on(MariaDbServer::start()).unwrap();
    assert_row_locks_are_inspectable_and_session_locks_are_not(server.url());
}

fn assert_row_locks_are_inspectable_and_session_locks_are_not(url: String) {
    let sql = Sql { store: TestStore::new(), url };
    let hold = ["--json", "hold", "--label", "worker 7", "--lease", "5s", "orders/42"];
    let mut holder = TestProcess::start(&mut sql.command("row", &hold));
    let held = holder.next_json();
    assert_eq!(held["key"], "orders/42");
    for mode in ["row", "lease"] {
        let shown = sql.json(mode, &["--json", "show", "orders/42"]);
        assert_eq!((&shown["held"], &shown["token"]), (&json!(true), &held["token"]), "{mode}");
        assert_eq!(shown["label"], "worker 7");
        let list = sql.json(mode, &["--json", "list"]);
        assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
        assert_eq!(list[0]["key"], "orders/42");
    }
    for arguments in [&["show", "orders/42"][..], &["list"], &["break", "orders/42", "--yes"]] {
        let refused = sql.run("session", arguments);
        assert_eq!(refused.status, 69, "{refused:?}");
        assert!(refused.stderr.contains("mode=session"), "{refused:?}");
    }
    let broken = sql.json("row", &["--json", "break", "orders/42", "--yes"]);
    assert_eq!(broken["broken"], json!(true));
    assert_eq!(holder.next_json()["lost"], "gone");
    assert_eq!(holder.wait(), 76);
    assert_eq!(sql.run("row", &["show", "orders/42"]).status, 1);
}
