//! Builds the transactions and range requests for a queue, and decodes the responses. The functions
//! send nothing: `EtcdBackend::execute` and `EtcdBackend::range` send the requests.

use registry_core::{BackendError, ClaimMode};

use crate::error::protocol_error;
use crate::names::prefix_end;
use crate::proto::{
    ASCENDING, BY_CREATION, CREATE, Compare, DESCENDING, DeleteRangeRequest, EQUAL, GREATER,
    KeyValue, LESS, MODIFICATION, OpRequest, OpResponse, PutRequest, RangeRequest, RequestOp,
    ResponseHeader, TargetUnion, TxnRequest, TxnResponse, VALUE,
};
use crate::record::{self, SHARED_FROM, UPGRADABLE_END, UPGRADABLE_FROM, WITHOUT_TOKEN_FROM};

/// The tombstone of a claim that joins a queue.
#[derive(Debug, Clone)]
pub(crate) struct TombstonePut {
    pub(crate) name: Vec<u8>,
    pub(crate) lease: i64,
    /// The common prefix of all tombstones of this queue.
    pub(crate) prefix: Vec<u8>,
}

/// Appends the entry `name` to `queue` unless the key exists. On success, the response contains the
/// result of the put, the two newest entries, and, if `tombstone` is given, some existing
/// tombstones. Otherwise it contains the key `name` and the first entry.
pub(crate) fn enqueue(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    tombstone: Option<TombstonePut>,
) -> TxnRequest {
    // Without a tombstone, the layout is etcdctl. It has no upgrades, so every creation revision is
    // a valid token.
    let put = match &tombstone {
        Some(_) => put_behind(queue, name, record, lease, ClaimMode::Exclusive),
        None => put_op(name, record, lease),
    };
    let mut success = ops([put, OpRequest::Range(newest_entries(queue, 2))]);
    success.extend(tombstone.into_iter().flat_map(tombstone_ops));
    TxnRequest {
        compare: vec![compare_create_revision(name, 0)],
        success,
        failure: ops([OpRequest::Range(get(name)), OpRequest::Range(first_entry(queue))]),
    }
}

/// Puts the entry `name` into `queue` if the queue is empty. On success, the response contains the
/// result of the put and, if `tombstone` is given, some existing tombstones. Otherwise it contains
/// the key `name` and the first entry.
pub(crate) fn enqueue_if_empty(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    tombstone: Option<TombstonePut>,
) -> TxnRequest {
    let mut is_empty = compare_create_revision(queue, 0);
    is_empty.range_end = prefix_end(queue);
    let mut success = ops([put_op(name, record, lease)]);
    success.extend(tombstone.into_iter().flat_map(tombstone_ops));
    TxnRequest {
        compare: vec![is_empty],
        success,
        failure: ops([OpRequest::Range(get(name)), OpRequest::Range(first_entry(queue))]),
    }
}

/// The condition on a queue under which an entry is appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AppendIf {
    Always,
    Empty,
    /// The queue is not empty, and all entries are shared.
    Shared,
    /// The queue is not empty, and all entries are shared or upgradable.
    SharedOrUpgradable,
    /// The queue has no entry that was created or changed after this revision.
    UnchangedSince(i64),
}

impl AppendIf {
    fn compares(self, queue: &[u8]) -> Vec<Compare> {
        let all = |result, target, target_union| compare_all(queue, result, target, target_union);
        let value = |result, value: &[u8]| all(result, VALUE, TargetUnion::Value(value.to_vec()));
        match self {
            Self::Always => Vec::new(),
            Self::Empty => vec![all(EQUAL, CREATE, TargetUnion::CreateRevision(0))],
            // No record is equal to a limit, because every record is longer.
            Self::Shared => vec![value(GREATER, SHARED_FROM), value(LESS, UPGRADABLE_FROM)],
            Self::SharedOrUpgradable => {
                vec![value(GREATER, SHARED_FROM), value(LESS, UPGRADABLE_END)]
            }
            Self::UnchangedSince(revision) => {
                let next = TargetUnion::ModRevision(revision.saturating_add(1));
                vec![all(LESS, MODIFICATION, next)]
            }
        }
    }
}

