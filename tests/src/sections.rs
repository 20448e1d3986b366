//! The work of a process that shares a lock with others: it takes the lock, increments a number in more than one step, and writes down
//! when it was inside. Ours is done by the program `lock-sections`, that of others by `peers/peer.py`. Judges nothing.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io, process};

use registry_core::{DistributedLock, FencingToken};
use registry_testkit::history::{Event, What, host_clock};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

/// What a process is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Task {
    /// The server, or the cluster, by the form of [`RedisConfig::from_url`](registry_redis::RedisConfig::from_url); or another store, with all options.
    pub url: String,
    /// In whose form.
    pub form: Form,
    /// Whether releases are told by plain messages even in a cluster.
    pub plain_messages: bool,
    /// The namespace of the lock. May be empty where the form's own is.
    pub namespace: String,
    /// The key of the lock.
    pub key: String,
    /// How many times it is taken.
    pub sections: u32,
    /// How long a section takes.
    pub hold_ms: u64,
    /// The longest pause between two of them.
    pub pause_ms: u64,
    /// The file that gets a line for each section.
    pub journal: PathBuf,
    /// The file with the number.
    pub counter: PathBuf,
}

/// Whose locks they look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::exhaustive_enums, reason = "those that the peers know")]
pub enum Form {
    /// Spring Integration's.
    Spring,
    /// Redisson's.
    Redisson,
}

impl Task {
    /// A task whose journal and counter are in files of these names.
    #[must_use]
    pub fn new(
        url: impl Into<String>,
        form: Form,
        namespace: impl Into<String>,
        key: impl Into<String>,
        journal: PathBuf,
        counter: PathBuf,
    ) -> Self {
        Self {
            url: url.into(),
            form,
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

/// One line of a journal. Times are nanoseconds of [`host_clock`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Section {
    /// The process.
    pub client: u32,
    /// When it began to ask for the lock.
    pub asked: u64,
    /// When it had it.
    pub entered: u64,
    /// When it began to give it back.
    pub leaving: u64,
    /// When it had given it back.
    pub left: u64,
    /// Ours, and those in ZooKeeper: the fencing token.
    #[serde(default)]
    pub token: Option<u64>,
    /// Others: when it last heard of a release, before it had the lock.
    #[serde(default)]
    pub woken: Option<u64>,
    /// Others: of how many releases it heard.
    #[serde(default)]
    pub wakes: u32,
    /// Others: how many times it heard of none for as long as it listens.
    #[serde(default)]
    pub fallbacks: u32,
}

impl Section {
    /// What happened to the lock, for the checks of the testkit. `number` tells the sections of a process apart.
    #[must_use]
    pub fn events(&self, key: &str, number: u32) -> [Event; 4] {
        let op = u64::from(self.client) << 32 | u64::from(number);
        [
            (self.asked, What::AcquireCalled { key: key.into() }),
            (self.entered, What::AcquireGranted { token: self.token, valid_until: None }),
            (self.leaving, What::ReleaseCalled),
            (self.left, What::ReleaseFreed),
        ]
        .map(|(at, what)| Event::new(at, op, self.client, what))
    }
}

/// Does the task.
///
/// # Errors
/// Those of the lock and of the files. A lock that was lost inside a section is one.
///
/// # Cancel safety
/// Dropping the future gives up the task; a section that it is in is not journalled.
pub async fn take_sections(lock: &DistributedLock, task: &Task) -> Result<(), Box<dyn Error>> {
    let clock = host_clock();
    let mut journal = fs::OpenOptions::new().create(true).append(true).open(&task.journal)?;
    for _ in 0..task.sections {
        let asked = clock();
        let guard = lock.lock().await?;
        let entered = clock();
        // One step for all who exclude each other, and many for those who do not.
        let count: u64 = fs::read_to_string(&task.counter)?.trim().parse()?;
        sleep(Duration::from_millis(task.hold_ms)).await;
        write_over(&task.counter, count + 1)?;
        let token = guard.fencing_token().map(FencingToken::get);
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

/// Puts a number into the file at once: whoever reads it at the wrong time reads a wrong number, not half of one.
fn write_over(counter: &Path, count: u64) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).open(counter)?;
    file.write_all(format!("{count:>10}").as_bytes())
}
