//! Forwards the servers' invalidation messages (`CLIENT TRACKING`) to the subscribed registries.
//! `RedisNode` receives the messages. The engine verifies the claims of the reported keys.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::Value;
use registry_core::{InvalidationSet, Key};

use crate::names::RedisKeyNames;

/// The subscribed registries, and whether the servers send invalidations.
#[derive(Clone)]
pub(crate) struct InvalidationForwarder(Arc<ForwarderState>);

struct ForwarderState {
    names: RedisKeyNames,
    /// Set when a server refuses client tracking. Cleared when a server enables client tracking.
    is_tracking_refused: AtomicBool,
    subscribers: InvalidationSet,
    /// Keys of migrating slots, for which no server sends invalidations.
    untracked_keys: Mutex<BTreeSet<Key>>,
}

/// The maximum delay before the engine verifies an untracked key.
const UNTRACKED_KEY_DELAY_MAX: Duration = Duration::from_millis(250);

impl InvalidationForwarder {
    pub(crate) fn new(names: RedisKeyNames) -> Self {
        Self(Arc::new(ForwarderState {
            names,
            is_tracking_refused: AtomicBool::new(false),
            subscribers: InvalidationSet::default(),
            untracked_keys: Mutex::default(),
        }))
    }

    /// Returns the subscribed registries.
    pub(crate) fn subscribers(&self) -> &InvalidationSet {
        &self.0.subscribers
    }

    /// Records whether a server sends invalidations.
    pub(crate) fn set_tracking(&self, is_tracking: bool) {
        self.0.is_tracking_refused.store(!is_tracking, Ordering::Release);
    }

    /// Returns the state that [`set_tracking`](Self::set_tracking) last recorded for any server.
    /// Returns true before the first record.
    pub(crate) fn is_tracking(&self) -> bool {
        !self.0.is_tracking_refused.load(Ordering::Acquire)
    }

    /// Forwards the keys of an invalidation message. A message without a list of keys invalidates
    /// all keys.
    pub(crate) fn forward(&self, data: &[Value]) {
        let Some(Value::Array(names)) = data.first() else {
            return self.0.subscribers.notify_all();
        };
        for name in names {
            let Value::BulkString(name) = name else { continue };
            if let Some(key) = self.parse_key(name) {
                self.0.subscribers.notify(&key);
            }
        }
    }

    /// Notifies the subscribed registries of these keys within [`UNTRACKED_KEY_DELAY_MAX`], because
    /// the server sends no invalidations for untracked keys.
    pub(crate) fn notify_after_delay<'a>(&self, names: impl Iterator<Item = &'a [u8]>) {
        let mut keys = self.0.untracked_keys.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = keys.is_empty();
        keys.extend(names.filter_map(|name| self.parse_key(name)));
        if was_empty && !keys.is_empty() {
            let invalidations = self.clone();
            tokio::spawn(async move {
                tokio::time::sleep(UNTRACKED_KEY_DELAY_MAX).await;
                let untracked_keys = &invalidations.0.untracked_keys;
                let keys = std::mem::take(
                    &mut *untracked_keys.lock().unwrap_or_else(PoisonError::into_inner),
                );
                for key in keys {
                    invalidations.0.subscribers.notify(&key);
                }
            });
        }
    }

    fn parse_key(&self, name: &[u8]) -> Option<Key> {
        self.0.names.parse_key(std::str::from_utf8(name).ok()?)
    }
}

impl fmt::Debug for InvalidationForwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InvalidationForwarder")
            .field("tracking", &self.is_tracking())
            .finish_non_exhaustive()
    }
}
