//! The dashboard and the alerting rules of the book, checked with Prometheus, promtool and
//! Grafana's schema.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Output};
use std::time::Duration;

use axum::routing::{Router, get};
use futures_util::poll;
use lock_registry::observe::{MetricKind, MetricsObserver, describe_metrics};
use lock_registry::{LockError, LockOptions, LockRegistryExt as _};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use registry_testkit::prometheus::{Prometheus, promtool};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

/// The maximum time until all panels have data. Typically they have it after a second.
const LIMIT: Duration = Duration::from_secs(60);

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../book/src/operate/monitoring").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(file(name)).expect("the file exists")
}

fn dashboard() -> Value {
    serde_json::from_str(&read("dashboard.json")).expect("the dashboard is JSON")
}

/// Returns the title and the expression of each query of the dashboard.
fn queries(dashboard: &Value) -> Vec<(String, String)> {
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().expect("the dashboard has panels") {
        let title = panel["title"].as_str().expect("a panel has a title");
        for target in panel["targets"].as_array().expect("a panel has targets") {
            let expression = target["expr"].as_str().expect("a target has an expression");
            queries.push((title.to_owned(), expression.to_owned()));
        }
    }
    queries
}

/// Returns the metrics that `text` names.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    let words = words.filter(|word| word.starts_with("lock_registry_"));
    words.map(|word| word.trim_end_matches("_bucket").to_owned()).collect()
}

#[test]
fn the_dashboard_shows_every_metric_and_the_rules_name_no_other() {
    let all: BTreeSet<_> = describe_metrics().iter().map(|it| it.name.to_owned()).collect();
    let shown = queries(&dashboard()).iter().flat_map(|it| metrics_in(&it.1)).collect();
    assert_eq!(all, shown);
    for name in ["alerts.yml", "alerts-test.yml"] {
        let others: Vec<_> = metrics_in(&read(name)).difference(&all).cloned().collect();
        assert!(others.is_empty(), "{name}: {others:?}");
    }
    for metric in describe_metrics() {
        let is_total = metric.name.ends_with("_total");
        assert_eq!(is_total, metric.kind == MetricKind::Counter, "{}", metric.name);
    }
}

#[tokio::test]
async fn each_alert_fires_and_does_not_fire_as_its_tests_state() {
    let (rules, tests) = (file("alerts.yml"), file("alerts-test.yml"));
    let text = |path: &Path| path.to_str().expect("the path is UTF-8").to_owned();
    promtool(&["check", "rules", &text(&rules)]).await.expect("Prometheus accepts the rules");
    promtool(&["test", "rules", &text(&tests)]).await.expect("the rules pass their tests");
    // Both cases of each alert are tested.
    let tests = read("alerts-test.yml");
    let lines: Vec<_> = tests.lines().map(str::trim).collect();
    for alert in read("alerts.yml").lines().filter_map(|it| it.trim().strip_prefix("- alert: ")) {
        let tested = format!("alertname: {alert}");
        let fires = lines.windows(2).filter(|it| it[0] == tested).map(|it| it[1] == "exp_alerts:");
        assert_eq!(fires.collect::<BTreeSet<_>>().len(), 2, "{alert} is tested in both cases");
    }
}

/// Runs `check_dashboard.py` on a dashboard.
fn check(dashboard: &Path) -> Output {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/check_dashboard.py");
    Command::new("python3").arg(program).arg(dashboard).output().expect("python3 is installed")
}

#[test]
fn the_dashboard_has_the_schema_of_grafana() {
    let output = check(&file("dashboard.json"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}; `.ci/lib` installs the schema");

    // The check finds members that the schema does not have, and members of another type.
    let broken = tempfile::NamedTempFile::new().expect("a temporary file can be created");
    for (pointer, value, problem) in [
        ("/panels/0/targets/0", json!({ "expression": "up" }), "not in the schema"),
        ("/panels/0/gridPos/x", json!("0"), "is no"),
        ("/templating/list/0/type", json!("unknown"), "is no"),
    ] {
        let mut dashboard = dashboard();
        *dashboard.pointer_mut(pointer).expect("the member exists") = value;
        fs::write(broken.path(), dashboard.to_string()).expect("the file can be written");
        let output = check(broken.path());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(problem), "{pointer}: {text}");
    }
}

