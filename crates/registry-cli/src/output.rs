//! All output for users and programs: results on stdout, notices and errors on stderr, as text or
//! as JSON.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::ProgressDrawTarget;
use lock_registry::Holder;
use lock_registry::modes::{ClaimMode, WaitingClaim};
use nix::sys::signal::{SigSet, SigmaskHow};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::exit::CliError;

/// The format of the output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
    quiet: bool,
}

impl Output {
    pub(crate) fn new(json: bool, quiet: bool) -> Self {
        Self { json, quiet }
    }

    /// Returns whether `lockreg` may show a progress line, which it redraws.
    pub(crate) fn may_show_progress_line(self) -> bool {
        // Hidden without a terminal, and on a dumb terminal, where nothing can be redrawn.
        !self.json && !self.quiet && !ProgressDrawTarget::stderr().is_hidden()
    }

    /// Prints a result to stdout: `value` as JSON with `--json`, otherwise `text`.
    pub(crate) fn result(
        self,
        value: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<(), CliError> {
        if self.json { json_to_stdout(value) } else { to_stdout(text().as_bytes()) }
    }

    /// Prints progress or a warning to stderr, unless `--quiet` was given.
    pub(crate) fn notice(self, event: &str, text: &str, details: Value) {
        if !self.quiet {
            self.alert(event, text, details);
        }
    }

    /// Prints to stderr even with `--quiet`: a lost lock, a failed release or campaign, a release
    /// by force over HTTP, and the end of a command whose status `lockreg` does not return.
    pub(crate) fn alert(self, event: &str, text: &str, details: Value) {
        if !self.json {
            return line_to_stderr(&format!("lockreg: {text}"));
        }
        let mut line = Map::new();
        line.insert("event".to_owned(), event.into());
        if let Value::Object(details) = details {
            line.extend(details);
        }
        line_to_stderr(&Value::Object(line).to_string());
    }

    /// Prints the failure that ends `lockreg` to stderr.
    pub(crate) fn failure(self, failure: &CliError) {
        if failure.is_silent() {
            return;
        }
        let chain = failure.chain();
        if self.json {
            let (message, causes) =
                chain.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
            line_to_stderr(
                &json!({ "event": "error", "status": failure.status(), "message": message, "causes": causes })
                    .to_string(),
            );
        } else {
            line_to_stderr(&format!("lockreg: error: {}", chain.join(": ")));
        }
    }
}

/// Prints `value` to stdout as one line of JSON, and flushes it.
pub(crate) fn json_to_stdout(value: &impl Serialize) -> Result<(), CliError> {
    let mut line = serde_json::to_string(value).map_err(|error| CliError::Output(error.into()))?;
    line.push('\n');
    to_stdout(line.as_bytes())
}

/// Prints `text` to stdout, and flushes it.
pub(crate) fn to_stdout(text: &[u8]) -> Result<(), CliError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text).and_then(|()| stdout.flush()).map_err(CliError::Output)
}

/// Queues one line for stderr. Ignores errors.
pub(crate) fn line_to_stderr(line: &str) {
    to_stderr(format!("{line}\n").into_bytes());
}

/// Writes one line to stderr before this function returns, even if the write blocks. Ignores
/// errors.
pub(crate) fn line_to_stderr_at_once(line: &str) {
    let _ = io::stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Returns `text` as an error may show it: redacted if it may be a misplaced store URL.
pub(crate) fn redact_if_url(text: &str) -> Cow<'_, str> {
    if text.contains("://") { lock_registry::config::redact_url(text).into() } else { text.into() }
}

/// Waits until the queued lines are written, but at most for [`FLUSH_LIMIT`]. The reader of stderr
/// may be stopped.
pub(crate) fn flush_stderr() {
    let writer = STDERR_WRITER.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(StderrWriter { lines, ended }) = writer {
        // The thread ends after the last line.
        drop(lines);
        let _ = ended.recv_timeout(FLUSH_LIMIT);
    }
}

/// Passes the log to the stderr thread. Each write contains one or more whole lines.
#[derive(Debug)]
pub(crate) struct LogToStderr;

