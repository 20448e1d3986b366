//! Which keys this store has let go itself, lately. A guess at what the server would say, never more: whoever relies on it asks the server.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RowId;

/// Rows that are there, most likely, and that nobody holds, most likely: the last that was heard of them is that they were let go. To take such a row again
/// is less work for the server than to take one of which nothing is known.
#[derive(Debug, Default)]
pub(crate) struct LetGo(Mutex<HashSet<RowId>>);

impl LetGo {
    /// How many are remembered. To forget one costs its next grant a little time, and nothing else.
    const MAX: usize = 4_096;

    pub(crate) fn note(&self, id: RowId) {
        let mut rows = self.rows();
        if rows.len() >= Self::MAX {
            rows.clear();
        }
        rows.insert(id);
    }

    /// Whether the row was let go, as far as is known. That is known no more from now on.
    pub(crate) fn take(&self, id: RowId) -> bool {
        self.rows().remove(&id)
    }

    fn rows(&self) -> MutexGuard<'_, HashSet<RowId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use registry_core::Key;

    use super::*;

    #[test]
    fn what_was_let_go_is_known_once_and_of_limited_number() {
        let let_go = LetGo::default();
        let row = |number: usize| RowId::of("", &Key::new(&number.to_string()).unwrap());
        assert!(!let_go.take(row(0)));
        for number in 0..=LetGo::MAX {
            let_go.note(row(number));
            assert!(let_go.rows().len() <= LetGo::MAX);
        }
        assert!(let_go.take(row(LetGo::MAX)));
        assert!(!let_go.take(row(LetGo::MAX)));
    }
}
