//! `lockreg` over real Redis servers, whose URL is in the environment or an option.

mod serve;
mod several;

use std::future::Future;
use std::io;

use nix::sys::signal::Signal;
use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::redis::RedisServer;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::support::{
    CommandOutput, TEST_TIMEOUT, TestProcess, TestStore, contents, is_alive, wait_until,
};

const PROCESSES: usize = 10;

/// Servers, and `lockreg` with their URL in its environment.
struct Redis<S = RedisServer> {
    servers: Option<S>,
    runtime: Runtime,
    store: TestStore,
    url: String,
}

impl Redis {
    fn start(options: &[&str], login: &str) -> Self {
        Self::of(RedisServer::start(options), |server| format!("redis://{login}{}", server.addr()))
    }
}

impl<S> Redis<S> {
    fn of(start: impl Future<Output = io::Result<S>>, url: impl FnOnce(&S) -> String) -> Self {
        let runtime = Runtime::new().unwrap();
        let servers = runtime.block_on(start).unwrap();
        let url = url(&servers);
        Self { servers: Some(servers), runtime, store: TestStore::new(), url }
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

#[test]
fn exactly_one_of_ten_processes_that_do_not_wait_runs() {
    let redis = Redis::start(&[], "");
    let script = r#"echo "$LOCKREG_FENCING_TOKEN" >> "$T/tokens"; read -r _; true"#;
    let arguments = ["--url", &redis.url, "run", "--no-wait", "nightly", "--", "sh", "-c", script];
    let mut processes: Vec<TestProcess> = (0..PROCESSES)
        .map(|_| TestProcess::start(redis.store.lockreg([]).args(arguments)))
        .collect();
    wait_until("all but one to be refused", || {
        processes.retain_mut(|process| match process.try_wait() {
            Some(status) => {
                assert_eq!(status.code(), Some(75));
                false
            }
            None => true,
        });
        processes.len() == 1
    });
    assert_eq!(processes.pop().unwrap().finish(), 0);
    let tokens = contents(&redis.store.path("tokens"));
    assert_eq!(tokens.lines().count(), 1, "{tokens}");
    assert!(tokens.trim().parse::<u64>().is_ok_and(|token| token > 0), "{tokens}");
}

#[test]
fn a_held_lock_is_shown_listed_and_broken_and_its_holder_is_notified() {
    let redis = Redis::start(&["--requirepass", "canary"], ":canary@");
    let hold = ["--json", "hold", "--label", "worker 7", "--lease", "1s", "orders/42"];
    let mut holder = TestProcess::start(&mut redis.command(&hold));
    let held = holder.next_json();
    assert_eq!(held["key"], "orders/42");

    let shown = redis.json(&["--json", "show", "orders/42"]);
    assert_eq!((&shown["held"], &shown["token"]), (&json!(true), &held["token"]));
    assert_eq!(shown["label"], "worker 7");
    let list = redis.json(&["--json", "list"]);
    assert_eq!(list.as_array().map(Vec::len), Some(1), "{list}");
    assert_eq!(list[0]["key"], "orders/42");
    assert_eq!(redis.json(&["--json", "--namespace", "shop", "list"]), json!([]));

    let broken = redis.json(&["--json", "break", "orders/42", "--yes"]);
    assert_eq!(broken["broken"], json!(true));
    assert_eq!(holder.next_json()["lost"], "gone");
    assert_eq!(holder.wait(), 76);
    assert_eq!(redis.run(&["show", "orders/42"]).status, 1);
}

#[test]
fn a_leader_without_its_store_ends_its_command_before_another_candidate_leads() {
    let redis = Redis::start(&[], "");
    let server = redis.servers.as_ref().unwrap().addr();
    let _enter_guard = redis.runtime.enter();
    let proxy = FaultProxy::start(server).unwrap();
    let url = format!("redis://{}", proxy.addr());
    // The command ignores SIGTERM, so only SIGKILL ends it.
    let script = "trap '' TERM; echo $$; while :; do sleep 1; done";
    let elect = ["elect", "--lease", "3s", "--grace", "500ms", "role", "--", "sh", "-c", script];
    let mut first = TestProcess::start(redis.command(&elect).env("LOCK_REGISTRY_URL", &url));
    let pid = first.next_line();
    let second = TestProcess::start(&mut redis.command(&elect));
    redis.runtime.block_on(proxy.set_mode(ProxyMode::BlackHole)).unwrap();
    second.next_line();
    assert!(!is_alive(&pid), "two commands run");

    // The first candidate campaigns again as soon as it reaches the store.
    redis.runtime.block_on(proxy.set_mode(ProxyMode::Pass)).unwrap();
    drop(second);
    first.next_line();
    first.signal(Signal::SIGKILL);
    first.wait();
}

/// The proxy blocks the connection of `lockreg` while the test moves the monotonic clock of
/// `lockreg` ahead by `--wait`. After that, the wait is over and the command is not run.
#[cfg(target_os = "linux")]
#[test]
fn the_time_for_connecting_counts_towards_the_wait_of_a_scheduled_command() {
    use registry_testkit::clock::ClockShim;

    let redis = Redis::start(&[], "");
    let holder = TestProcess::start(&mut redis.command(&["hold", "nightly"]));
    holder.next_line();
    let _enter_guard = redis.runtime.enter();
    let proxy = FaultProxy::start(redis.servers.as_ref().unwrap().addr()).unwrap();
    redis.runtime.block_on(proxy.set_mode(ProxyMode::BlackHole)).unwrap();
    let clock = ClockShim::new().unwrap();
    // The attempt to connect does not end before the wait.
    let url = format!("redis://{}?connect_timeout=1h", proxy.addr());
    let run = ["run", "--wait", "30m", "--once-per", "36500days", "nightly", "--", "true"];
    let mut command = redis.command(&run);
    command.env("LOCK_REGISTRY_URL", url).envs(clock.environment());
    let mut waiting = TestProcess::start(&mut command);
    redis.runtime.block_on(proxy.until(TEST_TIMEOUT, |counts| counts.accepted > 0)).unwrap();
    clock.jump_monotonic(30 * 60).unwrap();
    redis.runtime.block_on(proxy.set_mode(ProxyMode::Pass)).unwrap();
    assert_eq!(waiting.wait(), 0);
    waiting.wait_for_stderr("another process holds its lock");
    assert_eq!(holder.finish(), 0);
}

#[test]
fn doctor_prints_the_class_and_the_configuration_faults() {
    let redis = Redis::start(&["--maxmemory-policy", "allkeys-lru"], "");
    let report = redis.json(&["doctor", "--json"]);
    assert_eq!((&report["store"], &report["reachable"]), (&json!("redis"), &json!(true)));
    let promises = &report["capabilities"];
    assert_eq!((&promises["class"], &promises["reach"]), (&json!("volatile"), &json!("network")));
    let warnings = |report: &Value| {
        let findings = report["findings"].as_array().unwrap().clone();
        findings.into_iter().filter(|finding| finding["severity"] == "warning").collect::<Vec<_>>()
    };
    let found = warnings(&report);
    assert_eq!(found.len(), 1, "{report}");
    assert!(found[0]["message"].as_str().unwrap().contains("noeviction"), "{report}");
    let text = redis.run(&["doctor"]).stdout;
    assert!(text.contains("warning: ") && text.contains("all hosts"), "{text}");
    // A server with the recommended settings.
    let redis = Redis::start(&[], "");
    assert_eq!(warnings(&redis.json(&["doctor", "--json"])), Vec::<Value>::new());
}

#[test]
fn bench_measures_a_server() {
    let redis = Redis::start(&[], "");
    let report = redis.json(&["bench", "--for", "100ms", "--json"]);
    assert!(report["pairs"].as_u64().is_some_and(|pairs| pairs > 0), "{report}");
}

#[test]
fn a_refused_login_or_a_stopped_server_is_status_69_and_the_password_is_redacted() {
    let mut redis = Redis::start(&["--requirepass", "right"], "worker:canary@");
    let assert_refused = |redis: &Redis, part: &str| {
        for arguments in
            [&["list"][..], &["--json", "doctor"], &["-vvv", "run", "key", "--", "true"]]
        {
            let done = redis.run(arguments);
            assert_eq!(done.status, 69, "{done:?}");
            let text = format!("{}{}", done.stdout, done.stderr);
            assert!(text.contains(part) && !text.contains("canary"), "{done:?}");
        }
    };
    assert_refused(&redis, "rejected this user or password");
    redis.servers = None;
    assert_refused(&redis, "the connection was refused");
}
