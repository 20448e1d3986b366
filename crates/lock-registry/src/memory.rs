//! Named in-process stores: one per name and namespace, until the process ends.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use registry_core::MemoryBackend;

type NamedStores = HashMap<(String, Option<String>), MemoryBackend>;

/// Returns the store of this name and namespace, created on first use. It is never dropped, so that
/// its tokens only grow.
pub(crate) fn named(name: String, namespace: Option<String>) -> MemoryBackend {
    static STORES: LazyLock<Mutex<NamedStores>> = LazyLock::new(Mutex::default);

    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    stores.entry((name, namespace)).or_default().clone()
}
