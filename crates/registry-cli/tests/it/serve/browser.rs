//! The page of `lockreg serve` in headless Chromium, over a SQLite store.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{Serve, TOKEN};
use crate::support::{TEST_TIMEOUT, TestProcess, TestStore, screenshot_path};

/// A browser with an open page, controlled by W3C WebDriver commands to chromedriver. Dropping it
/// ends its processes.
struct Browser {
    driver: Child,
    agent: ureq::Agent,
    /// The URL of the WebDriver session.
    session: String,
}

/// Starts chromedriver and returns its port. Returns `None` if chromedriver has ended: it listens
/// on one port of IPv4 and IPv6, chooses a free one of IPv4, and ends if it is in use on IPv6.
fn start_driver() -> Option<(Child, u16)> {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("chromedriver is installed, Debian package chromium-driver");
    let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
    let port = lines.find_map(|line| {
        let (_, rest) = line.split_once("successfully on port ")?;
        rest.trim_end_matches('.').parse().ok()
    });
    if port.is_none() {
        _ = driver.kill();
        driver.wait().unwrap();
    }
    Some((driver, port?))
}

impl Browser {
    fn open(url: &str) -> Self {
        let (driver, port) =
            (0..10).find_map(|_| start_driver()).expect("chromedriver prints its port");
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(TEST_TIMEOUT))
            .build()
            .into();
        let mut browser =
            Self { driver, agent, session: format!("http://127.0.0.1:{port}/session") };
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1100,760",
            "--force-device-scale-factor=1",
            "--lang=en",
        ];
        let session = browser.command(
            "",
            &json!({ "capabilities": { "alwaysMatch": {
                "goog:chromeOptions": { "args": arguments },
                "goog:loggingPrefs": { "browser": "ALL" },
            } } }),
        );
        browser.session = format!("{}/{}", browser.session, session["sessionId"].as_str().unwrap());
        browser.command("/url", &json!({ "url": url }));
        browser
    }

    #[track_caller]
    fn command(&self, path: &str, parameters: &Value) -> Value {
        let url = format!("{}{path}", self.session);
        let mut answer = self.agent.post(&url).send(parameters.to_string()).unwrap();
        Self::value(&answer.body_mut().with_config().limit(1 << 26).read_to_string().unwrap())
    }

    #[track_caller]
    fn value(answer: &str) -> Value {
        let mut answer: Value = serde_json::from_str(answer).unwrap();
        assert!(answer["value"]["error"].is_null(), "{answer}");
        answer["value"].take()
    }

    #[track_caller]
    fn run(&self, script: &str) -> Value {
        self.command("/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Waits until the expression is true in the page.
    #[track_caller]
    fn wait_until(&self, expression: &str) {
        let script = format!("return Boolean({expression})");
        let started = Instant::now();
        while self.run(&script) != json!(true) {
            assert!(
                started.elapsed() < TEST_TIMEOUT,
                "not {expression}:\n{}",
                self.run("return document.body.innerText")
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    #[track_caller]
    fn wait_for_text(&self, text: &str) {
        self.wait_until(&format!("document.body.innerText.includes({})", json!(text)));
    }

    /// Returns the path that WebDriver commands use for the element.
    #[track_caller]
    fn find(&self, css: &str) -> String {
        let found = self.command("/element", &json!({ "using": "css selector", "value": css }));
        let id = found.as_object().unwrap().values().next().unwrap();
        format!("/element/{}", id.as_str().unwrap())
    }

    #[track_caller]
    fn click(&self, css: &str) {
        self.command(&format!("{}/click", self.find(css)), &json!({}));
    }

    #[track_caller]
    fn type_into(&self, css: &str, text: &str) {
        self.command(&format!("{}/value", self.find(css)), &json!({ "text": text }));
    }

    /// Writes the screenshot `NAME.png` for the book.
    fn take_screenshot(&self, name: &str) {
        let url = format!("{}/screenshot", self.session);
        let mut answer = self.agent.get(&url).call().unwrap();
        let text = answer.body_mut().with_config().limit(1 << 26).read_to_string().unwrap();
        let png = BASE64.decode(Self::value(&text).as_str().unwrap()).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 10_000, "{} bytes", png.len());
        std::fs::write(screenshot_path(&format!("{name}.png")), png).unwrap();
    }

    /// Returns the errors and warnings that the page has logged, such as violations of its content
    /// security policy.
    fn log(&self) -> Vec<String> {
        let entries = self.command("/se/log", &json!({ "type": "browser" }));
        let entries = entries.as_array().unwrap().iter();
        entries.filter_map(|entry| entry["message"].as_str().map(str::to_owned)).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The end of the session ends the browser. Killing chromedriver would leave it running.
        _ = self.agent.delete(&self.session).call();
        _ = self.driver.kill();
        _ = self.driver.wait();
    }
}

fn hold(store: &TestStore, label: &str, key: &str) -> TestProcess {
    let holder = store.start(["hold", "--label", label, key]);
    holder.next_line();
    holder
}

#[test]
fn the_page_follows_the_store() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let browser = Browser::open(&serve.url);
    browser.wait_for_text("sqlite: 0 held, 0 waiting");
    let mut holders = Vec::new();
    for (label, key) in [
        ("billing-2:311", "invoices/2026-11"),
        ("web-1:4711", "orders/42"),
        ("web-2:4712", "orders/43"),
        ("worker-7:1290", "reports/daily"),
    ] {
        holders.push(hold(&store, label, key));
    }
    browser.wait_for_text("4 held");
    let waiters = ["web-2:4712", "web-3:4713"]
        .map(|label| store.start(["hold", "--label", label, "orders/42"]));
    browser.wait_for_text("2 waiting");
    let cells = "return Array.from(document.querySelectorAll('#locks tbody tr')).find(row => \
        row.textContent.includes('orders/42')).innerText.split('\\t').map(text => text.trim())";
    let row = browser.run(cells);
    let token = store.holder("orders/42").unwrap().to_string();
    assert_eq!(
        (&row[0], &row[1], &row[2], &row[3], &row[6]),
        (
            &json!("orders/42"),
            &json!("exclusive"),
            &json!("web-1:4711"),
            &json!(token),
            &json!("2")
        )
    );
    browser.wait_for_text("web-3:4713 waits for orders/42 (exclusive), held by web-1:4711");
    browser.take_screenshot("serve");

    browser.click("th button[data-sort=waiters]");
    browser
        .wait_until("document.querySelector('#locks tbody tr').innerText.startsWith('orders/42')");
    browser.type_into("#filter", "REPORT");
    browser.wait_until("document.querySelectorAll('#locks tbody tr').length === 1");
    browser.run("const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))");
    assert_eq!(holders.remove(1).finish(), 0);
    browser.wait_until("!document.getElementById('numbers').innerText.includes('2 waiting')");
    browser.click("#locks tbody tr button");
    browser.wait_for_text("Past holders");
    browser.wait_until("document.querySelectorAll('#timeline .track').length === 2");
    browser.wait_until("document.querySelectorAll('#timeline .bar.ended').length === 1");
    browser.take_screenshot("serve-details");
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))");
    browser.wait_until("document.getElementById('details').hidden");
    assert_eq!(browser.log(), [""; 0]);
    drop((waiters, holders));
    browser.wait_for_text("0 held, 0 waiting");
}

