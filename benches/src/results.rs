//! Records what a benchmark measures. The tables and charts of the book are generated from the
//! results files.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

use serde_json::{Value, json};

/// The environment variable that names the folder of the results files.
const FOLDER: &str = "BENCH_RESULTS";

/// The figures of this program, and the versions of the servers that it started.
static RESULTS: Mutex<(Vec<Value>, BTreeMap<String, String>)> =
    Mutex::new((Vec::new(), BTreeMap::new()));

/// The place of a figure in the tables of the book.
#[derive(Debug, Clone)]
pub struct Row {
    group: &'static str,
    name: String,
    column: Option<String>,
}

/// Returns the row `name` of the table `group`.
pub fn row(group: &'static str, name: impl Into<String>) -> Row {
    Row { group, name: name.into(), column: None }
}

impl Row {
    /// Sets the column. In a table without columns, each row has one figure and its reference.
    #[must_use]
    pub fn column(mut self, column: impl Into<String>) -> Self {
        self.column = Some(column.into());
        self
    }

    /// Returns a figure with its unit. The book shows a time (`ns`) in a suitable unit.
    pub const fn measured(self, median: f64, unit: &'static str) -> Figure {
        Figure { row: self, median, unit, p99: None, reference: None }
    }
}

/// One figure and its reference.
#[derive(Debug)]
#[must_use = "a figure must be recorded"]
pub struct Figure {
    row: Row,
    median: f64,
    unit: &'static str,
    p99: Option<f64>,
    reference: Option<(String, f64)>,
}

impl Figure {
    /// Adds the 99th percentile.
    pub const fn p99(mut self, p99: f64) -> Self {
        self.p99 = Some(p99);
        self
    }

    /// Adds the reference and its median.
    pub fn against(mut self, reference: &str, median: f64) -> Self {
        self.reference = Some((reference.to_owned(), median));
        self
    }

    /// Prints the figure, and adds it to the results of this program.
    pub fn record(self) {
        let Self { row: Row { group, name, column }, median, unit, p99, reference } = self;
        let mut figure = json!({ "group": group, "name": name });
        let mut text = format!("{group}: {name}");
        if let Some(column) = column {
            text += &format!(" [{column}]");
            figure["column"] = column.into();
        }
        text += &format!(": {} {unit}", rounded(median));
        figure["median"] = rounded(median).into();
        figure["unit"] = unit.into();
        if let Some(p99) = p99 {
            text += &format!(", p99 {}", rounded(p99));
            figure["p99"] = rounded(p99).into();
        }
        if let Some((reference, reference_median)) = reference {
            let ratio = rounded(median / reference_median);
            text += &format!("; {reference}: {} {unit}; {ratio} x", rounded(reference_median));
            figure["reference"] = reference.into();
            figure["reference_median"] = rounded(reference_median).into();
            figure["ratio"] = ratio.into();
        }
        println!("{text}");
        RESULTS.lock().unwrap_or_else(PoisonError::into_inner).0.push(figure);
    }
}

/// Records the version of a server: the first version number in `answer`.
pub fn record_server(name: &str, answer: &str) {
    let versions = answer.split(|c: char| !c.is_ascii_digit() && c != '.');
    let version = versions.map(|version| version.trim_matches('.')).find(|it| it.contains('.'));
    let version = version.unwrap_or("of an unknown version").to_owned();
    RESULTS.lock().unwrap_or_else(PoisonError::into_inner).1.insert(name.to_owned(), version);
}

/// Returns whether this run measures. `cargo test` only verifies that a benchmark works, not how
/// fast it is.
pub fn is_full_run() -> bool {
    env::args().any(|argument| argument == "--bench")
}

/// Writes the results file of the benchmark `program` of this package.
pub fn write_results(program: &str) {
    write_results_of(program, &format!("cargo bench -p lock-registry-benches --bench {program}"));
}

/// Writes `PROGRAM.json` to the folder that `BENCH_RESULTS` names. Writes nothing without that
/// variable, in `cargo test`, and if arguments have selected a part of the program.
pub fn write_results_of(program: &str, command: &str) {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
    if !env::args().skip(1).eq(["--bench"]) {
        return;
    }
    let (figures, servers) =
        std::mem::take(&mut *RESULTS.lock().unwrap_or_else(PoisonError::into_inner));
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models = || processors.lines().filter_map(|line| line.strip_prefix("model name\t: "));
    let results = json!({
        "command": command,
        "version": env!("CARGO_PKG_VERSION"),
        "date": output_of("date", &["--utc", "+%F"]),
        "machine": {
            "processor": models().next(),
            "cores": models().count(),
            // Some programs run on one processor.
            "cores_used": std::thread::available_parallelism().map_or(0, usize::from),
            "rust": output_of("rustc", &["--version"]),
        },
        "servers": servers,
        "results": figures,
    });
    fs::create_dir_all(&folder).expect("the folder of the results can be created");
    let text = serde_json::to_string_pretty(&results).expect("the keys are strings");
    fs::write(folder.join(program).with_extension("json"), text + "\n")
        .expect("the results can be written");
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("the program is installed");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Rounds to four significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}
