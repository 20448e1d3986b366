//! The protocol between a test and a lock holder: one line of JSON for each command and each
//! report.

use std::error::Error;
use std::iter;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::history::HistoryEvent;

/// A command to a lock holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum HolderCommand {
    /// Acquire the lock and hold it. Answered by `held`, `busy` or `failed`. A `lost` may follow.
    Lock {
        /// The lock's key.
        key: String,
        /// The maximum wait, in milliseconds; unlimited if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        wait_ms: Option<u64>,
        /// The lease, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease_ms: Option<u64>,
        /// Whether the lease is renewed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        renew: Option<bool>,
    },
    /// Release the lock and wait for the store's answer, or stop waiting for the lock. Answered by
    /// `released`, `cancelled` or `failed`.
    Unlock {
        /// The lock's key.
        key: String,
    },
    /// Drop the guard without waiting, or stop waiting for the lock. Answered by `dropped` or
    /// `cancelled`, or by `failed` if no `lock` command is in force.
    Drop {
        /// The lock's key.
        key: String,
    },
    /// Report whether the lock is held. Answered by `status`.
    Status {
        /// The lock's key.
        key: String,
    },
    /// Write to the data that the lock protects, with the token of the held lock. Answered by
    /// `written`, or by `failed` if the write was refused. The program must have a
    /// [`FencedWriter`](super::FencedWriter).
    Write {
        /// The lock's key.
        key: String,
        /// The value to write.
        value: String,
    },
    /// Acquire and release the lock repeatedly, in sequence. Answered by `repeated` after the last
    /// round, or by `failed`.
    Repeat {
        /// The lock's key.
        key: String,
        /// The number of rounds.
        rounds: u32,
        /// How long to hold the lock in each round, in milliseconds.
        #[serde(default)]
        hold_ms: u64,
    },
    /// Acquire and release the lock repeatedly from several concurrent tasks. Answered by
    /// `contended` after the stated time, or by `failed`.
    Contend {
        /// The lock's key.
        key: String,
        /// The number of tasks.
        tasks: u32,
        /// How long a task holds the lock each time, in milliseconds.
        hold_ms: u64,
        /// The total duration, in milliseconds. An acquisition that still waits at its end is
        /// cancelled and counts towards the longest wait.
        for_ms: u64,
    },
    /// Release all locks and end the process. Answered by `closed`. The end of the input has the
    /// same effect.
    Quit,
}

impl HolderCommand {
    /// Creates a command to lock `key`, without a limit to the wait.
    #[must_use]
    pub fn lock(key: impl Into<String>) -> Self {
        Self::Lock { key: key.into(), wait_ms: None, lease_ms: None, renew: None }
    }

    /// Creates a command to try once to lock `key`.
    #[must_use]
    pub fn try_lock(key: impl Into<String>) -> Self {
        Self::Lock { key: key.into(), wait_ms: Some(0), lease_ms: None, renew: None }
    }
}

/// A report of a lock holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
#[non_exhaustive]
pub enum HolderReport {
    /// The store is open.
    Ready {
        /// The process id.
        pid: u32,
    },
    /// The lock is held.
    Held {
        /// The lock's key.
        key: String,
        /// The fencing token, if the store issues tokens.
        token: Option<u64>,
        /// How long the guard is still valid, in milliseconds.
        valid_for_ms: u64,
    },
    /// Another client holds the lock, and the wait has expired.
    Busy {
        /// The lock's key.
        key: String,
    },
    /// A held lock was lost.
    Lost {
        /// The lock's key.
        key: String,
        /// The reason.
        reason: String,
    },
    /// The lock is released, and the store has confirmed the release.
    Released {
        /// The lock's key.
        key: String,
    },
    /// The guard was dropped.
    Dropped {
        /// The lock's key.
        key: String,
    },
    /// The acquisition was cancelled before it was granted.
    Cancelled {
        /// The lock's key.
        key: String,
    },
    /// Whether the lock is held.
    Status {
        /// The lock's key.
        key: String,
        /// Whether the guard reports that it holds the lock.
        held: bool,
        /// The fencing token, if the store issues tokens.
        token: Option<u64>,
        /// How long the guard is still valid, in milliseconds.
        valid_for_ms: u64,
    },
    /// The write was applied.
    Written {
        /// The lock's key.
        key: String,
    },
    /// All rounds of a `repeat` command are complete.
    Repeated {
        /// The lock's key.
        key: String,
        /// The number of rounds.
        rounds: u32,
    },
    /// The share of a contended lock that the process acquired.
    Contended {
        /// The lock's key.
        key: String,
        /// How many times its tasks acquired the lock.
        grants: u32,
        /// The longest time during which none of its tasks held the lock, in milliseconds.
        longest_wait_ms: u64,
    },
    /// An operation failed.
    Failed {
        /// The lock's key, if the operation concerns one lock.
        key: Option<String>,
        /// The operation.
        doing: String,
        /// The error, with all its causes.
        problem: String,
    },
    /// A step of a lock's history.
    HistoryEvent(HistoryEvent),
    /// The registry is closed, and the process is about to end.
    Closed {
        /// Whether all locks were released.
        clean: bool,
    },
}

impl HolderReport {
    /// Creates a `failed` report from an error and all its causes.
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
