//! Writes to ZooKeeper that succeed only if the lock is still held.
//!
//! The servers execute all writes of a multi request or none. Each multi request also checks that
//! the holder's node exists, or all nodes of its units in Curator's semaphore. The servers delete
//! these nodes before another client can hold the lock. They therefore refuse a late write of a
//! former holder.

use std::fmt;

use registry_core::{BackendError, LockGuard};
use zookeeper_client::{Acls, CheckWriteError, CreateMode, Error, MultiWriteResult};

use crate::backend::ZkBackend;
use crate::conversion::ANY_VERSION;
use crate::error::{timed_out, to_backend_error};
use crate::path::is_valid_path;
use crate::timer::timeout;
use crate::units::{REQUEST_BYTES_MAX, STEP_BYTES, acl_bytes};

/// Creates fenced writes to the ensemble that also stores the lock.
///
/// # Examples
/// ```no_run
/// use registry_core::LockGuard;
/// use registry_zk::{FenceError, Multi};
///
/// # async fn example(guard: LockGuard) -> Result<(), FenceError> {
/// // The servers execute both writes or none, and only if the guard still holds the lock.
/// guard.multi()?.set("/balance", "17.50", None).create("/journal/7", "-2.50").commit().await?;
/// # Ok(())
/// # }
/// ```
pub trait Multi {
    /// Starts a multi request. The servers execute all its writes or none, and only if this guard
    /// still holds the lock.
    ///
    /// Paths are relative to the chroot. Nothing is sent before [`commit`](FencedMulti::commit).
    ///
    /// # Errors
    /// [`FenceError::Lost`] if the lock is known to be lost. [`FenceError::Unsupported`]
    /// if the lock is in another kind of store.
    fn multi(&self) -> Result<FencedMulti<'_>, FenceError>;
}

/// The writes of a multi request under a lock. [`Multi::multi`] creates this value.
#[must_use = "nothing is written before `commit`"]
pub struct FencedMulti<'a> {
    guard: &'a LockGuard,
    backend: &'a ZkBackend,
    steps: Vec<WriteStep>,
}

enum WriteStep {
    Create { path: String, data: Vec<u8> },
    Set { path: String, data: Vec<u8>, version: Option<i32> },
    Delete { path: String, version: Option<i32> },
    Check { path: String, version: i32 },
}

impl WriteStep {
    fn path(&self) -> &str {
        match self {
            Self::Create { path, .. }
            | Self::Set { path, .. }
            | Self::Delete { path, .. }
            | Self::Check { path, .. } => path,
        }
    }

    /// Returns an upper bound of this step's bytes in a request, without `STEP_BYTES` and the
    /// chroot.
    fn bytes_upper_bound(&self, acl_bytes: usize) -> usize {
        let payload = match self {
            Self::Create { data, .. } => data.len().saturating_add(acl_bytes),
            Self::Set { data, .. } => data.len(),
            Self::Delete { .. } | Self::Check { .. } => 0,
        };
        payload.saturating_add(self.path().len())
    }
}

/// Result of one write.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Written {
    /// The node was created.
    Created,
    /// The node has the new data and this version.
    #[non_exhaustive]
    Set {
        /// The number of writes to the node's data.
        version: i32,
    },
    /// The node was deleted.
    Deleted,
    /// The node had the expected version.
    Checked,
}

/// The error of a fenced multi request. After [`Store`](Self::Store), the writes may have been
/// executed. After any other error, nothing was written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// This guard no longer holds the lock. Nothing was written.
    #[error("lock {key:?} was lost, so nothing was written; acquire the lock again")]
    #[non_exhaustive]
    Lost {
        /// The key.
        key: String,
    },
    /// The lock is in another kind of store.
    #[error(
        "lock {key:?} is not in ZooKeeper, so it cannot fence writes to ZooKeeper; use a lock of a ZooKeeper registry"
    )]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
    },
    /// The servers refused one write, or its path is not valid. No write was executed.
    #[error(
        "write {step} (counted from 0) under lock {key:?} was refused; correct the write, nothing was written"
    )]
    #[non_exhaustive]
    Refused {
        /// The key.
        key: String,
        /// Index of the refused write, from 0.
        step: usize,
        /// The error of the servers or the client library.
        source: Error,
    },
    /// The writes exceed [`FencedMulti::BYTES_MAX`]. Nothing was sent.
    #[error("the request may need {bytes} bytes; the limit is {max} bytes, so split the writes", max = FencedMulti::BYTES_MAX)]
    #[non_exhaustive]
    TooLarge {
        /// An upper bound of the request's size with these writes.
        bytes: usize,
    },
    /// A store error. If [`BackendError::refused`] returns true, nothing was written. Otherwise the
    /// outcome is unknown.
    #[error("fenced writes under lock {key:?} failed")]
    #[non_exhaustive]
    Store {
        /// The key.
        key: String,
        /// The store error.
        source: BackendError,
    },
}

