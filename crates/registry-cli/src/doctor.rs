//! `lockreg doctor`: connects to the store, and prints its guarantees, its settings and its
//! configuration faults.

use std::time::{Duration, Instant};

use lock_registry::{
    Capabilities, GuaranteeClass,
    backend::{Finding, Severity},
    config::{Origin, Setting},
};
use serde_json::json;

use crate::acquire::close;
use crate::args::{self, GlobalArgs};
use crate::exit::{self, CliError};
use crate::output::{Output, format_coarse, printable, table, whole_millis};
use crate::store::StoreConfig;

/// `lockreg doctor`.
pub(crate) async fn doctor(
    global: &GlobalArgs,
    doctor: &args::DoctorArgs,
    output: Output,
) -> Result<u8, CliError> {
    let store = StoreConfig::choose(global)?;
    let settings = store.settings()?;
    let registry = store.open(output).await?;
    let started = Instant::now();
    let findings = registry.diagnose().await?;
    let elapsed = started.elapsed();
    let capabilities = registry.capabilities();
    close(&registry).await;
    output.result(&json_report(&settings, &capabilities, &findings, elapsed), || {
        text_report(&settings, &capabilities, &findings)
    })?;
    let has_warning = findings.iter().any(|finding| finding.severity > Severity::Note);
    Ok(if doctor.strict && has_warning { exit::NEGATIVE_RESULT } else { 0 })
}

fn json_report(
    settings: &[Setting],
    capabilities: &Capabilities,
    findings: &[Finding],
    elapsed: Duration,
) -> serde_json::Value {
    let settings: Vec<_> = settings
        .iter()
        .map(|setting| json!({ "name": setting.name, "value": setting.value, "origin": json_origin(setting.origin) }))
        .collect();
    json!({
        "store": capabilities.store,
        "reachable": true,
        "diagnosis_ms": whole_millis(elapsed),
        "capabilities": {
            "class": capabilities.class,
            "reach": capabilities.reach,
            "fencing": capabilities.fencing,
            "fair": capabilities.fair,
            "wakes": capabilities.wakes,
            "tells_losses": capabilities.reports_invalidations,
            "shared": capabilities.shared,
            "upgradable": capabilities.upgradable,
            "permits": capabilities.permits,
            "values": capabilities.values,
            "waiters": capabilities.waiters,
            "labels": capabilities.labels,
            "inspect": capabilities.inspect,
            "lease_min_ms": whole_millis(capabilities.lease_min),
            "lease_max_ms": whole_millis(capabilities.lease_max),
        },
        "settings": settings,
        "findings": findings,
    })
}

fn text_report(settings: &[Setting], capabilities: &Capabilities, findings: &[Finding]) -> String {
    let yes_no = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let row = |name: &str, value: String| [name.to_owned(), value];
    let guarantees = [
        row("store", capabilities.store.to_owned()),
        row("exclusion among", capabilities.reach.to_string()),
        row("class", format!("{}: {}", capabilities.class, describe_class(capabilities.class))),
        row("fencing tokens", yes_no(capabilities.fencing)),
        row("FIFO order", yes_no(capabilities.fair)),
        row("notifies waiters", yes_no(capabilities.wakes)),
        row("reports losses", yes_no(capabilities.reports_invalidations)),
        row("stores labels", yes_no(capabilities.labels)),
        row("reports holders", yes_no(capabilities.inspect)),
        row("lists waiters", yes_no(capabilities.waiters)),
        row("shared locks", yes_no(capabilities.shared)),
        row("upgradable locks", yes_no(capabilities.upgradable)),
        row("permits", yes_no(capabilities.permits)),
        row("value blocks", yes_no(capabilities.values)),
        row(
            "leases",
            format!(
                "{} to {}",
                format_coarse(capabilities.lease_min),
                format_coarse(capabilities.lease_max)
            ),
        ),
    ];
    let mut report = table(["STORE", ""], guarantees);
    report.push('\n');
    let settings = settings.iter().map(|setting| {
        [setting.name.to_owned(), printable(&setting.value), text_origin(setting.origin)]
    });
    report.push_str(&table(["OPTION", "VALUE", "SOURCE"], settings));
    report.push('\n');
    if findings.is_empty() {
        report.push_str("No configuration faults found.\n");
    }
    for finding in findings {
        let severity = if finding.severity == Severity::Note { "note" } else { "warning" };
        report.push_str(&format!("{severity}: {}\n", finding.message));
    }
    report
}

fn describe_class(class: GuaranteeClass) -> &'static str {
    match class {
        GuaranteeClass::Durable => {
            "fenced writes are safe under every fault that preserves the store's data"
        }
        GuaranteeClass::Volatile => {
            "one holder, and safe fenced writes, unless the store loses data or its clock jumps"
        }
        GuaranteeClass::BestEffort => {
            "one holder unless a failover, data loss or clock jump happens"
        }
        GuaranteeClass::None => "no mutual exclusion: the store grants every claim",
        _ => "unknown to this version of lockreg",
    }
}

/// Returns the origin of a setting as text. `Origin::Code` means a default, because `lockreg` sets
/// only defaults in code.
fn text_origin(origin: Origin) -> String {
    match origin {
        Origin::Code => "the default of lockreg".to_owned(),
        other => other.to_string(),
    }
}

fn json_origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Code => "default",
        Origin::CommandLine => "command_line",
        Origin::Environment => "environment",
        Origin::Url => "url",
        _ => "other",
    }
}