impl io::Write for LogToStderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        to_stderr(bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Queues `bytes` for the stderr thread. Drops `bytes` if the queue is full.
///
/// This function does not block, unless the thread cannot be started. stderr may be a full pipe or
/// a stopped terminal, and `lockreg` must still handle the loss of a lock.
fn to_stderr(bytes: Vec<u8>) {
    let mut writer = STDERR_WRITER.lock().unwrap_or_else(PoisonError::into_inner);
    if writer.is_none() {
        *writer = StderrWriter::start().ok();
    }
    match &*writer {
        Some(writer) => {
            let _ = writer.lines.try_send(bytes);
        }
        None => {
            let _ = io::stderr().lock().write_all(&bytes);
        }
    }
}

/// The thread that writes all lines to stderr. A blocked write delays the end of the process by at
/// most [`FLUSH_LIMIT`].
#[derive(Debug)]
struct StderrWriter {
    lines: SyncSender<Vec<u8>>,
    ended: Receiver<()>,
}

impl StderrWriter {
    fn start() -> io::Result<Self> {
        let (lines, queue) = sync_channel::<Vec<u8>>(BACKLOG_MAX);
        let (ended_sender, ended) = channel();
        // The new thread inherits this mask. It may start before `Signals::catch`, and a signal
        // that the kernel delivered to it would end the process.
        let old_mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let thread = std::thread::Builder::new().name("stderr".to_owned()).spawn(move || {
            for bytes in queue {
                let _ = io::stderr().lock().write_all(&bytes);
            }
            let _ = ended_sender.send(());
        });
        old_mask.thread_set_mask()?;
        thread?;
        Ok(Self { lines, ended })
    }
}

static STDERR_WRITER: Mutex<Option<StderrWriter>> = Mutex::new(None);
/// The maximum number of queued lines.
const BACKLOG_MAX: usize = 1_024;
/// How long the end of this process waits for the reader of stderr.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Returns a table with this heading as text.
pub(crate) fn table<const N: usize>(
    heading: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_header(heading);
    for row in rows {
        table.add_row(row);
    }
    let mut text = String::new();
    for line in table.lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// A holder, as JSON.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HolderView<'a> {
    pub(crate) key: &'a str,
    pub(crate) held: bool,
    /// `exclusive`, `shared`, `upgradable` or `permits`.
    pub(crate) mode: Option<&'static str>,
    /// The units that the holder has taken.
    pub(crate) units: Option<u32>,
    /// All units of the semaphore.
    pub(crate) units_of: Option<u32>,
    pub(crate) label: Option<&'a str>,
    pub(crate) token: Option<u64>,
    pub(crate) held_for_ms: Option<u64>,
    pub(crate) lease_left_ms: Option<u64>,
}

impl<'a> From<&'a Holder> for HolderView<'a> {
    fn from(holder: &'a Holder) -> Self {
        Self {
            key: holder.key.as_str(),
            held: true,
            mode: Some(holder.mode.name()),
            units: permits(holder.mode).map(|(take, _)| take),
            units_of: permits(holder.mode).map(|(_, of)| of),
            label: holder.label.as_deref(),
            token: holder.token.map(u64::from),
            held_for_ms: holder.held_for.map(whole_millis),
            lease_left_ms: holder.lease_left.map(whole_millis),
        }
    }
}

impl<'a> HolderView<'a> {
    /// Returns the view of a key that is not locked.
    pub(crate) fn unlocked(key: &'a str) -> Self {
        Self {
            key,
            held: false,
            mode: None,
            units: None,
            units_of: None,
            label: None,
            token: None,
            held_for_ms: None,
            lease_left_ms: None,
        }
    }
}

/// Returns the units that a claim takes, and all units of the semaphore.
fn permits(mode: ClaimMode) -> Option<(u32, u32)> {
    match mode {
        ClaimMode::Permits { take, of } => Some((take, of)),
        _ => None,
    }
}

/// The columns of a table of holders.
pub(crate) const HOLDER_HEADING: [&str; 6] =
    ["KEY", "MODE", "HELD BY", "TOKEN", "HELD FOR", "LEASE LEFT"];

/// A row of a table of holders.
pub(crate) fn holder_row(holder: &Holder) -> [String; 6] {
    let unknown = || "-".to_owned();
    [
        printable(holder.key.as_str()),
        holder.mode.to_string(),
        holder.label.as_deref().map_or_else(unknown, printable),
        holder.token.map_or_else(unknown, |token| token.to_string()),
        holder.held_for.map_or_else(unknown, format_coarse),
        holder.lease_left.map_or_else(unknown, format_coarse),
    ]
}

/// A waiting claim as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct WaiterView<'a> {
    key: &'a str,
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    units: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    units_of: Option<u32>,
    label: Option<&'a str>,
    waited_for_ms: Option<u64>,
    expires_in_ms: Option<u64>,
}

