//! The messages and calls of etcd's API that locks need. The messages are written manually, so a
//! build needs no protobuf compiler. The field numbers are those of etcd's `rpc.proto` and
//! `kv.proto`. The encoding permits this file to omit unused fields.

use prost::Message;

/// A unary call.
pub(crate) trait UnaryCall: Message + Default + Clone + 'static {
    type Response: Message + Default + 'static;
    const PATH: &'static str;
}

macro_rules! calls {
    ($($request:ident -> $response:ident at $path:literal,)*) => {
        $(impl UnaryCall for $request {
            type Response = $response;
            const PATH: &'static str = $path;
        })*
    };
}

calls! {
    RangeRequest -> RangeResponse at "/etcdserverpb.KV/Range",
    TxnRequest -> TxnResponse at "/etcdserverpb.KV/Txn",
    LeaseGrantRequest -> LeaseGrantResponse at "/etcdserverpb.Lease/LeaseGrant",
    LeaseRevokeRequest -> LeaseRevokeResponse at "/etcdserverpb.Lease/LeaseRevoke",
    LeaseTimeToLiveRequest -> LeaseTimeToLiveResponse at "/etcdserverpb.Lease/LeaseTimeToLive",
    AuthenticateRequest -> AuthenticateResponse at "/etcdserverpb.Auth/Authenticate",
    StatusRequest -> StatusResponse at "/etcdserverpb.Maintenance/Status",
    MemberListRequest -> MemberListResponse at "/etcdserverpb.Cluster/MemberList",
}

/// The path of a stream of [`LeaseKeepAliveRequest`]s, whose responses arrive in order.
pub(crate) const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// The path of a stream of [`WatchRequest`]s.
pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ResponseHeader {
    /// The revision of the store when the request was executed.
    #[prost(int64, tag = "3")]
    pub(crate) revision: i64,
    /// The Raft term of the last log entry that the member had applied.
    #[prost(uint64, tag = "4")]
    pub(crate) raft_term: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(crate) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    /// Empty for a single key. Otherwise the first key after the range.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) limit: i64,
    #[prost(int32, tag = "5")]
    pub(crate) sort_order: i32,
    #[prost(int32, tag = "6")]
    pub(crate) sort_target: i32,
    #[prost(bool, tag = "8")]
    pub(crate) keys_only: bool,
    #[prost(int64, tag = "12")]
    pub(crate) min_create_revision: i64,
    #[prost(int64, tag = "13")]
    pub(crate) max_create_revision: i64,
}

/// `sort_order`: ascending.
pub(crate) const ASCENDING: i32 = 1;
/// `sort_order`: descending.
pub(crate) const DESCENDING: i32 = 2;
/// `sort_target`: the creation revision.
pub(crate) const BY_CREATION: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(crate) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) lease: i64,
    #[prost(bool, tag = "5")]
    pub(crate) ignore_value: bool,
    #[prost(bool, tag = "6")]
    pub(crate) ignore_lease: bool,
}

