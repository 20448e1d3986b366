//! The state of `lockreg top`: the rows that are shown, the selection, and what a key press does.
//! Uses no terminal and no store.

use std::cmp::{Ordering, Reverse};
use std::collections::HashMap;
use std::time::Duration;

use lock_registry::modes::WaitingClaim;
use lock_registry::{Holder, Key, LockError};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::widgets::TableState;

use crate::snapshot::{GrantCounter, Snapshot};

/// One row of the table: a holder of a key, or a key without holder for which claims wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) key: Key,
    pub(crate) holder: Option<Holder>,
    /// The number of claims that wait for the key.
    pub(crate) waiters: usize,
}

/// The column by which the rows are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SortColumn {
    Key,
    HeldBy,
    HeldFor,
    LeaseLeft,
    Waiters,
}

/// The part of the screen that receives key presses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Focus {
    Table,
    Filter,
    Details,
    /// The question whether to release the lock of this key by force.
    ConfirmBreak(Key),
}

/// An action that a key press requests from the caller of [`View::press`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Quit,
    Break(Key),
}

#[derive(Debug)]
pub(crate) struct View {
    pub(crate) store: &'static str,
    pub(crate) lists_waiters: bool,
    pub(crate) snapshot: Option<Snapshot>,
    pub(crate) grants: GrantCounter,
    /// The error of the last snapshot. The rows are then those of an earlier snapshot.
    pub(crate) error: Option<String>,
    /// The result of the last action.
    pub(crate) message: Option<String>,
    pub(crate) rows: Vec<Row>,
    /// The sort column, and whether the order is reversed.
    pub(crate) sort: (SortColumn, bool),
    pub(crate) filter: String,
    pub(crate) focus: Focus,
    pub(crate) table: TableState,
    /// The row that was selected last. `arrange` finds it again by its key and token, or else by
    /// its key.
    last_selected: Option<Row>,
}

impl SortColumn {
    const ALL: [Self; 5] = [Self::Key, Self::HeldBy, Self::HeldFor, Self::LeaseLeft, Self::Waiters];

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

impl View {
    pub(crate) fn new(store: &'static str, lists_waiters: bool) -> Self {
        Self {
            store,
            lists_waiters,
            snapshot: None,
            grants: GrantCounter::default(),
            error: None,
            message: None,
            rows: Vec::new(),
            sort: (SortColumn::Key, false),
            filter: String::new(),
            focus: Focus::Table,
            table: TableState::default(),
            last_selected: None,
        }
    }

    /// Stores a new snapshot and arranges its rows, or stores the error of a failed snapshot.
    pub(crate) fn record(&mut self, snapshot: Result<Snapshot, LockError>) {
        match snapshot {
            Ok(snapshot) => {
                self.grants.record(&snapshot);
                self.snapshot = Some(snapshot);
                self.error = None;
                self.arrange();
            }
            Err(error) => self.error = Some(error.to_string()),
        }
    }

    pub(crate) fn set_message(&mut self, message: String) {
        self.message = Some(message);
    }

    /// Returns the time since the shown snapshot was taken.
    pub(crate) fn age(&self) -> Duration {
        self.snapshot.as_ref().map_or(Duration::ZERO, Snapshot::age)
    }

    pub(crate) fn selected(&self) -> Option<&Row> {
        self.rows.get(self.table.selected()?)
    }

    /// Returns the holders of the selected key, and the claims that wait for it.
    pub(crate) fn details(&self) -> Option<(&Key, Vec<&Holder>, Vec<&WaitingClaim>)> {
        let (row, snapshot) = (self.selected()?, self.snapshot.as_ref()?);
        let holders = snapshot.holders.iter().filter(|holder| holder.key == row.key).collect();
        let waiters = snapshot.waiters.iter().filter(|waiter| waiter.key == row.key).collect();
        Some((&row.key, holders, waiters))
    }

    /// Changes the state after a key press. Returns the action that the caller must take.
    pub(crate) fn press(&mut self, key: KeyEvent) -> Option<Action> {
        self.message = None;
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return Some(Action::Quit);
        }
        match self.focus.clone() {
            Focus::Table => return self.press_in_table(key.code),
            Focus::Filter => self.press_in_filter(key.code),
            Focus::Details => {
                if matches!(key.code, KeyCode::Esc | KeyCode::Enter | KeyCode::Char('q')) {
                    self.focus = Focus::Table;
                }
            }
            Focus::ConfirmBreak(locked) => {
                self.focus = Focus::Table;
                if key.code == KeyCode::Char('y') {
                    return Some(Action::Break(locked));
                }
            }
        }
        None
    }

