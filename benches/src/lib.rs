//! Runs benchmark groups and prints each result as a ratio to the reference of its group.
//!
//! Absolute times say more about a machine than about a program. In each group the benchmark named `reference` does the
//! least that the job needs; the others are told by how many times longer they take, from the same run.

use std::fs;
use std::path::{Path, PathBuf};

use criterion::Criterion;

/// Runs `benches` as the command line says, and prints the ratios of what was measured.
pub fn run(groups: &[&str], benches: impl FnOnce(&mut Criterion)) {
    let mut criterion = Criterion::default().configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
    for group in groups {
        print_ratios(group);
    }
}

fn print_ratios(group: &str) {
    let folder = results().join(group);
    let Some(reference) = median_ns(&folder.join("reference")) else { return };
    println!("\n{group}: reference {reference:.0} ns");
    let Ok(entries) = fs::read_dir(&folder) else { return };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    names.sort();
    for bench in names {
        let name = bench.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name != "reference"
            && name != "report"
            && let Some(median) = median_ns(&bench)
        {
            let (ratio, speed) = (median / reference, reference / median);
            println!(
                "{group}/{name}: {median:.0} ns, {ratio:.2} x its time, {speed:.2} x its speed"
            );
        }
    }
}

fn results() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    target.join("criterion")
}

fn median_ns(bench: &Path) -> Option<f64> {
    let estimates = fs::read(bench.join("new/estimates.json")).ok()?;
    let estimates: serde_json::Value = serde_json::from_slice(&estimates).ok()?;
    estimates.pointer("/median/point_estimate")?.as_f64()
}
