//! Writes to etcd that a holder cannot make any more once its lock is gone: the other half of a fencing token.

use std::fmt;

use registry_core::{BackendError, Claim, LockGuard};

use crate::backend::EtcdBackend;
use crate::error::{Failure, unreadable};
use crate::names::end_of;
use crate::txn::{self, Answer};
use crate::wire::{DeleteRangeRequest, Op, PutRequest, TxnRequest};

/// Guards writes to etcd by a lock that lives in the same cluster.
pub trait Fence {
    /// A transaction that is carried out only if the lock is still this guard's: the members compare the lock's key, and the revision in
    /// which it came to be, with the guard's token.
    ///
    /// A lock can be lost without its holder knowing in time: no lease survives a process that stands still in the middle of a write. What
    /// such a holder writes late is not written.
    ///
    /// # Examples
    /// ```no_run
    /// use registry_etcd::Fence;
    ///
    /// # async fn example(guard: registry_core::LockGuard) -> Result<(), registry_etcd::FenceError> {
    /// guard.txn().put("accounts/42", "17.50").delete("accounts/42/pending").commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    fn txn(&self) -> FencedTxn<'_>;
}

/// What is to be done at once, if the lock is still held. Nothing is sent before [`commit`](Self::commit).
#[must_use]
pub struct FencedTxn<'a> {
    guard: &'a LockGuard,
    operations: Vec<Op>,
}

/// What came of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Committed {
    /// The revision of the data that it made.
    pub revision: i64,
    /// What each [`get`](FencedTxn::get) has found, in their order.
    pub values: Vec<Option<Vec<u8>>>,
}

/// Why a transaction was not carried out, or may not have been.
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
    #[error("lock {key:?} does not live in etcd, so it cannot guard writes there")]
    #[non_exhaustive]
    Unsupported {
        /// The key.
        key: String,
    },
    /// The cluster is in trouble. Unless the error is [refused](BackendError::refused), it is not known whether anything was written.
    #[error("etcd could not carry out what lock {key:?} guards")]
    #[non_exhaustive]
    Backend {
        /// The key.
        key: String,
        /// What went wrong.
        source: BackendError,
    },
}

impl Fence for LockGuard {
    fn txn(&self) -> FencedTxn<'_> {
        FencedTxn { guard: self, operations: Vec::new() }
    }
}

impl FencedTxn<'_> {
    /// Writes `value` under `key`.
    pub fn put(mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        let put = PutRequest { key: key.into(), value: value.into(), ..PutRequest::default() };
        self.operations.push(Op::Put(put));
        self
    }

    /// Deletes `key`.
    pub fn delete(mut self, key: impl Into<Vec<u8>>) -> Self {
        let gone = DeleteRangeRequest { key: key.into(), range_end: Vec::new() };
        self.operations.push(Op::Delete(gone));
        self
    }

    /// Deletes all keys that begin with `prefix`; with an empty one, all keys that there are.
    pub fn delete_prefix(mut self, prefix: impl Into<Vec<u8>>) -> Self {
        let prefix = prefix.into();
        let range_end = end_of(&prefix);
        let key = if prefix.is_empty() { vec![0] } else { prefix };
        self.operations.push(Op::Delete(DeleteRangeRequest { key, range_end }));
        self
    }

    /// Reads `key`, as it is after what stands before this.
    pub fn get(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.operations.push(Op::Range(txn::one(&key.into())));
        self
    }

    /// Does it all, or nothing.
    ///
    /// # Errors
    /// [`FenceError::Lost`] when the lock is not this guard's any more: nothing was written. The others say that it could not be done.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open whether it is done. If it is, the lock was held.
    pub async fn commit(self) -> Result<Committed, FenceError> {
        let key = self.guard.key().to_owned();
        if !self.guard.is_held() {
            return Err(FenceError::Lost { key });
        }
        let token = self.guard.fencing_token();
        let created = token.and_then(|token| i64::try_from(token.get()).ok());
        let (Some(backend), Some(created)) = (self.guard.backend::<EtcdBackend>(), created) else {
            return Err(FenceError::Unsupported { key });
        };
        let Ok(claim) = self.guard.claim_for_fence() else {
            return Err(FenceError::Lost { key });
        };
        let done = run(backend, claim, created, self.operations).await;
        match done {
            Ok(Some(committed)) => Ok(committed),
            Ok(None) => Err(FenceError::Lost { key }),
            Err(source) => Err(FenceError::Backend { key, source }),
        }
    }
}

/// `None` if the lock is not held any more.
async fn run(
    backend: &EtcdBackend,
    claim: &Claim,
    created: i64,
    operations: Vec<Op>,
) -> Result<Option<Committed>, BackendError> {
    let Some(name) = backend.name_of(claim, created).await? else { return Ok(None) };
    let reads: Vec<bool> = operations.iter().map(|op| matches!(op, Op::Range(_))).collect();
    let txn = TxnRequest {
        compare: vec![txn::created_in(&name, created)],
        success: operations.into_iter().map(txn::op).collect(),
        failure: Vec::new(),
    };
    let mut answer: Answer = backend.ask(txn).await.map_err(Failure::into_error)?;
    if !answer.succeeded {
        return Ok(None);
    }
    let mut values = Vec::new();
    for is_read in reads {
        if is_read {
            values.push(answer.key()?.map(|found| found.value));
        } else {
            answer.skip()?;
        }
    }
    if answer.header.revision == 0 {
        return Err(unreadable());
    }
    Ok(Some(Committed { revision: answer.header.revision, values }))
}

// By hand: what is written may be a secret.
impl fmt::Debug for FencedTxn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTxn")
            .field("key", &self.guard.key())
            .field("operations", &self.operations.len())
            .finish()
    }
}
