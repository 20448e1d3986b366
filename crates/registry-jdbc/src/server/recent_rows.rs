//! A set of recently used rows that probably share a property. The set is not synchronised with the
//! server, so a statement must check the property.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::RowId;

/// Rows that probably share a property, for example that they are free since this process released
/// them. The store uses such a set to choose the statement that probably succeeds.
#[derive(Debug, Default)]
pub(crate) struct RecentRows(Mutex<HashSet<RowId>>);

impl RecentRows {
    /// The maximum number of remembered rows. Forgetting a row only slows its next grant or
    /// release.
    const MAX: usize = 4_096;

    pub(crate) fn insert(&self, id: RowId) {
        let mut rows = self.rows();
        if rows.len() >= Self::MAX {
            rows.clear();
        }
        rows.insert(id);
    }

    /// Removes the row. Returns whether it was in the set.
    pub(crate) fn remove(&self, id: RowId) -> bool {
        self.rows().remove(&id)
    }

    /// Removes all of these rows if the set contains all of them. Returns whether it did.
    pub(crate) fn remove_all(&self, ids: &[RowId]) -> bool {
        let mut rows = self.rows();
        let has_all = ids.iter().all(|id| rows.contains(id));
        if has_all {
            ids.iter().for_each(|id| _ = rows.remove(id));
        }
        has_all
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
    fn a_row_is_removed_once_and_the_number_of_rows_is_limited() {
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

    #[test]
    fn several_rows_are_removed_together_or_not_at_all() {
        let rows = RecentRows::default();
        let [a, b, missing] = ["a", "b", "c"].map(|key| RowId::new("", &Key::new(key).unwrap()));
        rows.insert(a);
        rows.insert(b);
        assert!(!rows.remove_all(&[a, missing]));
        assert!(rows.remove_all(&[a, b]));
        assert!(!rows.remove(a));
    }
}
