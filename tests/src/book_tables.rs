//! The tables of the documentation that are generated from the code: options, schemes, features,
//! capabilities, metrics and exit statuses. The program `book-tables` writes them, and a test fails
//! if they are stale.
//!
//! A page marks a table with `<!-- generated: NAME -->` and `<!-- end -->`.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use lock_registry::RegistryConfig;
use lock_registry::config::{OptionDescription, describe_options, describe_schemes};
use lock_registry::observe::describe_metrics;
use registry_core::config::format_time;

/// The pages with generated tables.
const PAGES: &[&str] = &[
    "book/src/configuration.md",
    "book/src/databases.md",
    "book/src/lockreg.md",
    "book/src/operating.md",
    "book/src/redis.md",
    "book/src/stores.md",
    "crates/lock-registry/README.md",
    "crates/lock-registry/src/options.md",
];

/// One store for each row of the table of capabilities.
const STORES: &[&str] = &[
    "memory:",
    "sqlite:locks.db",
    "postgres://host/db",
    "postgres://host/db?mode=session",
    "postgres://host/db?mode=row",
    "postgres://host/db?layout=spring",
    "mysql://host/db",
    "mysql://host/db?mode=session",
    "mysql://host/db?mode=row",
    "mysql://host/db?layout=spring",
    "redis://host",
    "redis://host?layout=spring",
    "redis://host?layout=redisson",
    "redis+sentinel://host/service",
    "redis+cluster://host",
    "redis+quorum://a,b,c",
    "zk://host",
    "zk://host?layout=curator",
    "zk://host?layout=curator&naming=curator-read-write",
    "zk://host?layout=curator&naming=curator-semaphore",
    "etcd://host",
    "etcd://host?layout=etcdctl",
    "pass-through:",
];

const START: &str = "<!-- generated: ";
const END: &str = "<!-- end -->";

/// Returns the pages of the workspace at `root` whose tables are stale, each with its new text.
///
/// # Errors
/// If a page cannot be read, or marks a table that is not generated.
pub fn stale_pages(root: &Path) -> io::Result<Vec<(&'static str, String)>> {
    let mut stale = Vec::new();
    for page in PAGES {
        let old = fs::read_to_string(root.join(page))?;
        let new = with_tables(root, &old)?;
        if new != old {
            stale.push((*page, new));
        }
    }
    Ok(stale)
}

fn with_tables(root: &Path, page: &str) -> io::Result<String> {
    let mut new = String::new();
    let mut rest = page;
    while let Some((before, marked)) = rest.split_once(START) {
        let invalid = |problem| io::Error::other(format!("{problem} after {START}"));
        let (name, after) = marked.split_once(" -->").ok_or_else(|| invalid("no ` -->`"))?;
        let (_, after) = after.split_once(END).ok_or_else(|| invalid("no end"))?;
        let table = table(root, name)?;
        // Writing to a string does not fail.
        let _ = write!(new, "{before}{START}{name} -->\n\n{table}\n{END}");
        rest = after;
    }
    Ok(new + rest)
}

fn table(root: &Path, name: &str) -> io::Result<String> {
    Ok(match name.split_once(' ') {
        None if name == "options" => all_options(),
        Some(("options", stores)) => options_of(&stores.split(' ').collect::<Vec<_>>()),
        None if name == "schemes" => schemes(),
        None if name == "capabilities" => capabilities()?,
        None if name == "features" => features(root)?,
        None if name == "metrics" => metrics(),
        Some(("exit", "statuses")) => exit_statuses(root)?,
        _ => return Err(io::Error::other(format!("no table is named {name:?}"))),
    })
}

fn metrics() -> String {
    let mut table = String::from(
        "| metric | kind | labels in addition to `store` and `name` | meaning |\n|---|---|---|---|\n",
    );
    for metric in describe_metrics() {
        let labels = metric.labels.iter().map(|(name, values)| match *name {
            "mode" => "`mode`".to_owned(),
            name => format!("`{name}`: `{}`", values.join("`, `")),
        });
        let labels = labels.collect::<Vec<_>>().join("; ");
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        let _ = writeln!(table, "| `{name}` | {kind} | {labels} | {help} |");
    }
    table
}

