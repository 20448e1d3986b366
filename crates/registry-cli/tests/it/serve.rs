//! `lockreg serve`: its HTTP interface for programs, its limits, and the requests that it refuses.

#[cfg(feature = "server-tests")]
mod browser;
#[cfg(feature = "server-tests")]
mod stores;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::{TEST_TIMEOUT, TestProcess, TestStore, wait_until};

const TOKEN: &str = "correct-horse-battery-staple";

/// A running `lockreg serve`.
pub(crate) struct Serve {
    pub(crate) process: TestProcess,
    url: String,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: ureq::http::HeaderMap,
    body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }
}

impl Serve {
    fn start(store: &TestStore, arguments: &[&str]) -> Self {
        Self::listen_on(store, "0", arguments)
    }

    fn listen_on(store: &TestStore, address: &str, arguments: &[&str]) -> Self {
        let mut command = store.lockreg(["serve", "--interval", "50ms", "--listen", address]);
        Self::of(command.args(arguments))
    }

    pub(crate) fn of(command: &mut Command) -> Self {
        let process = TestProcess::start(command);
        let url = process.next_line();
        Self { process, url }
    }

    fn request(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TEST_TIMEOUT))
            .build()
            .into();
        let mut request =
            ureq::http::Request::builder().method(method).uri(self.url.clone() + path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut answer = agent.run(request.body(()).unwrap()).unwrap();
        Answer {
            status: answer.status().as_u16(),
            headers: answer.headers().clone(),
            body: answer.body_mut().read_to_string().unwrap(),
        }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[])
    }

    /// Waits until the JSON of `path` is as expected, and returns it.
    #[track_caller]
    pub(crate) fn wait_for(&self, path: &str, is_expected: impl Fn(&Value) -> bool) -> Value {
        let mut json = Value::Null;
        wait_until("the expected answer", || {
            json = self.get(path).json();
            is_expected(&json)
        });
        json
    }

    fn connect(&self) -> TcpStream {
        let address = self.url.trim_start_matches("http://").trim_end_matches('/');
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream
    }

    /// Opens an event stream, and reads the first line of its answer.
    pub(crate) fn events(&self) -> BufReader<TcpStream> {
        let mut stream = self.connect();
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut events = BufReader::new(stream);
        let mut line = String::new();
        events.read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 200"), "{line}");
        events
    }
}

/// Returns the next event that is as expected. Skips other events.
pub(crate) fn next_event(
    events: &mut BufReader<TcpStream>,
    is_expected: impl Fn(&Value) -> bool,
) -> Value {
    loop {
        let mut line = String::new();
        assert!(events.read_line(&mut line).unwrap() > 0, "the stream ended");
        if let Some(data) = line.strip_prefix("data: ") {
            let event = serde_json::from_str(data).unwrap();
            if is_expected(&event) {
                return event;
            }
        }
    }
}

/// Percent-encodes every byte of a key.
fn encoded(key: &str) -> String {
    key.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[test]
fn holders_waiters_and_past_holders_are_served() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let mut events = serve.events();
    assert_eq!(next_event(&mut events, |_| true)["all"], true);
    let holder = store.start(["hold", "--label", "worker 7", "orders/42"]);
    holder.next_line();
    let waiter = store.start(["hold", "--label", "worker 8", "orders/42"]);
    let path = format!("api/locks/{}", encoded("orders/42"));
    let lock = serve.wait_for(&path, |lock| !lock["waiters"].as_array().unwrap().is_empty());
    assert_eq!(lock["token"].as_u64(), store.holder("orders/42"));
    assert_eq!(
        (&lock["held"], &lock["label"], &lock["holders"][0]["label"], &lock["waiters"][0]["label"]),
        (&json!(true), &json!("worker 7"), &json!("worker 7"), &json!("worker 8"))
    );
    assert_eq!(serve.get("api/locks/orders/42").json()["label"], "worker 7");
    assert_eq!(serve.get("api/locks?key=orders/42").json()["label"], "worker 7");
    let all = serve.get("api/locks").json();
    assert_eq!((&all["store"], &all["lists_waiters"]), (&json!("sqlite"), &json!(true)));
    assert_eq!(
        (&all["holders"][0]["key"], &all["waiters"][0]["key"]),
        (&json!("orders/42"), &json!("orders/42"))
    );
    let waits = serve.get("api/waits").json();
    assert_eq!(
        waits["waits"],
        json!([{ "waiter": "worker 8", "key": "orders/42", "mode": "exclusive", "holder": "worker 7", "deadlock": null }])
    );
    next_event(&mut events, |event| event["set"][0]["waiters"][0]["label"] == "worker 8");

    assert_eq!(holder.finish(), 0);
    waiter.next_line();
    let event =
        next_event(&mut events, |event| event["set"][0]["holders"][0]["label"] == "worker 8");
    assert_eq!(event["all"], false);
    let lock = serve.wait_for(&path, |lock| lock["label"] == "worker 8");
    let past: Vec<_> = (lock["history"].as_array().unwrap().iter())
        .map(|hold| (hold["label"].as_str().unwrap(), hold["ended"].as_bool().unwrap()))
        .collect();
    assert_eq!(past, [("worker 7", true), ("worker 8", false)]);
    assert_eq!(waiter.finish(), 0);
    next_event(&mut events, |event| event["removed"] == json!(["orders/42"]));
    assert_eq!(serve.wait_for(&path, |lock| lock["held"] == false)["holders"], json!([]));
}

