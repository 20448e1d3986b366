//! Remembers recent properties of rows. It is only a guess at the server's
//! state: callers must verify it with the server.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RowId;

/// Rows that probably share one property: this process released them, or they are held. It helps a
/// backend to send the best statement first.
#[derive(Debug, Default)]
pub(crate) struct RecentRows(Mutex<HashSet<RowId>>);

impl RecentRows {
    /// The maximum number of remembered rows. Forgetting a row only slows its next grant.
    const MAX: usize = 4_096;

    pub(crate) fn insert(&self, id: RowId) {
        let mut rows = self.rows();
        if rows.len() >= Self::MAX {
            rows.clear();
        }
        rows.insert(id);
    }

    /// Removes the row, and returns whether it was remembered.
    pub(crate) fn remove(&self, id: RowId) -> bool {
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
    fn a_row_is_remembered_once_and_their_number_is_limited() {
        let rows = RecentRows::default();
        let row = |number: usize| RowId::new("", &Key::new(&number.to_string()).unwrap());
        assert!(!rows.remove(row(0)));
        for number in 0..=RecentRows::MAX {
            rows.insert(row(number));
            assert!(rows.rows().len() <= RecentRows::MAX);
        }
        assert!(rows.remove(row(RecentRows::MAX)));
        assert!(!rows.remove(row(RecentRows::MAX)));
    }
}
