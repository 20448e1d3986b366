//! Lists the holders and waiters of locks for administrators, and releases locks by force.
//! `backend` calls this module.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join_all;
use registry_core::{BackendError, BackendErrorKind, Holder, Key, Release, WaitingClaim};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::blockers::{queue_changed, read_queue};
use crate::error::to_backend_error;
use crate::node_data::{decode_grant_or_exclusive, decode_label, decode_semaphore_mode};
use crate::nodes::{delete, read_children};
use crate::queue::{LEASES, QUEUE, is_contender};
use crate::semaphore;
use crate::session::ZkSession;

impl ZkBackend {
    /// Returns the holders of `key`, in the order of their tokens.
    pub(crate) async fn holders_of(&self, key: &Key) -> Result<Vec<Holder>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        self.read_holders(&session, key.clone()).await?.ok_or_else(queue_changed)
    }

    /// Returns `None` if the queue changed during each of several reads.
    async fn read_holders(
        &self,
        session: &Arc<ZkSession>,
        key: Key,
    ) -> Result<Option<Vec<Holder>>, BackendError> {
        let dir = self.paths().node_path(&key);
        if self.paths().is_curator_semaphore() {
            return Ok(Some(semaphore::read_holders(session, &key, &dir).await?.holders));
        }
        Ok(read_queue(session, &dir).await?.map(|queue| queue.holders(&key)))
    }

    /// Returns the holders of all keys below the base that this login may read. Omits a key whose
    /// queue changed during each of several reads, so that it does not prevent the whole list.
    pub(crate) async fn holders(&self) -> Result<Vec<Holder>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        let read = async |key| Ok(self.read_holders(&session, key).await?.unwrap_or_default());
        self.for_each_key(&session, read).await
    }

    /// Returns the claims that wait for `key`, or for any key that this login may read. Without
    /// `key`, omits keys as [`holders`](Self::holders) does.
    pub(crate) async fn waiting_claims(
        &self,
        key: Option<&Key>,
    ) -> Result<Vec<WaitingClaim>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        match key {
            Some(key) => self.read_waiting(&session, key.clone()).await?.ok_or_else(queue_changed),
            None => {
                let read =
                    async |key| Ok(self.read_waiting(&session, key).await?.unwrap_or_default());
                self.for_each_key(&session, read).await
            }
        }
    }

    /// Returns `None` if the queue changed during each of several reads.
    async fn read_waiting(
        &self,
        session: &Arc<ZkSession>,
        key: Key,
    ) -> Result<Option<Vec<WaitingClaim>>, BackendError> {
        let is_curator_semaphore = self.paths().is_curator_semaphore();
        let queue_path = self.paths().queue_path(&key);
        let names = if is_curator_semaphore {
            semaphore::read_waiting(session, &queue_path).await?
        } else {
            let Some(queue) = read_queue(session, &queue_path).await? else { return Ok(None) };
            queue.into_waiting()
        };
        let mut waiting = Vec::with_capacity(names.len());
        for chunk in names.chunks(CONCURRENT_REQUESTS) {
            let reads = chunk.iter().map(async |name| {
                let path = format!("{queue_path}/{name}");
                let client = session.client();
                session.with_request_timeout(client.get_data(&path)).await
            });
            for (name, read) in chunk.iter().zip(try_join_all(reads).await?) {
                let (data, stat) = match read {
                    Ok(read) => read,
                    // The claim was granted or has left the queue, or the login may not read it.
                    Err(Error::NoNode | Error::NoAuth) => continue,
                    Err(error) => return Err(to_backend_error(&error)),
                };
                let mode = if is_curator_semaphore {
                    decode_semaphore_mode(&data)
                } else {
                    decode_grant_or_exclusive(name, &data, &stat).mode
                };
                waiting.push(
                    WaitingClaim::new(key.clone())
                        .with_mode(mode)
                        .with_label(decode_label(&data))
                        .with_times(age(stat.ctime), None),
                );
            }
        }
        Ok(Some(waiting))
    }

    /// Calls `read` for each possible key below the base, and returns all results. Nested layouts
    /// are searched to any depth.
    async fn for_each_key<T, F>(
        &self,
        session: &Arc<ZkSession>,
        read: impl Fn(Key) -> F + Sync,
    ) -> Result<Vec<T>, BackendError>
    where
        T: Send,
        F: Future<Output = Result<Vec<T>, BackendError>> + Send,
    {
        let mut all = Vec::new();
        let mut paths = read_children_or_empty(session, self.paths().base()).await?;
        while !paths.is_empty() {
            let mut nested = Vec::new();
            for chunk in paths.chunks(CONCURRENT_REQUESTS) {
                let requests = chunk.iter().map(async |relative_path| {
                    let Some(key) = self.paths().parse_key(relative_path) else {
                        return Ok::<_, BackendError>((Vec::new(), Vec::new()));
                    };
                    let dir = self.paths().node_path(&key);
                    match read(key).await {
                        // The login may not read this key. The other keys must still be listed.
                        Err(error) if error.kind() == BackendErrorKind::Denied => {
                            Ok((Vec::new(), Vec::new()))
                        }
                        found => {
                            Ok((found?, self.nested_keys(session, relative_path, &dir).await?))
                        }
                    }
                });
                for (found, relative_paths) in try_join_all(requests).await? {
                    all.extend(found);
                    nested.extend(relative_paths);
                }
            }
            paths = nested;
        }
        Ok(all)
    }

    /// Returns the paths of possible keys below the key at `relative_path`, relative to the base.
    async fn nested_keys(
        &self,
        session: &Arc<ZkSession>,
        relative_path: &str,
        dir: &str,
    ) -> Result<Vec<String>, BackendError> {
        if !self.paths().has_nested_keys() {
            return Ok(Vec::new());
        }
        let mut nested = read_children_or_empty(session, dir).await?;
        let is_curator_semaphore = self.paths().is_curator_semaphore();
        let is_of_semaphore = |name: &str| is_curator_semaphore && [QUEUE, LEASES].contains(&name);
        nested.retain(|name| !is_contender(name) && !is_of_semaphore(name));
        nested.iter_mut().for_each(|name| *name = format!("{relative_path}/{name}"));
        Ok(nested)
    }

    pub(crate) async fn force_release_key(&self, key: &Key) -> Result<Release, BackendError> {
        let session = self.sessions().get_or_open().await?;
        let dir = self.paths().node_path(key);
        for _ in 0..TRIES_MAX {
            let paths: Vec<_> = if self.paths().is_curator_semaphore() {
                semaphore::read_holders(&session, key, &dir).await?.paths
            } else {
                let queue = read_queue(&session, &dir).await?.ok_or_else(queue_changed)?;
                queue.names_to_release().map(|name| format!("{dir}/{name}")).collect()
            };
            if paths.is_empty() {
                return Ok(Release::NotHeld);
            }
            let mut was_freed = false;
            for chunk in paths.chunks(CONCURRENT_REQUESTS) {
                let deletions = chunk.iter().map(|path| delete(&session, path));
                was_freed |= try_join_all(deletions).await?.contains(&true);
            }
            if was_freed {
                return Ok(Release::Freed);
            }
        }
        Err(BackendError::transient(format!(
            "zookeeper: the holder of the lock changed during each of {TRIES_MAX} attempts; retry"
        ))
        .as_refused())
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

/// Returns the time since the server's wall clock showed `ctime`. The result depends on the wall
/// clocks of two hosts, so it is only displayed.
fn age(ctime: i64) -> Option<Duration> {
    let created_at = UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(ctime).ok()?))?;
    SystemTime::now().duration_since(created_at).ok()
}

/// The maximum number of keys that are read concurrently, and of nodes of one key that are read or
/// deleted concurrently.
const CONCURRENT_REQUESTS: usize = 64;

/// The maximum number of attempts to release a key by force while its holders change.
const TRIES_MAX: u32 = 8;
