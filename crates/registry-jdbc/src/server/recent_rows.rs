//! What this store has lately found out about rows. A guess at what the server would answer: whoever relies on it asks the server.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RowId;

/// Rows of which one thing is known, most likely: that they were let go, or that somebody holds them. It saves the server work to ask first what fits.
#[derive(Debug, Default)]
pub(crate) struct RecentRows(Mutex<HashSet<RowId>>);

impl RecentRows {
    /// How many are remembered. To forget one costs its next grant a little time, and nothing else.
    const MAX: usize = 4_096;

    pub(crate) fn note(&self, id: RowId) {
        let mut rows = self.rows();
        if rows.len() >= Self::MAX {
            rows.clear();
        }
        rows.insert(id);
    }

    /// Whether the row was noted. It is not any more from now on.
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
    fn what_was_noted_is_known_once_and_of_limited_number() {
        let rows = RecentRows::default();
        let row = |number: usize| RowId::of("", &Key::new(&number.to_string()).unwrap());
        assert!(!rows.take(row(0)));
        for number in 0..=RecentRows::MAX {
            rows.note(row(number));
            assert!(rows.rows().len() <= RecentRows::MAX);
        }
        assert!(rows.take(row(RecentRows::MAX)));
        assert!(!rows.take(row(RecentRows::MAX)));
    }
}
