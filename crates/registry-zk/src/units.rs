//! Computes the bytes of a request with many nodes, and the maximum number of units of one claim in
//! Curator's semaphore. No I/O.

use registry_core::{BackendError, BackendErrorKind, Claim, ClaimMode, QueuedEntry};
use zookeeper_client::Acls;

use crate::config::ZkConfig;
use crate::node_data::encode_node_data;
use crate::queue::node_bytes;

/// The error of permits with more units than one request or one session can contain. It is the
/// [source](std::error::Error::source) of the [`BackendError`] of a refused attempt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{units} units of {key:?} are more than {units_max}, the maximum for one guard of this key in Curator's semaphore"
)]
#[non_exhaustive]
pub struct TooManyUnits {
    /// The key of the semaphore.
    pub key: String,
    /// The units of the refused claim.
    pub units: u32,
    /// The maximum for this key: 1,000, or fewer if the key or the ACL is long.
    pub units_max: u32,
}

/// Refuses permits whose units do not fit into one request or one session.
pub(crate) fn refuse_too_many_units(
    config: &ZkConfig,
    claim: &Claim,
    queue: &str,
) -> Result<(), BackendError> {
    let ClaimMode::Permits { take, of } = claim.mode() else { return Ok(()) };
    if !config.is_curator_semaphore() {
        return Ok(());
    }
    let path_bytes = |mode| node_bytes(queue, claim.id(), config.naming, QueuedEntry::Claim(mode));
    let queued_bytes = path_bytes(ClaimMode::Exclusive);
    let unit_path_bytes = path_bytes(ClaimMode::Permits { take: 1, of }) - queued_bytes;
    let unit_step_bytes =
        unit_path_bytes + unit_data(claim, false).len() + acl_bytes(&config.acls()) + STEP_BYTES;
    let other_bytes = queued_bytes + unit_data(claim, true).len() + 3 * STEP_BYTES;
    let units_in_session = ZkConfig::NODE_BYTES_MAX.saturating_sub(queued_bytes) / unit_path_bytes;
    let units_in_request = REQUEST_BYTES_MAX.saturating_sub(other_bytes) / unit_step_bytes;
    let fitting = u32::try_from(units_in_session.min(units_in_request)).unwrap_or(UNITS_MAX);
    let units_max = fitting.min(UNITS_MAX);
    if take <= units_max {
        return Ok(());
    }
    let error = TooManyUnits { key: claim.key().as_str().to_owned(), units: take, units_max };
    let message = format!(
        "zookeeper: {take} units are more than {units_max}, the maximum for one guard of this key in Curator's semaphore; take fewer, or use a shorter key"
    );
    Err(BackendError::new(BackendErrorKind::Misconfigured, message).with_source(error).as_refused())
}

/// Returns the data of a unit's node. Only the first unit has the label, because the nodes of all
/// units are in one request.
pub(crate) fn unit_data(claim: &Claim, is_first: bool) -> Vec<u8> {
    let label = claim.label().filter(|_| is_first).map(Into::into);
    encode_node_data(&claim.clone().with_label(label), Some(claim.mode()), None)
}

/// Returns the maximum bytes of an ACL in a request.
pub(crate) fn acl_bytes(acls: &Acls<'_>) -> usize {
    acls.iter().map(|acl| acl.scheme().len() + acl.id().len() + STEP_BYTES).sum()
}

/// The maximum bytes of a step in a request, without its path, data and ACL. The rest consists of
/// numbers and length fields.
pub(crate) const STEP_BYTES: usize = 40;
/// The maximum bytes of a request. Servers close the connection after a request of more than
/// `jute.maxbuffer`, 1 MiB by default.
pub(crate) const REQUEST_BYTES_MAX: usize = 1_000_000;
/// The maximum number of units of one claim.
const UNITS_MAX: u32 = 1_000;