impl<'a> From<&'a WaitingClaim> for WaiterView<'a> {
    fn from(waiter: &'a WaitingClaim) -> Self {
        Self {
            key: waiter.key.as_str(),
            mode: waiter.mode.name(),
            units: permits(waiter.mode).map(|(take, _)| take),
            units_of: permits(waiter.mode).map(|(_, of)| of),
            label: waiter.label.as_deref(),
            waited_for_ms: waiter.waited_for.map(whole_millis),
            expires_in_ms: waiter.expires_in.map(whole_millis),
        }
    }
}

/// The columns of a table of waiters.
pub(crate) const WAITER_HEADING: [&str; 4] = ["KEY", "MODE", "WAITER", "WAITED FOR"];

/// A row of a table of waiters.
pub(crate) fn waiter_row(waiter: &WaitingClaim) -> [String; 4] {
    let unknown = || "-".to_owned();
    [
        printable(waiter.key.as_str()),
        waiter.mode.to_string(),
        waiter.label.as_deref().map_or_else(unknown, printable),
        waiter.waited_for.map_or_else(unknown, format_coarse),
    ]
}

/// Returns the holder of a lock as part of a sentence: `host:42 (for 3m, lease ends in 20s)`.
pub(crate) fn describe_holder(holder: Option<&Holder>) -> String {
    let Some(holder) = holder else { return "another client".to_owned() };
    let mut phrase = holder.label.as_deref().map_or_else(|| "another client".to_owned(), printable);
    let facts: Vec<String> = [
        holder.held_for.map(|held| format!("for {}", format_coarse(held))),
        holder.lease_left.map(|left| format!("lease ends in {}", format_coarse(left))),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !facts.is_empty() {
        let _ = write!(phrase, " ({})", facts.join(", "));
    }
    phrase
}

/// Returns `text` unchanged if a terminal shows it unchanged, otherwise quoted and escaped. Keys
/// and labels come from other users.
pub(crate) fn printable(text: &str) -> String {
    // Invisible characters, and characters that change the direction of the text.
    let is_misleading = |c: char| {
        c.is_control()
            || matches!(
                c,
                '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'
                    ..='\u{200f}'
            )
            || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}')
            || matches!(c, '\u{e0000}'..='\u{e0fff}')
    };
    let is_plain = !text.is_empty() && !text.contains(is_misleading) && text.trim() == text;
    if is_plain {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' | '\n' | '\r' | '\t' => quoted.extend(c.escape_default()),
            c if is_misleading(c) => quoted.extend(c.escape_unicode()),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

/// Formats a time for text output: in seconds from 1 s on, otherwise in milliseconds.
pub(crate) fn format_coarse(span: Duration) -> String {
    let span = if span.as_secs() > 0 {
        Duration::from_secs(span.as_secs())
    } else {
        Duration::from_millis(whole_millis(span))
    };
    humantime::format_duration(span).to_string()
}

/// Returns the whole milliseconds of `span`.
pub(crate) fn whole_millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use lock_registry::Key;

    use super::*;

    #[test]
    fn text_that_could_mislead_is_escaped() {
        assert_eq!(printable("orders/42 ü"), "orders/42 ü");
        assert_eq!(printable("a\x1b[31mb"), r#""a\u{1b}[31mb""#);
        assert_eq!(printable("a\u{202e}b"), r#""a\u{202e}b""#);
        assert_eq!(printable("a\"\\\n\u{3164}"), r#""a\"\\\n\u{3164}""#);
        assert_eq!(printable(r"a\u{a}"), r"a\u{a}");
        assert_eq!(printable(" a"), r#"" a""#);
        assert_eq!(printable(""), r#""""#);
    }

    #[test]
    fn the_description_of_a_holder_contains_all_known_facts() {
        let holder = Holder::new(Key::new("a").unwrap());
        assert_eq!(describe_holder(Some(&holder)), "another client");
        let holder = holder
            .with_label(Some("host:1".to_owned()))
            .with_times(Some(Duration::from_millis(61_200)), Some(Duration::from_millis(900)));
        assert_eq!(describe_holder(Some(&holder)), "host:1 (for 1m 1s, lease ends in 900ms)");
    }

    #[test]
    fn a_table_has_no_trailing_blanks() {
        let text = table(["A", "B"], [["1".to_owned(), "2".to_owned()]]);
        assert_eq!(text, " A  B\n 1  2\n");
    }
}
