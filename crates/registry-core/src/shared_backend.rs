//! The registries of this process that share a backend.
//!
//! After a forced release, all of these registries verify their claims. A store need not report a
//! change to the client that made the change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::LockBackend;
use crate::invalidation::{InvalidationSet, Invalidations};
use crate::key::Key;

/// The registries of each backend. The key is the backend's address in memory.
static REGISTRIES: Mutex<Option<HashMap<usize, Arc<InvalidationSet>>>> = Mutex::new(None);

/// The entry of one registry in the table of [`REGISTRIES`]. Dropping the last entry of a backend
/// removes the backend from the table.
#[derive(Debug)]
pub(crate) struct SharedBackendEntry {
    backend_address: usize,
    /// `None` only during the drop of this entry.
    registries: Option<Arc<InvalidationSet>>,
}

impl SharedBackendEntry {
    pub(crate) fn new(backend: &Arc<dyn LockBackend>, invalidations: Invalidations) -> Self {
        let address = Arc::as_ptr(backend).cast::<()>().addr();
        let registries =
            Arc::clone(registry_table().get_or_insert_default().entry(address).or_default());
        registries.subscribe(invalidations);
        Self { backend_address: address, registries: Some(registries) }
    }

    /// Makes all registries over this backend verify their claims on `key`.
    pub(crate) fn request_verification(&self, key: &Key) {
        if let Some(registries) = &self.registries {
            registries.notify(key);
        }
    }
}

impl Drop for SharedBackendEntry {
    fn drop(&mut self) {
        let mut table = registry_table();
        // The entry drops its reference while the mutex is locked. If the last two entries are
        // dropped concurrently, the second then finds only its own reference and the table's.
        if self.registries.take().is_some_and(|registries| Arc::strong_count(&registries) == 2) {
            table.as_mut().and_then(|table| table.remove(&self.backend_address));
        }
    }
}

fn registry_table() -> MutexGuard<'static, Option<HashMap<usize, Arc<InvalidationSet>>>> {
    REGISTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}
