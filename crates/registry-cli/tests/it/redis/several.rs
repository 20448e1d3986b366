//! Each subcommand over each kind of Redis setup: sentinels, cluster, quorum, Unix socket, TLS.

use registry_testkit::redis::{
    RedisCluster, RedisOptions, RedisQuorum, RedisServer, SentinelOptions, SentinelSetup,
};
use serde_json::{Value, json};

use super::Redis;
use crate::support::TestProcess;

/// Runs all subcommands of `lockreg` with these servers. `doctor` must report this class.
fn assert_commands_work<S>(redis: &Redis<S>, class: &str) {
    let script = r#"echo "$LOCKREG_KEY $LOCKREG_FENCING_TOKEN"; exit 3"#;
    let run = redis.run(&["run", "--no-wait", "nightly", "--", "sh", "-c", script]);
    assert_eq!(run.status, 3, "{run:?}");
    let token = run.stdout.trim().strip_prefix("nightly ").and_then(|token| token.parse().ok());
    assert!(token.is_some_and(|token: u64| token > 0), "{run:?}");

    let held = |key: &str| {
        let hold = ["--json", "hold", "--label", "worker 7", "--lease", "10s", key];
        let held = TestProcess::start(&mut redis.command(&hold));
        assert_eq!(held.next_json()["key"], key);
        held
    };
    let keys = ["a", "b", "orders/42"];
    let mut holders = keys.map(held);
    let list = redis.json(&["--json", "list"]);
    let mut listed: Vec<_> = list.as_array().unwrap().iter().map(|lock| &lock["key"]).collect();
    listed.sort_by_key(|key| key.as_str());
    assert_eq!(listed, keys, "{list}");
    assert_eq!(redis.json(&["--json", "show", "orders/42"])["label"], "worker 7");
    assert_eq!(redis.run(&["run", "--no-wait", "a", "--", "true"]).status, 75);

    let broken = redis.json(&["--json", "break", "orders/42", "--yes"]);
    assert_eq!(broken["broken"], json!(true));
    let [a, b, orders] = &mut holders;
    assert_eq!(orders.next_json()["lost"], "gone");
    assert_eq!(orders.wait(), 76);
    for holder in [a, b] {
        holder.close_stdin();
        assert_eq!(holder.wait(), 0);
    }
    assert_eq!(redis.json(&["--json", "list"]), json!([]));

    let report = redis.json(&["doctor", "--json"]);
    assert_eq!((&report["store"], &report["reachable"]), (&json!("redis"), &json!(true)));
    assert_eq!(report["capabilities"]["class"], class, "{report}");
    let text = redis.run(&["doctor"]).stdout;
    assert!(text.contains(&format!(" {class}: one holder")), "{text}");
    assert!(!text.contains("canary") && !report.to_string().contains("canary"), "{text}");
    let bench = redis.json(&["bench", "--for", "100ms", "--json"]);
    assert!(bench["pairs"].as_u64().is_some_and(|pairs| pairs > 0), "{bench}");
}

fn with_login() -> RedisOptions {
    RedisOptions::new().login("worker", "canary")
}

#[test]
fn all_commands_work_with_sentinels() {
    let options = SentinelOptions::new().servers(with_login()).sentinel_login("watcher", "canary2");
    let redis = Redis::of(SentinelSetup::start_with(&options), |setup| {
        let url = setup.url().replace("://", "://worker:canary@");
        format!("{url}?sentinel_user=watcher&sentinel_password=canary2")
    });
    assert_commands_work(&redis, "best-effort");
    let settings = redis.json(&["doctor", "--json"])["settings"].clone();
    let shown = |name: &str| {
        let all = settings.as_array().unwrap();
        all.iter().find(|setting| setting["name"] == name).map(|setting| setting["value"].clone())
    };
    assert_eq!(shown("sentinel_password"), Some(Value::from("***")), "{settings}");
}

#[test]
fn all_commands_work_with_a_cluster() {
    let options = with_login();
    let redis = Redis::of(RedisCluster::start_with(&options), |cluster| {
        cluster.url().replace("://", "://worker:canary@")
    });
    assert_commands_work(&redis, "best-effort");
}

#[test]
fn all_commands_work_with_a_quorum() {
    let options = with_login();
    let redis = Redis::of(RedisQuorum::start_with(3, &options), |quorum| {
        quorum.url().replace("://", "://worker:canary@")
    });
    assert_commands_work(&redis, "best-effort");
}

#[test]
fn all_commands_work_with_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("redis.sock").to_str().unwrap().to_owned();
    let arguments = ["--unixsocket", &path, "--requirepass", "canary"];
    let url = |_: &RedisServer| format!("redis+unix://:canary@{path}?db=1");
    assert_commands_work(&Redis::of(RedisServer::start(&arguments), url), "volatile");
}

#[cfg(feature = "redis-tls")]
#[test]
fn all_commands_work_with_tls_and_a_client_certificate() {
    use registry_testkit::tls::TlsFolder;

    let folder = TlsFolder::new().unwrap();
    let arguments = ["--tls-auth-clients", "yes", "--requirepass", "canary"];
    let redis = Redis::of(RedisServer::start_tls(&folder, &arguments), |server| {
        let url = server.url().replace("://", "://:canary@");
        let (ca, cert) = (folder.ca_file(), folder.client_cert_file());
        let key = folder.client_key_file();
        format!("{url}?ca={}&cert={}&key={}", ca.display(), cert.display(), key.display())
    });
    assert_commands_work(&redis, "volatile");
}
