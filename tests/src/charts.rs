//! The charts of the book: SVG bar charts of the figures in the results files. The program
//! `book-tables` writes them, and a test fails if they are stale.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use crate::figures::{Figure, Results};
use crate::pictures::{frame, write_text};

/// The names of the charts. Each is a file in `book/src/pictures`.
const CHARTS: [&str; 3] = ["latency", "throughput", "ratios"];

/// The stores, each with the results file that compares a lock with the same requests without this
/// library.
const RATIOS: [(&str, &str); 6] = [
    ("SQLite", "sqlite"),
    ("Redis", "redis"),
    ("PostgreSQL", "sql"),
    ("MariaDB", "sql"),
    ("etcd", "etcd"),
    ("ZooKeeper", "zk"),
];

const WIDTH: f64 = 700.0;
const TOP: f64 = 66.0;
/// The horizontal space for the names of stores, and for the figure after the longest bar.
const LEFT: f64 = 100.0;
const RIGHT: f64 = 90.0;
const BAR: f64 = 18.0;

/// Returns the charts of the workspace at `root` that are stale, each as its path and its text.
///
/// # Errors
/// If a results file cannot be read, or lacks a figure.
pub fn stale_charts(root: &Path) -> io::Result<Vec<(String, String)>> {
    let mut stale = Vec::new();
    for name in CHARTS {
        let target = format!("book/src/pictures/{name}.svg");
        let new = chart(root, name)?.draw();
        if fs::read_to_string(root.join(&target)).ok().as_deref() != Some(&*new) {
            stale.push((target, new));
        }
    }
    Ok(stale)
}

/// Returns the Markdown that shows the chart `name`, with a text that describes it.
pub(crate) fn markdown(root: &Path, name: &str) -> io::Result<String> {
    Ok(format!("![{}](../pictures/{name}.svg)\n", chart(root, name)?.alt()))
}

fn chart(root: &Path, name: &str) -> io::Result<Chart> {
    match name {
        "latency" => {
            let series = ["bare round trip", "lock and unlock"];
            Chart::of_stores(root, "Time of an uncontended lock and unlock, logarithmic", series)
        }
        "throughput" => {
            let series = ["pairs of one task", "pairs of 64 tasks"];
            Chart::of_stores(root, "Locks and unlocks per second, logarithmic", series)
        }
        "ratios" => Chart::of_ratios(root),
        _ => Err(io::Error::other(format!("no chart is named {name:?}"))),
    }
}

struct Chart {
    title: &'static str,
    series: Vec<&'static str>,
    /// The bars of each store, in the order of the series.
    rows: Vec<(String, Vec<Bar>)>,
    /// The position of a vertical line, in the unit of `Bar::length`.
    mark: Option<f64>,
}

struct Bar {
    /// Between 0 and 1.
    length: f64,
    text: String,
}

