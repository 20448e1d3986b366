//! The registries of this process that share a backend.
//!
//! After a forced release, all of them verify their claims: a store need not report a change to the
//! client that made it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::LockBackend;
use crate::invalidation::Invalidations;
use crate::key::Key;

/// The registries of each backend. The key is the backend's address in memory.
static REGISTRIES: Mutex<Option<HashMap<usize, Vec<Invalidations>>>> = Mutex::new(None);

/// The entry of one registry among the registries of its backend. Dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct Sibling {
    backend: usize,
    hints: Invalidations,
}

impl Sibling {
    pub(crate) fn new(backend: &Arc<dyn LockBackend>, hints: Invalidations) -> Self {
        let backend = Arc::as_ptr(backend).cast::<()>().addr();
        let mut registries = registries();
        registries.get_or_insert_default().entry(backend).or_default().push(hints.clone());
        Self { backend, hints }
    }

    /// Makes all registries over this backend verify their claims on `key`.
    pub(crate) fn verify(&self, key: &Key) {
        let siblings = registries().as_ref().and_then(|all| all.get(&self.backend).cloned());
        siblings.iter().flatten().for_each(|hints| hints.notify(key));
    }
}

impl Drop for Sibling {
    fn drop(&mut self) {
        let mut registries = registries();
        let Some(all) = registries.as_mut() else { return };
        if let Some(siblings) = all.get_mut(&self.backend) {
            siblings.retain(|hints| !hints.is_same(&self.hints));
            if siblings.is_empty() {
                all.remove(&self.backend);
            }
        }
    }
}

fn registries() -> MutexGuard<'static, Option<HashMap<usize, Vec<Invalidations>>>> {
    REGISTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}
