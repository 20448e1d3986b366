//! Measures the overhead of the engine and the etcd store over the two transactions that a lock
//! needs. Also measures etcd's own lock service (`v3lock`), and the hand-over to the next waiter in
//! the queue.
//!
//! Client and server may run on all processors: the server does several things at once for each
//! request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_registry_benches::{
    compare_in_task, hand_over_time, median_of, record_server, row, write_results,
};
use prost::Message;
use registry_core::{LockOptions, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// Long enough for a waiter to enqueue and to start its watch. The server is then equally idle
/// before the measured write and before the measured release.
const PAUSE: Duration = Duration::from_millis(10);

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let server = EtcdServer::start().await.unwrap();
        let status = server.ctl(&["endpoint", "status"]).await.unwrap();
        record_server("etcd", status.split(", ").nth(2).unwrap_or_default());
        let channel = Endpoint::from_shared(server.url()).unwrap().connect().await.unwrap();
        let granted: LeaseGrantResponse =
            call(&channel, "/etcdserverpb.Lease/LeaseGrant", LeaseGrantRequest { ttl: 3_600 })
                .await;
        let reference = EtcdReference { channel: channel.clone(), lease: granted.id };
        let registry = open(&server).await;
        pairs(&registry, &reference).await;

        // The measured time begins with the release call and ends with the next waiter's guard. Its
        // reference is a write on the same channel.
        let other = open(&server).await;
        let (mut hand_overs, mut writes) = (Vec::new(), Vec::new());
        for round in 0..400 {
            let registries = [&registry, &other];
            let locks = [round, round + 1].map(|n| registries[n % 2].obtain("handed"));
            hand_overs.push(hand_over_time(locks, &LockOptions::new(), PAUSE).await);
            tokio::time::sleep(PAUSE).await;
            let started = Instant::now();
            let create_revision = reference.enqueue().await;
            writes.push(started.elapsed());
            reference.dequeue(create_revision).await;
        }
        let row = row("hand-over", "etcd: from a release to the grant of another client");
        let hand_over = row.measured(median_of(hand_overs), "ns");
        hand_over.against("a write after the same idle time", median_of(writes)).record();
        _ = registry.close(Duration::from_secs(1)).await;
        _ = other.close(Duration::from_secs(1)).await;
    });
    write_results("etcd");
}

