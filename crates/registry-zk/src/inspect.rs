//! Inspects locks for administrators and releases locks by force. `backend` calls this module.

use std::sync::Arc;

use futures_util::future::try_join_all;
use registry_core::{BackendError, BackendErrorKind, Holder, Key, Release};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::error::to_backend_error;
use crate::queue::is_contender;
use crate::recipe::{decode_holder, delete, read_children, sort_contenders};
use crate::session::ZkSession;

impl ZkBackend {
    pub(crate) async fn holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        read_holder(&session, key, &self.paths().node_path(key)).await
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

    /// Returns the holder of the key at `relative_path`, relative to the base, and the paths of
    /// possible keys below this key.
    async fn inspect_key(
        &self,
        session: &Arc<ZkSession>,
        relative_path: &str,
    ) -> Result<(Option<Holder>, Vec<String>), BackendError> {
        let Some(key) = self.paths().parse_key(relative_path) else {
            return Ok((None, Vec::new()));
        };
        let dir = self.paths().node_path(&key);
        let held = match read_holder(session, &key, &dir).await {
            // The login may not read this key. The other keys must still be listed.
            Err(error) if error.kind() == BackendErrorKind::Denied => {
                return Ok((None, Vec::new()));
            }
            held => held?,
        };
        if !self.paths().has_nested_keys() {
            return Ok((held, Vec::new()));
        }
        let mut nested = read_children_or_empty(session, &dir).await?;
        nested.retain(|name| !is_contender(name));
        nested.iter_mut().for_each(|name| *name = format!("{relative_path}/{name}"));
        Ok((held, nested))
    }

    pub(crate) async fn force_release_key(&self, key: &Key) -> Result<Release, BackendError> {
        let session = self.sessions().get_or_open().await?;
        let dir = self.paths().node_path(key);
        for _ in 0..ATTEMPTS_MAX {
            let children = read_children_or_empty(&session, &dir).await?;
            let queue = sort_contenders(&session, &dir, children).await?;
            let Some(head) = queue.head() else { break };
            if delete(&session, &format!("{dir}/{head}")).await? {
                return Ok(Release::Freed);
            }
        }
        Ok(Release::NotHeld)
    }
}

async fn read_holder(
    session: &Arc<ZkSession>,
    key: &Key,
    dir: &str,
) -> Result<Option<Holder>, BackendError> {
    for _ in 0..ATTEMPTS_MAX {
        let queue =
            sort_contenders(session, dir, read_children_or_empty(session, dir).await?).await?;
        let Some(head) = queue.head() else { break };
        let path = format!("{dir}/{head}");
        match session.with_request_timeout(session.client().get_data(&path)).await? {
            Ok((data, stat)) => return Ok(Some(decode_holder(key, &data, stat.czxid))),
            // The holder's node was deleted after the list was read. A successor may exist.
            Err(Error::NoNode) => {}
            // The login may not read the node's data, but may still check the node's existence.
            Err(Error::NoAuth) => {
                let response =
                    session.with_request_timeout(session.client().check_stat(&path)).await?;
                if let Some(stat) = response.map_err(|error| to_backend_error(&error))? {
                    return Ok(Some(decode_holder(key, &[], stat.czxid)));
                }
            }
            Err(error) => return Err(to_backend_error(&error)),
        }
    }
    Ok(None)
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

/// The maximum number of attempts per key while its holder changes between two reads.
const ATTEMPTS_MAX: u32 = 8;
