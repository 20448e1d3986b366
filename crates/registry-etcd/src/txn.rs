//! Builds the requests about a queue and reads their responses.

use registry_core::BackendError;

use crate::error::unreadable;
use crate::names::end_of;
use crate::wire::{
    ASCENDING, BY_CREATION, CREATE, Compare, DESCENDING, DeleteRangeRequest, Done, EQUAL, KeyValue,
    Op, PutRequest, RangeRequest, RequestOp, ResponseHeader, Target, TxnRequest, TxnResponse,
};

/// The tombstone of a claim that joins a queue.
pub(crate) struct Trace {
    pub(crate) name: Vec<u8>,
    pub(crate) lease: i64,
    /// The common prefix of all tombstones of this queue.
    pub(crate) all: Vec<u8>,
}

/// Appends `name` to `queue` unless it exists. On success, the response contains the result of the
/// put, the two newest entries, and some existing tombstones. Otherwise it contains the key `name`
/// and the first entry.
pub(crate) fn join(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    trace: Option<Trace>,
) -> TxnRequest {
    let mut success = ops([put(name, record, lease), Op::Range(newest(queue, 2))]);
    success.extend(trace.into_iter().flat_map(leave_trace));
    TxnRequest {
        compare: vec![created_in(name, 0)],
        success,
        failure: ops([Op::Range(one(name)), Op::Range(first(queue))]),
    }
}

/// Puts `name` into `queue` if the queue is empty. On success, the response contains the result of
/// the put and some existing tombstones. Otherwise it contains the key `name` and the first entry.
pub(crate) fn join_empty(
    queue: &[u8],
    name: &[u8],
    record: Vec<u8>,
    lease: i64,
    trace: Option<Trace>,
) -> TxnRequest {
    let mut nobody = created_in(queue, 0);
    nobody.range_end = end_of(queue);
    let mut success = ops([put(name, record, lease)]);
    success.extend(trace.into_iter().flat_map(leave_trace));
    TxnRequest {
        compare: vec![nobody],
        success,
        failure: ops([Op::Range(one(name)), Op::Range(first(queue))]),
    }
}

/// Reads the existing tombstones before it writes the own one.
fn leave_trace(trace: Trace) -> [RequestOp; 2] {
    [op(Op::Range(some_traces(&trace.all))), op(put(&trace.name, Vec::new(), trace.lease))]
}

fn some_traces(all: &[u8]) -> RangeRequest {
    RangeRequest {
        key: all.to_vec(),
        range_end: end_of(all),
        limit: TRACES,
        keys_only: true,
        ..RangeRequest::default()
    }
}

/// Reads the key `name`, the last entry before the revision `created`, and the first entry.
///
/// With the prefix `traces`, also reads some tombstones that are older than `created`. With
/// `trace`, also reads that tombstone, whatever its revision.
pub(crate) fn look(
    queue: &[u8],
    name: &[u8],
    created: i64,
    traces: Option<&[u8]>,
    trace: Option<&[u8]>,
) -> TxnRequest {
    let mut looks = ops([one(name), before(queue, created), first(queue)].map(Op::Range));
    looks.extend(traces.map(|all| {
        let max_create_revision = created.saturating_sub(1);
        op(Op::Range(RangeRequest { max_create_revision, ..some_traces(all) }))
    }));
    looks.extend(trace.map(|trace| op(Op::Range(one(trace)))));
    TxnRequest { success: looks, ..TxnRequest::default() }
}

/// Reads the key `name` and its predecessor's key. The cost does not depend on the length of the
/// queue, unlike [`look`], for which the members read all of it.
pub(crate) fn peek(name: &[u8], before: &[u8]) -> TxnRequest {
    notify_all([name, before].into_iter())
}

/// Reads the keys `names` without their records.
pub(crate) fn notify_all<'a>(names: impl Iterator<Item = &'a [u8]>) -> TxnRequest {
    let key = |name| Op::Range(RangeRequest { keys_only: true, ..one(name) });
    TxnRequest { success: ops(names.map(key)), ..TxnRequest::default() }
}

/// Deletes `name` if it was created in the revision `created`.
pub(crate) fn delete(name: &[u8], created: i64) -> TxnRequest {
    TxnRequest { compare: vec![created_in(name, created)], ..erase(name) }
}

/// Deletes `name`, whatever its revision.
pub(crate) fn erase(name: &[u8]) -> TxnRequest {
    TxnRequest { success: ops([gone(name)]), ..TxnRequest::default() }
}

/// Like [`delete`], and always deletes the tombstone as well.
pub(crate) fn delete_with(name: &[u8], created: i64, trace: Option<&[u8]>) -> TxnRequest {
    let mut txn = delete(name, created);
    for answers in [&mut txn.success, &mut txn.failure] {
        answers.extend(trace.map(|trace| op(gone(trace))));
    }
    txn
}

/// Like [`delete_with`], but first reads the last entry before it.
pub(crate) fn leave(queue: &[u8], name: &[u8], created: i64, trace: Option<&[u8]>) -> TxnRequest {
    let mut txn = delete_with(name, created, trace);
    txn.success.insert(0, op(Op::Range(before(queue, created))));
    txn
}

/// Attaches `name` and its tombstone to other leases, if `name` was created in the revision
/// `created`. Its value and creation revision do not change.
pub(crate) fn move_to(
    name: &[u8],
    created: i64,
    lease: i64,
    trace: Option<(&[u8], i64)>,
) -> TxnRequest {
    let put_again =
        PutRequest { key: name.to_vec(), lease, ignore_value: true, ..PutRequest::default() };
    let mut success = ops([Op::Put(put_again)]);
    success.extend(trace.map(|(trace, lease)| op(put(trace, left_again(created), lease))));
    TxnRequest { compare: vec![created_in(name, created)], success, failure: Vec::new() }
}

