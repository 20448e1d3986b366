//! The registered waiters of `KEY`: the fields of the hash `NS:{KEY}:waiters`, one per waiting
//! claim. The header of `register_waiter.lua` specifies the format of a field. No script that
//! grants or releases a lock reads or writes this hash.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use redis::Value;
use registry_core::{BackendError, Claim, Key, WaiterStore, WaitingClaim};

use crate::store::{
    CONCURRENT_READS_MAX, RedisStore, ceil_millis, parse_integer, parse_response,
    unexpected_response,
};

#[async_trait]
impl WaiterStore for RedisStore {
    async fn register(&self, claim: &Claim, waited_for: Duration) -> Result<(), BackendError> {
        let lock = self.names.lock_name(claim.key());
        let waited_us = u64::try_from(waited_for.as_micros()).unwrap_or(u64::MAX);
        let call = self
            .scripts
            .register_waiter
            .call([self.names.waiters_key(&lock)])
            .arg(self.names.holder_id(claim.id()))
            .arg(waited_us)
            .arg(ceil_millis(claim.lease()))
            .arg(claim.mode().to_string())
            .arg(claim.label().unwrap_or_default());
        self.connections.run(self.slot(&lock), &call).await.map(drop)
    }

    async fn unregister(&self, claim: &Claim) -> Result<(), BackendError> {
        let lock = self.names.lock_name(claim.key());
        let call = self.scripts.unregister_waiter.call([self.names.waiters_key(&lock)]);
        let call = call.arg(self.names.holder_id(claim.id()));
        self.connections.run(self.slot(&lock), &call).await.map(drop)
    }

    async fn waiting(&self, key: Option<&Key>) -> Result<Vec<WaitingClaim>, BackendError> {
        let keys = match key {
            Some(key) => vec![key.clone()],
            None => self.keys_with_waiters().await?,
        };
        let requests: Vec<_> = keys.iter().map(|key| self.load_waiting_claims(key)).collect();
        let waiting: Vec<Vec<WaitingClaim>> =
            stream::iter(requests).buffer_unordered(CONCURRENT_READS_MAX).try_collect().await?;
        Ok(waiting.into_iter().flatten().collect())
    }
}

impl RedisStore {
    async fn load_waiting_claims(&self, key: &Key) -> Result<Vec<WaitingClaim>, BackendError> {
        let lock = self.names.lock_name(key);
        let call = self.scripts.waiters.call([self.names.waiters_key(&lock)]);
        let response: Vec<Value> =
            parse_response(self.connections.run(self.slot(&lock), &call).await?)?;
        let [now, Value::Array(fields)] = &response[..] else { return Err(unexpected_response()) };
        let now = parse_integer(now).and_then(|now| u64::try_from(now).ok());
        let now = now.ok_or_else(unexpected_response)?;
        // Another program may have written other fields.
        let waiting = fields.chunks(2).filter_map(|field| match field {
            [_, Value::BulkString(value)] => decode_value(key, value, now),
            _ => None,
        });
        Ok(waiting.collect())
    }
}

/// Decodes the value of a field. Returns `None` for an expired field, or if another program wrote
/// the value.
fn decode_value(key: &Key, value: &[u8], now: u64) -> Option<WaitingClaim> {
    let value = std::str::from_utf8(value).ok()?;
    let since: u64 = value.get(..16)?.parse().ok()?;
    let until: u64 = value.get(16..32)?.parse().ok()?;
    let (mode, label) = value.get(32..)?.split_once('\n')?;
    let left = until.checked_sub(now).filter(|left| *left > 0)?;
    Some(
        WaitingClaim::new(key.clone())
            .with_mode(mode.parse().ok()?)
            .with_label(Some(label).filter(|label| !label.is_empty()).map(str::to_owned))
            .with_times(
                Some(Duration::from_micros(now.saturating_sub(since))),
                Some(Duration::from_micros(left)),
            ),
    )
}
