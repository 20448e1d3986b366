//! A lock holder as the remote holder of a conformance harness.

use std::io::ErrorKind;
use std::time::Duration;

use async_trait::async_trait;
use registry_conformance::{RemoteHolder, RemoteLock};
use registry_core::ClaimMode;

use super::{HolderLock, HolderRequest, LockHolder};

/// Far longer than a reply takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);
const REPLIES: &str = "the process replies";

#[async_trait]
impl RemoteHolder for LockHolder {
    async fn lock(&mut self, key: &str, wait: Duration) -> RemoteLock {
        let (mode, fair) = (ClaimMode::Exclusive, false);
        let request = HolderRequest::Lock { key: key.into(), mode, fair, wait: Some(wait) };
        let held: Option<HolderLock> = self.request(request, wait + LIMIT).await.expect(REPLIES);
        held.map_or(RemoteLock::Busy, |held| RemoteLock::Held { token: Some(held.token) })
    }

    async fn unlock(&mut self, key: &str) -> bool {
        match Self::unlock(self, key, LIMIT).await {
            Err(error) if error.kind() == ErrorKind::TimedOut => panic!("{error}"),
            unlocked => unlocked.is_ok(),
        }
    }

    async fn is_held(&mut self, key: &str) -> bool {
        self.status(key, LIMIT).await.expect(REPLIES).is_some()
    }

    async fn kill(&mut self) {
        self.process().kill().expect("the process runs");
        self.process().wait_exit(LIMIT).await.expect("a killed process ends");
    }

    async fn pause(&mut self) {
        self.process().pause().await.expect("the process runs");
    }

    async fn resume(&mut self) {
        self.process().resume().expect("the process is paused");
    }
}
