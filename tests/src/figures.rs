//! The tables of measured figures, from the results files in `benches/results`, which the
//! benchmarks write.
//!
//! A table is named `results PLACE + PLACE …`. A place is `FILE`, `FILE/GROUP` or
//! `FILE/GROUP/NAME`, which selects the rows whose names begin with NAME.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use serde::Deserialize;

/// A results file.
#[derive(Debug, Deserialize)]
pub(crate) struct Results {
    command: String,
    version: String,
    date: String,
    machine: Machine,
    servers: BTreeMap<String, String>,
    /// In the order of the measurement.
    #[serde(rename = "results")]
    pub(crate) figures: Vec<Figure>,
}

#[derive(Debug, Deserialize)]
struct Machine {
    processor: Option<String>,
    cores: u32,
    cores_used: u32,
    rust: String,
}

/// One measured figure, which is a median.
#[derive(Debug, Deserialize)]
pub(crate) struct Figure {
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) column: Option<String>,
    pub(crate) median: f64,
    unit: String,
    p99: Option<f64>,
    reference: Option<String>,
    reference_median: Option<f64>,
    pub(crate) ratio: Option<f64>,
}

impl Results {
    /// Reads the results file `name` of the workspace at `root`.
    pub(crate) fn read(root: &Path, name: &str) -> io::Result<Self> {
        let path = format!("benches/results/{name}.json");
        let text = fs::read_to_string(root.join(&path));
        text.and_then(|text| Ok(serde_json::from_str(&text)?))
            .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))
    }

    /// Returns a sentence on how the figures were measured.
    fn origin(&self, file: &str) -> String {
        let Self { command, version, date, machine, servers, .. } = self;
        let processor = machine.processor.as_deref().unwrap_or("an unknown processor");
        let processor = processor.replace("(R)", "").replace("(TM)", "");
        let cores = if machine.cores_used == machine.cores {
            format!("{} cores", machine.cores)
        } else {
            format!("{} of {} cores", machine.cores_used, machine.cores)
        };
        let servers: String =
            servers.iter().map(|(name, version)| format!("{name} {version}, ")).collect();
        let rust = machine.rust.split(" (").next().unwrap_or_default();
        format!(
            "`{command}`, version {version}, {date}:\n{servers}{cores} of an {processor}, {rust} \
             (`benches/results/{file}.json`)."
        )
    }
}

impl Figure {
    /// Returns the figure with its unit.
    pub(crate) fn text(&self) -> String {
        quantity(self.median, &self.unit)
    }
}

/// Returns the table of these places, and how its figures were measured.
pub(crate) fn table(root: &Path, places: &str) -> io::Result<String> {
    let (mut figures, mut origins) = (Vec::new(), BTreeMap::new());
    for place in places.split(" + ") {
        let mut parts = place.splitn(3, '/');
        let file = parts.next().unwrap_or_default();
        let (group, name) = (parts.next(), parts.next().unwrap_or_default());
        let results = Results::read(root, file)?;
        origins.insert(file, results.origin(file));
        let is_selected = |figure: &Figure| {
            group.is_none_or(|group| figure.group == group) && figure.name.starts_with(name)
        };
        let before = figures.len();
        figures.extend(results.figures.into_iter().filter(is_selected));
        if figures.len() == before {
            return Err(io::Error::other(format!("{place} selects no figure")));
        }
    }
    let table = if figures[0].column.is_some() {
        with_columns(&figures)
    } else {
        with_references(&figures)
    };
    let origins: Vec<String> = origins.into_values().collect();
    Ok(format!("{table}\nMeasured with {}\n", origins.join("\nMeasured with ")))
}

/// Returns the text of a figure in one column.
type Cell<'a> = &'a dyn Fn(&Figure) -> Option<String>;

/// Returns a table with a row for each figure.
fn with_references(figures: &[Figure]) -> String {
    let reference = |figure: &Figure| {
        let (name, median) = (figure.reference.as_ref()?, figure.reference_median?);
        Some(format!("{name}: {}", quantity(median, &figure.unit)))
    };
    let columns: [(&str, Cell<'_>); 5] = [
        ("", &|figure| Some(figure.name.clone())),
        ("measured", &|figure| Some(figure.text())),
        ("p99", &|figure| figure.p99.map(|p99| quantity(p99, &figure.unit))),
        ("reference", &reference),
        ("ratio", &ratio),
    ];
    // A column without any value is left out.
    let is_used = |cell: Cell<'_>| figures.iter().any(|it| cell(it).is_some());
    let columns: Vec<_> = columns.into_iter().filter(|(_, cell)| is_used(cell)).collect();
    let row = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut table = row(columns.iter().map(|(head, _)| (*head).to_owned()).collect());
    let _ = writeln!(table, "|{}", "---|".repeat(columns.len()));
    for figure in figures {
        table += &row(columns.iter().map(|(_, cell)| cell(figure).unwrap_or_default()).collect());
    }
    table
}

/// Returns a table whose figures are in rows and columns, each with its ratio.
fn with_columns(figures: &[Figure]) -> String {
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    for figure in figures {
        let column = figure.column.as_deref().unwrap_or_default();
        if !rows.contains(&&*figure.name) {
            rows.push(&*figure.name);
        }
        if !columns.contains(&column) {
            columns.push(column);
        }
    }
    let head = columns.join(" | ");
    let mut table = format!("| | {head} |\n|---{}|\n", "|---".repeat(columns.len()));
    for row in rows {
        let _ = write!(table, "| {row} |");
        for column in &columns {
            let figure = figures
                .iter()
                .find(|figure| figure.name == row && figure.column.as_deref() == Some(column));
            let cell = figure.map_or_else(String::new, |figure| {
                let ratio = ratio(figure).map(|ratio| format!(" ({ratio})")).unwrap_or_default();
                figure.text() + &ratio
            });
            let _ = write!(table, " {cell} |");
        }
        table.push('\n');
    }
    table
}

fn ratio(figure: &Figure) -> Option<String> {
    figure.ratio.map(|ratio| format!("{} x", number(ratio)))
}

/// Returns a value with its unit. A time in nanoseconds is converted to a suitable unit.
fn quantity(value: f64, unit: &str) -> String {
    let without_trailing_zeros = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    match unit {
        "ns" => {
            let units = [(1e9, "s"), (1e6, "ms"), (1e3, "us")];
            let (size, unit) =
                units.into_iter().find(|(size, _)| value >= *size).unwrap_or((1.0, "ns"));
            format!("{} {unit}", number(value / size))
        }
        "" => without_trailing_zeros(number(value)),
        "/s" => format!("{}/s", without_trailing_zeros(number(value))),
        unit => format!("{} {unit}", without_trailing_zeros(number(value))),
    }
}

/// Rounds to three significant digits, and groups the digits before the decimal point.
fn number(value: f64) -> String {
    let rounded: f64 = format!("{value:.2e}").parse().unwrap_or(value);
    let decimals = match rounded {
        0.0..0.01 => 4,
        0.01..0.1 => 3,
        0.1..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    let mut text = format!("{rounded:.decimals$}");
    let mut at = text.find('.').unwrap_or(text.len());
    while at > 3 {
        at -= 3;
        text.insert(at, ',');
    }
    text
}
