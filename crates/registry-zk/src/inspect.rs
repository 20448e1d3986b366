//! Inspection of locks for administrators, and forced release. Called by `backend`.

use std::sync::Arc;

use futures_util::future::try_join_all;
use registry_core::{BackendError, BackendErrorKind, Holder, Key, Release};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::error::explain;
use crate::queue::is_contender;
use crate::recipe::{delete, holder, line_up, read};
use crate::session::Session;

impl ZkBackend {
    pub(crate) async fn holder(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        let session = self.sessions().get().await?;
        holder_in(&session, key, &self.paths().of(key)).await
    }

    /// Returns the holders of all keys below the base that this login may read. Nested layouts are
    /// searched to any depth.
    pub(crate) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let session = self.sessions().get().await?;
        let base = self.paths().base();
        let mut holders = Vec::new();
        let mut keys = children(&session, base).await?;
        while !keys.is_empty() {
            let mut deeper = Vec::new();
            for some in keys.chunks(AT_ONCE) {
                let seen = some.iter().map(|below| self.look_below(&session, below));
                for (held, below) in try_join_all(seen).await? {
                    holders.extend(held);
                    deeper.extend(below);
                }
            }
            keys = deeper;
        }
        Ok(holders)
    }

    /// Returns the holder of the key at `below`, relative to the base, and the possible keys below
    /// it.
    async fn look_below(
        &self,
        session: &Arc<Session>,
        below: &str,
    ) -> Result<(Option<Holder>, Vec<String>), BackendError> {
        let Some(key) = self.paths().key_of(below) else { return Ok((None, Vec::new())) };
        let dir = self.paths().of(&key);
        let held = match holder_in(session, &key, &dir).await {
            // Rights to this key are missing; the other keys must still be listed.
            Err(error) if error.kind() == BackendErrorKind::Denied => {
                return Ok((None, Vec::new()));
            }
            held => held?,
        };
        if !self.paths().are_nested() {
            return Ok((held, Vec::new()));
        }
        let mut deeper = children(session, &dir).await?;
        deeper.retain(|name| !is_contender(name));
        deeper.iter_mut().for_each(|name| *name = format!("{below}/{name}"));
        Ok((held, deeper))
    }

    pub(crate) async fn break_lock(&self, key: &Key) -> Result<Release, BackendError> {
        let session = self.sessions().get().await?;
        let dir = self.paths().of(key);
        for _ in 0..TRIES {
            let children = children(&session, &dir).await?;
            let queue = line_up(&session, &dir, children).await?;
            let Some(first) = queue.first() else { break };
            if delete(&session, &format!("{dir}/{first}")).await? {
                return Ok(Release::Freed);
            }
        }
        Ok(Release::NotHeld)
    }
}

async fn holder_in(
    session: &Arc<Session>,
    key: &Key,
    dir: &str,
) -> Result<Option<Holder>, BackendError> {
    for _ in 0..TRIES {
        let queue = line_up(session, dir, children(session, dir).await?).await?;
        let Some(first) = queue.first() else { break };
        let path = format!("{dir}/{first}");
        match session.bounded(session.client().get_data(&path)).await? {
            Ok((data, stat)) => return Ok(Some(holder(key, &data, stat.czxid))),
            // Deleted since the list was read; a successor may exist.
            Err(Error::NoNode) => {}
            // Without the right to read the data, the node's existence is still visible.
            Err(Error::NoAuth) => {
                let seen = session.bounded(session.client().check_stat(&path)).await?;
                if let Some(stat) = seen.map_err(|error| explain(&error))? {
                    return Ok(Some(holder(key, &[], stat.czxid)));
                }
            }
            Err(error) => return Err(explain(&error)),
        }
    }
    Ok(None)
}

async fn children(session: &Arc<Session>, dir: &str) -> Result<Vec<String>, BackendError> {
    match read(session, dir).await? {
        Ok(children) => Ok(children),
        Err(Error::NoNode) => Ok(Vec::new()),
        Err(error) => Err(explain(&error)),
    }
}

/// Number of keys read concurrently.
const AT_ONCE: usize = 64;

/// Reads per key while its holder changes between two reads.
const TRIES: u32 = 8;
