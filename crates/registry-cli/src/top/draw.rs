//! Draws the state of `lockreg top`.

use std::time::Duration;

use lock_registry::Holder;
use lock_registry::modes::WaitingClaim;
use ratatui::Frame;
use ratatui::layout::{Constraint, Flex, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row as TableRow, Table, TableState, Wrap};

use super::view::{Focus, Row, SortColumn, View};
use crate::output::{format_coarse, printable};

pub(crate) fn draw(frame: &mut Frame<'_>, view: &mut View) {
    let [summary, rows, hints] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(summary_line(view), summary);
    draw_table(frame, view, rows);
    frame.render_widget(hint_line(view), hints);
    match &view.focus {
        Focus::Details => draw_details(frame, view),
        Focus::ConfirmBreak(key) => {
            let holder = view.rows.iter().find(|row| row.key == *key);
            let label = holder.and_then(|row| row.holder.as_ref()?.label.as_deref());
            let held_by = label.map_or_else(|| "another client".to_owned(), printable);
            let text = format!(
                "y: release it by force    any other key: cancel\n\n{} is held by {held_by}.\n\nUntil the holder detects the loss, at its next renewal or the end of its lease, two holders may run.",
                printable(key.as_str())
            );
            draw_popup(frame, " Release by force ", &text, 10);
        }
        Focus::Table | Focus::Filter => {}
    }
}

fn summary_line(view: &View) -> Line<'static> {
    let snapshot = view.snapshot.as_ref();
    let held = snapshot.map_or(0, |snapshot| snapshot.holders.len());
    let mut text = format!(" {}  {held} held", view.store);
    if view.lists_waiters {
        let waiting = snapshot.map_or(0, |snapshot| snapshot.waiters.len());
        text += &format!("  {waiting} waiting");
    }
    text +=
        &format!("  {:.1} grants/s  {} ms old", view.grants.per_second(), view.age().as_millis());
    if view.rows.len() < held || !view.filter.is_empty() {
        text += &format!("  {} shown", view.rows.len());
    }
    Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
}

fn hint_line(view: &View) -> Line<'static> {
    if view.focus == Focus::Filter {
        return Line::raw(format!(
            " filter: {}_   enter: keep   esc: clear",
            printable_or_empty(&view.filter)
        ));
    }
    if let Some(message) = view.error.as_ref().or(view.message.as_ref()) {
        return Line::styled(format!(" {}", printable(message)), coloured(Color::Red));
    }
    let filter = match view.filter.as_str() {
        "" => String::new(),
        filter => format!("  filter {}", printable(filter)),
    };
    Line::raw(format!(" q quit  / filter  s sort  r reverse  enter details  b break{filter}"))
}

fn draw_table(frame: &mut Frame<'_>, view: &mut View, area: Rect) {
    let (sorted, is_reversed) = view.sort;
    let heading = |title: &'static str, column: Option<SortColumn>| match column {
        Some(column) if column == sorted => {
            format!("{title}{}", if is_reversed { "▼" } else { "▲" })
        }
        _ => title.to_owned(),
    };
    let header = TableRow::new([
        heading("KEY", Some(SortColumn::Key)),
        heading("MODE", None),
        heading("HELD BY", Some(SortColumn::HeldBy)),
        heading("FOR", Some(SortColumn::HeldFor)),
        heading("LEASE", Some(SortColumn::LeaseLeft)),
        heading("TOKEN", None),
        heading("WAIT", Some(SortColumn::Waiters)),
    ])
    .style(Style::new().add_modifier(Modifier::BOLD));
    let age = view.age();
    // Only visible rows are formatted, because there may be thousands.
    let visible = usize::from(area.height.saturating_sub(1)).max(1);
    let selected = view.table.selected();
    let first = view
        .table
        .offset()
        .max(selected.map_or(0, |selected| (selected + 1).saturating_sub(visible)))
        .min(selected.unwrap_or(usize::MAX))
        .min(view.rows.len().saturating_sub(visible));
    *view.table.offset_mut() = first;
    let shown = view.rows.iter().skip(first).take(visible);
    let rows: Vec<TableRow<'_>> = shown.map(|row| table_row(row, age)).collect();
    let mut state = TableState::new().with_selected(selected.map(|selected| selected - first));
    let widths = [
        Constraint::Fill(1),
        Constraint::Length(10),
        Constraint::Fill(1),
        Constraint::Length(8),
        Constraint::Length(6),
        Constraint::Length(16),
        Constraint::Length(5),
    ];
    let table = Table::new(rows, widths)
        .header(header)
        .column_spacing(1)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut state);
}

fn table_row(row: &Row, age: Duration) -> TableRow<'static> {
    let unknown = || "-".to_owned();
    let holder = row.holder.as_ref();
    let label = holder.and_then(|holder| holder.label.as_deref());
    let held_for = holder.and_then(|holder| holder.held_for).map(|held| held + age);
    let lease_left = holder.and_then(|holder| holder.lease_left);
    let waiters = match row.waiters {
        0 => Cell::from(""),
        waiters => Cell::from(waiters.to_string()).style(coloured(Color::Yellow)),
    };
    TableRow::new([
        Cell::from(printable(row.key.as_str())),
        Cell::from(holder.map_or_else(unknown, |holder| holder.mode.to_string())),
        Cell::from(label.map_or_else(unknown, printable)),
        Cell::from(held_for.map_or_else(unknown, format_short)),
        Cell::from(lease_left.map_or_else(unknown, |left| format_short(left.saturating_sub(age)))),
        Cell::from(
            holder.and_then(|holder| holder.token).map_or_else(unknown, |token| token.to_string()),
        ),
        waiters,
    ])
}