/// Causes every event that a panel of the dashboard shows.
async fn use_locks() -> Result<(), Box<dyn std::error::Error>> {
    let locks = lock_registry::connect("memory:").await?;
    let order = locks.obtain("orders/42");

    let guard = order.lock().await?;
    guard.extend(Duration::from_secs(60)).await?;
    drop(guard.reenter()?);
    assert!(order.try_lock().await?.is_none());
    {
        let mut dropped = pin!(order.lock());
        assert!(poll!(&mut dropped).is_pending());
    }
    // An operator breaks the lock.
    locks.force_release("orders/42").await?;
    guard.lost().await;
    drop(guard);

    let readers = [order.read().await?, order.read().await?];
    drop(readers);
    order.upgradable().await?.upgrade().await?.downgrade().await?.unlock().await?;
    locks.semaphore("uploads", 5).acquire_many(2).await?.unlock().await?;

    let job = locks.once("report").tick(1);
    for _ in 0..2 {
        _ = job.run(|_| async {}).await?;
    }
    _ = locks.once("import").tick(1).try_run(|_| async { Err::<(), _>("no file") }).await?;
    locks.election("scheduler").run_term(|_| async {}).await?;

    // Closing does not wait for the end of a `min_hold`.
    let min_hold = LockOptions::new().min_hold(Duration::from_secs(60));
    locks.obtain("kept").lock_with(min_hold).await?.unlock().await?;
    _ = locks.close(Duration::ZERO).await;
    assert!(matches!(order.lock().await, Err(LockError::Closed)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_evaluates_every_panel_and_rule_on_scraped_data() {
    let times = Matcher::Suffix("_seconds".into());
    let builder = PrometheusBuilder::new();
    let builder =
        builder.set_buckets_for_metric(times, &MetricsObserver::BUCKETS).expect("buckets");
    let recorder = builder.install_recorder().expect("no other test installs a recorder");
    let app = Router::new().route("/metrics", get(|| async move { recorder.render() }));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let addr = listener.local_addr().expect("the listener has an address");
    let serving = tokio::spawn(axum::serve(listener, app).into_future());
    let using = tokio::spawn(async {
        loop {
            use_locks().await.expect("the in-process store has no errors");
            sleep(Duration::from_millis(50)).await;
        }
    });
    let prometheus = Prometheus::start(addr, &file("alerts.yml")).await;
    let prometheus = prometheus.expect("Prometheus starts");

    let checked = async {
        for (title, expression) in queries(&dashboard()) {
            // Grafana would replace these variables.
            let expression = expression
                .replace("$__rate_interval", "1m")
                .replace("\"$store\"", "\".*\"")
                .replace("\"$name\"", "\".*\"");
            assert!(!expression.contains('$'), "{title}: {expression}");
            let deadline = Instant::now() + LIMIT;
            loop {
                let series = prometheus.query(&expression).await;
                let series = series.unwrap_or_else(|error| panic!("{title}: {error}"));
                if series.iter().any(|it| it["value"][1] != "NaN") {
                    break;
                }
                assert!(Instant::now() < deadline, "{title} has no data: {expression}");
                sleep(Duration::from_millis(100)).await;
            }
        }
        let deadline = Instant::now() + LIMIT;
        loop {
            let rules = prometheus.rules().await.expect("Prometheus returns its rules");
            for rule in &rules {
                assert!(rule["lastError"].as_str().is_none_or(str::is_empty), "{rule}");
            }
            let is_firing =
                |name: &str| rules.iter().any(|it| it["name"] == name && it["state"] == "firing");
            let is_evaluated = rules.iter().all(|it| it["health"] == "ok");
            let firing = ["LockLost", "LockLeftToLease", "LockTickFailed"];
            if is_evaluated && firing.iter().all(|name| is_firing(name)) {
                break;
            }
            assert!(Instant::now() < deadline, "{rules:#?}");
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = checked => {}
        ended = using => panic!("the locks are used no more: {ended:?}"),
        ended = serving => panic!("the exporter has ended: {ended:?}"),
    }
}
