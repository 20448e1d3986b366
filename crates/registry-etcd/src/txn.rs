//! What is asked of etcd about a queue, and how the answers read.

use registry_core::BackendError;

use crate::error::unreadable;
use crate::names::end_of;
use crate::wire::{
    ASCENDING, BY_CREATION, CREATE, Compare, DESCENDING, DeleteRangeRequest, Done, EQUAL, KeyValue,
    Op, PutRequest, RangeRequest, RequestOp, ResponseHeader, Target, TxnRequest, TxnResponse,
};

/// The trace of the one who joins a queue.
pub(crate) struct Trace {
    pub(crate) name: Vec<u8>,
    pub(crate) lease: i64,
    /// What the names of all traces of this queue begin with.
    pub(crate) all: Vec<u8>,
}

/// Puts `name` at the end of `queue`, unless it is in it. Answers with what was put, with the two newest of the queue, and with some of the
/// traces that there were; or else with what is under `name`, and with the first of the queue.
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

/// Puts `name` into `queue` if that is empty. Answers with what was put, and with some of the traces that there were; or else with what is
/// under `name`, and with the first of the queue.
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

/// First what there is, then the own one.
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

/// Answers with what is under `name`, with the one that came last before the revision `created`, and with the first of the queue. With
/// `traces`, what all of them begin with, also with some that are older than `created`; and with what is under `trace`, whenever that came
/// to be.
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

/// Answers with what is under `name`, and with what is under the name of the one before it. Costs the members the same however long the
/// queue is, other than [`look`], for which they go through all of it.
pub(crate) fn peek(name: &[u8], before: &[u8]) -> TxnRequest {
    look_at_all([name, before].into_iter())
}

/// Answers with what is under each of `names`, without the records.
pub(crate) fn look_at_all<'a>(names: impl Iterator<Item = &'a [u8]>) -> TxnRequest {
    let key = |name| Op::Range(RangeRequest { keys_only: true, ..one(name) });
    TxnRequest { success: ops(names.map(key)), ..TxnRequest::default() }
}

/// Deletes `name` if it is the key that came to be in `created`.
pub(crate) fn delete(name: &[u8], created: i64) -> TxnRequest {
    TxnRequest { compare: vec![created_in(name, created)], ..erase(name) }
}

/// Deletes `name`, whichever key it is.
pub(crate) fn erase(name: &[u8]) -> TxnRequest {
    TxnRequest { success: ops([gone(name)]), ..TxnRequest::default() }
}

/// As [`delete`], with its trace, which goes in any case.
pub(crate) fn delete_with(name: &[u8], created: i64, trace: Option<&[u8]>) -> TxnRequest {
    let mut txn = delete(name, created);
    for answers in [&mut txn.success, &mut txn.failure] {
        answers.extend(trace.map(|trace| op(gone(trace))));
    }
    txn
}

/// As [`delete_with`]; answers first with the one that came last before it.
pub(crate) fn leave(queue: &[u8], name: &[u8], created: i64, trace: Option<&[u8]>) -> TxnRequest {
    let mut txn = delete_with(name, created, trace);
    txn.success.insert(0, op(Op::Range(before(queue, created))));
    txn
}

/// Attaches `name`, and its trace, to other leases if it is the key that came to be in `created`, which stays as it is.
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

/// Leaves a trace for `name` again, if that is the key that came to be in `created`.
pub(crate) fn leave_again(name: &[u8], created: i64, trace: &[u8], lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![created_in(name, created)],
        success: ops([put(trace, left_again(created), lease)]),
        failure: Vec::new(),
    }
}

/// What stands in a trace that was not left together with its place: which one that is. For it may be younger than places behind that one,
/// as is the trace of whoever stands there again later.
pub(crate) fn left_again(created: i64) -> Vec<u8> {
    created.to_string().into_bytes()
}

/// That `name` is the key that came to be in `revision`; that it is not there, for zero.
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

/// All of a queue, the first one first.
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

/// The one that came last before the revision `created`.
pub(crate) fn before(queue: &[u8], created: i64) -> RangeRequest {
    RangeRequest { max_create_revision: created.saturating_sub(1), ..newest(queue, 1) }
}

/// The one that came to be in `created`.
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

/// How many traces are told at once. One is enough to be careful; the others are done away with together with it.
const TRACES: i64 = 8;

/// The answer to a transaction, read part by part.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) succeeded: bool,
    pub(crate) header: ResponseHeader,
    parts: std::vec::IntoIter<crate::wire::ResponseOp>,
}

impl Answer {
    pub(crate) fn read(answer: TxnResponse) -> Result<Self, BackendError> {
        // Without a revision there would be no token, and a place that looks as if nobody had it.
        let header = answer.header.filter(|header| header.revision > 0);
        Ok(Self {
            succeeded: answer.succeeded,
            header: header.ok_or_else(unreadable)?,
            parts: answer.responses.into_iter(),
        })
    }

    /// Passes over a part.
    pub(crate) fn skip(&mut self) -> Result<(), BackendError> {
        self.parts.next().map(drop).ok_or_else(unreadable)
    }

    /// The keys that the next part has found.
    pub(crate) fn keys(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        match self.parts.next().and_then(|part| part.response) {
            Some(Done::Range(range)) => Ok(range.kvs),
            _ => Err(unreadable()),
        }
    }

    /// The keys that the next part has found, if there is such a part.
    pub(crate) fn keys_if_any(&mut self) -> Result<Vec<KeyValue>, BackendError> {
        if self.parts.len() == 0 { Ok(Vec::new()) } else { self.keys() }
    }

    /// The first key that the next part has found.
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