fn draw_details(frame: &mut Frame<'_>, view: &View) {
    let Some((key, holders, waiters)) = view.details() else { return };
    let mut text = format!("{}\n", printable(key.as_str()));
    for holder in &holders {
        text += &format!("\n{}", describe_holder(holder));
    }
    if holders.is_empty() {
        text += "\nnot locked";
    }
    for waiter in &waiters {
        text += &format!("\n{}", describe_waiter(waiter));
    }
    if waiters.is_empty() && view.lists_waiters {
        text += "\nno process waits";
    }
    draw_popup(frame, " Details (esc: back) ", &text, u16::MAX);
}

fn describe_holder(holder: &Holder) -> String {
    let label = holder.label.as_deref().map_or_else(|| "-".to_owned(), printable);
    let mut text = format!("held by {label}, {}", holder.mode);
    if let Some(token) = holder.token {
        text += &format!(", token {token}");
    }
    if let Some(held) = holder.held_for {
        text += &format!(", for {}", format_coarse(held));
    }
    if let Some(left) = holder.lease_left {
        text += &format!(", lease ends in {}", format_coarse(left));
    }
    text
}

fn describe_waiter(waiter: &WaitingClaim) -> String {
    let label = waiter.label.as_deref().map_or_else(|| "-".to_owned(), printable);
    let mut text = format!("{label} waits, {}", waiter.mode);
    if let Some(waited) = waiter.waited_for {
        text += &format!(", for {}", format_coarse(waited));
    }
    text
}

fn draw_popup(frame: &mut Frame<'_>, title: &'static str, text: &str, height_max: u16) {
    let area = frame.area();
    // A small terminal has no room for margins.
    let width = area.width.saturating_sub(8).max(area.width.min(40)).min(90);
    let height = area.height.saturating_sub(4).max(area.height.min(8)).min(height_max);
    let [row] = Layout::vertical([Constraint::Length(height)]).flex(Flex::Center).areas(area);
    let [popup] = Layout::horizontal([Constraint::Length(width)]).flex(Flex::Center).areas(row);
    frame.render_widget(Clear, popup);
    let lines: Vec<Line<'_>> = text.lines().map(|line| Line::from(Span::raw(line))).collect();
    let paragraph =
        Paragraph::new(lines).wrap(Wrap { trim: false }).block(Block::bordered().title(title));
    frame.render_widget(paragraph, popup);
}

/// Formats a time in one unit, such as `75s` or `12h`, because the columns are narrow.
fn format_short(span: Duration) -> String {
    match span.as_secs() {
        0 => format!("{}ms", span.as_millis()),
        seconds @ 1..=599 => format!("{seconds}s"),
        seconds @ 600..=35_999 => format!("{}m", seconds / 60),
        seconds @ 36_000..=863_999 => format!("{}h", seconds / 3_600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

fn printable_or_empty(text: &str) -> String {
    if text.is_empty() { String::new() } else { printable(text) }
}

/// Returns a style with this colour, or without one if `NO_COLOR` is set (<https://no-color.org>).
fn coloured(colour: Color) -> Style {
    let is_off = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    if is_off { Style::new() } else { Style::new().fg(colour) }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent};

    use super::super::view::tests::snapshot;
    use super::*;

    fn screen(view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..80).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..24).map(|y| line(y).trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn eighty_columns_show_all_columns_of_a_lock() {
        let mut view = View::new("sqlite", true);
        let held = [("orders/42", "vm:3679", 75), ("a\u{202e}b\x1b[31m", "x\ny", 2)];
        view.record(Ok(snapshot(&held, &["orders/42"])));
        let screen = screen(&mut view);
        let row = screen.lines().find(|line| line.contains("orders/42")).unwrap();
        for part in ["exclusive", "vm:3679", "75s", "1795185329468081", " 1"] {
            assert!(row.contains(part), "{part}: {row}");
        }
        assert!(screen.contains("2 held  1 waiting"), "{screen}");
        assert!(screen.contains(r#""a\u{202e}b\u"#), "{screen}");
        assert!(!screen.contains('\x1b'), "{screen}");
    }

    #[test]
    fn details_and_the_question_show_the_whole_key() {
        let mut view = View::new("redis", true);
        let name = "k".repeat(150);
        view.record(Ok(snapshot(&[(&name, "worker 7", 3)], &[&name])));
        view.press(KeyEvent::from(KeyCode::Enter));
        let details = screen(&mut view);
        let lines = details.lines().filter_map(|line| line.trim_start().strip_prefix('│'));
        let of_key = lines.filter(|line| line.starts_with('k'));
        assert_eq!(of_key.map(|line| line.matches('k').count()).sum::<usize>(), 150, "{details}");
        view.press(KeyEvent::from(KeyCode::Esc));
        view.press(KeyEvent::from(KeyCode::Char('b')));
        let question = screen(&mut view);
        assert!(question.contains("y: release it by force"), "{question}");
    }

    #[test]
    fn a_terminal_of_any_size_is_drawn() {
        for (width, height) in [(1, 1), (20, 3), (80, 24), (300, 100)] {
            let mut view = View::new("etcd", false);
            view.record(Ok(snapshot(&[("a", "b", 3)], &[])));
            for code in [KeyCode::Null, KeyCode::Enter, KeyCode::Esc, KeyCode::Char('b')] {
                view.press(KeyEvent::from(code));
                let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
                terminal.draw(|frame| draw(frame, &mut view)).unwrap();
            }
        }
    }
}
