//! Writes to ZooKeeper that are made only if the lock is still held: the other half of a fencing token.
//!
//! The servers make all writes of a multi or none, and one of its parts here is a check that the holder's node is there. That is gone before
//! anybody else can hold the lock; so what a holder that was lost writes late is refused.

use std::fmt;

use registry_core::{BackendError, FencingToken, LockGuard};
use zookeeper_client::{Acls, CheckWriteError, CreateMode, Error, MultiWriteResult};

use crate::backend::ZkBackend;
use crate::error::{explain, silent};
use crate::path::is_path;

/// Writes under a lock that lives in the same ZooKeeper.
///
/// # Examples
/// ```no_run
/// use registry_core::LockGuard;
/// use registry_zk::{FenceError, Multi};
///
/// # async fn example(guard: LockGuard) -> Result<(), FenceError> {
/// // Made together, and only if nobody else was granted the lock since.
/// guard.multi()?.set("/balance", "17.50", None).create("/journal/7", "-2.50").commit().await?;
/// # Ok(())
/// # }
/// ```
pub trait Multi {
    /// Begins writes that are made together, and only if the lock is still this guard's.
    ///
    /// Paths are below the chroot. Nothing is sent before [`commit`](FencedMulti::commit).
    ///
    /// # Errors
    /// [`FenceError::Lost`] when the lock is known to be lost, [`FenceError::Unsupported`] when it lives in another kind of store.
    fn multi(&self) -> Result<FencedMulti<'_>, FenceError>;
}

/// Writes that are made together under a lock. Made by [`Multi::multi`].
#[must_use = "nothing is written before it is committed"]
pub struct FencedMulti<'a> {
    guard: &'a LockGuard,
    backend: &'a ZkBackend,
    steps: Vec<Step>,
}

enum Step {
    Create { path: String, data: Vec<u8> },
    Set { path: String, data: Vec<u8>, version: Option<i32> },
    Delete { path: String, version: Option<i32> },
    Check { path: String, version: i32 },
}

impl Step {
    fn path(&self) -> &str {
        match self {
            Self::Create { path, .. }
            | Self::Set { path, .. }
            | Self::Delete { path, .. }
            | Self::Check { path, .. } => path,
        }
    }

    /// How many bytes it takes in a request at most, but for what all have alike.
    fn bytes(&self, acls: usize) -> usize {
        let more = match self {
            Self::Create { data, .. } => data.len().saturating_add(acls),
            Self::Set { data, .. } => data.len(),
            Self::Delete { .. } | Self::Check { .. } => 0,
        };
        more.saturating_add(self.path().len())
    }
}

/// What came of one of the writes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Written {
    /// The node was made.
    Created,
    /// The node has new data, and this version.
    #[non_exhaustive]
    Set {
        /// How many times its data has been written.
        version: i32,
    },
    /// The node is gone.
    Deleted,
    /// The node had the version that it should have.
    Checked,
}

/// Why nothing was written, or it is not known whether anything was.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The lock is not this guard's any more. Nothing was written.
    #[error("lock {key:?} was lost")]
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
    },
    /// The lock lives in another kind of store.
    #[error("lock {key:?} does not live in ZooKeeper, so it cannot fence writes to it")]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
    },
    /// The servers refused one of the writes, and so made none.
    #[error("step {step} of the writes was refused")]
    #[non_exhaustive]
    Refused {
        /// Which one, counted from 0.
        step: usize,
        /// What the servers said.
        source: Error,
    },
    /// The writes are more than the servers take at once. Nothing was sent.
    #[error("the writes take {bytes} bytes, and the servers take {max} at once", max = FencedMulti::BYTES_MAX)]
    #[non_exhaustive]
    TooLarge {
        /// How many bytes they take, with their paths.
        bytes: usize,
    },
    /// Trouble with the servers. Nothing was written if [`BackendError::refused`] says so; otherwise it is not known.
    #[error("the servers could not make the writes")]
    #[non_exhaustive]
    Store {
        /// What went wrong.
        source: BackendError,
    },
}

impl Multi for LockGuard {
    fn multi(&self) -> Result<FencedMulti<'_>, FenceError> {
        let Some(backend) = self.backend::<ZkBackend>() else {
            return Err(FenceError::Unsupported { key: self.key().to_owned() });
        };
        if !self.is_held() {
            return Err(lost(self));
        }
        Ok(FencedMulti { guard: self, backend, steps: Vec::new() })
    }
}

