//! Requests for the nodes of a queue. `recipe`, `conversion`, `blockers`, `semaphore`,
//! `later_token`, `inspect` and `diagnose` call this module.

use std::sync::Arc;

use futures_util::future::try_join_all;
use registry_core::{BackendError, BackendErrorKind, FencingToken, Moment};
use zookeeper_client::{CreateMode, Error, MultiWriteResult, MultiWriter, Stat};

use crate::error::to_backend_error;
use crate::queue::ContenderQueue;
use crate::session::{ConfirmedBy, ZkSession};

/// The children of a lock's node.
#[derive(Default)]
pub(crate) struct ListedChildren {
    pub(crate) names: Vec<String>,
    /// The last transaction that wrote the data of the lock's node, or that created it.
    pub(crate) parent_mzxid: i64,
}

impl From<(Vec<String>, Stat)> for ListedChildren {
    fn from((names, stat): (Vec<String>, Stat)) -> Self {
        Self { names, parent_mzxid: stat.mzxid }
    }
}

/// A node that was just created.
pub(crate) struct CreatedNode {
    pub(crate) path: String,
    /// The transaction that created the node. `None` if the node was already deleted.
    pub(crate) czxid: Option<i64>,
    /// The children of the parent after the creation.
    pub(crate) listed: Result<ListedChildren, Error>,
}

/// Creates an ephemeral sequential node in `dir`, whose name is `prefix` and a number. Also lists
/// `dir`.
pub(crate) async fn create_sequential(
    session: &ZkSession,
    dir: &str,
    prefix: &str,
    data: &[u8],
) -> Result<Result<CreatedNode, Error>, BackendError> {
    let path = format!("{dir}/{prefix}");
    let options = CreateMode::EphemeralSequential.with_acls(session.config().acls());
    let client = session.client();
    let sent_at = Moment::now();
    let created = client.create(&path, data, &options);
    let listed = client.get_children(dir);
    // Responses arrive in the order of the requests. Awaiting the second response first wakes this
    // task only once.
    let responses = session.with_request_timeout(async {
        let listed = listed.await;
        Ok((created.await?, listed))
    });
    let ((stat, number), listed) = match responses.await? {
        Ok(responses) => responses,
        Err(error) => return Ok(Err(error)),
    };
    let path = format!("{path}{number}");
    let czxid = if stat.is_invalid() {
        // Servers before 3.5 do not return the id of the transaction that created the node.
        let response = session.with_request_timeout(client.check_stat(&path)).await?;
        response.map_err(|error| to_backend_error(&error).as_unknown())?.map(|stat| stat.czxid)
    } else {
        Some(stat.czxid)
    };
    session.record_majority_response(sent_at);
    session.record_server_time(stat.ctime);
    let listed = listed.map(ListedChildren::from);
    Ok(Ok(CreatedNode { path, czxid, listed }))
}

/// Creates `path` and its parents as containers. Creates persistent nodes instead if the servers do
/// not support containers, or delete a parent during each attempt. The servers delete a container
/// that has been empty for some time.
pub(crate) async fn create_parents(session: &ZkSession, path: &str) -> Result<(), BackendError> {
    let acls = session.config().acls();
    for mode in [CreateMode::Container, CreateMode::Persistent] {
        // `NoNode` means that a parent was deleted during the call.
        for _ in 0..MKDIR_ATTEMPTS_MAX {
            match session
                .with_request_timeout(session.client().mkdir(path, &mode.with_acls(acls)))
                .await?
            {
                Ok(()) => return Ok(()),
                Err(Error::NoNode) => {}
                // Servers before 3.5 do not support containers.
                Err(Error::Unimplemented) if mode == CreateMode::Container => break,
                Err(error) => return Err(to_backend_error(&error)),
            }
        }
    }
    Err(to_backend_error(&Error::NoNode))
}

/// Returns the children of `dir` as of this call or later, unless another leader was elected.
pub(crate) async fn read_children(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    Ok(read_listed_children(session, dir).await?.map(|listed| listed.names))
}

/// Like [`read_children`]. Also returns the transaction that last wrote `dir`, from the same
/// response.
pub(crate) async fn read_listed_children(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Result<ListedChildren, Error>, BackendError> {
    let client = session.client();
    let synced = client.sync(dir);
    let listed = client.get_children(dir);
    match session.with_request_timeout(synced).await? {
        Ok(()) => {
            let listed = session.with_request_timeout(listed).await?;
            Ok(listed.map(ListedChildren::from))
        }
        Err(error) => Ok(Err(error)),
    }
}

/// Returns the children of `dir` as of this call or later, even after a leader election.
pub(crate) async fn read_children_after_confirmation(
    session: &Arc<ZkSession>,
    dir: &str,
) -> Result<Result<Vec<String>, Error>, BackendError> {
    session.confirm(ConfirmedBy::Majority).await.map_err(BackendError::as_unknown)?;
    // A server rejects a client that has seen a newer transaction than the server's last one. The
    // list therefore includes the state that the majority confirmed.
    session.with_request_timeout(session.client().list_children(dir)).await
}

/// Sorts the contenders. If their names do not determine the order, concurrently requests the
/// transaction that created each node.
pub(crate) async fn sort_contenders(
    session: &Arc<ZkSession>,
    dir: &str,
    children: Vec<String>,
) -> Result<ContenderQueue, BackendError> {
    let naming = session.config().naming;
    let unordered = match ContenderQueue::from_children(children, naming) {
        Ok(queue) => return Ok(queue),
        Err(unordered) => unordered,
    };
    let czxids = unordered.names().iter().map(async |name| {
        let client = session.client();
        let path = format!("{dir}/{name}");
        let request = client.check_stat(&path);
        let stat = session
            .with_request_timeout(request)
            .await?
            .map_err(|error| to_backend_error(&error).as_unknown())?;
        Ok::<_, BackendError>(stat.map(|stat| stat.czxid))
    });
    let czxids = try_join_all(czxids).await?;
    Ok(unordered.sort_by_transaction(czxids))
}

/// Executes all writes of a transaction or none.
pub(crate) async fn commit(
    session: &ZkSession,
    mut writer: MultiWriter<'_>,
) -> Result<Result<Vec<MultiWriteResult>, Error>, BackendError> {
    let committed = async { writer.commit().await.map_err(Error::from) };
    session.with_request_timeout(committed).await
}

/// Deletes a node. Returns false if it did not exist.
pub(crate) async fn delete(session: &ZkSession, path: &str) -> Result<bool, BackendError> {
    match session.with_request_timeout(session.client().delete(path, None)).await? {
        Ok(()) => Ok(true),
        Err(Error::NoNode) => Ok(false),
        Err(error) => Err(to_backend_error(&error)),
    }
}

pub(crate) fn fencing_token(zxid: i64) -> Option<FencingToken> {
    FencingToken::try_from(zxid).ok()
}

/// Returns the error of a transaction id that is not a valid token.
pub(crate) fn negative_transaction_error() -> BackendError {
    let message = "zookeeper: the server returned a negative transaction id, which is not a valid fencing token; check that the server's data directory was not copied from another server";
    BackendError::new(BackendErrorKind::Protocol, message)
}

/// The maximum number of attempts to create the parents of a node while the servers delete empty
/// parents. It applies to containers and to persistent nodes separately.
const MKDIR_ATTEMPTS_MAX: u32 = 4;
