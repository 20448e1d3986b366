//! The minimum that locks between processes need in Redis: one expiring key per lock, and a message
//! to waiters.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{FutureExt, StreamExt};
use redis::Script;
use redis::aio::{MultiplexedConnection, PubSub};

const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
    redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '') return 1 end return 0";

/// Returns the new lease of each key, or -1 if this client does not hold the key.
const RENEW: &str = "local left = {} for i, key in ipairs(KEYS) do \
    if redis.call('GET', key) == ARGV[1] then redis.call('PEXPIRE', key, ARGV[2]) left[i] = ARGV[2] else left[i] = -1 end \
    end return left";

/// The interval at which a waiter polls, because messages may be lost.
const POLL: Duration = Duration::from_millis(100);

/// One lock of one process.
pub struct RedisReference {
    key: String,
    id: String,
    commands: MultiplexedConnection,
    messages: PubSub,
    release: Script,
}

impl RedisReference {
    pub async fn connect(url: &str, key: &str) -> Self {
        let mut messages = client(url).get_async_pubsub().await.unwrap();
        messages.subscribe(key).await.unwrap();
        Self {
            key: key.to_owned(),
            id: format!("{:032x}", std::process::id()),
            commands: connect(url).await,
            messages,
            release: Script::new(RELEASE),
        }
    }

    pub async fn lock(&mut self) {
        let mut messages = self.messages.on_message();
        loop {
            // Messages from before this attempt say nothing about its result.
            while messages.next().now_or_never().is_some() {}
            let mut set = redis::cmd("SET");
            set.arg(&self.key).arg(&self.id).arg("NX").arg("PX").arg(30_000);
            let done: Option<String> = set.query_async(&mut self.commands).await.unwrap();
            if done.is_some() {
                return;
            }
            _ = tokio::time::timeout(POLL, pin!(messages.next())).await;
        }
    }

    pub async fn unlock(&mut self) {
        let mut call = self.release.key(&self.key);
        let freed: i64 = call.arg(&self.id).invoke_async(&mut self.commands).await.unwrap();
        assert_eq!(freed, 1);
    }
}

/// Acquires `keys` and renews them every third of `lease`, 100 keys per script.
pub async fn hold(connection: &MultiplexedConnection, keys: &[String], lease: Duration) -> ! {
    let lease_ms = lease.as_millis() as u64;
    for keys in keys.chunks(100) {
        let mut all = redis::pipe();
        for key in keys {
            all.cmd("SET").arg(key).arg("owner").arg("PX").arg(lease_ms).ignore();
        }
        let () = all.query_async(&mut connection.clone()).await.unwrap();
    }
    println!("held");
    let renew = Script::new(RENEW);
    let mut ticks = tokio::time::interval(lease / 3);
    loop {
        ticks.tick().await;
        let calls = keys.chunks(100).map(async |keys| {
            let mut call = renew.prepare_invoke();
            keys.iter().for_each(|key| _ = call.key(key));
            call.arg("owner").arg(lease_ms);
            let left: Vec<i64> = call.invoke_async(&mut connection.clone()).await.unwrap();
            assert!(left.iter().all(|left| *left > 0));
        });
        join_all(calls).await;
    }
}

pub async fn connect(url: &str) -> MultiplexedConnection {
    client(url).get_multiplexed_async_connection().await.unwrap()
}

fn client(url: &str) -> redis::Client {
    let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
    let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
    redis::Client::open(info.set_tcp_settings(tcp)).unwrap()
}
