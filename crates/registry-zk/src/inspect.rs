//! Inspects locks for administrators and releases locks by force. `backend` calls this module.

use std::sync::Arc;

use futures_util::future::try_join_all;
use registry_core::{BackendError, BackendErrorKind, Holder, Key, Release};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::error::to_backend_error;
use crate::modes::read_holders;
use crate::nodes::{delete, read_children};
use crate::queue::{LEASES, QUEUE, is_contender};
use crate::semaphore;
use crate::session::ZkSession;

impl ZkBackend {
    /// Returns the holders of `key`, in the order of their tokens.
    pub(crate) async fn holders_of(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        self.read_holders(&session, key).await
    }

    async fn read_holders(
        &self,
        session: &Arc<ZkSession>,
        key: &Key,
    ) -> Result<Vec<Holder>, BackendError> {
        let dir = self.paths().node_path(key);
        if self.paths().is_semaphore() {
            return Ok(semaphore::read_holders(session, key, &dir).await?.holders);
        }
        Ok(read_holders(session, &dir).await?.holders(key))
    }

    /// Returns the holders of all keys below the base that this login may read. Nested layouts are
    /// searched to any depth.
    pub(crate) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        let base = self.paths().base();
        let mut holders = Vec::new();
        let mut keys = read_children_or_empty(&session, base).await?;
        while !keys.is_empty() {
            let mut nested = Vec::new();
            for chunk in keys.chunks(CONCURRENT_READS) {
                let requests =
                    chunk.iter().map(|relative_path| self.inspect_key(&session, relative_path));
                for (held, relative_path) in try_join_all(requests).await? {
                    holders.extend(held);
                    nested.extend(relative_path);
                }
            }
            keys = nested;
        }
        Ok(holders)
    }

    /// Returns the holders of the key at `relative_path`, relative to the base, and the paths of
    /// possible keys below this key.
    async fn inspect_key(
        &self,
        session: &Arc<ZkSession>,
        relative_path: &str,
    ) -> Result<(Vec<Holder>, Vec<String>), BackendError> {
        let Some(key) = self.paths().parse_key(relative_path) else {
            return Ok((Vec::new(), Vec::new()));
        };
        let dir = self.paths().node_path(&key);
        let held = match self.read_holders(session, &key).await {
            // The login may not read this key. The other keys must still be listed.
            Err(error) if error.kind() == BackendErrorKind::Denied => {
                return Ok((Vec::new(), Vec::new()));
            }
            held => held?,
        };
        if !self.paths().has_nested_keys() {
            return Ok((held, Vec::new()));
        }
        let mut nested = read_children_or_empty(session, &dir).await?;
        let is_semaphore = self.paths().is_semaphore();
        let is_of_semaphore = |name: &str| is_semaphore && [QUEUE, LEASES].contains(&name);
        nested.retain(|name| !is_contender(name) && !is_of_semaphore(name));
        nested.iter_mut().for_each(|name| *name = format!("{relative_path}/{name}"));
        Ok((held, nested))
    }

    pub(crate) async fn force_release_key(&self, key: &Key) -> Result<Release, BackendError> {
        let session = self.sessions().get_or_open().await?;
        let dir = self.paths().node_path(key);
        for _ in 0..ATTEMPTS_MAX {
            let paths: Vec<_> = if self.paths().is_semaphore() {
                semaphore::read_holders(&session, key, &dir).await?.paths
            } else {
                let holders = read_holders(&session, &dir).await?;
                holders.names().map(|name| format!("{dir}/{name}")).collect()
            };
            if paths.is_empty() {
                break;
            }
            let mut was_freed = false;
            for path in paths {
                was_freed |= delete(&session, &path).await?;
            }
            if was_freed {
                return Ok(Release::Freed);
            }
        }
        Ok(Release::NotHeld)
    }
}

async fn read_children_or_empty(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Vec<String>, BackendError> {
    match read_children(session, dir).await? {
        Ok(children) => Ok(children),
        Err(Error::NoNode) => Ok(Vec::new()),
        Err(error) => Err(to_backend_error(&error)),
    }
}

/// The number of keys that are read concurrently.
const CONCURRENT_READS: usize = 64;

/// The maximum number of attempts per key while its holders change between two reads.
const ATTEMPTS_MAX: u32 = 8;