#[test]
fn keys_with_any_characters_are_found() {
    let store = TestStore::new();
    let long = "k".repeat(4_096);
    let keys = [
        "..",
        "a/../b",
        "/a",
        "a//b",
        "%2F",
        " ",
        "a?b#c&d=e+f",
        "ü/😀",
        "<b>\u{202e}\n\u{1b}",
        &long,
    ];
    let mut command = store.lockreg(["hold", "--label", "all", "first"]);
    for key in keys {
        command.args(["--also", key]);
    }
    let holder = TestProcess::start(&mut command);
    holder.next_line();
    let serve = Serve::start(&store, &[]);
    for key in keys {
        for path in ["api/locks/", "api/locks?key="] {
            let answer = serve.get(&format!("{path}{}", encoded(key)));
            let lock = answer.json();
            assert_eq!(
                (&lock["key"], &lock["label"]),
                (&json!(key), &json!("all")),
                "{path} {key:?}"
            );
        }
    }
    let refused = serve.get(&format!("api/locks/{}", encoded(&"k".repeat(4_097))));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"].as_str().unwrap().contains("4096"), "{}", refused.body);
    assert_eq!(serve.get("api/locks/%FF").status, 400);
    assert_eq!(serve.get("api/locks?key=%FF").status, 400);
    assert_eq!(holder.finish(), 0);
}

#[test]
fn without_the_token_no_lock_is_released() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--lease", "3s", "a/1"]);
    holder.next_line();
    let bearer = format!("Bearer {TOKEN}");
    let read_only = Serve::start(&store, &[]);
    let answer = read_only.request("DELETE", "api/locks/a/1", &[("Authorization", &bearer)]);
    assert_eq!(answer.status, 403);
    assert!(answer.body.contains("--allow-break"), "{}", answer.body);

    let file = store.path("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let serve = Serve::start(&store, &["--allow-break", "--token-file", file.to_str().unwrap()]);
    for path in ["api/locks/a/1", "api/locks?key=a/1"] {
        for headers in [
            &[][..],
            &[("Authorization", "Bearer wrong")],
            &[("Authorization", "Bearer ")],
            &[("Authorization", TOKEN)],
            &[("Authorization", "Basic Y29ycmVjdA==")],
            &[("Cookie", &*format!("token={TOKEN}"))],
        ] {
            let answer = serve.request("DELETE", path, headers);
            assert_eq!(answer.status, 401, "{path} {headers:?}");
            assert_eq!(answer.headers["www-authenticate"], "Bearer");
        }
    }
    assert_eq!(serve.request("DELETE", &format!("api/locks/a/1?token={TOKEN}"), &[]).status, 401);
    for method in ["POST", "PUT", "PATCH"] {
        let answer = serve.request(method, "api/locks/a/1", &[("Authorization", &bearer)]);
        assert_eq!(answer.status, 405, "{method}");
    }
    assert!(store.holder("a/1").is_some());

    let broken = serve.request("DELETE", "api/locks/a/1", &[("Authorization", &bearer)]);
    assert_eq!((broken.status, broken.json()), (200, json!({ "key": "a/1", "broken": true })));
    assert!(holder.next_line().contains("lost"));
    serve.process.wait_for_stderr("a/1 was released by force");
    let free =
        serve.request("DELETE", "api/locks/a/1", &[("authorization", &format!("bearer  {TOKEN}"))]);
    assert_eq!((free.status, free.json()), (200, json!({ "key": "a/1", "broken": false })));
    serve.wait_for("api/locks/a/1", |lock| lock["held"] == false);
}