async fn pairs(registry: &Registry, reference: &EtcdReference) {
    let lock = registry.obtain("orders/42");
    let lock_and_unlock = move |pairs| {
        let lock = lock.clone();
        async move {
            for _ in 0..pairs {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        }
    };
    let two_transactions = {
        let reference = reference.clone();
        move |pairs| {
            let reference = reference.clone();
            async move {
                for _ in 0..pairs {
                    let create_revision = reference.enqueue().await;
                    reference.dequeue(create_revision).await;
                }
            }
        }
    };
    let uncontended = row("pairs", "etcd: uncontended lock and unlock");
    compare_in_task(
        uncontended.clone(),
        "the two bare transactions",
        two_transactions.clone(),
        lock_and_unlock.clone(),
    )
    .await;
    let reference = reference.clone();
    let lock_with_service = move |pairs| {
        let reference = reference.clone();
        async move {
            for _ in 0..pairs {
                reference.lock_with_service().await;
            }
        }
    };
    const AGAINST: &str = "the servers' own locks (`v3lock`)";
    compare_in_task(uncontended, AGAINST, lock_with_service.clone(), lock_and_unlock).await;
    let bare = row("pairs", "etcd: the two bare transactions");
    compare_in_task(bare, AGAINST, lock_with_service, two_transactions).await;
}

/// Acquires and releases locks without the engine. All its keys have one long lease.
#[derive(Clone)]
struct EtcdReference {
    channel: Channel,
    lease: i64,
}

impl EtcdReference {
    fn key(&self) -> Vec<u8> {
        format!("bare/{:x}", self.lease).into_bytes()
    }

    /// Runs the transaction with which the lock recipe of etcd joins a queue. Returns the creation
    /// revision of its key.
    async fn enqueue(&self) -> i64 {
        let enqueue = enqueue(&self.key(), self.lease);
        let response: TxnResponse = call(&self.channel, "/etcdserverpb.KV/Txn", enqueue).await;
        assert!(response.succeeded);
        response.header.unwrap().revision
    }

    async fn dequeue(&self, create_revision: i64) {
        let dequeue = dequeue(&self.key(), create_revision);
        let response: TxnResponse = call(&self.channel, "/etcdserverpb.KV/Txn", dequeue).await;
        assert!(response.succeeded);
    }

    /// Locks and unlocks with etcd's own lock service.
    async fn lock_with_service(&self) {
        let lock = LockRequest { name: b"served".to_vec(), lease: self.lease };
        let response: LockResponse = call(&self.channel, "/v3lockpb.Lock/Lock", lock).await;
        let unlock = UnlockRequest { key: response.key };
        let _: UnlockResponse = call(&self.channel, "/v3lockpb.Lock/Unlock", unlock).await;
    }
}

async fn open(server: &EtcdServer) -> Registry {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    let backend = EtcdBackend::open(config).await.unwrap();
    // The interval is so long that a hand-over is always caused by the watch, and never by a poll.
    Registry::builder(Arc::new(backend)).poll(Duration::from_secs(60)).build().unwrap()
}

async fn call<Q: Message + 'static, A: Message + Default + 'static>(
    channel: &Channel,
    path: &'static str,
    request: Q,
) -> A {
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<Q, A>::default();
    let path = PathAndQuery::from_static(path);
    grpc.unary(Request::new(request), path, codec).await.unwrap().into_inner()
}

/// Returns the transaction with which etcd's lock recipe joins a queue.
fn enqueue(key: &[u8], lease: i64) -> TxnRequest {
    let queue = RangeRequest {
        key: b"bare/".to_vec(),
        range_end: b"bare0".to_vec(),
        limit: 1,
        sort_order: 1,
        sort_target: 2,
    };
    let put = PutRequest { key: key.to_vec(), lease };
    let own = RangeRequest { key: key.to_vec(), ..RangeRequest::default() };
    TxnRequest {
        compare: vec![compare(key, 0)],
        success: vec![RequestOp { put: Some(put), ..RequestOp::default() }, range(queue.clone())],
        failure: vec![range(own), range(queue)],
    }
}

fn dequeue(key: &[u8], create_revision: i64) -> TxnRequest {
    let delete = DeleteRangeRequest { key: key.to_vec() };
    let success = vec![RequestOp { delete: Some(delete), ..RequestOp::default() }];
    TxnRequest { compare: vec![compare(key, create_revision)], success, failure: Vec::new() }
}

/// Returns the condition that `key` has this creation revision. Zero means that the key does not
/// exist.
fn compare(key: &[u8], create_revision: i64) -> Compare {
    Compare { target: 1, key: key.to_vec(), create_revision: Some(create_revision) }
}

fn range(range: RangeRequest) -> RequestOp {
    RequestOp { range: Some(range), ..RequestOp::default() }
}

/// Defines parts of etcd's protobuf messages: only the fields that this benchmark uses.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $(#[prost($($tag:tt)*)] $field:ident: $kind:ty,)* })*) => {
        $($(#[$doc])* #[derive(Clone, PartialEq, Message)] struct $name {
            $(#[prost($($tag)*)] $field: $kind,)*
        })*
    };
}

messages! {
    UnlockResponse {}
    ResponseHeader { #[prost(int64, tag = "3")] revision: i64, }
    LeaseGrantRequest { #[prost(int64, tag = "1")] ttl: i64, }
    LeaseGrantResponse { #[prost(int64, tag = "2")] id: i64, }
    RangeRequest {
        #[prost(bytes = "vec", tag = "1")] key: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] range_end: Vec<u8>,
        #[prost(int64, tag = "3")] limit: i64,
        #[prost(int32, tag = "5")] sort_order: i32,
        #[prost(int32, tag = "6")] sort_target: i32,
    }
    PutRequest {
        #[prost(bytes = "vec", tag = "1")] key: Vec<u8>,
        #[prost(int64, tag = "3")] lease: i64,
    }
    DeleteRangeRequest { #[prost(bytes = "vec", tag = "1")] key: Vec<u8>, }
    RequestOp {
        #[prost(message, optional, tag = "1")] range: Option<RangeRequest>,
        #[prost(message, optional, tag = "2")] put: Option<PutRequest>,
        #[prost(message, optional, tag = "3")] delete: Option<DeleteRangeRequest>,
    }
    Compare {
        #[prost(int32, tag = "2")] target: i32,
        #[prost(bytes = "vec", tag = "3")] key: Vec<u8>,
        #[prost(int64, optional, tag = "5")] create_revision: Option<i64>,
    }
    TxnRequest {
        #[prost(message, repeated, tag = "1")] compare: Vec<Compare>,
        #[prost(message, repeated, tag = "2")] success: Vec<RequestOp>,
        #[prost(message, repeated, tag = "3")] failure: Vec<RequestOp>,
    }
    TxnResponse {
        #[prost(message, optional, tag = "1")] header: Option<ResponseHeader>,
        #[prost(bool, tag = "2")] succeeded: bool,
    }
    LockRequest {
        #[prost(bytes = "vec", tag = "1")] name: Vec<u8>,
        #[prost(int64, tag = "2")] lease: i64,
    }
    LockResponse { #[prost(bytes = "vec", tag = "2")] key: Vec<u8>, }
    UnlockRequest { #[prost(bytes = "vec", tag = "1")] key: Vec<u8>, }
}