impl Multi for LockGuard {
    fn multi(&self) -> Result<FencedMulti<'_>, FenceError> {
        let Some(backend) = self.backend::<ZkBackend>() else {
            return Err(FenceError::Unsupported { key: self.key().to_owned() });
        };
        if !self.is_held() {
            return Err(lost_error(self));
        }
        Ok(FencedMulti { guard: self, backend, steps: Vec::new() })
    }
}

impl FencedMulti<'_> {
    /// The maximum bytes of the request with all writes and their paths. Servers close the
    /// connection after a request of more than `jute.maxbuffer`, 1 MiB by default. Other locks of
    /// the backend share this connection.
    pub const BYTES_MAX: usize = REQUEST_BYTES_MAX;

    /// Adds a write that creates a persistent node, with the rights that this client gives to
    /// created nodes.
    pub fn create(mut self, path: impl Into<String>, data: impl Into<Vec<u8>>) -> Self {
        self.steps.push(WriteStep::Create { path: path.into(), data: data.into() });
        self
    }

    /// Adds a write of a node's data. If a version is given, the servers refuse all writes unless
    /// the node has this version.
    pub fn set(
        mut self,
        path: impl Into<String>,
        data: impl Into<Vec<u8>>,
        version: Option<i32>,
    ) -> Self {
        self.steps.push(WriteStep::Set { path: path.into(), data: data.into(), version });
        self
    }

    /// Adds a write that deletes a node. If a version is given, the servers refuse all writes
    /// unless the node has this version.
    pub fn delete(mut self, path: impl Into<String>, version: Option<i32>) -> Self {
        self.steps.push(WriteStep::Delete { path: path.into(), version });
        self
    }

    /// Adds a check. The servers refuse all writes unless the node has this version.
    pub fn check(mut self, path: impl Into<String>, version: i32) -> Self {
        self.steps.push(WriteStep::Check { path: path.into(), version });
        self
    }

    /// Executes all writes or none, and returns the result of each.
    ///
    /// # Errors
    /// After these errors, nothing was written:
    /// - [`FenceError::Lost`] if the lock was lost,
    /// - [`FenceError::Refused`] if a path is not valid, or the servers refuse one of the writes,
    /// - [`FenceError::TooLarge`] if the writes exceed [`BYTES_MAX`](Self::BYTES_MAX).
    ///
    /// After [`FenceError::Store`], the writes may have been executed.
    ///
    /// # Cancel safety
    /// If the future is dropped, the writes may or may not be executed.
    pub async fn commit(self) -> Result<Vec<Written>, FenceError> {
        let backend = self.backend;
        self.send().await.map_err(|error| match error {
            FenceError::Store { key, source } => {
                FenceError::Store { key, source: backend.with_address(source) }
            }
            error => error,
        })
    }

    async fn send(self) -> Result<Vec<Written>, FenceError> {
        let guard = self.guard;
        let claim = guard.claim_for_fence().map_err(|_| lost_error(guard))?;
        let found = self.backend.sessions().find_entry(claim.id());
        let (session, entry) = found.ok_or_else(|| lost_error(guard))?;
        let (node, token, other_units) = {
            let state = entry.state.lock().await;
            let node = state.node.as_ref().ok_or_else(|| lost_error(guard))?;
            (node.path.clone(), node.grant.token, state.other_unit_paths.clone())
        };
        // The claim may have had a different node with a different token earlier.
        if i64::from(guard.fencing_token()) != token || !guard.is_held() {
            return Err(lost_error(guard));
        }
        let chroot = session.config().chroot.as_deref().unwrap_or_default();
        let acls = session.config().acls();
        let unit_bytes = other_units.iter().map(|path| path.len() + STEP_BYTES).sum::<usize>();
        let bytes = self.bytes_upper_bound(&node, chroot, &acls).saturating_add(unit_bytes);
        if bytes > Self::BYTES_MAX {
            return Err(FenceError::TooLarge { bytes });
        }
        let store_error = |source| store_error(guard, source);
        session.wait_until_connected().await.map_err(store_error)?;
        let new_node = CreateMode::Persistent.with_acls(acls);
        let client = session.client();
        let not_sent_error = |error: Error| store_error(to_backend_error(&error).as_refused());
        let mut writer = client.new_check_writer(&node, None).map_err(not_sent_error)?;
        for path in &other_units {
            writer.add_check_version(path, ANY_VERSION).map_err(not_sent_error)?;
        }
        let refused_error =
            |step, source| FenceError::Refused { key: guard.key().to_owned(), step, source };
        for (index, step) in self.steps.iter().enumerate() {
            let refused = |source| refused_error(index, source);
            if !is_valid_path(step.path()) {
                return Err(refused(Error::BadArguments(
                    &"a path must be absolute, such as `/a/b`",
                )));
            }
            let path = format!("{chroot}{}", step.path());
            let added = match step {
                WriteStep::Create { data, .. } => writer.add_create(&path, data, &new_node),
                WriteStep::Set { data, version, .. } => writer.add_set_data(&path, data, *version),
                WriteStep::Delete { version, .. } => writer.add_delete(&path, *version),
                WriteStep::Check { version, .. } => writer.add_check_version(&path, *version),
            };
            added.map_err(refused)?;
        }
        let limit = session.config().request_timeout;
        let response = session.unless_stopped(writer.commit());
        let response = timeout(limit, response).await.map_err(|_| store_error(timed_out(limit)))?;
        match response.unwrap_or_else(|| Err(Error::ConnectionLoss.into())) {
            Ok(results) => {
                Ok(results.into_iter().skip(other_units.len()).map(write_result).collect())
            }
            Err(CheckWriteError::CheckFailed { source: Error::NoNode }) => Err(lost_error(guard)),
            Err(CheckWriteError::OperationFailed { index, source }) => {
                // The checks of the other units precede the writes.
                match (index.checked_sub(other_units.len()), source) {
                    (Some(step), source) => Err(refused_error(step, source)),
                    (None, Error::NoNode) => Err(lost_error(guard)),
                    (None, source) => Err(store_error(to_backend_error(&source))),
                }
            }
            Err(
                CheckWriteError::RequestFailed { source } | CheckWriteError::CheckFailed { source },
            ) => Err(store_error(to_backend_error(&source))),
        }
    }
}

