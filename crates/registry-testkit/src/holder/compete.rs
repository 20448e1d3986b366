//! Tasks of a lock holder that compete for locks with tasks of other processes. The recorded
//! history contains what each task acquired.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use registry_core::{ClaimMode, LockError, LockOptions, LockRegistry};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::history::Recorder;
use crate::recording_client::RecordingClient;

/// Tasks that acquire and release locks repeatedly. Waits have no limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "a complete description of the tasks")]
pub struct Competition {
    /// The client number of the first task in the history. The other tasks have the next numbers.
    pub first_client: u32,
    /// The number of tasks.
    pub tasks: u32,
    /// What each task acquires.
    pub locks: CompetedLocks,
    /// How long a task holds its locks each time.
    pub hold: Duration,
    /// How long a task pauses after a release.
    pub pause: Duration,
    /// The duration after which a task does not acquire its locks again.
    pub span: Duration,
}

/// What a task acquires each time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_enums, reason = "a request of a test to its own program")]
pub enum CompetedLocks {
    /// One key in one mode.
    One {
        /// The lock's key.
        key: String,
        /// The mode.
        mode: ClaimMode,
    },
    /// Some of the keys, chosen at random, in a random order, with `obtain_all`.
    All {
        /// The keys.
        keys: Vec<String>,
        /// The number of keys that a task acquires.
        take: usize,
    },
    /// Some of the keys, chosen at random, one after the other in their order in `keys`.
    InOrder {
        /// The keys.
        keys: Vec<String>,
        /// The number of keys that a task acquires.
        take: usize,
    },
}

impl Competition {
    /// Runs the tasks, and returns after all of them have ended.
    pub(super) async fn run(
        self,
        registry: &Arc<dyn LockRegistry>,
        recorder: &Recorder,
    ) -> Result<(), LockError> {
        let end = Instant::now() + self.span;
        let mut tasks = JoinSet::new();
        for task in 0..self.tasks {
            let client = RecordingClient::new(recorder, self.first_client + task);
            let (competition, registry) = (self.clone(), Arc::clone(registry));
            tasks.spawn(async move {
                while Instant::now() < end {
                    match competition.critical_section(&client, &*registry).await {
                        // A lost lease is a recorded event and does not end the task.
                        Ok(()) | Err(LockError::Lost { .. }) => {}
                        Err(error) => return Err(error),
                    }
                    sleep(competition.pause).await;
                }
                Ok(())
            });
        }
        tasks.join_all().await.into_iter().collect()
    }

    /// Acquires, holds and releases the locks once.
    async fn critical_section(
        &self,
        client: &RecordingClient,
        registry: &dyn LockRegistry,
    ) -> Result<(), LockError> {
        match &self.locks {
            CompetedLocks::One { key, mode } => {
                let guard = client.acquire(registry, key, *mode, LockOptions::new()).await?;
                sleep(self.hold).await;
                if let Some(guard) = guard {
                    guard.unlock().await?;
                }
                Ok(())
            }
            CompetedLocks::All { keys, take } => {
                let mut chosen = fastrand::choose_multiple(keys.iter().cloned(), *take);
                fastrand::shuffle(&mut chosen);
                let guard = client.lock_all(registry, &chosen).await?;
                sleep(self.hold).await;
                guard.unlock().await
            }
            CompetedLocks::InOrder { keys, take } => {
                let mut chosen = fastrand::choose_multiple(0..keys.len(), *take);
                chosen.sort_unstable();
                let mut guards = Vec::new();
                for number in chosen {
                    let lock = registry.obtain(&keys[number]);
                    guards.extend(client.lock_with(&lock, LockOptions::new()).await?);
                }
                sleep(self.hold).await;
                let unlocked = guards.into_iter().map(|guard| guard.unlock());
                join_all(unlocked).await.into_iter().collect()
            }
        }
    }
}