impl Chart {
    /// Returns the chart of two columns of the results file `stores`.
    fn of_stores(root: &Path, title: &'static str, series: [&'static str; 2]) -> io::Result<Self> {
        let figures = Results::read(root, "stores")?.figures;
        let is_shown =
            |figure: &&Figure| figure.column.as_deref().is_some_and(|it| series.contains(&it));
        let shown: Vec<_> =
            figures.iter().filter(|it| it.group == "pairs").filter(is_shown).collect();
        let logs = || shown.iter().map(|figure| figure.median.log10());
        // The shortest bar must be visible.
        let (min, max) = (logs().fold(f64::MAX, f64::min) - 0.5, logs().fold(0.0, f64::max));
        let mut rows: Vec<(String, Vec<Bar>)> = Vec::new();
        for figure in shown {
            let length = (figure.median.log10() - min) / (max - min);
            let bar = Bar { length, text: figure.text() };
            match rows.last_mut() {
                Some((store, bars)) if *store == figure.name => bars.push(bar),
                _ => rows.push((figure.name.clone(), vec![bar])),
            }
        }
        Ok(Self { title, series: series.to_vec(), rows, mark: None })
    }

    fn of_ratios(root: &Path) -> io::Result<Self> {
        let mut ratios = Vec::new();
        for (store, file) in RATIOS {
            let name = format!("{store}: uncontended lock and unlock");
            let results = Results::read(root, file)?;
            // Of the figures with this name, the first is compared with the same requests.
            let found = results.figures.into_iter().find(|figure| figure.name == name);
            let ratio = found.and_then(|figure| figure.ratio);
            let ratio = ratio.ok_or_else(|| io::Error::other(format!("{file}: no {name}")))?;
            ratios.push((store.to_owned(), ratio));
        }
        let max = ratios.iter().map(|(_, ratio)| *ratio).fold(1.0, f64::max);
        let bar = |ratio| vec![Bar { length: ratio / max, text: format!("{ratio:.2} x") }];
        Ok(Self {
            title: "Time of a lock and unlock, in units of the same requests without this library",
            series: Vec::new(),
            rows: ratios.into_iter().map(|(store, ratio)| (store, bar(ratio))).collect(),
            mark: Some(1.0 / max),
        })
    }

    /// Returns a text with all figures.
    fn alt(&self) -> String {
        let mut alt = format!("Bar chart. {}.", self.title);
        for (store, bars) in &self.rows {
            let texts: Vec<String> = bars
                .iter()
                .enumerate()
                .map(|(number, bar)| match self.series.get(number) {
                    Some(series) => format!("{series} {}", bar.text),
                    None => bar.text.clone(),
                })
                .collect();
            let _ = write!(alt, " {store}: {}.", texts.join(", "));
        }
        alt
    }

    fn draw(&self) -> String {
        const KINDS: [&str; 2] = ["plain", "held"];
        let mut body = String::new();
        let length_max = WIDTH - LEFT - RIGHT;
        let mut left = LEFT;
        for (series, kind) in self.series.iter().zip(KINDS) {
            write_bar(&mut body, kind, (left, 42.0), 14.0);
            write_text(&mut body, "small", (left + 20.0, 54.0), "start", series);
            left += 160.0;
        }
        let mark = self.mark.unwrap_or_default();
        let mut top = TOP;
        for (store, bars) in &self.rows {
            let height = BAR * bars.len() as f64;
            write_text(&mut body, "", (LEFT - 10.0, top + height / 2.0 + 4.5), "end", store);
            let kinds = &KINDS[KINDS.len() - bars.len()..];
            for (bar, kind) in bars.iter().zip(kinds) {
                write_bar(&mut body, kind, (LEFT, top), length_max * bar.length);
                // The text begins after the vertical line, which would cross it.
                let end = LEFT + length_max * bar.length.max(mark);
                write_text(&mut body, "small", (end + 6.0, top + 13.0), "start", &bar.text);
                top += BAR;
            }
            top += 10.0;
        }
        if self.mark.is_some() {
            let x = LEFT + length_max * mark;
            write_text(&mut body, "small", (x, TOP - 12.0), "middle", "1 x: without this library");
            let (first, last) = (TOP - 7.0, top - 4.0);
            let _ = writeln!(
                body,
                "<line class=\"line\" x1=\"{x:.0}\" y1=\"{first:.0}\" x2=\"{x:.0}\" y2=\"{last:.0}\"/>"
            );
        }
        frame((WIDTH, top + 6.0), self.title, &self.alt(), &body)
    }
}

fn write_bar(body: &mut String, kind: &str, (left, top): (f64, f64), length: f64) {
    let height = BAR - 4.0;
    let _ = writeln!(
        body,
        "<rect class=\"{kind}\" x=\"{left:.0}\" y=\"{top:.0}\" width=\"{length:.0}\" \
         height=\"{height:.0}\" rx=\"2\"/>"
    );
}