/// Appends the entry `name` to `queue` unless the key exists or the condition fails. On success,
/// the response contains the result of the put, all entries, and, if `tombstone` is given, all
/// earlier tombstones. Otherwise it contains the key `name` and all entries.
pub(crate) fn append(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    tombstone: Option<TombstonePut>,
    condition: AppendIf,
    mode: ClaimMode,
) -> TxnRequest {
    let mut compare = vec![compare_create_revision(name, 0)];
    compare.extend(condition.compares(queue));
    let put = match condition {
        AppendIf::Always => put_behind(queue, name, record, lease, mode),
        // The other conditions admit only a claim that is granted at once.
        _ => put_op(name, record, lease),
    };
    let mut success = ops([put, OpRequest::Range(entries(queue))]);
    success.extend(tombstone.into_iter().flat_map(|tombstone| {
        [
            op(OpRequest::Range(all_tombstones(&tombstone.prefix))),
            op(put_op(&tombstone.name, Vec::new(), tombstone.lease)),
        ]
    }));
    let failure = ops([OpRequest::Range(get(name)), OpRequest::Range(entries(queue))]);
    TxnRequest { compare, success, failure }
}

/// Reads all entries and all tombstones of a queue.
pub(crate) fn read_entries(queue: &[u8], tombstone_prefix: Option<&[u8]>) -> TxnRequest {
    let mut success = ops([OpRequest::Range(entries(queue))]);
    success.extend(tombstone_prefix.map(|prefix| op(OpRequest::Range(all_tombstones(prefix)))));
    TxnRequest { success, ..TxnRequest::default() }
}

fn all_tombstones(prefix: &[u8]) -> RangeRequest {
    RangeRequest { limit: 0, ..some_tombstones(prefix) }
}

/// Puts the request `name` to upgrade the claim of `own_entry`, if `own_entry` has not changed and
/// the key `name` does not exist. On success, the response contains the result of the put, then the
/// parts of [`read_entries`].
pub(crate) fn request_upgrade(
    queue: &[u8],
    own_entry: &KeyValue,
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    tombstone_prefix: Option<&[u8]>,
) -> TxnRequest {
    let mut txn = read_entries(queue, tombstone_prefix);
    txn.success.insert(0, op(put_op(name, record, lease)));
    txn.compare = vec![compare_mod_revision(own_entry), compare_create_revision(name, 0)];
    txn
}

/// Replaces the record of `own_entry` if it has not changed and all entries in `must_exist` exist.
/// Then also deletes `upgrade_request`, if given.
pub(crate) fn replace_record(
    own_entry: &KeyValue,
    record: Vec<u8>,
    must_exist: &[&KeyValue],
    upgrade_request: Option<&KeyValue>,
) -> TxnRequest {
    let mut compare = vec![compare_mod_revision(own_entry)];
    let exists = |entry: &&KeyValue| compare_create_revision(&entry.key, entry.create_revision);
    compare.extend(must_exist.iter().map(exists));
    let put = PutRequest {
        key: own_entry.key.clone(),
        value: record,
        ignore_lease: true,
        ..PutRequest::default()
    };
    let mut success = ops([OpRequest::Put(put)]);
    success.extend(upgrade_request.map(|request| op(delete_op(&request.key))));
    TxnRequest { compare, success, failure: Vec::new() }
}

/// Replaces the records of these waiting entries, if none has changed and all entries in
/// `must_exist` exist.
pub(crate) fn replace_waiting(
    records: &[(&KeyValue, Vec<u8>)],
    must_exist: &[&KeyValue],
) -> TxnRequest {
    let mut txn = TxnRequest::default();
    let exists = |entry: &&KeyValue| compare_create_revision(&entry.key, entry.create_revision);
    txn.compare.extend(must_exist.iter().map(exists));
    for (entry, record) in records {
        let replacement = replace_record(entry, record.clone(), &[], None);
        txn.compare.extend(replacement.compare);
        txn.success.extend(replacement.success);
    }
    txn
}

/// Puts the entry `name` of a claim of this mode into `queue`. The record has no token if the queue
/// contains a record without one or, unless this claim is shared, an upgradable or upgraded claim.
/// An upgrade may then take a larger token before this claim is granted.
fn put_behind(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    mode: ClaimMode,
) -> OpRequest {
    // An upgrade waits for readers that hold the key, so their tokens are smaller. It removes the
    // tokens of waiting readers itself.
    let end = if mode == ClaimMode::Shared { WITHOUT_TOKEN_FROM } else { UPGRADABLE_FROM };
    let end = TargetUnion::Value(end.to_vec());
    let without_token = record::without_token(&record, mode);
    let put_if = |compare, record, otherwise| {
        let success = ops([put_op(name, record, lease)]);
        OpRequest::Txn(TxnRequest { compare: vec![compare], success, failure: ops([otherwise]) })
    };
    let keeps_token = compare_all(queue, LESS, VALUE, end);
    let behind = put_if(keeps_token, record.clone(), put_op(name, without_token, lease));
    // In an empty queue, the comparison of values is false.
    let is_empty = compare_all(queue, EQUAL, CREATE, TargetUnion::CreateRevision(0));
    put_if(is_empty, record, behind)
}

