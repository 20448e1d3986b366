//! Reads and writes value blocks. A value block is a key next to the queue of a lock, without a
//! lease. Its value is [`LockValue::encode`] of the bytes and the writer's fencing token.

use async_trait::async_trait;
use registry_core::{
    BackendError, BackendErrorKind, Claim, ClaimMode, FencingToken, Key, LockValue, ValueRead,
    ValueStore, ValueWrite,
};

use crate::backend::EtcdBackend;
use crate::error::CallError;
use crate::proto::{OpRequest, PutRequest, TxnRequest};
use crate::record;
use crate::txn;

#[async_trait]
impl ValueStore for EtcdBackend {
    /// The members do not report their clocks, so the result has no time.
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let found = self.range(txn::get(&self.names.value_name(key))).await?.kvs.pop();
        let value = found.map(|found| LockValue::decode(&found.value).ok_or_else(foreign_value));
        Ok(ValueRead::new(value.transpose()?))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        if claim.mode() != ClaimMode::Exclusive {
            return Ok(ValueWrite::NotHeld);
        }
        let grant = self.find_entry_with_token(claim, i64::from(token)).await;
        let grant = grant.map_err(|error| self.with_address(error))?;
        let Some((entry_name, create_revision)) = grant else { return Ok(ValueWrite::NotHeld) };
        let put = PutRequest {
            key: self.names.value_name(claim.key()),
            value: LockValue::encode(token, value),
            ..PutRequest::default()
        };
        // The mode and the token are compared too: another request may convert the claim meanwhile.
        let record = record::exclusive_grant_prefix(claim.id(), i64::from(token), create_revision);
        let mut compare = txn::compare_value_prefix(&entry_name, record).to_vec();
        compare.push(txn::compare_create_revision(&entry_name, create_revision));
        let txn = TxnRequest {
            compare,
            success: vec![txn::op(OpRequest::Put(put))],
            failure: Vec::new(),
        };
        match self.execute(txn).await.map_err(CallError::into_error) {
            Ok(results) if results.succeeded => Ok(ValueWrite::Written),
            Ok(_) => Ok(ValueWrite::NotHeld),
            Err(error) => Err(self.with_address(error)),
        }
    }
}

fn foreign_value() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "etcd: another program has written the value of the lock; delete its key",
    )
}
