//! Reads and writes value blocks. The value block of `KEY` is stored under `NS:{KEY}:value` without
//! an expiry, in the format of [`LockValue::encode`].

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use redis::Value;
use registry_core::{
    BackendError, BackendErrorKind, Claim, FencingToken, Key, LockValue, ValueRead, ValueStore,
    ValueWrite,
};

use crate::store::{RedisStore, not_durable, parse_response, unexpected_response};

#[async_trait]
impl ValueStore for RedisStore {
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let lock = self.names.lock_name(key);
        let call = self.scripts.read_value_block.call([self.names.value_key(&lock)]);
        let Value::Array(parts) = self.connections.run(self.slot(&lock), &call).await? else {
            return Err(unexpected_response());
        };
        let (now_us, stored) = match &parts[..] {
            [Value::Int(now_us), Value::BulkString(stored)] => (*now_us, Some(stored)),
            [Value::Int(now_us)] | [Value::Int(now_us), Value::Nil] => (*now_us, None),
            _ => return Err(unexpected_response()),
        };
        let value = stored.map(|stored| parse_value(stored)).transpose()?;
        let now_us = u64::try_from(now_us).map_err(|_| unexpected_response())?;
        Ok(ValueRead::new(value).with_now(SystemTime::UNIX_EPOCH + Duration::from_micros(now_us)))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let lock = self.names.lock_name(claim.key());
        let call = self
            .scripts
            .write_value_block
            .call([lock.as_str(), &self.names.value_key(&lock)])
            .arg(self.names.holder_id(claim.id()))
            .arg(token.get())
            .arg(value);
        let slot = self.slot(&lock);
        let response = if self.durability.is_required() {
            let durable = self.connections.run_durably(slot, &call).await?;
            if let Some(shortfall) = durable.shortfall {
                return Err(not_durable(&shortfall));
            }
            durable.response
        } else {
            self.connections.run(slot, &call).await?
        };
        Ok(match parse_response::<i64>(response)? {
            1 => ValueWrite::Written,
            _ => ValueWrite::NotHeld,
        })
    }
}

fn parse_value(stored: &[u8]) -> Result<LockValue, BackendError> {
    LockValue::decode(stored).ok_or_else(|| {
        BackendError::new(
            BackendErrorKind::Protocol,
            "redis: another program has written the value of the lock; delete its key",
        )
    })
}
