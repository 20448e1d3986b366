//! The work of a process that shares a lock with other programs. The process acquires the lock,
//! increments a number in more than one step, and records the times of each critical section. The
//! program `lock-sections` does this with our locks, and the programs in `peers` with those of
//! other libraries. This module checks no results.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, process};

use registry_core::{ClaimMode, DistributedLock};
use registry_testkit::history::{HistoryEvent, HistoryEventKind, host_clock};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

/// How long opening a connection may take. Long enough for any machine.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a request may take. Long enough for any machine, and shorter than the lease.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// The work of one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SectionTask {
    /// The URL of the server or the cluster, as for
    /// [`RedisConfig::from_url`](registry_redis::RedisConfig::from_url), or of another store with
    /// all its options.
    pub url: String,
    /// The library whose record format is used.
    pub layout: PeerLayout,
    /// Whether releases are published by `PUBLISH` even in a cluster.
    pub plain_messages: bool,
    /// The namespace of the lock. May be empty where the layout allows it.
    pub namespace: String,
    /// The key of the lock.
    pub key: String,
    /// The number of acquisitions.
    pub sections: u32,
    /// The duration of a critical section.
    pub hold_ms: u64,
    /// The longest pause between two sections.
    pub pause_ms: u64,
    /// The file that gets a line for each section.
    pub journal: PathBuf,
    /// The file with the number that each section increments.
    pub counter: PathBuf,
}

/// The library whose record format both sides use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::exhaustive_enums, reason = "those that the peers know")]
pub enum PeerLayout {
    /// Spring Integration's.
    Spring,
    /// Redisson's.
    Redisson,
}

impl SectionTask {
    /// Creates a task with one section, whose journal and counter are in these files.
    #[must_use]
    pub fn new(
        url: impl Into<String>,
        layout: PeerLayout,
        namespace: impl Into<String>,
        key: impl Into<String>,
        journal: PathBuf,
        counter: PathBuf,
    ) -> Self {
        Self {
            url: url.into(),
            layout,
            plain_messages: false,
            namespace: namespace.into(),
            key: key.into(),
            sections: 1,
            hold_ms: 1,
            pause_ms: 4,
            journal,
            counter,
        }
    }
}

/// One line of a journal. Times are in nanoseconds of [`host_clock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Section {
    /// The process.
    pub client: u32,
    /// When the process began to acquire the lock.
    pub asked: u64,
    /// When the acquisition returned.
    pub entered: u64,
    /// When the process began to release the lock.
    pub leaving: u64,
    /// When the release returned.
    pub left: u64,
    /// For our processes and those on ZooKeeper: the fencing token.
    #[serde(default)]
    pub token: Option<u64>,
    /// For other processes: when the last release message before the grant arrived.
    #[serde(default)]
    pub woken: Option<u64>,
    /// For other processes: the number of release messages received.
    #[serde(default)]
    pub wakes: u32,
    /// For other processes: how often the wait for a release message timed out.
    #[serde(default)]
    pub fallbacks: u32,
}

impl Section {
    /// Returns the events of this section for the checks of the testkit. `number` distinguishes the
    /// sections of a process.
    #[must_use]
    pub fn events(&self, key: &str, number: u32) -> [HistoryEvent; 4] {
        let op = u64::from(self.client) << 32 | u64::from(number);
        [
            (
                self.asked,
                HistoryEventKind::AcquireCalled { key: key.into(), mode: ClaimMode::Exclusive },
            ),
            (
                self.entered,
                HistoryEventKind::AcquireGranted { token: self.token, valid_until: None },
            ),
            (self.leaving, HistoryEventKind::ReleaseCalled),
            (self.left, HistoryEventKind::ReleaseFreed),
        ]
        .map(|(at, kind)| HistoryEvent::new(at, op, self.client, kind))
    }
}

/// Runs all sections of the task.
///
/// # Errors
/// Returns lock errors and file errors. A lock that was lost inside a section is an error.
///
/// # Cancel safety
/// Dropping the future ends the task. A section in progress is not written to the journal.
pub async fn run_sections(
    lock: &DistributedLock,
    task: &SectionTask,
) -> Result<(), Box<dyn Error>> {
    let clock = host_clock();
    let mut journal = fs::OpenOptions::new().create(true).append(true).open(&task.journal)?;
    for _ in 0..task.sections {
        let asked = clock();
        let guard = lock.lock().await?;
        let entered = clock();
        // Read, pause and write are one atomic step only under mutual exclusion.
        let count: u64 = fs::read_to_string(&task.counter)?.trim().parse()?;
        sleep(Duration::from_millis(task.hold_ms)).await;
        overwrite_number(&task.counter, count + 1)?;
        let token = Some(guard.fencing_token().get());
        let leaving = clock();
        guard.unlock().await?;
        let left = clock();
        let client = process::id();
        let (woken, wakes, fallbacks) = (None, 0, 0);
        let section =
            Section { client, asked, entered, leaving, left, token, woken, wakes, fallbacks };
        let line = serde_json::to_string(&section)? + "\n";
        journal.write_all(line.as_bytes())?;
        sleep(Duration::from_micros(fastrand::u64(0..=task.pause_ms * 1_000))).await;
    }
    Ok(())
}

/// Replaces the number in one write: a concurrent reader can read an old number, but never a part
/// of a number.
fn overwrite_number(counter: &Path, count: u64) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(counter)?;
    file.write_all(format!("{count:>10}").as_bytes())
}
