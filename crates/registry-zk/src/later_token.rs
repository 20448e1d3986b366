//! Keeps the tokens of a key growing after an upgrade. `recipe` calls this module directly before a
//! grant.
//!
//! The token of a claim is the transaction that created its node. The token of an upgraded claim is
//! the transaction of the upgrade, which is larger than the tokens of the claims that wait. This
//! transaction also writes the data of the lock's node, so that these claims detect the upgrade. If
//! a claim's token is smaller than the last write of the lock's node, the claim takes a new token
//! directly before its grant. The new token is the transaction of another write. This transaction
//! writes the claim's node and also the lock's node, because claims behind this claim may have
//! smaller tokens.
//!
//! After a write with an unknown outcome, the claim writes again. The servers execute the requests
//! of a session in order, so the last write is the one that was answered.

use registry_core::{BackendError, Claim, Moment};
use zookeeper_client::{Error, MultiWriteResult};

use crate::error::to_backend_error;
use crate::node_data::encode_node_data;
use crate::nodes::commit;
use crate::queue_entry::{ClaimState, QueueEntry};
use crate::session::ZkSession;

/// The data of a lock's node. Only the transaction of the last write has a meaning.
pub(crate) const LOCK_DATA: &[u8] = b"";

/// Ensures that the token of the claim is larger than those of all earlier holders. Changes nothing
/// if the claim is already granted. Call it only if no node blocks the claim. `parent_mzxid` is the
/// last transaction that wrote the lock's node, from the same read as the list of the queue.
/// Returns false if the caller must try again.
pub(crate) async fn ensure_largest_token(
    session: &ZkSession,
    entry: &QueueEntry,
    state: &mut ClaimState,
    claim: &Claim,
    parent_mzxid: i64,
) -> Result<bool, BackendError> {
    let Some(node) = &mut state.node else { return Ok(false) };
    // A granted claim keeps its token, even if another holder of the lock takes a larger token.
    let is_granted = state.held_until.is_some();
    if is_granted || parent_mzxid <= node.grant.token || !session.config().has_upgrades() {
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