/// Compares all entries of `queue`.
fn compare_all(queue: &[u8], result: i32, target: i32, target_union: TargetUnion) -> Compare {
    Compare {
        result,
        target,
        key: queue.to_vec(),
        target_union: Some(target_union),
        range_end: prefix_end(queue),
    }
}

/// Compares the revision in which `entry` was last changed.
fn compare_mod_revision(entry: &KeyValue) -> Compare {
    Compare {
        result: EQUAL,
        target: MODIFICATION,
        key: entry.key.clone(),
        target_union: Some(TargetUnion::ModRevision(entry.mod_revision)),
        range_end: Vec::new(),
    }
}

/// Returns the condition that the value of `name` begins with `prefix` and is longer.
pub(crate) fn compare_value_prefix(name: &[u8], prefix: Vec<u8>) -> [Compare; 2] {
    let compare = |result, value| Compare {
        result,
        target: VALUE,
        key: name.to_vec(),
        target_union: Some(TargetUnion::Value(value)),
        range_end: Vec::new(),
    };
    let end = prefix_end(&prefix);
    [compare(GREATER, prefix), compare(LESS, end)]
}

/// Returns two operations: a read of the existing tombstones, then the put of the new tombstone.
fn tombstone_ops(tombstone: TombstonePut) -> [RequestOp; 2] {
    [
        op(OpRequest::Range(some_tombstones(&tombstone.prefix))),
        op(put_op(&tombstone.name, Vec::new(), tombstone.lease)),
    ]
}

/// Reads up to `TOMBSTONES_MAX` tombstones.
fn some_tombstones(prefix: &[u8]) -> RangeRequest {
    RangeRequest {
        key: prefix.to_vec(),
        range_end: prefix_end(prefix),
        limit: TOMBSTONES_MAX,
        keys_only: true,
        ..RangeRequest::default()
    }
}

/// Reads the key `name`, the last entry before the revision `create_revision`, and the first entry.
///
/// If `tombstone_prefix` is given, also reads some tombstones that are older than
/// `create_revision`. If `tombstone` is given, also reads the tombstone of this name, regardless of
/// its revision.
pub(crate) fn read_queue(
    queue: &[u8],
    name: &[u8],
    create_revision: i64,
    tombstone_prefix: Option<&[u8]>,
    tombstone: Option<&[u8]>,
) -> TxnRequest {
    let mut reads =
        ops([get(name), predecessor(queue, create_revision), first_entry(queue)]
            .map(OpRequest::Range));
    reads.extend(tombstone_prefix.map(|prefix| {
        let max_create_revision = create_revision.saturating_sub(1);
        op(OpRequest::Range(RangeRequest { max_create_revision, ..some_tombstones(prefix) }))
    }));
    reads.extend(tombstone.map(|tombstone| op(OpRequest::Range(get(tombstone)))));
    TxnRequest { success: reads, ..TxnRequest::default() }
}

/// Reads the key `name` and its predecessor's key. For this transaction the members read two keys.
/// For [`read_queue`] they read the whole queue.
pub(crate) fn read_entry_and_predecessor(name: &[u8], predecessor: &[u8]) -> TxnRequest {
    read_keys([name, predecessor].into_iter())
}

/// Reads the keys `names` without their records.
pub(crate) fn read_keys<'a>(names: impl Iterator<Item = &'a [u8]>) -> TxnRequest {
    let key = |name| OpRequest::Range(RangeRequest { keys_only: true, ..get(name) });
    TxnRequest { success: ops(names.map(key)), ..TxnRequest::default() }
}

/// Deletes `name` if it was created in the revision `create_revision`.
pub(crate) fn delete(name: &[u8], create_revision: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![compare_create_revision(name, create_revision)],
        ..delete_any_revision(name)
    }
}

/// Deletes `name`, regardless of its revision.
pub(crate) fn delete_any_revision(name: &[u8]) -> TxnRequest {
    TxnRequest { success: ops([delete_op(name)]), ..TxnRequest::default() }
}

