//! `lockreg doctor`: connects to the store and prints its guarantees, its settings and its
//! problems.

use std::time::{Duration, Instant};

use lock_registry::{
    Capabilities, Finding, GuaranteeClass, LockRegistry, Origin, Setting, Severity,
};
use serde_json::json;

use crate::args::{self, Global};
use crate::exit::{self, Failure};
use crate::say::{Say, coarse, millis, printable, table};
use crate::store::Store;
use crate::take::close;

/// `lockreg doctor`.
pub(crate) async fn doctor(
    global: &Global,
    doctor: &args::Doctor,
    say: Say,
) -> Result<u8, Failure> {
    let store = Store::choose(global)?;
    let settings = store.settings()?;
    let registry = store.open(say).await?;
    let asked = Instant::now();
    let findings = registry.diagnose().await?;
    let took = asked.elapsed();
    let capabilities = registry.capabilities();
    close(&registry).await;
    say.result(&machine_report(&settings, &capabilities, &findings, took), || {
        human_report(&settings, &capabilities, &findings)
    })?;
    let is_warned = findings.iter().any(|finding| finding.severity > Severity::Note);
    Ok(if doctor.strict && is_warned { exit::NEGATIVE } else { 0 })
}

fn machine_report(
    settings: &[Setting],
    capabilities: &Capabilities,
    findings: &[Finding],
    took: Duration,
) -> serde_json::Value {
    let settings: Vec<_> = settings
        .iter()
        .map(|setting| json!({ "name": setting.name, "value": setting.value, "origin": machine_origin(setting.origin) }))
        .collect();
    json!({
        "store": capabilities.store,
        "reachable": true,
        "diagnosis_ms": millis(took),
        "capabilities": {
            "class": capabilities.class,
            "reach": capabilities.reach,
            "fencing": capabilities.fencing,
            "fair": capabilities.fair,
            "wakes": capabilities.wakes,
            "tells_losses": capabilities.reports_invalidations,
            "shared": capabilities.shared,
            "labels": capabilities.labels,
            "inspect": capabilities.inspect,
            "lease_min_ms": millis(capabilities.lease_min),
            "lease_max_ms": millis(capabilities.lease_max),
        },
        "settings": settings,
        "findings": findings,
    })
}

fn human_report(settings: &[Setting], capabilities: &Capabilities, findings: &[Finding]) -> String {
    let yes_no = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let row = |name: &str, value: String| [name.to_owned(), value];
    let promises = [
        row("store", capabilities.store.to_owned()),
        row("excludes", capabilities.reach.to_string()),
        row("class", format!("{}: {}", capabilities.class, meaning(capabilities.class))),
        row("fencing tokens", yes_no(capabilities.fencing)),
        row("grants in order", yes_no(capabilities.fair)),
        row("wakes waiters", yes_no(capabilities.wakes)),
        row("tells losses", yes_no(capabilities.reports_invalidations)),
        row("keeps labels", yes_no(capabilities.labels)),
        row("tells holders", yes_no(capabilities.inspect)),
        row(
            "leases",
            format!("{} to {}", coarse(capabilities.lease_min), coarse(capabilities.lease_max)),
        ),
    ];
    let mut report = table(["THE STORE", ""], promises);
    report.push('\n');
    let settings = settings.iter().map(|setting| {
        [setting.name.to_owned(), printable(&setting.value), human_origin(setting.origin)]
    });
    report.push_str(&table(["SET", "TO", "BY"], settings));
    report.push('\n');
    if findings.is_empty() {
        report.push_str("Nothing is wrong.\n");
    }
    for finding in findings {
        let severity = if finding.severity == Severity::Note { "note" } else { "warning" };
        report.push_str(&format!("{severity}: {}\n", finding.message));
    }
    report
}

fn meaning(class: GuaranteeClass) -> &'static str {
    match class {
        GuaranteeClass::A => "fenced writes are safe under every fault that its data survives",
        GuaranteeClass::B => {
            "one holder, and safe fenced writes, as long as the store's data and clock survive"
        }
        GuaranteeClass::C => "one holder as long as there is no failover, data loss or clock jump",
        GuaranteeClass::None => "nobody is excluded",
        _ => "newer than this program",
    }
}

/// Returns the origin of a setting as text. In this program, only the defaults are set by code.
fn human_origin(origin: Origin) -> String {
    match origin {
        Origin::Code => "the default of lockreg".to_owned(),
        other => other.to_string(),
    }
}

fn machine_origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Code => "default",
        Origin::CommandLine => "command_line",
        Origin::Environment => "environment",
        Origin::Url => "url",
        _ => "other",
    }
}