#[test]
fn processes_that_wait_for_each_other_are_marked() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let browser = Browser::open(&serve.url);
    let _first = hold(&store, "billing-1:17", "accounts/7");
    let _second = hold(&store, "billing-2:23", "accounts/9");
    let _waits = [
        store.start(["hold", "--label", "billing-1:17", "accounts/9"]),
        store.start(["hold", "--label", "web-1:4711", "accounts/7"]),
    ];
    browser.wait_for_text("2 waiting");
    assert_eq!(browser.run("return document.getElementById('alarm').hidden"), json!(true));
    let _cycle = store.start(["hold", "--label", "billing-2:23", "accounts/7"]);
    browser.wait_for_text(
        "Possible deadlock: billing-1:17 waits for accounts/9, held by billing-2:23; \
         billing-2:23 waits for accounts/7, held by billing-1:17",
    );
    browser
        .wait_until("document.querySelectorAll('#graph path.deadlock[marker-end]').length === 2");
    browser.wait_until(
        "document.querySelectorAll('#graph path:not(.deadlock)[marker-end]').length === 1",
    );
    browser.take_screenshot("serve-deadlock");
    assert_eq!(browser.log(), [""; 0]);
}

#[test]
fn hostile_keys_and_labels_neither_run_nor_break_the_table() {
    let store = TestStore::new();
    let long = format!("long{}", "k".repeat(4_092));
    let texts = [
        "<script>window.attacked = 1</script>",
        "<img src=x onerror='window.attacked = 1'>",
        "\"><svg onload=window.attacked=1>",
        "javascript:window.attacked=1",
        "{{constructor.constructor('window.attacked=1')()}}",
        "line\nbreak\r\nand\ttab \u{1b}[31m\0red".trim_end_matches('\0'),
        "\u{202e}evil\u{2066}\u{200b}",
        "\u{5d0}\u{5d1}\u{5d2} orders/1 \u{627}\u{628}",
        "Z\u{334}\u{335}\u{336}\u{337}\u{338}\u{31a}\u{31b}\u{31c}\u{31d}\u{31e}\u{31f}\u{320}algo",
        "\u{ad}\u{3164}\u{e0041}",
        "__proto__",
        "constructor",
        &long,
    ]
    .map(|text| text.replace('\0', ""));
    let holders: Vec<_> = texts
        .iter()
        .map(|text| {
            let label: String = text.chars().take(200).collect();
            hold(&store, &label, text)
        })
        .collect();
    let serve = Serve::start(&store, &[]);
    let browser = Browser::open(&serve.url);
    browser.wait_for_text(&format!("{} held", texts.len()));
    let _waiter = store.start(["hold", "--label", &texts[1], &texts[0]]);
    browser.wait_for_text("1 waiting");
    browser.wait_until("document.querySelector('#graph svg')");
    let rows = browser.run(
        "return Array.from(document.querySelectorAll('#locks tbody tr')).map(row => [row.firstElementChild.textContent, \
         row.getBoundingClientRect().height, row.children.length])",
    );
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), texts.len());
    for row in rows {
        let (key, height) = (row[0].as_str().unwrap(), row[1].as_f64().unwrap());
        assert!(height < 40.0 && row[2] == 7, "{height} px for {key:?}");
        assert!(
            !key.contains(|c: char| c.is_control() || c == '\u{202e}' || c == '\u{2066}'),
            "{key:?}"
        );
    }
    for row in 0..texts.len() {
        browser.run(&format!("document.querySelectorAll('#locks tbody tr button')[{row}].click()"));
        browser.wait_until(
            "document.querySelector('#holders li') && document.querySelector('#timeline .bar')",
        );
    }
    for (what, expression) in [
        ("a script ran", "window.attacked === undefined"),
        (
            "an element came from text",
            "document.querySelectorAll('script, img, iframe, object').length === 1",
        ),
        (
            "the page is wider than the window",
            "document.documentElement.scrollWidth <= window.innerWidth",
        ),
        (
            "the details are wider than their panel",
            "document.getElementById('details').scrollWidth <= document.getElementById('details').clientWidth",
        ),
    ] {
        assert_eq!(browser.run(&format!("return {expression}")), json!(true), "{what}");
    }
    assert_eq!(browser.log(), [""; 0]);
    drop(holders);
}

