//! Measures the overhead of the engine and the etcd store over the two transactions that a lock
//! needs. Also measures the lock that the servers offer themselves, and the hand-over to the next
//! waiter in the queue.
//!
//! Client and server may run on all processors: the server does several things at once for each
//! request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_registry_benches::in_a_task;
use prost::Message;
use registry_core::{LockRegistry, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_testkit::etcd::EtcdServer;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// Long enough for a waiter to enqueue and to listen. The server is then equally idle before the
/// measured write and before the measured release.
const PAUSE: Duration = Duration::from_millis(10);

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let server = EtcdServer::start().await.unwrap();
        let channel = Endpoint::from_shared(server.url()).unwrap().connect().await.unwrap();
        let granted: Granted =
            call(&channel, "/etcdserverpb.Lease/LeaseGrant", Grant { ttl: 3_600 }).await;
        let bare = Bare { channel: channel.clone(), lease: granted.id };
        let registry = open(&server).await;
        pairs(&registry, &bare).await;

        // From the call that releases the lock to the next waiter's guard, in units of a write on
        // the same channel.
        let other = open(&server).await;
        let (mut hand_overs, mut writes) = (Vec::new(), Vec::new());
        for round in 0..400 {
            let (from, to) = if round % 2 == 0 { (&registry, &other) } else { (&other, &registry) };
            let guard = from.obtain("handed").lock().await.unwrap();
            let next = to.obtain("handed");
            let waiting = tokio::spawn(async move {
                let guard = next.lock().await.unwrap();
                (Instant::now(), guard)
            });
            tokio::time::sleep(PAUSE).await;
            let begun = Instant::now();
            guard.unlock().await.unwrap();
            let (ended, guard) = waiting.await.unwrap();
            hand_overs.push(ended - begun);
            guard.unlock().await.unwrap();
            tokio::time::sleep(PAUSE).await;
            let begun = Instant::now();
            let created = bare.join().await;
            writes.push(begun.elapsed());
            bare.leave(created).await;
        }
        let (hand_over, write) = (middle(hand_overs), middle(writes));
        let times = hand_over.as_secs_f64() / write.as_secs_f64();
        println!("hand-over on etcd: {hand_over:?}, a write {write:?}: {times:.2} writes");
        registry.close(Duration::from_secs(1)).await;
        other.close(Duration::from_secs(1)).await;
    });
}

async fn pairs(registry: &Registry, bare: &Bare) {
    const OURS: &str = "lock and unlock";
    let lock = registry.obtain("orders/42");
    let ours = move |pairs| {
        let lock = lock.clone();
        async move {
            for _ in 0..pairs {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }
        }
    };
    let two = {
        let bare = bare.clone();
        move |pairs| {
            let bare = bare.clone();
            async move {
                for _ in 0..pairs {
                    let created = bare.join().await;
                    bare.leave(created).await;
                }
            }
        }
    };
    in_a_task("uncontended pairs on etcd", two.clone(), OURS, ours.clone()).await;
    let bare = bare.clone();
    let served = move |pairs| {
        let bare = bare.clone();
        async move {
            for _ in 0..pairs {
                bare.served().await;
            }
        }
    };
    const BESIDE: &str = "uncontended pairs on etcd, beside its own locks";
    in_a_task(BESIDE, served.clone(), OURS, ours).await;
    in_a_task(BESIDE, served, "the two bare transactions", two).await;
}

/// Locks with one long lease, created once.
#[derive(Clone)]
struct Bare {
    channel: Channel,
    lease: i64,
}

impl Bare {
    fn key(&self) -> Vec<u8> {
        format!("bare/{:x}", self.lease).into_bytes()
    }

    /// Runs the transaction with which the recipe acquires a lock. Returns its revision.
    async fn join(&self) -> i64 {
        let join = join(&self.key(), self.lease);
        let answer: TxnAnswer = call(&self.channel, "/etcdserverpb.KV/Txn", join).await;
        assert!(answer.succeeded);
        answer.header.unwrap().revision
    }

    async fn leave(&self, created: i64) {
        let leave = leave(&self.key(), created);
        let answer: TxnAnswer = call(&self.channel, "/etcdserverpb.KV/Txn", leave).await;
        assert!(answer.succeeded);
    }