    fn press_in_table(&mut self, code: KeyCode) -> Option<Action> {
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return Some(Action::Quit),
            KeyCode::Down | KeyCode::Char('j') => self.select_by(1),
            KeyCode::Up | KeyCode::Char('k') => self.select_by(-1),
            KeyCode::PageDown => self.select_by(PAGE_ROWS),
            KeyCode::PageUp => self.select_by(-PAGE_ROWS),
            KeyCode::Home => self.select_by(isize::MIN),
            KeyCode::End => self.select_by(isize::MAX),
            KeyCode::Char('s') => {
                self.sort.0 = self.sort.0.next();
                self.arrange();
            }
            KeyCode::Char('r') => {
                self.sort.1 = !self.sort.1;
                self.arrange();
            }
            KeyCode::Char('/') => self.focus = Focus::Filter,
            KeyCode::Enter if self.selected().is_some() => self.focus = Focus::Details,
            KeyCode::Char('b') => {
                if let Some(row) = self.selected().filter(|row| row.holder.is_some()) {
                    self.focus = Focus::ConfirmBreak(row.key.clone());
                }
            }
            _ => {}
        }
        None
    }

    fn press_in_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.focus = Focus::Table,
            KeyCode::Esc => {
                self.filter.clear();
                self.focus = Focus::Table;
            }
            KeyCode::Backspace => _ = self.filter.pop(),
            KeyCode::Char(typed) => self.filter.push(typed),
            _ => {}
        }
        self.arrange();
    }

    fn select_by(&mut self, rows: isize) {
        let last = self.rows.len().saturating_sub(1);
        let index = self.table.selected().unwrap_or(0).saturating_add_signed(rows).min(last);
        self.table.select((!self.rows.is_empty()).then_some(index));
        self.last_selected = self.selected().cloned();
    }

    /// Filters and sorts the rows. The selected row stays selected. If it no longer exists, selects
    /// another row of its key, or else the row at the same position.
    fn arrange(&mut self) {
        let Some(snapshot) = &self.snapshot else { return };
        let mut rows = rows_of(snapshot);
        let filter = self.filter.to_lowercase();
        rows.retain(|row| row.matches(&filter));
        let (column, is_reversed) = self.sort;
        rows.sort_by(|a, b| {
            let order = a.compare(b, column);
            if is_reversed { order.reverse() } else { order }
        });
        self.rows = rows;
        let is_selected = |row: &Row, exact: bool| {
            self.last_selected.as_ref().is_some_and(|selected| {
                let token = |row: &Row| row.holder.as_ref().map(|holder| holder.token);
                row.key == selected.key && (!exact || token(row) == token(selected))
            })
        };
        let find = |exact| self.rows.iter().position(|row| is_selected(row, exact));
        let index =
            find(true).or_else(|| find(false)).or_else(|| self.table.selected()).unwrap_or(0);
        let last = self.rows.len().saturating_sub(1);
        self.table.select((!self.rows.is_empty()).then_some(index.min(last)));
        self.last_selected = self.selected().cloned();
    }
}

impl Row {
    fn matches(&self, filter: &str) -> bool {
        let label = self.holder.as_ref().and_then(|holder| holder.label.as_deref());
        let contains = |text: &str| text.to_lowercase().contains(filter);
        contains(self.key.as_str()) || label.is_some_and(contains)
    }

    /// Compares two rows by a column. If the column is equal, compares their keys and tokens.
    fn compare(&self, other: &Self, column: SortColumn) -> Ordering {
        fn label(row: &Row) -> Option<&str> {
            row.holder.as_ref()?.label.as_deref()
        }
        let holder =
            |row: &Self| row.holder.as_ref().map(|it| (it.held_for, it.lease_left, it.token));
        let held_for = |row: &Self| holder(row).and_then(|(held_for, ..)| held_for);
        let lease_left = |row: &Self| holder(row).and_then(|(_, lease_left, _)| lease_left);
        let token = |row: &Self| holder(row).and_then(|(.., token)| token);
        let by_column = match column {
            SortColumn::Key => Ordering::Equal,
            SortColumn::HeldBy => label(self).cmp(&label(other)),
            // The longest hold comes first, as the largest value does in `top(1)`.
            SortColumn::HeldFor => Reverse(held_for(self)).cmp(&Reverse(held_for(other))),
            SortColumn::LeaseLeft => lease_left(self).cmp(&lease_left(other)),
            SortColumn::Waiters => Reverse(self.waiters).cmp(&Reverse(other.waiters)),
        };
        by_column
            .then_with(|| self.key.cmp(&other.key))
            .then_with(|| token(self).cmp(&token(other)))
    }
}

fn rows_of(snapshot: &Snapshot) -> Vec<Row> {
    let mut waiters: HashMap<&Key, usize> = HashMap::new();
    for waiter in &snapshot.waiters {
        *waiters.entry(&waiter.key).or_default() += 1;
    }
    let mut rows: Vec<Row> = (snapshot.holders.iter())
        .map(|holder| Row {
            key: holder.key.clone(),
            waiters: waiters.get(&holder.key).copied().unwrap_or(0),
            holder: Some(holder.clone()),
        })
        .collect();
    for holder in &snapshot.holders {
        waiters.remove(&holder.key);
    }
    let free = waiters.into_iter();
    rows.extend(free.map(|(key, waiters)| Row { key: key.clone(), holder: None, waiters }));
    rows
}