/// The response to a put. Locks need none of its fields.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct PutResponse {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct DeleteRangeResponse {
    #[prost(int64, tag = "2")]
    pub(crate) deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RequestOp {
    #[prost(oneof = "OpRequest", tags = "1, 2, 3, 4")]
    pub(crate) request: Option<OpRequest>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum OpRequest {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResponseOp {
    #[prost(oneof = "OpResponse", tags = "1, 2, 3")]
    pub(crate) response: Option<OpResponse>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum OpResponse {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(PutResponse),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeResponse),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Compare {
    #[prost(int32, tag = "1")]
    pub(crate) result: i32,
    #[prost(int32, tag = "2")]
    pub(crate) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) key: Vec<u8>,
    #[prost(oneof = "TargetUnion", tags = "4, 5, 6, 7, 8")]
    pub(crate) target_union: Option<TargetUnion>,
    /// If this field is set, all keys from `key` to `range_end` must satisfy the comparison. In an
    /// empty range, the compared revision is zero.
    #[prost(bytes = "vec", tag = "64")]
    pub(crate) range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum TargetUnion {
    #[prost(int64, tag = "4")]
    Version(i64),
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(bytes = "vec", tag = "7")]
    Value(Vec<u8>),
    #[prost(int64, tag = "8")]
    Lease(i64),
}

/// `result`: equal.
pub(crate) const EQUAL: i32 = 0;
/// `result`: the key's field is greater than the given value.
pub(crate) const GREATER: i32 = 1;
/// `result`: the key's field is less than the given value.
pub(crate) const LESS: i32 = 2;
/// `target`: the creation revision, which is zero for a missing key.
pub(crate) const CREATE: i32 = 1;
/// `target`: the revision of the last change, which is zero for a missing key.
pub(crate) const MODIFICATION: i32 = 2;
/// `target`: the value. The comparison with a missing key is false.
pub(crate) const VALUE: i32 = 3;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub(crate) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(crate) responses: Vec<ResponseOp>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseGrantRequest {
    /// In seconds.
    #[prost(int64, tag = "1")]
    pub(crate) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
    #[prost(string, tag = "4")]
    pub(crate) error: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseRevokeResponse {}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseKeepAliveResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
    /// Zero or negative for a lease that the member does not know.
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseTimeToLiveRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct LeaseTimeToLiveResponse {
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
    #[prost(int64, tag = "4")]
    pub(crate) granted_ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchRequest {
    #[prost(oneof = "WatchUnion", tags = "1, 2, 3")]
    pub(crate) request: Option<WatchUnion>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum WatchUnion {
    #[prost(message, tag = "1")]
    Create(WatchCreateRequest),
    #[prost(message, tag = "2")]
    Cancel(WatchCancelRequest),
    #[prost(message, tag = "3")]
    Progress(WatchProgressRequest),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    /// Empty for a single key. Otherwise the first key after the range.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) start_revision: i64,
    #[prost(int32, repeated, tag = "5")]
    pub(crate) filters: Vec<i32>,
    /// The client chooses this id. etcd supports such ids from version 3.4 on.
    #[prost(int64, tag = "7")]
    pub(crate) watch_id: i64,
}

/// `filters`: no events for puts.
pub(crate) const NO_PUTS: i32 = 0;

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct WatchCancelRequest {
    #[prost(int64, tag = "1")]
    pub(crate) watch_id: i64,
}

/// Requests a response over the stream, to detect a dead connection.
#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct WatchProgressRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct WatchResponse {
    #[prost(int64, tag = "2")]
    pub(crate) watch_id: i64,
    /// This response reports that the member has created the watch.
    #[prost(bool, tag = "3")]
    pub(crate) created: bool,
    #[prost(bool, tag = "4")]
    pub(crate) canceled: bool,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<WatchEvent>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct WatchEvent {
    /// Zero for a put, one for a deletion.
    #[prost(int32, tag = "1")]
    pub(crate) kind: i32,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(crate) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) password: String,
}

// Written manually, because the fields include a password.
impl std::fmt::Debug for AuthenticateRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthenticateRequest").finish_non_exhaustive()
    }
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub(crate) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(crate) token: String,
}

impl std::fmt::Debug for AuthenticateResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthenticateResponse").finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct StatusRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StatusResponse {
    #[prost(string, tag = "2")]
    pub(crate) version: String,
    /// The leader's id. Zero if the member has no leader.
    #[prost(uint64, tag = "4")]
    pub(crate) leader: u64,
    #[prost(string, repeated, tag = "8")]
    pub(crate) errors: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct MemberListRequest {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct MemberListResponse {
    #[prost(message, repeated, tag = "2")]
    pub(crate) members: Vec<ClusterMember>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(crate) struct ClusterMember {
    #[prost(bool, tag = "5")]
    pub(crate) is_learner: bool,
}
