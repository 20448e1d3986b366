//! What is said between a test and a lock holder: one line of JSON for each order and each report.

use std::error::Error;
use std::iter;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::history::Event;

/// What a lock holder works with. Options that are not set are the engine's own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct HolderOptions {
    /// Its store: `memory:`, which is its own alone, or `sqlite:PATH`.
    pub store: String,
    /// The registry's lease, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// Whether leases are renewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew: Option<bool>,
    /// How often a waiter looks by itself, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_ms: Option<u64>,
    /// How often a claim is handed on inside the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handoff: Option<u32>,
    /// The registry's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Whether each step of each lock is reported for [`LockHolder::events`](super::LockHolder::events).
    #[serde(default)]
    pub history: bool,
}

impl HolderOptions {
    /// A holder over this store.
    #[must_use]
    pub fn new(store: impl Into<String>) -> Self {
        Self { store: store.into(), ..Self::default() }
    }

    /// With leases of this length.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease_ms = Some(millis(lease));
        self
    }

    /// With or without renewals.
    #[must_use]
    pub fn renew(mut self, renew: bool) -> Self {
        self.renew = Some(renew);
        self
    }

    /// With waiters that look this often by themselves.
    #[must_use]
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll_ms = Some(millis(poll));
        self
    }

    /// With so many hand-offs in a row.
    #[must_use]
    pub fn handoff(mut self, times: u32) -> Self {
        self.handoff = Some(times);
        self
    }

    /// With this label.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// With a record of what happens to its locks.
    #[must_use]
    pub fn history(mut self) -> Self {
        self.history = true;
        self
    }
}

/// What a lock holder is told to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Order {
    /// Take the lock and keep it. Answered by `held`, `busy` or `failed`; later perhaps by `lost`.
    Lock {
        /// The lock's key.
        key: String,
        /// How long to wait for it, in milliseconds; for ever if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        wait_ms: Option<u64>,
        /// Its lease, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease_ms: Option<u64>,
        /// Whether it is renewed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        renew: Option<bool>,
    },
    /// Let go of the lock and wait for the store's answer; or stop waiting for it. Answered by `released`, `cancelled` or
    /// `failed`.
    Unlock {
        /// The lock's key.
        key: String,
    },
    /// Drop the guard without waiting for anything, or stop waiting for it. Answered by `dropped` or `cancelled`.
    Drop {
        /// The lock's key.
        key: String,
    },
    /// Tell whether the lock is held. Answered by `status`.
    Status {
        /// The lock's key.
        key: String,
    },
    /// Take the lock and let go of it, many times, one after the other. Answered by `repeated`, in the end, or `failed`.
    Repeat {
        /// The lock's key.
        key: String,
        /// How many times.
        rounds: u32,
        /// How long to keep it each time, in milliseconds.
        #[serde(default)]
        hold_ms: u64,
    },
    /// Take the lock and release it again and again, by several tasks at once. Answered by `contended`, in the end, or `failed`.
    Contend {
        /// The lock's key.
        key: String,
        /// How many tasks.
        tasks: u32,
        /// How long each of them holds it, in milliseconds.
        hold_ms: u64,
        /// How long this goes on, in milliseconds. An acquisition that waits then is ended and counts as a wait.
        for_ms: u64,
    },
    /// Let go of everything and end. Answered by `closed`. The end of the input is the same order.
    Quit,
}

impl Order {
    /// Take the lock of `key`, however long it takes.
    #[must_use]
    pub fn lock(key: impl Into<String>) -> Self {
        Self::Lock { key: key.into(), wait_ms: None, lease_ms: None, renew: None }
    }

    /// Try once to take the lock of `key`.
    #[must_use]
    pub fn try_lock(key: impl Into<String>) -> Self {
        Self::Lock { key: key.into(), wait_ms: Some(0), lease_ms: None, renew: None }
    }
}

/// What a lock holder says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Report {
    /// The store is open.
    Ready {
        /// The process id.
        pid: u32,
    },
    /// The lock is held.
    Held {
        /// The lock's key.
        key: String,
        /// Its token, from stores that have them.
        token: Option<u64>,
        /// How long the guard is valid, in milliseconds.
        valid_for_ms: u64,
    },
    /// Somebody else holds the lock, and the wait is over.
    Busy {
        /// The lock's key.
        key: String,
    },
    /// A lock that was held is not held any more.
    Lost {
        /// The lock's key.
        key: String,
        /// Why.
        reason: String,
    },
    /// The lock was let go of, and the store has confirmed it.
    Released {
        /// The lock's key.
        key: String,
    },
    /// The guard was dropped.
    Dropped {
        /// The lock's key.
        key: String,
    },
    /// The lock was not held yet, and is not waited for any more.
    Cancelled {
        /// The lock's key.
        key: String,
    },
    /// Whether the lock is held.
    Status {
        /// The lock's key.
        key: String,
        /// Whether the guard says so.
        held: bool,
        /// Its token, from stores that have them.
        token: Option<u64>,
        /// How long the guard is valid, in milliseconds.
        valid_for_ms: u64,
    },
    /// All rounds are done.
    Repeated {
        /// The lock's key.
        key: String,
        /// How many.
        rounds: u32,
    },
    /// The share that a process got of a contended lock.
    Contended {
        /// The lock's key.
        key: String,
        /// How often its tasks were granted the lock.
        grants: u32,
        /// The longest time in which none of its tasks was granted the lock, in milliseconds.
        longest_wait_ms: u64,
    },
    /// Something went wrong.
    Failed {
        /// The lock's key, if it is about one.
        key: Option<String>,
        /// What was tried.
        doing: String,
        /// What went wrong, with all its causes.
        problem: String,
    },
    /// A step of a lock's history.
    Event(Event),
    /// The registry is closed, and the process ends.
    Closed {
        /// Whether everything was let go of.
        clean: bool,
    },
}

impl Report {
    /// That something went wrong, with all its causes.
    #[must_use]
    pub fn failed(key: Option<String>, doing: &str, error: &(dyn Error + 'static)) -> Self {
        let causes = iter::successors(Some(error), |error| (*error).source());
        let problem = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        Self::Failed { key, doing: doing.into(), problem }
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