/// The number of rows by which Page Up and Page Down move the selection.
const PAGE_ROWS: isize = 10;

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Instant;

    use lock_registry::FencingToken;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    /// Returns a snapshot with one holder for each element of `held`, which is a key, a label and
    /// the seconds since the grant, and with one waiter for each key of `waiters`.
    pub(crate) fn snapshot(held: &[(&str, &str, u64)], waiters: &[&str]) -> Snapshot {
        let holder = |(nth, (name, label, seconds)): (usize, &(&str, &str, u64))| {
            Holder::new(key(name))
                .with_label(Some((*label).to_owned()))
                .with_token(FencingToken::new(1_795_185_329_468_081 + nth as u64))
                .with_times(Some(Duration::from_secs(*seconds)), Some(Duration::from_secs(28)))
        };
        let waiter = |name: &&str| {
            WaitingClaim::new(key(name))
                .with_label(Some("waiter".to_owned()))
                .with_times(Some(Duration::from_secs(42)), None)
        };
        Snapshot {
            holders: held.iter().enumerate().map(holder).collect(),
            waiters: waiters.iter().map(waiter).collect(),
            taken_at: Instant::now(),
        }
    }

    fn row_keys(view: &View) -> Vec<&str> {
        view.rows.iter().map(|row| row.key.as_str()).collect()
    }

    fn press(view: &mut View, code: KeyCode) -> Option<Action> {
        view.press(KeyEvent::from(code))
    }

    fn view() -> View {
        let mut view = View::new("sqlite", true);
        let held = [("b", "x", 5), ("a", "y", 9), ("c", "w", 7)];
        view.record(Ok(snapshot(&held, &["c", "c", "free"])));
        view
    }

    #[test]
    fn rows_are_sorted_by_each_column_and_reversed() {
        let mut view = view();
        assert_eq!(row_keys(&view), ["a", "b", "c", "free"]);
        for sorted in [
            ["free", "c", "b", "a"], // by label
            ["a", "c", "b", "free"], // the longest hold first
            ["free", "a", "b", "c"], // by remaining lease, which is equal
            ["c", "free", "a", "b"], // the most waiters first
        ] {
            press(&mut view, KeyCode::Char('s'));
            assert_eq!(row_keys(&view), sorted);
        }
        press(&mut view, KeyCode::Char('r'));
        assert_eq!(row_keys(&view), ["b", "a", "free", "c"]);
    }

    #[test]
    fn a_filter_finds_keys_and_labels_and_esc_removes_it() {
        let mut view = view();
        press(&mut view, KeyCode::Char('/'));
        press(&mut view, KeyCode::Char('Y'));
        assert_eq!(row_keys(&view), ["a"]);
        assert_eq!(press(&mut view, KeyCode::Char('q')), None, "the letter is added to the filter");
        assert_eq!(row_keys(&view), [""; 0]);
        press(&mut view, KeyCode::Backspace);
        press(&mut view, KeyCode::Enter);
        assert_eq!(row_keys(&view), ["a"]);
        press(&mut view, KeyCode::Char('/'));
        press(&mut view, KeyCode::Esc);
        assert_eq!(row_keys(&view).len(), 4);
        assert_eq!(press(&mut view, KeyCode::Char('q')), Some(Action::Quit));
    }

    #[test]
    fn the_selected_row_stays_selected_while_others_come_and_go() {
        let mut view = view();
        press(&mut view, KeyCode::Down);
        assert_eq!(view.selected().unwrap().key, key("b"));
        view.record(Ok(snapshot(&[("0", "x", 1), ("a", "y", 9), ("b", "x", 5)], &[])));
        assert_eq!(view.selected().unwrap().key, key("b"));
        view.record(Ok(snapshot(&[("0", "x", 1)], &[])));
        assert_eq!(view.selected().unwrap().key, key("0"));
        view.record(Ok(snapshot(&[], &[])));
        assert_eq!(view.selected(), None);
        for code in [KeyCode::Down, KeyCode::Up, KeyCode::End, KeyCode::Enter, KeyCode::Char('b')] {
            assert_eq!(press(&mut view, code), None);
        }
    }

    #[test]
    fn a_lock_is_broken_only_after_a_confirmation() {
        let mut view = view();
        for (answer, action) in [('n', None), ('b', None), ('y', Some(Action::Break(key("a"))))] {
            assert_eq!(press(&mut view, KeyCode::Char('b')), None);
            assert_eq!(view.focus, Focus::ConfirmBreak(key("a")));
            assert_eq!(press(&mut view, KeyCode::Char(answer)), action);
            assert_eq!(view.focus, Focus::Table);
        }
        // The rows may change while the question is shown.
        press(&mut view, KeyCode::Char('b'));
        view.record(Ok(snapshot(&[("0", "x", 1)], &[])));
        assert_eq!(press(&mut view, KeyCode::Char('y')), Some(Action::Break(key("a"))));
    }

    #[test]
    fn an_error_keeps_the_rows_of_the_last_snapshot() {
        let mut view = view();
        view.record(Err(LockError::Closed));
        assert!(view.error.is_some());
        assert_eq!(row_keys(&view).len(), 4);
        view.record(Ok(snapshot(&[], &[])));
        assert_eq!((view.error.as_deref(), view.rows.len()), (None, 0));
    }
}