#[test]
fn a_lock_is_released_with_the_token_only() {
    let store = TestStore::new();
    let holder = store.start(["hold", "--lease", "3s", "--label", "stuck", "../a?b"]);
    holder.next_line();
    let mut command =
        store.lockreg(["serve", "--listen", "0", "--interval", "50ms", "--allow-break"]);
    let serve = Serve::of(command.env("LOCKREG_SERVE_TOKEN", TOKEN));
    let browser = Browser::open(&serve.url);
    browser.wait_for_text("1 held");
    browser.click("#locks tbody tr button");
    browser.type_into("#token", "wrong");
    browser.click("#break button");
    assert_eq!(
        browser.run("return document.getElementById('broken').textContent"),
        json!(""),
        "not confirmed"
    );
    browser.click("#sure");
    browser.click("#break button");
    browser.wait_for_text("the token is missing or wrong");
    assert!(store.holder("../a?b").is_some());
    browser.run("document.getElementById('token').value = ''");
    browser.type_into("#token", TOKEN);
    browser.click("#sure");
    browser.click("#break button");
    browser.wait_for_text("The lock was released.");
    browser.wait_for_text("0 held");
    assert!(holder.next_line().contains("lost"));
}

#[test]
fn the_page_reconnects_after_a_restart_of_the_server() {
    let store = TestStore::new();
    let mut serve = Serve::start(&store, &[]);
    let browser = Browser::open(&serve.url);
    browser.wait_for_text("live");
    let address = serve.url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    serve.process.signal(Signal::SIGTERM);
    assert_eq!(serve.process.wait(), 0);
    browser.wait_for_text("no connection to lockreg");
    let _holder = hold(&store, "new", "a/1");
    let mut command = store.lockreg(["serve", "--interval", "50ms", "--listen"]);
    let _serve = Serve::of(command.arg(&address));
    browser.wait_for_text("1 held");
    browser.wait_for_text("live");
}

#[test]
fn many_open_pages_do_not_block_each_other() {
    let store = TestStore::new();
    let serve = Serve::start(&store, &[]);
    let browser = Browser::open(&serve.url);
    browser.wait_for_text("live");
    let _holder = hold(&store, "worker 7", "a/1");
    // Browsers open six connections to one server.
    for _ in 0..8 {
        let page = browser.command("/window/new", &json!({ "type": "tab" }));
        browser.command("/window", &json!({ "handle": page["handle"] }));
        browser.command("/url", &json!({ "url": serve.url }));
        browser.wait_for_text("1 held");
    }
    browser.click("#locks tbody tr button");
    browser.wait_until("document.querySelectorAll('#timeline .bar').length === 1");
}