#[test]
fn an_invalid_option_is_a_usage_error() {
    let store = TestStore::new();
    let short = store.path("short");
    fs::write(&short, "short").unwrap();
    let short = short.to_str().unwrap();
    for (arguments, part) in [
        (&["--allow-break"][..], "LOCKREG_SERVE_TOKEN"),
        (&["--allow-break", "--token-file", short], "at least 16"),
        (&["--allow-break", "--token-file", "/does/not/exist"], "/does/not/exist"),
        (&["--token-file", short], "--allow-break"),
        (&["--listen", "example.com:80"], "IP:PORT"),
        (&["--listen", "127.0.0.1"], "IP:PORT"),
        (&["--listen", "::1"], "IP:PORT"),
        (&["--listen", ":::0"], "IP:PORT"),
        (&["--listen", "127.0.0.1:99999"], "IP:PORT"),
        (&["--interval", "1ms"], "50ms"),
    ] {
        let done = crate::support::CommandOutput::of(store.lockreg(["serve"]).args(arguments));
        assert_eq!(done.status, 64, "{arguments:?}: {done:?}");
        assert!(done.stderr.contains(part), "{arguments:?}: {done:?}");
        assert!(!done.stderr.contains(TOKEN));
    }
    let mut command = store.lockreg(["serve", "--allow-break"]);
    let done =
        crate::support::CommandOutput::of(command.env("LOCKREG_SERVE_TOKEN", "sixteen bytes ü ü"));
    assert_eq!(done.status, 64);
    assert!(
        done.stderr.contains("letters and digits") && !done.stderr.contains("sixteen"),
        "{done:?}"
    );
}

#[test]
fn an_address_in_use_is_reported() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let address = serve.url.trim_start_matches("http://").trim_end_matches('/');
    let done = crate::support::CommandOutput::of(store.lockreg(["serve", "--listen"]).arg(address));
    assert_eq!(done.status, 71);
    assert!(done.stderr.contains(address) && done.stderr.contains("--listen"), "{done:?}");
}

#[test]
fn only_requests_for_this_host_are_answered_on_a_loopback_address() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &["--allow-host", "Locks.Example"]);
    for (host, status) in [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("locks.example:443", 200),
        ("attacker.example", 421),
        ("attacker.example:80", 421),
        ("127.0.0.1.attacker.example", 421),
        ("localhost.attacker.example", 421),
    ] {
        let answer = serve.request("GET", "api/locks", &[("Host", host)]);
        assert_eq!(answer.status, status, "{host}");
    }
    let open = Serve::listen_on(&store, "0.0.0.0:0", &[]);
    open.process.wait_for_stderr("other hosts can read all keys");
    let named = Serve::listen_on(&store, "0.0.0.0:0", &["--allow-host", "locks.example"]);
    let port = named.url.trim_end_matches('/').rsplit_once(':').unwrap().1;
    let named = Serve { url: format!("http://127.0.0.1:{port}/"), process: named.process };
    assert_eq!(named.request("GET", "healthz", &[("Host", "anything.example")]).status, 421);
    assert_eq!(named.request("GET", "healthz", &[("Host", "locks.example")]).status, 200);
    let port = open.url.trim_end_matches('/').rsplit_once(':').unwrap().1;
    let open = Serve { url: format!("http://127.0.0.1:{port}/"), process: open.process };
    assert_eq!(open.request("GET", "healthz", &[("Host", "anything.example")]).status, 200);
}

#[test]
fn every_answer_has_the_headers_that_restrict_browsers() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    for path in [
        "",
        "api/locks",
        "api/locks/a",
        "api/waits",
        "metrics",
        "healthz",
        "nothing",
        "api/locks/%FF",
    ] {
        let answer = serve.get(path);
        for (name, part) in [
            ("content-security-policy", "default-src 'none'"),
            ("content-security-policy", "script-src 'sha256-"),
            ("content-security-policy", "frame-ancestors 'none'"),
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            let value = answer.headers[name].to_str().unwrap();
            assert!(value.contains(part), "/{path}: {name}: {value}");
        }
        assert!(!answer.headers.contains_key("access-control-allow-origin"));
    }
    let page = serve.get("").body;
    assert!(
        !page.contains("http://")
            || page.matches("http://").count()
                == page.matches("http://www.w3.org/2000/svg").count()
    );
    assert!(!page.contains("https://") && !page.contains("{{"));
    assert_eq!(serve.get("nothing").status, 404);
}

#[test]
fn metrics_are_counted_by_the_names_of_keys() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--also", "orders/43", "--also", "a\"b\\c\nd", "orders/42"]);
    holder.next_line();
    let serve = Serve::start(&store, &[]);
    let _waiter = store.start(["hold", "orders/42"]);
    serve.wait_for("api/locks/orders/42", |lock| !lock["waiters"].as_array().unwrap().is_empty());
    let answer = serve.get("metrics");
    assert!(
        answer.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4")
    );
    for line in [
        "lockreg_holders{name=\"orders/*\",mode=\"exclusive\"} 2",
        "lockreg_holders{name=\"a\\\"b\\\\c\\nd\",mode=\"exclusive\"} 1",
        "lockreg_waiters{name=\"orders/*\",mode=\"exclusive\"} 1",
        "lockreg_deadlocks 0",
        "lockreg_snapshot_failures_total 0",
    ] {
        assert!(answer.body.lines().any(|found| found == line), "no {line}:\n{}", answer.body);
    }
    // Each metric is documented.
    let page = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../book/src/operate/monitoring.md"
    ));
    let page = page.unwrap();
    for metric in answer.body.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = metric.split(' ').next().unwrap();
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not in the book");
    }
    assert_eq!(holder.finish(), 0);
    serve.wait_for("api/locks/orders/43", |lock| lock["held"] == false);
    assert!(!serve.get("metrics").body.contains("a\\\"b"), "a series of a free key");
}