fn all_options() -> String {
    let mut table = String::from(
        "| option | environment | stores | default | values | meaning |\n|---|---|---|---|---|---|\n",
    );
    for option in describe_options() {
        let OptionDescription { name, variable, stores, default, values, help, .. } = option;
        let _ = writeln!(
            table,
            "| `{name}` | `{variable}` | {stores} | {default} | {values} | {help} |"
        );
    }
    table
}

/// Returns the options of these stores that not all stores have.
fn options_of(stores: &[&str]) -> String {
    let mut table =
        String::from("| option | stores | default | values | meaning |\n|---|---|---|---|---|\n");
    for option in describe_options() {
        let OptionDescription { name, stores: all, default, values, help, .. } = option;
        let is_one = |part: &str| {
            stores.iter().any(|store| part.split([' ', '+', '`']).any(|word| word == *store))
        };
        let parts: Vec<&str> = all.split(", ").filter(|part| is_one(part)).collect();
        if !parts.is_empty() {
            let parts = parts.join(", ");
            let _ = writeln!(table, "| `{name}` | {parts} | {default} | {values} | {help} |");
        }
    }
    table
}

fn schemes() -> String {
    let mut table = String::from("| scheme | Cargo feature |\n|---|---|\n");
    for (scheme, feature) in describe_schemes() {
        let feature =
            feature.map_or_else(|| "built in".to_owned(), |feature| format!("`{feature}`"));
        let _ = writeln!(table, "| `{scheme}:` | {feature} |");
    }
    table
}

fn capabilities() -> io::Result<String> {
    let mut table = String::from(
        "| store | `class` | `reach` | `fencing` | `fair` | `wakes` | `reports_invalidations` | `labels` | `inspect` | leases | modes |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for url in STORES {
        let config = RegistryConfig::from_url(url).map_err(io::Error::other)?;
        let can = config.capabilities().map_err(io::Error::other)?;
        let (scheme, _) = url.split_once(':').unwrap_or((url, ""));
        let option = url.split_once('?').map_or_else(String::new, |(_, it)| format!(" `{it}`"));
        let _ = write!(table, "| `{scheme}:`{option} | {} | {:?} |", can.class, can.reach);
        let flags = [can.fencing, can.fair, can.wakes, can.reports_invalidations];
        for flag in flags.into_iter().chain([can.labels, can.inspect]) {
            let _ = write!(table, " {} |", if flag { "yes" } else { "no" });
        }
        let (min, max) = (format_time(can.lease_min), format_time(can.lease_max));
        let modes = [
            ("shared", can.shared),
            ("upgradable", can.upgradable),
            ("permits", can.permits),
            ("values", can.values),
            ("fair_on_request", can.fair_on_request),
        ];
        let modes = modes.iter().filter(|(_, can)| *can).map(|(mode, _)| format!("`{mode}`"));
        let modes = modes.collect::<Vec<_>>().join(", ");
        let _ = writeln!(table, " `{min}` to `{max}` | {modes} |");
    }
    Ok(table)
}

/// Returns the features that `Cargo.toml` documents with `##`.
fn features(root: &Path) -> io::Result<String> {
    let manifest = fs::read_to_string(root.join("crates/lock-registry/Cargo.toml"))?;
    let mut table = String::from("| feature | adds |\n|---|---|\n");
    let mut help = String::new();
    for line in manifest.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            text.trim_end_matches('.').clone_into(&mut help);
        } else if let Some((feature, _)) = line.split_once(" = [")
            && !help.is_empty()
        {
            if feature != "server-tests" {
                let _ = writeln!(table, "| `{feature}` | {help} |");
            }
            help.clear();
        }
    }
    Ok(table)
}

/// Returns the statuses of the help text of `lockreg`.
fn exit_statuses(root: &Path) -> io::Result<String> {
    let help = fs::read_to_string(root.join("crates/registry-cli/src/exit_status.txt"))?;
    let mut table = String::from("| status | means |\n|---|---|\n");
    for line in help.lines().skip(1) {
        let Some((status, meaning)) = line.trim_start().split_once(' ') else { break };
        let _ = writeln!(table, "| {} | {} |", status.replace('+', " + "), meaning.trim_start());
    }
    Ok(table)
}
