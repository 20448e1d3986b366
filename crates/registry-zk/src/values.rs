//! Reads and writes value blocks. A value block is a persistent node next to the node of a key. Its
//! data has the format of [`LockValue::encode`].

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use registry_core::{
    BackendError, BackendErrorKind, Claim, ClaimMode, FencingToken, Key, LockValue, ValueRead,
    ValueStore, ValueWrite,
};
use zookeeper_client::{CheckWriteError, CreateMode, Error};

use crate::backend::ZkBackend;
use crate::error::{timed_out, to_backend_error};
use crate::session::ZkSession;
use crate::timer::timeout;

#[async_trait]
impl ValueStore for ZkBackend {
    /// The returned server time is an estimate: the creation time of the newest queue node of this
    /// client, plus the time since then. Without such a node, no server time is returned.
    async fn value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        self.read_value(key).await.map_err(|error| self.with_address(error))
    }

    async fn set_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let written = self.write_value(claim, token, value).await;
        written.map_err(|error| self.with_address(error))
    }
}

impl ZkBackend {
    async fn read_value(&self, key: &Key) -> Result<ValueRead, BackendError> {
        let session = self.sessions().get_or_open().await?;
        session.wait_until_connected().await?;
        let path = self.paths().value_path(key);
        let client = session.client();
        let synced = client.sync(&path);
        let read = client.get_data(&path);
        // Both requests are sent at once. The server executes them in order, so the sync is first.
        let synced = session.with_request_timeout(synced).await?;
        synced.map_err(|error| to_backend_error(&error))?;
        let value = match session.with_request_timeout(read).await? {
            Ok((stored, _)) => Some(LockValue::decode(&stored).ok_or_else(foreign_value_error)?),
            Err(Error::NoNode) => None,
            Err(error) => return Err(to_backend_error(&error)),
        };
        let read = ValueRead::new(value);
        Ok(match self.sessions().server_time() {
            Some(now) => read.with_now(SystemTime::UNIX_EPOCH + now),
            None => read,
        })
    }

    async fn write_value(
        &self,
        claim: &Claim,
        token: FencingToken,
        value: &[u8],
    ) -> Result<ValueWrite, BackendError> {
        let found = self.sessions().find_entry(claim.id());
        let Some((session, entry)) = found.filter(|_| claim.mode() == ClaimMode::Exclusive) else {
            return Ok(ValueWrite::NotHeld);
        };
        let node = {
            let state = entry.state.lock().await;
            // The claim may have had a different node with a different token earlier.
            let has_token = |granted: i64| i64::from(token) == granted;
            state.node.as_ref().filter(|node| has_token(node.grant.token)).map(|it| it.path.clone())
        };
        let Some(node) = node else { return Ok(ValueWrite::NotHeld) };
        session.wait_until_connected().await?;
        let path = self.paths().value_path(claim.key());
        let stored = LockValue::encode(token, value);
        for _ in 0..TRIES_MAX {
            for creates in [false, true] {
                match write(&session, &node, &path, &stored, creates).await? {
                    Ok(()) => return Ok(ValueWrite::Written),
                    Err(CheckWriteError::CheckFailed { source: Error::NoNode }) => {
                        return Ok(ValueWrite::NotHeld);
                    }
                    // The value has no node yet, or another holder has just created it.
                    Err(CheckWriteError::OperationFailed {
                        source: Error::NoNode | Error::NodeExists,
                        ..
                    }) => {}
                    Err(
                        CheckWriteError::OperationFailed { source, .. }
                        | CheckWriteError::RequestFailed { source }
                        | CheckWriteError::CheckFailed { source },
                    ) => return Err(to_backend_error(&source)),
                }
            }
        }
        Err(BackendError::transient("zookeeper: other writes of the value interfered; retry"))
    }
}

/// Writes the value in one request that also checks that the claim's node exists.
async fn write(
    session: &ZkSession,
    node: &str,
    path: &str,
    stored: &[u8],
    creates: bool,
) -> Result<Result<(), CheckWriteError>, BackendError> {
    let client = session.client();
    let not_sent = |error: Error| to_backend_error(&error).as_refused();
    let mut writer = client.new_check_writer(node, None).map_err(not_sent)?;
    let options = CreateMode::Persistent.with_acls(session.config().acls());
    let added = if creates {
        writer.add_create(path, stored, &options)
    } else {
        writer.add_set_data(path, stored, None)
    };
    added.map_err(not_sent)?;
    let limit: Duration = session.config().request_timeout;
    let response = session.unless_stopped(writer.commit());
    let response = timeout(limit, response).await.map_err(|_| timed_out(limit))?;
    let response = response.unwrap_or_else(|| Err(Error::ConnectionLoss.into()));
    Ok(response.map(drop))
}

fn foreign_value_error() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "zookeeper: another program has written the value of the lock; delete its node",
    )
}

/// The maximum number of rounds to write a value while other clients create or delete its node.
/// Each round tries to set the value and then to create the node.
const TRIES_MAX: u32 = 3;
