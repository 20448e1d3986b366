//! Measures what a lock costs on every store. Latency and throughput are next to a bare round trip.
//! Shared locks, permits and locks of several keys are next to exclusive locks.
//!
//! Names of stores on the command line select them. Client and server may run on all processors, as
//! in a service.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use lock_registry_benches::{compare_modes, measure_pairs, record_server, write_results};
use prost::Message;
use registry_core::{LockBackend, MemoryBackend, Registry};
use registry_etcd::{EtcdBackend, EtcdConfig};
use registry_jdbc::{
    MySqlBackend, MySqlConfig, PostgresBackend, PostgresConfig, SqliteBackend, SqliteConfig,
};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::etcd::EtcdServer;
use registry_testkit::mariadb::MariaDbServer;
use registry_testkit::postgres::PostgresServer;
use registry_testkit::redis::RedisServer;
use registry_testkit::zookeeper::ZooKeeperServer;
use registry_zk::{ZkBackend, ZkConfig};
use sqlx::mysql::MySqlConnectOptions;
use sqlx::postgres::PgConnectOptions;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions as _, Connection, Executor, IntoArguments};
use tokio::sync::Mutex;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

fn main() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        if is_selected("memory") {
            let mutex = Arc::new(Mutex::new(()));
            let round_trip = move || {
                let mutex = Arc::clone(&mutex);
                async move { drop(std::hint::black_box(mutex.lock().await)) }
            };
            bench("in process", MemoryBackend::new(), round_trip).await;
        }
        if is_selected("sqlite") {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("locks.db");
            let backend = SqliteBackend::open(SqliteConfig::new(&path)).await.unwrap();
            let connection = SqliteConnectOptions::new().filename(path).connect().await.unwrap();
            bench("SQLite", backend, select_one(connection)).await;
        }
        if is_selected("redis") {
            redis().await;
        }
        if is_selected("postgres") {
            let server = PostgresServer::start().await.unwrap();
            record_server("PostgreSQL", &server.sql("SHOW server_version").await.unwrap());
            let config = PostgresConfig::from_url(&server.url()).unwrap();
            let options: PgConnectOptions = server.url().parse().unwrap();
            let round_trip = select_one(options.connect().await.unwrap());
            bench("PostgreSQL", PostgresBackend::open(config).await.unwrap(), round_trip).await;
        }
        if is_selected("mariadb") {
            let server = MariaDbServer::start().await.unwrap();
            record_server("MariaDB", &server.sql("SELECT VERSION()").await.unwrap());
            let config = MySqlConfig::from_url(&server.url()).unwrap();
            let options: MySqlConnectOptions = server.url().parse().unwrap();
            let round_trip = select_one(options.connect().await.unwrap());
            bench("MariaDB", MySqlBackend::open(config).await.unwrap(), round_trip).await;
        }
        if is_selected("etcd") {
            etcd().await;
        }
        if is_selected("zk") {
            let server = ZooKeeperServer::start().await.unwrap();
            record_server("ZooKeeper", &server.send_command("srvr").await.unwrap());
            let config = ZkConfig::from_url(&server.url()).unwrap();
            let servers = server.addr().to_string();
            let client = zookeeper_client::Client::connect(&servers).await.unwrap();
            let round_trip = move || {
                let client = client.clone();
                async move { drop(client.get_data("/").await.unwrap()) }
            };
            bench("ZooKeeper", ZkBackend::open(config).await.unwrap(), round_trip).await;
        }
    });
    write_results("stores");
}

/// Returns whether the command line names this store or no store at all.
fn is_selected(store: &str) -> bool {
    let mut names = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let first = names.next();
    first.as_ref().is_none_or(|first| first == store || names.any(|name| name == store))
}

async fn bench<R>(
    store: &'static str,
    backend: impl LockBackend + 'static,
    round_trip: impl Fn() -> R + Send + Sync + 'static,
) where
    R: Future<Output = ()> + Send + 'static,
{
    let backend: Arc<dyn LockBackend> = Arc::new(backend);
    let registry = Registry::builder(Arc::clone(&backend)).build().unwrap();
    let measured = async move {
        measure_pairs(store, &registry, round_trip).await;
        compare_modes(store, &registry, &*backend).await;
        _ = registry.close(Duration::from_secs(5)).await;
    };
    tokio::spawn(measured).await.unwrap();
}

/// Returns the bare round trip of an SQL store.
fn select_one<C: Connection + 'static>(connection: C) -> impl Fn() -> BoxFuture<'static, ()>
where
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
    <C::Database as sqlx::Database>::Arguments: IntoArguments<C::Database>,
{
    let connection = Arc::new(Mutex::new(connection));
    move || {
        let connection = Arc::clone(&connection);
        let select = async move {
            sqlx::query("SELECT 1").execute(&mut *connection.lock().await).await.unwrap();
        };
        Box::pin(select) as BoxFuture<'static, ()>
    }
}

async fn redis() {
    // Disk writes would dominate the time.
    let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
    let info = server.send_command_args(&["INFO", "server"]).await.unwrap();
    record_server("Redis", &info.text().unwrap_or_default());
    let client = redis::Client::open(server.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let ping = move || {
        let mut connection = connection.clone();
        async move { redis::cmd("PING").exec_async(&mut connection).await.unwrap() }
    };
    let config = RedisConfig::from_url(&server.url()).unwrap();
    bench("Redis", RedisBackend::open(config).await.unwrap(), ping).await;
}

/// etcd's `RangeRequest`, with only the field that this benchmark uses.
#[derive(Clone, PartialEq, Message)]
struct Read {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}
#[derive(Clone, PartialEq, Message)]
struct ReadResponse {}

async fn etcd() {
    let server = EtcdServer::start().await.unwrap();
    let status = server.ctl(&["endpoint", "status"]).await.unwrap();
    record_server("etcd", status.split(", ").nth(2).unwrap_or_default());
    let channel = Endpoint::from_shared(server.url()).unwrap().connect().await.unwrap();
    let read = move || {
        let mut grpc = Grpc::new(channel.clone());
        async move {
            grpc.ready().await.unwrap();
            let path = PathAndQuery::from_static("/etcdserverpb.KV/Range");
            let codec = ProstCodec::<Read, ReadResponse>::default();
            grpc.unary(Request::new(Read { key: b"none".to_vec() }), path, codec).await.unwrap();
        }
    };
    let config = EtcdConfig::new([(server.addr().ip().to_string(), server.addr().port())]);
    bench("etcd", EtcdBackend::open(config).await.unwrap(), read).await;
}
