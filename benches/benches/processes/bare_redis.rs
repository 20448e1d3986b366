//! The least that locks of several processes need: one key per lock that ends by itself, and a message to those who wait.

use std::pin::pin;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{FutureExt, StreamExt};
use redis::Script;
use redis::aio::{MultiplexedConnection, PubSub};

const RELEASE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
    redis.call('DEL', KEYS[1]) redis.call('PUBLISH', KEYS[1], '') return 1 end return 0";

/// For each key how long the lease is from now on, unless somebody else has it.
const RENEW: &str = "local left = {} for i, key in ipairs(KEYS) do \
    if redis.call('GET', key) == ARGV[1] then redis.call('PEXPIRE', key, ARGV[2]) left[i] = ARGV[2] else left[i] = -1 end \
    end return left";

/// Who waits without an end looks by itself once in a while, because messages may be lost.
const POLL: Duration = Duration::from_millis(100);

/// One lock of one process.
pub struct Bare {
    key: String,
    id: String,
    commands: MultiplexedConnection,
    messages: PubSub,
    release: Script,
}

impl Bare {
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
            // What was said before this attempt says nothing about it.
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

/// Takes `keys` and renews them every third of `lease`, a hundred by one script.
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
