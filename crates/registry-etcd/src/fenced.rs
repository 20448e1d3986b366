//! Fenced writes to etcd: transactions that succeed only while the lock is held.

use std::error::Error;
use std::fmt;

use registry_core::{BackendError, Claim, LockGuard};

use crate::backend::EtcdBackend;
use crate::error::{CallError, protocol_error};
use crate::names::prefix_end;
use crate::proto::{DeleteRangeRequest, OpRequest, PutRequest, TxnRequest};
use crate::txn::{self, TxnResults};

/// Fenced transactions on the cluster that also stores the lock.
pub trait Fence {
    /// Creates a transaction that is executed only if this guard still holds the lock. Guards of
    /// all modes can fence. The cluster compares the creation revision of the guard's queue entry.
    ///
    /// A lease alone cannot prevent a write of a process that is suspended and resumes after the
    /// lease has ended. The cluster does not execute a transaction of such a former holder.
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

/// The operations of a transaction that is executed only if the lock is still held. Nothing is sent
/// before [`commit`](Self::commit). Members allow 128 operations by default (`--max-txn-ops`).
#[must_use]
pub struct FencedTxn<'a> {
    guard: &'a LockGuard,
    operations: Vec<OpRequest>,
}

/// The result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Committed {
    /// The revision of the store after the transaction. A transaction that writes creates this
    /// revision.
    pub revision: i64,
    /// The value that each [`get`](FencedTxn::get) found, in the order of the calls.
    pub values: Vec<Option<Vec<u8>>>,
}

/// The error of a fenced transaction. After [`Backend`](Self::Backend), the transaction may have
/// been executed. After any other error, it was not executed.
///
/// `Display` shows one sentence. For a store error, it is
/// `fenced transaction on "KEY" at HOST:PORT failed: CAUSE; HINT`. [`source`](Error::source)
/// returns the error of the client library, if there is one.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum FenceError {
    /// This guard no longer holds the lock. Nothing was written.
    #[non_exhaustive]
    Lost {
        /// The lock's key.
        key: String,
    },
    /// The lock is in another kind of store.
    #[non_exhaustive]
    Unsupported {
        /// The lock's key.
        key: String,
    },
    /// The request failed. Unless the error is [refused](BackendError::refused), the transaction
    /// may or may not have been executed.
    #[non_exhaustive]
    Backend {
        /// The lock's key.
        key: String,
        /// The store error.
        source: BackendError,
    },
}

impl fmt::Display for FenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { key } => write!(
                f,
                "lock {key:?} was lost, so the transaction was not executed; acquire the lock again"
            ),
            Self::Unsupported { key } => write!(
                f,
                "lock {key:?} is not stored in etcd, so it cannot fence writes to etcd; use a lock of an etcd registry"
            ),
            Self::Backend { key, source } => {
                write!(f, "fenced transaction on {key:?}")?;
                if let Some(address) = source.address() {
                    write!(f, " at {address}")?;
                }
                write!(f, " failed: {}", source.message())
            }
        }
    }
}

impl Error for FenceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            // The text of `source` itself is part of this error's text.
            Self::Backend { source, .. } => source.source(),
            _ => None,
        }
    }
}

impl Fence for LockGuard {
    fn txn(&self) -> FencedTxn<'_> {
        FencedTxn { guard: self, operations: Vec::new() }
    }
}

impl FencedTxn<'_> {
    /// Adds an operation that writes `value` to `key`.
    pub fn put(mut self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Self {
        let put = PutRequest { key: key.into(), value: value.into(), ..PutRequest::default() };
        self.operations.push(OpRequest::Put(put));
        self
    }

    /// Adds an operation that deletes `key`.
    pub fn delete(mut self, key: impl Into<Vec<u8>>) -> Self {
        let delete = DeleteRangeRequest { key: key.into(), range_end: Vec::new() };
        self.operations.push(OpRequest::Delete(delete));
        self
    }

    /// Adds an operation that deletes all keys with `prefix`. An empty prefix deletes all keys of
    /// the cluster.
    pub fn delete_prefix(mut self, prefix: impl Into<Vec<u8>>) -> Self {
        let prefix = prefix.into();
        let range_end = prefix_end(&prefix);
        let key = if prefix.is_empty() { vec![0] } else { prefix };
        self.operations.push(OpRequest::Delete(DeleteRangeRequest { key, range_end }));
        self
    }

    /// Adds an operation that reads `key` after the preceding operations.
    pub fn get(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.operations.push(OpRequest::Range(txn::get(&key.into())));
        self
    }

    /// Executes all operations, or none.
    ///
    /// # Errors
    /// Returns [`FenceError::Lost`] if this guard no longer holds the lock: nothing was written.
    /// Returns [`FenceError::Unsupported`] if the lock is not in etcd, and [`FenceError::Backend`]
    /// for a store error.
    ///
    /// # Cancel safety
    /// If the future is dropped, the transaction may or may not be executed. The cluster executes
    /// the transaction only while the lock is held.
    pub async fn commit(self) -> Result<Committed, FenceError> {
        let key = self.guard.key().to_owned();
        if !self.guard.is_held() {
            return Err(FenceError::Lost { key });
        }
        let token = i64::from(self.guard.fencing_token());
        let Some(backend) = self.guard.backend::<EtcdBackend>() else {
            return Err(FenceError::Unsupported { key });
        };
        let Ok(claim) = self.guard.claim_for_fence() else {
            return Err(FenceError::Lost { key });
        };
        let result = execute(backend, claim, token, self.operations).await;
        match result {
            Ok(Some(committed)) => Ok(committed),
            Ok(None) => Err(FenceError::Lost { key }),
            Err(source) => Err(FenceError::Backend { key, source: backend.with_address(source) }),
        }
    }
}

/// Executes the transaction. Returns `None` if the lock is no longer held.
async fn execute(
    backend: &EtcdBackend,
    claim: &Claim,
    token: i64,
    operations: Vec<OpRequest>,
) -> Result<Option<Committed>, BackendError> {
    let Some((name, create_revision)) = backend.find_entry_with_token(claim, token).await? else {
        return Ok(None);
    };
    let reads: Vec<bool> = operations.iter().map(|op| matches!(op, OpRequest::Range(_))).collect();
    let txn = TxnRequest {
        compare: vec![txn::compare_create_revision(&name, create_revision)],
        success: operations.into_iter().map(txn::op).collect(),
        failure: Vec::new(),
    };
    let mut results: TxnResults = backend.execute(txn).await.map_err(CallError::into_error)?;
    if !results.succeeded {
        return Ok(None);
    }
    let mut values = Vec::new();
    for is_read in reads {
        if is_read {
            values.push(results.next_key()?.map(|found| found.value));
        } else {
            results.skip()?;
        }
    }
    if results.header.revision == 0 {
        return Err(protocol_error());
    }
    Ok(Some(Committed { revision: results.header.revision, values }))
}

// Written manually, because the written values may be secret.
impl fmt::Debug for FencedTxn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedTxn")
            .field("key", &self.guard.key())
            .field("operations", &self.operations.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_store_error_names_the_lock_the_address_the_cause_and_the_hint_once() {
        let source = BackendError::transient("etcd: the cause; the hint")
            .with_address("host:2379")
            .with_source(io::Error::other("the client library's error"));
        let error = FenceError::Backend { key: "k".to_owned(), source };
        assert_eq!(
            error.to_string(),
            "fenced transaction on \"k\" at host:2379 failed: etcd: the cause; the hint"
        );
        assert_eq!(error.source().unwrap().to_string(), "the client library's error");
    }
}
