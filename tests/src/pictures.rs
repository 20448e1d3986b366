//! The pictures of the book: SVG drawn from the text files in `book/pictures`. The program
//! `book-tables` writes them, and a test fails if they are stale.
//!
//! A file has one item per line. Texts are in quotes. In the text of a box, `|` is a line break.
//!
//! ```text
//! title "TEXT"                      alt "TEXT"                     size WIDTH HEIGHT
//! lane ID "NAME"                    a horizontal line; time runs from 0 to 100
//! bar LANE FROM TO KIND "TEXT"      arrow LANE TIME LANE TIME "TEXT"
//! over LANE TIME "TEXT"             under LANE TIME "TEXT"
//! box ID X Y WIDTH KIND "TEXT"      edge ID ID "TEXT"
//! ```
//!
//! KIND is `plain`, `held`, `paused`, `bad` or `good`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

/// Colours in light and dark themes. The background is opaque, so that the picture can be read on
/// any page.
const STYLE: &str = "
  text { font: 13px sans-serif; fill: #1f2328 }
  .title { font-weight: bold; font-size: 15px }
  .small { font-size: 12px }
  .page { fill: #ffffff; stroke: #d0d7de }
  .under { fill: #ffffff }
  .line { stroke: #57606a; fill: none; stroke-width: 1.3 }
  .head { fill: #57606a }
  .plain { fill: #f3f5f7; stroke: #57606a }
  .held { fill: #cfe3ff; stroke: #0550ae }
  .paused { fill: #ebedf0; stroke: #57606a; stroke-dasharray: 5 3 }
  .bad { fill: #ffd8d3; stroke: #b3261e }
  .good { fill: #d3f0d8; stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .page { fill: #161b22; stroke: #444c56 }
    .under { fill: #161b22 }
    .line { stroke: #9ba5b0 }
    .head { fill: #9ba5b0 }
    .plain { fill: #22272e; stroke: #9ba5b0 }
    .held { fill: #143a66; stroke: #79b8ff }
    .paused { fill: #2d333b; stroke: #9ba5b0 }
    .bad { fill: #5f1f1b; stroke: #ff9b93 }
    .good { fill: #14431f; stroke: #56d364 }
  }
";

/// The horizontal space for the names of lanes.
const LANE_LEFT: f64 = 120.0;
const LANE_TOP: f64 = 84.0;
const LANE_HEIGHT: f64 = 84.0;
const LINE_HEIGHT: f64 = 17.0;

/// Returns the pictures of the workspace at `root` that are stale, each as its path and its text.
///
/// # Errors
/// If a file cannot be read, or has an invalid line.
pub fn stale_pictures(root: &Path) -> io::Result<Vec<(String, String)>> {
    let mut stale = Vec::new();
    for entry in fs::read_dir(root.join("book/pictures"))? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let new = draw(&fs::read_to_string(&path)?)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        let target = format!("book/src/pictures/{name}.svg");
        if fs::read_to_string(root.join(&target)).ok().as_deref() != Some(&*new) {
            stale.push((target, new));
        }
    }
    stale.sort();
    Ok(stale)
}

/// A rectangle.
#[derive(Debug, Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

fn draw(text: &str) -> Result<String, String> {
    let (mut title, mut alt, mut size) = (String::new(), String::new(), (0.0, 0.0));
    let mut lanes: BTreeMap<String, f64> = BTreeMap::new();
    let mut boxes: BTreeMap<String, Area> = BTreeMap::new();
    // Lines are drawn first and texts last, so that boxes cover lines, and no shape covers a text.
    let (mut lines, mut shapes, mut texts) = (String::new(), String::new(), String::new());
    for (number, line) in text.lines().enumerate() {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let invalid = || format!("line {}: {line:?} is invalid", number + 1);
        let number = |word: &str| word.parse::<f64>().map_err(|_| invalid());
        let lane = |id: &str| lanes.get(id).copied().ok_or_else(invalid);
        let time = |word: &str| {
            number(word).map(|time| LANE_LEFT + time / 100.0 * (size.0 - LANE_LEFT - 20.0))
        };
        match words[..] {
            [] => {}
            ["title", text] => text.clone_into(&mut title),
            ["alt", text] => text.clone_into(&mut alt),
            ["size", width, height] => size = (number(width)?, number(height)?),
            ["lane", id, name] => {
                let y = LANE_TOP + LANE_HEIGHT * f64::from(u8::try_from(lanes.len()).unwrap_or(0));
                lanes.insert(id.to_owned(), y);
                arrow(&mut lines, (LANE_LEFT, y), (size.0 - 12.0, y));
                write_text(&mut texts, "", (16.0, y + 4.0), "start", name);
            }
            ["bar", id, from, to, kind, text] => {
                let (left, right, y) = (time(from)?, time(to)?, lane(id)?);
                let area = Area { left, top: y - 15.0, width: right - left, height: 30.0 };
                write_box(&mut shapes, &mut texts, area, kind, text);
            }
            ["arrow", from, start, to, end, text] => {
                let (start, end) = ((time(start)?, lane(from)?), (time(end)?, lane(to)?));
                // The line begins and ends at the edge of a bar.
                let step = if end.1 > start.1 { 16.0 } else { -16.0 };
                arrow(&mut lines, (start.0, start.1 + step), (end.0, end.1 - step));
                // The text is to the right of the middle of the line.
                let half = text_width(text) / 2.0 + 8.0;
                let middle = (f64::midpoint(start.0, end.0) + half, f64::midpoint(start.1, end.1));
                write_label(&mut texts, middle, text);
            }
            ["over", id, at, text] => {
                write_text(&mut texts, "small", (time(at)?, lane(id)? - 22.0), "middle", text);
            }
            ["under", id, at, text] => {
                write_text(&mut texts, "small", (time(at)?, lane(id)? + 32.0), "middle", text);
            }
            ["box", id, left, top, width, kind, text] => {
                let count = f64::from(u8::try_from(text.split('|').count()).unwrap_or(1));
                let area = Area {
                    left: number(left)?,
                    top: number(top)?,
                    width: number(width)?,
                    height: LINE_HEIGHT * count + 18.0,
                };
                boxes.insert(id.to_owned(), area);
                write_box(&mut shapes, &mut texts, area, kind, text);
            }
            ["edge", from, to, text] => {
                let from = boxes.get(from).ok_or_else(invalid)?;
                let to = boxes.get(to).ok_or_else(invalid)?;
                let (start, end) = ends(from, to);
                arrow(&mut lines, start, end);
                let middle = (f64::midpoint(start.0, end.0), f64::midpoint(start.1, end.1));
                write_label(&mut texts, middle, text);
            }
            _ => return Err(invalid()),
        }
    }
    if title.is_empty() || alt.is_empty() || size.0 < 1.0 {
        return Err("title, alt or size is missing".to_owned());
    }
    Ok(frame(size, &title, &alt, &format!("{lines}{shapes}{texts}")))
}

/// Returns a picture with a title and a border.
pub(crate) fn frame((width, height): (f64, f64), title: &str, alt: &str, body: &str) -> String {
    let (title, alt) = (escaped(title), escaped(alt));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" aria-labelledby=\"title alt\">\n\
         <title id=\"title\">{title}</title>\n<desc id=\"alt\">{alt}</desc>\n<style>{STYLE}</style>\n\
         <defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" \
         markerHeight=\"8\" orient=\"auto\"><path class=\"head\" d=\"M0 0 L8 4 L0 8 z\"/></marker></defs>\n\
         <rect class=\"page\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"8\"/>\n\
         <text class=\"title\" x=\"16\" y=\"28\">{title}</text>\n{body}</svg>\n",
        width - 1.0,
        height - 1.0,
    )
}

/// Splits a line at spaces outside of quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('"').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// Returns the points where an edge leaves one box and enters the other.
fn ends(from: &Area, to: &Area) -> ((f64, f64), (f64, f64)) {
    let centre = |area: &Area| (area.left + area.width / 2.0, area.top + area.height / 2.0);
    let (start, end) = (centre(from), centre(to));
    if to.left >= from.left + from.width {
        ((from.left + from.width, start.1), (to.left, end.1))
    } else if from.left >= to.left + to.width {
        ((from.left, start.1), (to.left + to.width, end.1))
    } else if to.top >= from.top + from.height {
        ((start.0, from.top + from.height), (end.0, to.top))
    } else {
        ((start.0, from.top), (end.0, to.top + to.height))
    }
}

fn arrow(lines: &mut String, from: (f64, f64), to: (f64, f64)) {
    // Writing to a string does not fail, here and below.
    let _ = writeln!(
        lines,
        "<line class=\"line\" x1=\"{:.0}\" y1=\"{:.0}\" x2=\"{:.0}\" y2=\"{:.0}\" marker-end=\"url(#head)\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn write_box(shapes: &mut String, texts: &mut String, area: Area, kind: &str, text: &str) {
    let Area { left, top, width, height } = area;
    let _ = writeln!(
        shapes,
        "<rect class=\"{kind}\" x=\"{left:.0}\" y=\"{top:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" rx=\"5\"/>"
    );
    let count = f64::from(u8::try_from(text.split('|').count()).unwrap_or(1));
    let mut y = top + height / 2.0 - (count - 1.0) * LINE_HEIGHT / 2.0 + 4.5;
    for line in text.split('|') {
        write_text(texts, "", (left + width / 2.0, y), "middle", line);
        y += LINE_HEIGHT;
    }
}

/// Writes a small text with an opaque background, so that its line does not cross it.
fn write_label(texts: &mut String, centre: (f64, f64), text: &str) {
    if !text.is_empty() {
        let width = text_width(text) + 8.0;
        let _ = writeln!(
            texts,
            "<rect class=\"under\" x=\"{:.0}\" y=\"{:.0}\" width=\"{width:.0}\" height=\"16\"/>",
            centre.0 - width / 2.0,
            centre.1 - 8.0
        );
        write_text(texts, "small", (centre.0, centre.1 + 4.0), "middle", text);
    }
}

/// An estimate, because the font is the reader's.
fn text_width(text: &str) -> f64 {
    f64::from(u16::try_from(text.chars().count()).unwrap_or(u16::MAX)) * 6.5
}

pub(crate) fn write_text(
    texts: &mut String,
    class: &str,
    at: (f64, f64),
    anchor: &str,
    text: &str,
) {
    if !text.is_empty() {
        let _ = writeln!(
            texts,
            "<text class=\"{class}\" x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"{anchor}\">{}</text>",
            at.0,
            at.1,
            escaped(text)
        );
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