/// Writes the tombstone of `name` again, if `name` was created in the revision `created`.
pub(crate) fn leave_again(name: &[u8], created: i64, trace: &[u8], lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![created_in(name, created)],
        success: ops([put(trace, left_again(created), lease)]),
        failure: Vec::new(),
    }
}

/// Returns the value of a tombstone that was not written together with its entry: the creation
/// revision of that entry. Such a tombstone may be younger than the entries behind its own entry,
/// as is the tombstone of a holder that rejoins.
pub(crate) fn left_again(created: i64) -> Vec<u8> {
    created.to_string().into_bytes()
}

/// Compares the creation revision of `name` with `revision`; zero means that the key does not
/// exist.
pub(crate) fn created_in(name: &[u8], revision: i64) -> Compare {
    Compare {
        result: EQUAL,
        target: CREATE,
        key: name.to_vec(),
        than: Some(Target::CreateRevision(revision)),
        range_end: Vec::new(),
    }
}

pub(crate) fn one(name: &[u8]) -> RangeRequest {
    RangeRequest { key: name.to_vec(), ..RangeRequest::default() }
}

/// Reads the whole queue, the first entry first.
pub(crate) fn all(queue: &[u8]) -> RangeRequest {
    RangeRequest {
        key: queue.to_vec(),
        range_end: end_of(queue),
        sort_order: ASCENDING,
        sort_target: BY_CREATION,
        ..RangeRequest::default()
    }
}

pub(crate) fn first(queue: &[u8]) -> RangeRequest {
    RangeRequest { limit: 1, ..all(queue) }
}

fn newest(queue: &[u8], count: i64) -> RangeRequest {
    RangeRequest { limit: count, sort_order: DESCENDING, ..all(queue) }
}

/// Reads the last entry that was created before the revision `created`.
pub(crate) fn before(queue: &[u8], created: i64) -> RangeRequest {
    RangeRequest { max_create_revision: created.saturating_sub(1), ..newest(queue, 1) }
}

/// Reads the entry that was created in the revision `created`.
pub(crate) fn of_revision(queue: &[u8], created: i64) -> RangeRequest {
    RangeRequest {
        min_create_revision: created,
        max_create_revision: created,
        limit: 1,
        ..all(queue)
    }
}

fn put(name: &[u8], value: Vec<u8>, lease: i64) -> Op {
    Op::Put(PutRequest { key: name.to_vec(), value, lease, ignore_value: false })
}

fn gone(name: &[u8]) -> Op {
    Op::Delete(DeleteRangeRequest { key: name.to_vec(), range_end: Vec::new() })
}

pub(crate) fn op(op: Op) -> RequestOp {
    RequestOp { request: Some(op) }
}

fn ops(all: impl IntoIterator<Item = Op>) -> Vec<RequestOp> {
    all.into_iter().map(op).collect()
}

/// The limit of tombstones per response. One suffices to detect a possible loss; the others are
/// erased together with it.
const TRACES: i64 = 8;

/// The response to a transaction, read part by part.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) succeeded: bool,
    pub(crate) header: ResponseHeader,
    parts: std::vec::IntoIter<crate::wire::ResponseOp>,
}

impl Answer {
    pub(crate) fn read(answer: TxnResponse) -> Result<Self, BackendError> {
        // Without a revision there is no token, and the entry would look as if it did not exist.
        let header = answer.header.filter(|header| header.revision > 0);
        Ok(Self {
            succeeded: answer.succeeded,
            header: header.ok_or_else(unreadable)?,
            parts: answer.responses.into_iter(),
        })
    }

    /// Skips the next part.
    pub(crate) fn skip(&mut self) -> Result<(), BackendError> {
        self.parts.next().map(drop).ok_or_else(unreadable)
    }

    /// Returns the keys in the next part.
    pub(crate) fn keys(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        match self.parts.next().and_then(|part| part.response) {
            Some(Done::Range(range)) => Ok(range.kvs),
            _ => Err(unreadable()),
        }
    }

    /// Returns the keys in the next part, or none if there is no further part.
    pub(crate) fn keys_if_any(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        if self.parts.len() == 0 { Ok(Vec::new()) } else { self.keys() }
    }

    /// Returns the first key in the next part.
    pub(crate) fn key(&mut self) -> Result<Option<KeyValue>, BackendError> {
        Ok(self.keys()?.into_iter().next())
    }
}

#[cfg(test)]
mod tests {
    use registry_core::BackendErrorKind;

    use super::*;

    #[test]
    fn an_answer_that_tells_no_revision_is_none() {
        let answer = |header| Answer::read(TxnResponse { header, ..TxnResponse::default() });
        for header in [None, Some(ResponseHeader::default())] {
            let error = answer(header).unwrap_err();
            assert_eq!((error.kind(), error.refused()), (BackendErrorKind::Protocol, false));
        }
        let header = ResponseHeader { revision: 1, raft_term: 1 };
        assert_eq!(answer(Some(header)).unwrap().header, header);
    }

    #[test]
    fn parts_that_are_missing_or_others_are_an_error() {
        let header = Some(ResponseHeader { revision: 1, raft_term: 1 });
        let deleted = Some(Done::Delete(crate::wire::DeleteRangeResponse::default()));
        let parts = [None, deleted].map(|response| crate::wire::ResponseOp { response });
        for part in parts {
            let answer = TxnResponse { header, succeeded: true, responses: vec![part] };
            let mut answer = Answer::read(answer).unwrap();
            assert!(answer.key().is_err(), "no keys");
            assert!(answer.skip().is_err(), "nothing is left");
        }
    }
}