    /// Locks and unlocks with the servers' own lock service.
    async fn served(&self) {
        let lock = Lock { name: b"served".to_vec(), lease: self.lease };
        let locked: Locked = call(&self.channel, "/v3lockpb.Lock/Lock", lock).await;
        let unlock = Unlock { key: locked.key };
        let _: Nothing = call(&self.channel, "/v3lockpb.Lock/Unlock", unlock).await;
    }
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

async fn open(server: &EtcdServer) -> Registry {
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    let backend = EtcdBackend::open(config).await.unwrap();
    // The waiter's own polling must not be measured.
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

/// The transaction with which the recipe joins a queue, in the bytes that every client sends.
fn join(key: &[u8], lease: i64) -> Txn {
    let queue = Range { key: b"bare/".to_vec(), end: b"bare0".to_vec(), limit: 1, order: 1, by: 2 };
    let put = Put { key: key.to_vec(), lease };
    let own = Range { key: key.to_vec(), ..Range::default() };
    Txn {
        compare: vec![compare(key, 0)],
        success: vec![Op { put: Some(put), ..Op::default() }, range(queue.clone())],
        failure: vec![range(own), range(queue)],
    }
}

fn leave(key: &[u8], created: i64) -> Txn {
    let delete = Delete { key: key.to_vec() };
    let success = vec![Op { delete: Some(delete), ..Op::default() }];
    Txn { compare: vec![compare(key, created)], success, failure: Vec::new() }
}

/// Compares the creation revision of `key`.
fn compare(key: &[u8], created: i64) -> Compare {
    Compare { target: 1, key: key.to_vec(), created: Some(created) }
}

fn range(range: Range) -> Op {
    Op { range: Some(range), ..Op::default() }
}

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $(#[prost($($tag:tt)*)] $field:ident: $kind:ty,)* })*) => {
        $($(#[$doc])* #[derive(Clone, PartialEq, Message)] struct $name {
            $(#[prost($($tag)*)] $field: $kind,)*
        })*
    };
}

messages! {
    Nothing {}
    Header { #[prost(int64, tag = "3")] revision: i64, }
    Grant { #[prost(int64, tag = "1")] ttl: i64, }
    Granted { #[prost(int64, tag = "2")] id: i64, }
    Range {
        #[prost(bytes = "vec", tag = "1")] key: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] end: Vec<u8>,
        #[prost(int64, tag = "3")] limit: i64,
        #[prost(int32, tag = "5")] order: i32,
        #[prost(int32, tag = "6")] by: i32,
    }
    Put {
        #[prost(bytes = "vec", tag = "1")] key: Vec<u8>,
        #[prost(int64, tag = "3")] lease: i64,
    }
    Delete { #[prost(bytes = "vec", tag = "1")] key: Vec<u8>, }
    Op {
        #[prost(message, optional, tag = "1")] range: Option<Range>,
        #[prost(message, optional, tag = "2")] put: Option<Put>,
        #[prost(message, optional, tag = "3")] delete: Option<Delete>,
    }
    Compare {
        #[prost(int32, tag = "2")] target: i32,
        #[prost(bytes = "vec", tag = "3")] key: Vec<u8>,
        #[prost(int64, optional, tag = "5")] created: Option<i64>,
    }
    Txn {
        #[prost(message, repeated, tag = "1")] compare: Vec<Compare>,
        #[prost(message, repeated, tag = "2")] success: Vec<Op>,
        #[prost(message, repeated, tag = "3")] failure: Vec<Op>,
    }
    TxnAnswer {
        #[prost(message, optional, tag = "1")] header: Option<Header>,
        #[prost(bool, tag = "2")] succeeded: bool,
    }
    Lock {
        #[prost(bytes = "vec", tag = "1")] name: Vec<u8>,
        #[prost(int64, tag = "2")] lease: i64,
    }
    Locked { #[prost(bytes = "vec", tag = "2")] key: Vec<u8>, }
    Unlock { #[prost(bytes = "vec", tag = "1")] key: Vec<u8>, }
}