impl FencedMulti<'_> {
    /// How many bytes all writes may have together, with their paths. Servers break the connection at requests of a mebibyte
    /// (`jute.maxbuffer`, unless they are set up otherwise), and all locks of a process share one.
    pub const BYTES_MAX: usize = 1_000_000;

    /// Makes a node that outlives the session, with the rights that this client gives to nodes.
    pub fn create(mut self, path: impl Into<String>, data: impl Into<Vec<u8>>) -> Self {
        self.steps.push(Step::Create { path: path.into(), data: data.into() });
        self
    }

    /// Writes a node's data; with a version, only if it has that.
    pub fn set(
        mut self,
        path: impl Into<String>,
        data: impl Into<Vec<u8>>,
        version: Option<i32>,
    ) -> Self {
        self.steps.push(Step::Set { path: path.into(), data: data.into(), version });
        self
    }

    /// Deletes a node; with a version, only if it has that.
    pub fn delete(mut self, path: impl Into<String>, version: Option<i32>) -> Self {
        self.steps.push(Step::Delete { path: path.into(), version });
        self
    }

    /// Writes nothing unless the node has this version.
    pub fn check(mut self, path: impl Into<String>, version: i32) -> Self {
        self.steps.push(Step::Check { path: path.into(), version });
        self
    }

    /// Makes all the writes or none, and tells what came of each.
    ///
    /// # Errors
    /// [`FenceError::Lost`] if the lock was lost, [`FenceError::Refused`] if one of the writes cannot be made,
    /// [`FenceError::TooLarge`] if they are more than [`BYTES_MAX`](Self::BYTES_MAX): then none was made. After [`FenceError::Store`]
    /// they may have been made.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it open whether the writes were made.
    pub async fn commit(self) -> Result<Vec<Written>, FenceError> {
        let guard = self.guard;
        let claim = guard.claim_for_fence().map_err(|_| lost(guard))?;
        let found = self.backend.sessions().find(claim.id());
        let (session, place) = found.ok_or_else(|| lost(guard))?;
        let node = {
            let stake = place.stake.lock().await;
            let node = stake.node.as_ref().map(|node| (node.path.clone(), node.czxid));
            node.ok_or_else(|| lost(guard))?
        };
        let (node, czxid) = node;
        // The same claim can have had another node before.
        if guard.fencing_token().map(i64::from) != Some(czxid) || !guard.is_held() {
            return Err(lost(guard));
        }
        let chroot = session.config().chroot.as_deref().unwrap_or_default();
        let acls = session.config().acls();
        let bytes = self.bytes(&node, chroot, &acls);
        if bytes > Self::BYTES_MAX {
            return Err(FenceError::TooLarge { bytes });
        }
        session.connected().await.map_err(store)?;
        let new_node = CreateMode::Persistent.with_acls(acls);
        let client = session.client();
        let mut writer = client.new_check_writer(&node, None).map_err(unsent)?;
        for (number, step) in self.steps.iter().enumerate() {
            let refused = |source| FenceError::Refused { step: number, source };
            if !is_path(step.path()) {
                return Err(refused(Error::BadArguments(&"a path is absolute, such as `/a/b`")));
            }
            let path = format!("{chroot}{}", step.path());
            let added = match step {
                Step::Create { data, .. } => writer.add_create(&path, data, &new_node),
                Step::Set { data, version, .. } => writer.add_set_data(&path, data, *version),
                Step::Delete { version, .. } => writer.add_delete(&path, *version),
                Step::Check { version, .. } => writer.add_check_version(&path, *version),
            };
            added.map_err(refused)?;
        }
        let limit = session.config().request_timeout;
        let answer = session.unless_stopped(writer.commit());
        let answer = tokio::time::timeout(limit, answer).await.map_err(|_| store(silent()))?;
        match answer.unwrap_or_else(|| Err(Error::ConnectionLoss.into())) {
            Ok(results) => Ok(results.into_iter().map(written).collect()),
            Err(CheckWriteError::CheckFailed { source: Error::NoNode }) => Err(lost(guard)),
            Err(CheckWriteError::OperationFailed { index, source }) => {
                Err(FenceError::Refused { step: index, source })
            }
            Err(
                CheckWriteError::RequestFailed { source } | CheckWriteError::CheckFailed { source },
            ) => Err(store(explain(&source))),
        }
    }
}

impl FencedMulti<'_> {
    /// How many bytes the request takes at most.
    fn bytes(&self, node: &str, chroot: &str, acls: &Acls<'_>) -> usize {
        let acls = acls.iter().map(|acl| acl.scheme().len() + acl.id().len() + STEP_BYTES).sum();
        let steps = self.steps.iter().map(|step| step.bytes(acls));
        let same = (self.steps.len() + 2).saturating_mul(STEP_BYTES + chroot.len());
        steps.fold(same.saturating_add(node.len()), usize::saturating_add)
    }
}

impl fmt::Debug for FencedMulti<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token: Option<FencingToken> = self.guard.fencing_token();
        f.debug_struct("FencedMulti")
            .field("key", &self.guard.key())
            .field("token", &token)
            .field("steps", &self.steps.len())
            .finish_non_exhaustive()
    }
}

fn written(result: MultiWriteResult) -> Written {
    match result {
        MultiWriteResult::Create { .. } => Written::Created,
        MultiWriteResult::SetData { stat } => Written::Set { version: stat.version },
        MultiWriteResult::Delete => Written::Deleted,
        _ => Written::Checked,
    }
}

fn lost(guard: &LockGuard) -> FenceError {
    FenceError::Lost { key: guard.key().to_owned() }
}

fn store(source: BackendError) -> FenceError {
    FenceError::Store { source }
}

fn unsent(error: Error) -> FenceError {
    store(explain(&error).as_refused())
}

/// What a step has in a request beside its path, data and rights: numbers, and the lengths of those.
const STEP_BYTES: usize = 40;