#[test]
fn a_store_that_fails_is_unhealthy_and_its_last_state_stays() {
    let store = TestStore::new();
    let holder = store.start(["hold", "a/1"]);
    holder.next_line();
    let serve = Serve::start(&store, &[]);
    assert_eq!((serve.get("healthz").status, &*serve.get("healthz").body), (200, "ok\n"));
    let mut events = serve.events();
    // The store fails from now on, because its file is not a database.
    let database = store.path("lock-registry/locks.db");
    fs::rename(&database, store.path("moved.db")).unwrap();
    fs::write(&database, "no database").unwrap();
    next_event(&mut events, |event| event["error"].is_string());
    let unhealthy = serve.get("healthz");
    assert_eq!(unhealthy.status, 503);
    assert!(!unhealthy.body.trim().is_empty());
    let all = serve.get("api/locks").json();
    assert_eq!((&all["holders"][0]["key"], all["error"].is_string()), (&json!("a/1"), true));
    wait_until("a counted failure", || {
        !serve.get("metrics").body.contains("lockreg_snapshot_failures_total 0\n")
    });
}

#[test]
fn clients_that_do_not_read_cost_little_memory_and_disturb_no_other_client() {
    let store = TestStore::new();
    let mut command = store.lockreg(["hold", "first"]);
    for index in 0..250 {
        command.args(["--also", &format!("{index:04}{}", "k".repeat(4_000))]);
    }
    let holder = TestProcess::start(&mut command);
    holder.next_line();
    let serve = Serve::start(&store, &[]);
    let resident_kb = || {
        let status = fs::read_to_string(format!("/proc/{}/status", serve.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let mut whole = serve.events();
    next_event(&mut whole, |event| event["all"] == true);
    let before = resident_kb();
    // The first event of each stream has a megabyte.
    let silent: Vec<_> = (0..100).map(|_| serve.events()).collect();
    let unfinished: Vec<_> = (0..100)
        .map(|_| {
            let mut stream = serve.connect();
            stream.write_all(b"GET /api/locks HTTP/1.1\r\nHost: lo").unwrap();
            stream
        })
        .collect();
    for index in 0..20 {
        let key = format!("short/{index}");
        let other = store.start(["hold", &key]);
        other.next_line();
        next_event(&mut whole, |event| event["set"].to_string().contains(&key));
        assert_eq!(other.finish(), 0);
    }
    let grown = resident_kb().saturating_sub(before);
    assert!(grown < 40_000, "{grown} kB more for 100 MB of unread events");
    drop((silent, unfinished));
    wait_until("an answer after the end of the streams", || serve.get("healthz").status == 200);
}

#[test]
fn invalid_requests_affect_only_their_connection() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    for request in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /api/locks HTTP/1.1\r\n\r\n",
        b"GET /api/locks HTTP/1.1\r\nHost: \xff\r\n\r\n",
        b"DELETE /api/locks/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\nx",
        b"\0\0\0\0\r\n\r\n",
    ] {
        let mut stream = serve.connect();
        stream.write_all(request).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // The server may also reset the connection.
        _ = stream.read_to_end(&mut answer);
        let text = String::from_utf8_lossy(&answer);
        assert!(!text.starts_with("HTTP/1.1 2"), "{text}");
    }
    assert_eq!(serve.get("healthz").status, 200);
}

#[test]
fn a_client_that_has_closed_its_sending_side_gets_its_answer() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let mut stream = serve.connect();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer}");
}

#[test]
fn a_signal_ends_serve_with_status_zero() {
    let store = TestStore::new();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut serve = Serve::start(&store, &[]);
        let _open = serve.events();
        serve.process.signal(signal);
        assert_eq!(serve.process.wait(), 0, "{signal}");
    }
}

#[test]
fn with_json_the_address_is_json() {
    let store = TestStore::new();
    let mut command = store.lockreg(["--json", "serve", "--listen", "0"]);
    let process = TestProcess::start(&mut command);
    let url = process.next_json()["url"].as_str().unwrap().to_owned();
    assert_eq!(Serve { process, url }.get("healthz").status, 200);
}
