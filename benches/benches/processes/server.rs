//! The stores over which `contention` and `held_locks` run, and their request counts.

use std::sync::Arc;

use lock_registry_benches::record_server;
use registry_core::LockBackend;
use registry_jdbc::{PostgresBackend, PostgresConfig};
use registry_redis::{RedisBackend, RedisConfig};
use registry_testkit::postgres::{PostgresOptions, PostgresServer};
use registry_testkit::redis::RedisServer;

use crate::measurement::{calls, info};

pub enum LockServer {
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl LockServer {
    pub async fn redis() -> Self {
        // Disk writes would dominate the time.
        let server = RedisServer::start(&["--appendonly", "no"]).await.unwrap();
        record_server("Redis", &info(&server, "server").await);
        Self::Redis(server)
    }

    pub async fn postgres() -> Self {
        let settings = ["shared_preload_libraries=pg_stat_statements"];
        let options = PostgresOptions::new().without_fsync().settings(&settings);
        let server = PostgresServer::start_with(options).await.unwrap();
        server.sql("CREATE EXTENSION pg_stat_statements").await.unwrap();
        record_server("PostgreSQL", &server.sql("SHOW server_version").await.unwrap());
        Self::Postgres(server)
    }

    /// The table of the figures, and the name of the reference.
    pub const fn table(&self) -> (&'static str, &'static str) {
        match self {
            Self::Redis(_) => ("redis-turns", "a bare loop"),
            Self::Postgres(_) => ("postgres-turns", "a bare `NOTIFY` loop"),
        }
    }

    /// The name of the figure for requests.
    pub const fn requests_name(&self) -> &'static str {
        match self {
            Self::Redis(_) => "commands per grant",
            Self::Postgres(_) => "statements per grant",
        }
    }

    pub fn url(&self) -> String {
        match self {
            Self::Redis(server) => server.url(),
            Self::Postgres(server) => server.url(),
        }
    }

    /// Deletes all locks.
    pub async fn clear(&self) {
        match self {
            Self::Redis(server) => _ = server.send_command("FLUSHALL").await.unwrap(),
            Self::Postgres(server) => {
                let tables = "DROP TABLE IF EXISTS lock_registry_locks, lock_registry_meta; \
                    DROP TABLE IF EXISTS bare; \
                    CREATE TABLE bare (key text PRIMARY KEY, owner int, until bigint) WITH (fillfactor = 70)";
                server.sql(tables).await.unwrap();
            }
        }
    }

    /// Resets the request count.
    pub async fn reset_request_count(&self) {
        match self {
            Self::Redis(server) => _ = server.send_command("CONFIG RESETSTAT").await.unwrap(),
            Self::Postgres(server) => {
                _ = server.sql("SELECT pg_stat_statements_reset()").await.unwrap();
            }
        }
    }

    /// The number of requests from clients since `reset_request_count`.
    pub async fn requests(&self, client: &str) -> u64 {
        match self {
            Self::Redis(server) => {
                // The statistics include the commands that scripts call. No script of this client
                // calls one of these.
                let mut names = vec!["eval", "evalsha", "subscribe", "unsubscribe", "ping"];
                if client == "reference" {
                    names.push("set");
                }
                calls(server, &names).await
            }
            Self::Postgres(server) => {
                let sum = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat_statements%'";
                server.sql(sum).await.unwrap().parse().unwrap()
            }
        }
    }
}

/// Opens the store of this library at a URL.
pub async fn open(url: &str) -> Arc<dyn LockBackend> {
    if url.starts_with("redis:") {
        Arc::new(RedisBackend::open(RedisConfig::from_url(url).unwrap()).await.unwrap())
    } else {
        Arc::new(PostgresBackend::open(PostgresConfig::from_url(url).unwrap()).await.unwrap())
    }
}
