//! Forwards the servers' invalidation messages (`CLIENT TRACKING`) to the registries that may hold
//! the locks. `Node` reports the messages; the engine then verifies the claims.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::Value;
use registry_core::{Invalidations, Key};

use crate::names::Names;

/// The subscribed registries, and whether the servers send invalidations.
#[derive(Clone)]
pub(crate) struct Rumours(Arc<Inner>);

struct Inner {
    names: Names,
    /// A server refused client tracking.
    untold: AtomicBool,
    registries: Mutex<Vec<Invalidations>>,
    /// Keys without invalidations for now.
    untold_keys: Mutex<BTreeSet<Key>>,
}

/// How soon a key is verified if the server could not be asked to track it.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

impl Rumours {
    pub(crate) fn new(names: Names) -> Self {
        Self(Arc::new(Inner {
            names,
            untold: AtomicBool::new(false),
            registries: Mutex::default(),
            untold_keys: Mutex::default(),
        }))
    }

    /// Subscribes a registry.
    pub(crate) fn tell(&self, hints: Invalidations) {
        let mut registries = self.0.registries.lock().unwrap_or_else(PoisonError::into_inner);
        registries.retain(Invalidations::is_live);
        registries.push(hints);
    }

    /// Returns whether any open registry is subscribed.
    pub(crate) fn are_wanted(&self) -> bool {
        let mut registries = self.0.registries.lock().unwrap_or_else(PoisonError::into_inner);
        registries.retain(Invalidations::is_live);
        !registries.is_empty()
    }

    /// Records whether a server sends invalidations.
    pub(crate) fn note(&self, told: bool) {
        self.0.untold.store(!told, Ordering::Release);
    }

    /// Returns whether the servers send invalidations.
    pub(crate) fn are_told(&self) -> bool {
        !self.0.untold.load(Ordering::Acquire)
    }

    /// Forwards the keys of an invalidation message. A message without a list invalidates all keys.
    pub(crate) fn spread(&self, named: &[Value]) {
        let Some(Value::Array(names)) = named.first() else { return self.spread_all() };
        for name in names {
            let Value::BulkString(name) = name else { continue };
            if let Some(key) = self.key(name) {
                self.each(|hints| hints.notify(&key));
            }
        }
    }

    /// Has these keys verified after [`LOOK_AGAIN`], because no invalidation would arrive for them.
    pub(crate) fn spread_soon<'a>(&self, names: impl Iterator<Item = &'a [u8]>) {
        let mut keys = self.0.untold_keys.lock().unwrap_or_else(PoisonError::into_inner);
        let is_idle = keys.is_empty();
        keys.extend(names.filter_map(|name| self.key(name)));
        if is_idle && !keys.is_empty() {
            let rumours = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(LOOK_AGAIN).await;
                let untold = &rumours.0.untold_keys;
                let keys =
                    std::mem::take(&mut *untold.lock().unwrap_or_else(PoisonError::into_inner));
                for key in keys {
                    rumours.each(|hints| hints.notify(&key));
                }
            });
        }
    }

    fn key(&self, name: &[u8]) -> Option<Key> {
        self.0.names.key(std::str::from_utf8(name).ok()?)
    }

    /// Invalidates all keys.
    pub(crate) fn spread_all(&self) {
        self.each(Invalidations::notify_all);
    }

    fn each(&self, tell: impl Fn(&Invalidations)) {
        let registries = self.0.registries.lock().unwrap_or_else(PoisonError::into_inner).clone();
        registries.iter().for_each(tell);
    }
}

// Written manually: the derived form would print only names.
impl fmt::Debug for Rumours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rumours").field("told", &self.are_told()).finish_non_exhaustive()
    }
}
