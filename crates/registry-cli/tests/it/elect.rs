//! `lockreg elect`: a command that runs while its process leads.

use nix::sys::signal::Signal;

use crate::support::{TestStore, wait_until};

const COMMAND: [&str; 4] = ["--", "sh", "-c", "echo leads; read x; exit 3"];

/// Returns the arguments of `lockreg elect` with these options.
fn elect<'a>(options: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["elect"];
    arguments.extend(options);
    arguments.push("role");
    arguments.extend(COMMAND);
    arguments
}

fn start(store: &TestStore, options: &[&str]) -> crate::support::TestProcess {
    let mut command = store.lockreg([]);
    command.args(elect(options));
    crate::support::TestProcess::start(&mut command)
}

#[test]
fn one_candidate_runs_its_command_at_a_time_and_the_next_follows_its_end() {
    let store = TestStore::new();
    let first = start(&store, &["--label", "host 1", "--data", "10.0.0.1:80"]);
    assert_eq!(first.next_line(), "leads");
    let value = store.run(["value", "role"]);
    assert!(value.stdout.contains("leader") && value.stdout.ends_with("10.0.0.1:80"), "{value:?}");
    let token = store.holder("role").unwrap();
    let mut second = start(&store, &[]);
    // The command of the first candidate reads the end of its stdin, and ends with its own status.
    assert_eq!(first.finish(), 3);
    assert_eq!(second.next_line(), "leads");
    assert!(store.holder("role").unwrap() > token);
    second.signal(Signal::SIGTERM);
    assert_eq!(second.wait(), 143);
    assert_eq!(store.holder("role"), None);
    let value = store.run(["value", "role"]);
    assert!(value.stdout.contains("vacant"), "{value:?}");
}

#[test]
fn a_candidate_that_loses_the_role_ends_its_command_and_campaigns_again() {
    let store = TestStore::new();
    let mut candidate = start(&store, &["--lease", "3s"]);
    assert_eq!(candidate.next_line(), "leads");
    let token = store.holder("role").unwrap();
    assert_eq!(store.run(["break", "--yes", "role"]).status, 0);
    assert_eq!(candidate.next_line(), "leads");
    assert!(store.holder("role").unwrap() > token);
    candidate.signal(Signal::SIGTERM);
    assert_eq!(candidate.wait(), 143);
}

#[test]
fn a_command_gets_one_sigterm_before_the_end_of_its_lease_and_then_sigkill() {
    let store = TestStore::new();
    let script = "trap 'echo drains' TERM; echo leads; while :; do sleep 0.05; done";
    let mut command = store.lockreg(["elect", "--lease", "3s", "role", "--", "sh", "-c", script]);
    let candidate = crate::support::TestProcess::start(command.env("LOCK_REGISTRY_RENEW", "false"));
    for line in ["leads", "drains", "leads", "drains", "leads"] {
        assert_eq!(candidate.next_line(), line);
    }
}

#[test]
fn a_candidate_that_must_end_does_not_campaign_again_after_a_loss() {
    let store = TestStore::new();
    let script =
        "trap 'echo drains' TERM; echo leads; until test -e $T/drained; do sleep 0.05; done";
    let mut command = store.lockreg(["elect", "--lease", "9s", "role", "--", "sh", "-c", script]);
    let mut candidate = crate::support::TestProcess::start(&mut command);
    assert_eq!(candidate.next_line(), "leads");
    assert_eq!(store.run(["break", "--yes", "role"]).status, 0);
    assert_eq!(candidate.next_line(), "drains");
    candidate.signal(Signal::SIGTERM);
    assert_eq!(candidate.next_line(), "drains");
    std::fs::write(store.path("drained"), "").unwrap();
    assert_eq!(candidate.wait(), 76);
}

#[test]
fn the_waiting_candidate_with_the_highest_priority_leads_next() {
    let store = TestStore::new();
    let leader = start(&store, &[]);
    assert_eq!(leader.next_line(), "leads");
    let low = start(&store, &["--priority", "1"]);
    let high = start(&store, &["--priority", "2"]);
    wait_until("both to campaign", || {
        let shown = store.run(["--json", "show", "role/candidates"]).stdout;
        ["\"1\"", "\"2\""].iter().all(|label| shown.contains(label))
    });
    assert_eq!(leader.finish(), 3);
    assert_eq!(high.next_line(), "leads");
    assert_eq!(high.finish(), 3);
    assert_eq!(low.next_line(), "leads");
    assert_eq!(low.finish(), 3);
}

#[test]
fn a_waiting_candidate_ends_at_a_signal() {
    let store = TestStore::new();
    let holder = store.start(["hold", "role"]);
    holder.next_line();
    let mut candidate = start(&store, &[]);
    candidate.wait_for_stderr("campaigning for role");
    candidate.signal(Signal::SIGINT);
    assert_eq!(candidate.wait(), 130);
    assert_eq!(holder.finish(), 0);
}

#[cfg(feature = "sqlite")]
#[test]
fn a_store_error_is_printed_once_even_with_quiet() {
    use lock_registry::sqlite::sqlx::{
        AssertSqlSafe, Connection as _, Executor as _, SqliteConnection,
    };

    let store = TestStore::new();
    let holder = store.start(["hold", "--lease", "1h", "role"]);
    holder.next_line();
    let mut quiet = start(&store, &["--quiet"]);
    let loud = start(&store, &[]);
    loud.wait_for_stderr("campaigning for role");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rename = |from: &str, to: &str| {
        let url = format!("sqlite:{}", store.path("lock-registry/locks.db").display());
        let statement = format!("ALTER TABLE {from} RENAME TO {to}");
        runtime.block_on(async {
            let mut admin = SqliteConnection::connect(&url).await.unwrap();
            admin.execute(AssertSqlSafe(statement)).await.unwrap();
        });
    };
    rename("lock_registry_locks", "other");
    quiet.wait_for_stderr("; retrying");
    loud.wait_for_stderr("; retrying");
    quiet.signal(Signal::SIGTERM);
    quiet.wait();
    assert_eq!(quiet.remaining_stderr(), "");
    rename("other", "lock_registry_locks");
    assert_eq!(holder.finish(), 0);
    let line = loud.wait_for_stderr("");
    assert!(line.contains("leading role"), "{line}");
}

#[test]
fn invalid_candidates_are_refused() {
    let store = TestStore::new();
    let long = "x".repeat(1_025);
    for options in [&["--data", &long][..], &["--lease", "1ms"], &["--grace", "never"]] {
        let mut command = store.lockreg([]);
        let done = crate::support::CommandOutput::of(command.args(elect(options)));
        assert_eq!(done.status, 64, "{options:?}: {done:?}");
    }
    let done = store.run(["elect", "role", "--", "/no/such/program"]);
    assert_eq!(done.status, 127, "{done:?}");
}
