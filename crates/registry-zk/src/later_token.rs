//! Keeps the tokens of a key growing after an upgrade. `recipe` calls this module directly before a
//! grant.
//!
//! The token of a claim is the transaction that created its node. An upgrade passes the claims that
//! wait, and its token, the transaction of the upgrade, is larger than theirs. This transaction
//! therefore also writes the data of the lock's node. A claim that is older than the last such
//! write takes the transaction of a write of its own. This transaction also writes the lock's node,
//! because claims behind it may be older than its token.
//!
//! An outcome that is unknown needs no resolution. The claim writes again, and the servers execute
//! the requests of a session in order. The last write is therefore the one that was answered.

use registry_core::{BackendError, Claim, Moment};
use zookeeper_client::{Error, MultiWriteResult};

use crate::error::to_backend_error;
use crate::node_data::encode_node_data;
use crate::nodes::commit;
use crate::queue_entry::{ClaimState, QueueEntry};
use crate::session::ZkSession;

/// The data of a lock's node. Only the transaction of the last write has a meaning.
pub(crate) const LOCK_DATA: &[u8] = b"";

/// Gives the claim, which holds the lock and was not granted before, a token that is larger than
/// those of all earlier holders. `last_write` is the last transaction that wrote the lock's node,
/// as of the list that showed that the claim holds the lock. Returns false if the caller must try
/// again.
pub(crate) async fn ensure_largest_token(
    session: &ZkSession,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    last_write: i64,
) -> Result<bool, BackendError> {
    let Some(node) = &mut state.node else { return Ok(false) };
    // A grant keeps its token, also if another claim that holds the lock too takes a later one.
    let is_granted = state.held_until.is_some();
    if is_granted || last_write <= node.grant.token || !session.config().has_upgrades() {
        return Ok(true);
    }
    // The data states no token, so the token is the transaction of this write.
    let data = encode_node_data(claim, None, None);
    let client = session.client();
    let mut writer = client.new_multi_writer();
    let mut add_operations = || {
        writer.add_set_data(&entry.dir, LOCK_DATA, None)?;
        writer.add_set_data(&node.path, &data, None)
    };
    add_operations().map_err(|error| to_backend_error(&error))?;
    let sent_at = Moment::now();
    match commit(session, writer).await? {
        Ok(results) => {
            let Some(MultiWriteResult::SetData { stat }) = results.last() else { return Ok(false) };
            node.grant.token = stat.mzxid;
            node.version = stat.version;
            session.record_majority_response(sent_at);
            Ok(true)
        }
        // The next attempt detects whether the node of the claim exists.
        Err(Error::NoNode | Error::ConnectionLoss) => Ok(false),
        Err(error) => Err(to_backend_error(&error)),
    }
}
