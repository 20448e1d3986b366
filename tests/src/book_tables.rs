//! The generated tables of the documentation. Options, schemes, features, capabilities, metrics,
//! exit statuses and error texts come from the code. The tables and charts of measured figures come
//! from results files. The program `book-tables` writes all of them, and a test fails if they are
//! stale.
//!
//! A page marks a table with `<!-- generated: NAME -->` and `<!-- end -->`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use lock_registry::RegistryConfig;
use lock_registry::config::{OptionDescription, describe_options, describe_schemes};
use lock_registry::observe::describe_metrics;
use registry_core::config::format_time;

use crate::{charts, figures};

/// The pages with generated tables.
const PAGES: &[&str] = &[
    "book/src/operate/errors.md",
    "book/src/operate/monitoring.md",
    "book/src/reference/capabilities.md",
    "book/src/reference/configuration.md",
    "book/src/reference/lockreg.md",
    "book/src/reference/performance.md",
    "book/src/stores/etcd.md",
    "book/src/stores/in-process.md",
    "book/src/stores/mysql.md",
    "book/src/stores/postgres.md",
    "book/src/stores/redis.md",
    "book/src/stores/sqlite.md",
    "book/src/stores/zookeeper.md",
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
        Some(("results", places)) => figures::table(root, places)?,
        Some(("chart", name)) => charts::markdown(root, name)?,
        Some(("exit", "statuses")) => exit_statuses(root)?,
        Some(("errors", places)) => error_texts(root, places, false)?,
        Some(("findings", places)) => error_texts(root, places, true)?,
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

/// Returns the table of the options of these stores, without the options that all stores have.
fn options_of(stores: &[&str]) -> String {
    let mut table =
        String::from("| option | stores | default | values | meaning |\n|---|---|---|---|---|\n");
    for option in describe_options() {
        let OptionDescription { name, stores: all, default, values, help, .. } = option;
        let names_a_store = |part: &str| {
            stores.iter().any(|store| part.split([' ', '+', '`']).any(|word| word == *store))
        };
        let parts: Vec<&str> = all.split(", ").filter(|part| names_a_store(part)).collect();
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

/// Returns the table of the features that `Cargo.toml` documents with `##`.
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

/// Returns the table of exit statuses, from the help text of `lockreg`.
fn exit_statuses(root: &Path) -> io::Result<String> {
    let help = fs::read_to_string(root.join("crates/registry-cli/src/exit_status.txt"))?;
    let mut table = String::from("| status | means |\n|---|---|\n");
    for line in help.lines().skip(1) {
        let Some((status, meaning)) = line.trim_start().split_once(' ') else { break };
        let _ = writeln!(table, "| {} | {} |", status.replace('+', " + "), meaning.trim_start());
    }
    Ok(table)
}

/// The beginnings of the texts in a `config.rs` or `options.rs` that state a problem. The other
/// texts in these files describe options.
const PROBLEMS: &[&str] = &[
    "contains ",
    "is ",
    "has no ",
    "does not ",
    "must ",
    "the URL ",
    "the chroot ",
    "encrypted ",
    "the certificates ",
    "cannot ",
    "no store URL ",
    "a server ",
    "a cluster ",
    "a quorum ",
    "a member ",
    "no member ",
    "keys would ",
    "the client certificate ",
    "the list of servers ",
    "the name of a member ",
    "the request time-out ",
    "the service name ",
    "the user agent ",
];

/// Words by which SQL statements are recognised: they can contain a semicolon too.
const SQL_WORDS: &[&str] =
    &["SELECT", "GET_LOCK", "RELEASE_ALL_LOCKS", "BEGIN ", "SET ", "PREPARE ", "EXECUTE "];

/// Returns the table of the texts of the form `CAUSE; REMEDY` in these files and folders of
/// `crates`: the errors, or the findings of `doctor`.
fn error_texts(root: &Path, places: &str, are_findings: bool) -> io::Result<String> {
    let mut files = Vec::new();
    for place in places.split(' ') {
        add_sources(&root.join("crates").join(place), &mut files)?;
    }
    files.retain(|file| file.ends_with("diagnose.rs") == are_findings);
    files.sort();
    let mut seen = BTreeSet::new();
    let mut table = String::from("| text | what to do |\n|---|---|\n");
    for file in files {
        let is_config = file.ends_with("config.rs") || file.ends_with("options.rs");
        for text in string_literals(&fs::read_to_string(&file)?) {
            let Some((cause, remedy)) = text.split_once("; ") else { continue };
            let is_sql = SQL_WORDS.iter().any(|word| text.contains(word));
            let is_problem = !is_config || PROBLEMS.iter().any(|start| text.starts_with(start));
            let is_prose = cause.contains(' ')
                && for_cell(cause).contains(char::is_alphabetic)
                && for_cell(remedy) != "…"
                && !text.ends_with("never shown")
                && !["```", ".await", "sqlx::"].iter().any(|code| text.contains(code));
            if is_prose && is_problem && !is_sql && seen.insert(text.clone()) {
                let _ = writeln!(table, "| {} | {} |", for_cell(cause), for_cell(remedy));
            }
        }
    }
    if seen.is_empty() {
        return Err(io::Error::other(format!("no error texts in {places}")));
    }
    Ok(table)
}

/// Adds a file, or all Rust files of a folder, except `event.rs`, which describes events.
fn add_sources(place: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if place.is_dir() {
        for entry in fs::read_dir(place)? {
            add_sources(&entry?.path(), files)?;
        }
    } else if place.extension().is_some_and(|extension| extension == "rs")
        && !place.ends_with("event.rs")
    {
        files.push(place.to_owned());
    }
    Ok(())
}

/// Returns the string literals outside of comments, attributes that explain lints, and tests.
fn string_literals(source: &str) -> Vec<String> {
    let code = source.split("\n#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut literals = Vec::new();
    let mut open: Option<String> = None;
    for line in code.lines() {
        let trimmed = line.trim_start();
        if open.is_none() && (trimmed.starts_with("//") || line.contains("reason = ")) {
            continue;
        }
        // If a line of a literal ends with a backslash, the indentation of the next line is not
        // part of the literal.
        let line = if open.is_some() { trimmed } else { line };
        let line = line.replace("'\"'", "");
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            match (&mut open, c) {
                (None, '"') => open = Some(String::new()),
                (Some(_), '"') => literals.extend(open.take()),
                (Some(text), '\\') => text.extend(chars.next()),
                (Some(text), c) => text.push(c),
                (None, _) => {}
            }
        }
    }
    literals
}

/// Returns the text with `…` for each value that the program inserts.
fn for_cell(text: &str) -> String {
    let mut cell = String::new();
    let mut in_value = false;
    for c in text.chars() {
        match c {
            '{' => {
                in_value = true;
                cell.push('…');
            }
            '}' => in_value = false,
            '|' => cell.push_str("\\|"),
            '<' => cell.push_str("&lt;"),
            c if !in_value => cell.push(c),
            _ => {}
        }
    }
    cell
}