/// Like [`delete`], but always deletes the tombstone too, even if the revision of `name` differs.
pub(crate) fn delete_with_tombstone(
    name: &[u8],
    create_revision: i64,
    tombstone: Option<&[u8]>,
) -> TxnRequest {
    let mut txn = delete(name, create_revision);
    for branch in [&mut txn.success, &mut txn.failure] {
        branch.extend(tombstone.map(|tombstone| op(delete_op(tombstone))));
    }
    txn
}

/// Like [`delete_with_tombstone`]. If `name` has this revision, first reads the entries up to it.
pub(crate) fn dequeue_non_exclusive(
    queue: &[u8],
    name: &[u8],
    create_revision: i64,
    tombstone: Option<&[u8]>,
) -> TxnRequest {
    let mut txn = delete_with_tombstone(name, create_revision, tombstone);
    let before = RangeRequest { max_create_revision: create_revision, ..entries(queue) };
    txn.success.insert(0, op(OpRequest::Range(before)));
    txn
}

/// Adds the deletion of the key `name` to both branches of `txn`.
pub(crate) fn with_deletion(mut txn: TxnRequest, name: &[u8]) -> TxnRequest {
    txn.success.push(op(delete_op(name)));
    txn.failure.push(op(delete_op(name)));
    txn
}

/// Like [`delete_with_tombstone`]. If `name` has this revision, first reads the predecessor.
pub(crate) fn dequeue_exclusive(
    queue: &[u8],
    name: &[u8],
    create_revision: i64,
    tombstone: Option<&[u8]>,
) -> TxnRequest {
    let mut txn = delete_with_tombstone(name, create_revision, tombstone);
    txn.success.insert(0, op(OpRequest::Range(predecessor(queue, create_revision))));
    txn
}

/// Attaches `name` and its tombstone to other leases, if `name` was created in the revision
/// `create_revision`. The value and the creation revision of `name` do not change.
pub(crate) fn attach_lease(
    name: &[u8],
    create_revision: i64,
    lease: i64,
    tombstone: Option<(&[u8], i64)>,
) -> TxnRequest {
    let put = PutRequest { key: name.to_vec(), lease, ignore_value: true, ..PutRequest::default() };
    let mut success = ops([OpRequest::Put(put)]);
    success.extend(tombstone.map(|(tombstone, lease)| {
        op(put_op(tombstone, rewritten_tombstone_value(create_revision), lease))
    }));
    TxnRequest {
        compare: vec![compare_create_revision(name, create_revision)],
        success,
        failure: Vec::new(),
    }
}

/// Writes the tombstone of `name` again, if `name` was created in the revision `create_revision`.
pub(crate) fn rewrite_tombstone(
    name: &[u8],
    create_revision: i64,
    tombstone: &[u8],
    lease: i64,
) -> TxnRequest {
    TxnRequest {
        compare: vec![compare_create_revision(name, create_revision)],
        success: ops([put_op(tombstone, rewritten_tombstone_value(create_revision), lease)]),
        failure: Vec::new(),
    }
}

/// Returns the value of a rewritten tombstone: the creation revision of its entry.
///
/// A rewritten tombstone was not written together with its entry. Its revision may therefore be
/// newer than those of entries that were appended after its own entry. A holder that releases and
/// enqueues again may reuse the names of its entry and tombstone. The tombstone of the new entry
/// also has a newer revision, but its value is empty.
pub(crate) fn rewritten_tombstone_value(create_revision: i64) -> Vec<u8> {
    create_revision.to_string().into_bytes()
}