impl FencedMulti<'_> {
    /// Returns an upper bound of the request's size in bytes.
    fn bytes_upper_bound(&self, node: &str, chroot: &str, acls: &Acls<'_>) -> usize {
        let acl_bytes = acl_bytes(acls);
        let steps = self.steps.iter().map(|step| step.bytes_upper_bound(acl_bytes));
        let common = (self.steps.len() + 2).saturating_mul(STEP_BYTES + chroot.len());
        steps.fold(common.saturating_add(node.len()), usize::saturating_add)
    }
}

impl fmt::Debug for FencedMulti<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedMulti")
            .field("key", &self.guard.key())
            .field("token", &self.guard.fencing_token())
            .field("steps", &self.steps.len())
            .finish_non_exhaustive()
    }
}

fn write_result(result: MultiWriteResult) -> Written {
    match result {
        MultiWriteResult::Create { .. } => Written::Created,
        MultiWriteResult::SetData { stat } => Written::Set { version: stat.version },
        MultiWriteResult::Delete => Written::Deleted,
        _ => Written::Checked,
    }
}

fn lost_error(guard: &LockGuard) -> FenceError {
    FenceError::Lost { key: guard.key().to_owned() }
}

fn store_error(guard: &LockGuard, source: BackendError) -> FenceError {
    FenceError::Store { key: guard.key().to_owned(), source }
}