/// Compares the creation revision of `name` with `revision`. The creation revision of a missing key
/// is zero.
pub(crate) fn compare_create_revision(name: &[u8], revision: i64) -> Compare {
    Compare {
        result: EQUAL,
        target: CREATE,
        key: name.to_vec(),
        target_union: Some(TargetUnion::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

pub(crate) fn get(name: &[u8]) -> RangeRequest {
    RangeRequest { key: name.to_vec(), ..RangeRequest::default() }
}

/// Reads the whole queue, the first entry first.
pub(crate) fn entries(queue: &[u8]) -> RangeRequest {
    RangeRequest {
        key: queue.to_vec(),
        range_end: prefix_end(queue),
        sort_order: ASCENDING,
        sort_target: BY_CREATION,
        ..RangeRequest::default()
    }
}

pub(crate) fn first_entry(queue: &[u8]) -> RangeRequest {
    RangeRequest { limit: 1, ..entries(queue) }
}

fn newest_entries(queue: &[u8], count: i64) -> RangeRequest {
    RangeRequest { limit: count, sort_order: DESCENDING, ..entries(queue) }
}

/// Reads the last entry that was created before the revision `create_revision`.
pub(crate) fn predecessor(queue: &[u8], create_revision: i64) -> RangeRequest {
    RangeRequest {
        max_create_revision: create_revision.saturating_sub(1),
        ..newest_entries(queue, 1)
    }
}

/// Reads the entry that was created in the revision `create_revision`.
pub(crate) fn entry_created_in(queue: &[u8], create_revision: i64) -> RangeRequest {
    RangeRequest {
        min_create_revision: create_revision,
        max_create_revision: create_revision,
        limit: 1,
        ..entries(queue)
    }
}

fn put_op(name: &[u8], value: Vec<u8>, lease: i64) -> OpRequest {
    OpRequest::Put(PutRequest { key: name.to_vec(), value, lease, ..PutRequest::default() })
}

fn delete_op(name: &[u8]) -> OpRequest {
    OpRequest::Delete(DeleteRangeRequest { key: name.to_vec(), range_end: Vec::new() })
}

pub(crate) fn op(request: OpRequest) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn ops(requests: impl IntoIterator<Item = OpRequest>) -> Vec<RequestOp> {
    requests.into_iter().map(op).collect()
}

/// The limit of [`some_tombstones`]. One tombstone suffices to detect a possible loss. The claim
/// that detects the loss deletes all returned tombstones.
const TOMBSTONES_MAX: i64 = 8;

/// The response to a transaction, decoded part by part.
#[derive(Debug)]
pub(crate) struct TxnResults {
    pub(crate) succeeded: bool,
    pub(crate) header: ResponseHeader,
    parts: std::vec::IntoIter<crate::proto::ResponseOp>,
}

impl TxnResults {
    pub(crate) fn decode(response: TxnResponse) -> Result<Self, BackendError> {
        // The revision becomes the fencing token. With revision 0, the entry would appear not to
        // exist.
        let header = response.header.filter(|header| header.revision > 0);
        Ok(Self {
            succeeded: response.succeeded,
            header: header.ok_or_else(protocol_error)?,
            parts: response.responses.into_iter(),
        })
    }

    /// Skips the next part.
    pub(crate) fn skip(&mut self) -> Result<(), BackendError> {
        self.parts.next().map(drop).ok_or_else(protocol_error)
    }

    /// Returns the keys in the next part.
    pub(crate) fn next_keys(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        match self.parts.next().and_then(|part| part.response) {
            Some(OpResponse::Range(range)) => Ok(range.kvs),
            _ => Err(protocol_error()),
        }
    }

    /// Returns the keys in the next part, or none if there is no further part.
    pub(crate) fn next_keys_if_any(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        if self.parts.len() == 0 { Ok(Vec::new()) } else { self.next_keys() }
    }

    /// Returns the first key in the next part.
    pub(crate) fn next_key(&mut self) -> Result<Option<KeyValue>, BackendError> {
        Ok(self.next_keys()?.into_iter().next())
    }
}

#[cfg(test)]
mod tests {
    use registry_core::BackendErrorKind;

    use super::*;

    #[test]
    fn a_response_without_a_revision_is_an_error() {
        let response =
            |header| TxnResults::decode(TxnResponse { header, ..TxnResponse::default() });
        for header in [None, Some(ResponseHeader::default())] {
            let error = response(header).unwrap_err();
            assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Protocol, false));
        }
        let header = ResponseHeader { revision: 1, raft_term: 1 };
        assert_eq!(response(Some(header)).unwrap().header, header);
    }

    #[test]
    fn a_missing_or_unexpected_part_is_an_error() {
        let header = Some(ResponseHeader { revision: 1, raft_term: 1 });
        let deleted = Some(OpResponse::Delete(crate::proto::DeleteRangeResponse::default()));
        let parts = [None, deleted].map(|response| crate::proto::ResponseOp { response });
        for part in parts {
            let response = TxnResponse { header, succeeded: true, responses: vec![part] };
            let mut response = TxnResults::decode(response).unwrap();
            assert!(response.next_key().is_err(), "no keys");
            assert!(response.skip().is_err(), "no part remains");
        }
    }
}
