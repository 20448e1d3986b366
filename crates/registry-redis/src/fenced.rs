//! Fenced writes to Redis. After a newer holder has written to a resource, the server refuses
//! writes of older holders.

use std::fmt;

use redis::Value;
use registry_core::{BackendError, BackendErrorKind, FencingToken};

use crate::config::{RedisConfig, ServerAddresses};
use crate::connections::RedisConnections;
use crate::error::may_follow_a_write;
use crate::invalidations::InvalidationForwarder;
use crate::names::{FENCE_PREFIX, tagged_name};
use crate::script::Script;
use crate::slot::hash_slot;
use crate::store::{channel_scheme, key_names, unexpected_response};

/// Writes to Redis that succeed only if no larger fencing token has written to the resource.
///
/// A holder can lose its lock without noticing in time, for example while its process is suspended
/// during a write. The server refuses such a late write if the next holder, with a larger token,
/// has already written. The resource and the locks may be on different servers, and the token may
/// come from any store.
///
/// The newest token of a resource `KEY` is stored under `lock-registry:fence:{KEY}`, without an
/// expiry. If `KEY` already contains a hash tag, the stored key is `lock-registry:fence:=KEY`.
/// Delete this key together with the resource, once no holder can have an old token.
///
/// # Examples
/// ```no_run
/// use registry_core::LockGuard;
/// use registry_redis::{Fenced, FencedWrites, RedisConfig};
///
/// # async fn example(guard: LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// let accounts = FencedWrites::open(RedisConfig::from_url("redis://127.0.0.1")?).await?;
/// let token = guard.fencing_token();
/// match accounts.set(token, "account/42", "17.50").await? {
///     Fenced::Written(_) => {}
///     Fenced::Stale { newest } => println!("refused: token {newest} has already written"),
///     _ => {}
/// }
/// # Ok(())
/// # }
/// ```
pub struct FencedWrites {
    connections: RedisConnections,
    is_cluster: bool,
}

/// The result of a fenced write.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fenced<T> {
    /// The write was executed.
    Written(T),
    /// The write was refused: a larger token has written to the resource.
    Stale {
        /// The largest token that has written to the resource.
        newest: FencingToken,
    },
}

/// The reply of a script.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScriptReply {
    /// `nil`, or no value.
    Nil,
    /// An integer.
    Int(i64),
    /// A string or a status.
    Bytes(Vec<u8>),
    /// A table.
    Array(Vec<Self>),
}

/// A Lua script that runs only if no larger token has written to the resource.
///
/// The body receives its own `KEYS` and `ARGV`, and may return any value that [`ScriptReply`] can
/// represent. Only the first of several return values counts.
///
/// You can also run the script with another Redis client. Send [`source`](Self::source) with the
/// token key before the body's keys, and the token before the body's arguments. The script returns
/// `{1, reply}`, or `{1}` if the body returns nothing. If a larger token has written, the script
/// returns `{0, newest token}`.
#[derive(Clone)]
pub struct FencedScript(std::sync::Arc<Script>);

impl FencedScript {
    /// Creates a script with this body.
    #[must_use]
    pub fn new(body: &str) -> Self {
        let head = include_str!("script/fenced.lua");
        let source = format!("{head}{body}\nend\nreturn {{1, (body(KEYS, ARGV))}}\n");
        Self(std::sync::Arc::new(Script::new(source)))
    }

    /// Returns the whole source of the script.
    #[must_use]
    pub fn source(&self) -> &str {
        self.0.source()
    }

    /// Returns the key that stores the newest token of the resource `key`. Both keys share a
    /// cluster slot, unless `key` has a closing brace and no hash tag.
    #[must_use]
    pub fn token_key(key: &str) -> String {
        tagged_name(FENCE_PREFIX, key)
    }
}

impl fmt::Debug for FencedScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FencedScript").field(&self.source()).finish()
    }
}

/// Returns a static script with this body. The first use builds the script.
macro_rules! static_script {
    ($body:literal) => {{
        static SCRIPT: std::sync::LazyLock<FencedScript> =
            std::sync::LazyLock::new(|| FencedScript::new($body));
        &*SCRIPT
    }};
}

impl FencedWrites {
    /// Connects to the servers of the resources. Refuses a quorum, because its masters share no
    /// data.
    ///
    /// A write counts as soon as the server has responded. It does not wait for the replicas and
    /// disks of [`with_replicas`](RedisConfig::with_replicas) and
    /// [`with_fsync`](RedisConfig::with_fsync).
    ///
    /// # Errors
    /// Returns the errors of [`RedisBackend::open`](crate::RedisBackend::open), and `Misconfigured`
    /// for a quorum.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connections.
    pub async fn open(config: RedisConfig) -> Result<Self, BackendError> {
        config.check()?;
        if matches!(config.servers, ServerAddresses::Quorum(_)) {
            return Err(BackendError::new(
                BackendErrorKind::Misconfigured,
                "redis: the masters of a quorum share no data; write to a single master, or to another store",
            )
            .as_refused());
        }
        #[cfg(feature = "tls")]
        let config = config.with_pem_files()?;
        let connections = RedisConnections::new(
            &config,
            channel_scheme(&config),
            &InvalidationForwarder::new(key_names(&config)),
        )
        .await?;
        connections.connect().await?;
        Ok(Self { connections, is_cluster: matches!(config.servers, ServerAddresses::Cluster(_)) })
    }

    /// Sets `key` to `value`, like `SET`.
    ///
    /// # Errors
    /// Returns a store error. Unless the error is [refused](BackendError::refused), the outcome of
    /// the write is unknown. A repetition with the same token is safe.
    ///
    /// # Cancel safety
    /// If the future is dropped, the outcome of the write is unknown.
    pub async fn set(
        &self,
        token: FencingToken,
        key: &str,
        value: impl AsRef<[u8]>,
    ) -> Result<Fenced<()>, BackendError> {
        let script = static_script!("return redis.call('SET', KEYS[1], ARGV[1])");
        Ok(self.run(token, script, &[key], &[value.as_ref()]).await?.map(drop))
    }

    /// Sets `field` of the hash `key` to `value`, like `HSET`.
    ///
    /// # Errors
    /// Returns the errors of [`set`](Self::set).
    ///
    /// # Cancel safety
    /// The same as [`set`](Self::set).
    pub async fn hset(
        &self,
        token: FencingToken,
        key: &str,
        field: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
    ) -> Result<Fenced<()>, BackendError> {
        let script = static_script!("return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])");
        let arguments = [field.as_ref(), value.as_ref()];
        Ok(self.run(token, script, &[key], &arguments).await?.map(drop))
    }

    /// Runs a script. The first key is the resource whose newest token is compared. In a cluster,
    /// all keys must share the slot of the resource.
    ///
    /// # Errors
    /// Returns the errors of [`set`](Self::set), and `Misconfigured` without a key. The code of an
    /// error that the script raises determines its kind: `Protocol` for `ERR` and unknown codes.
    /// Earlier writes of this script remain.
    ///
    /// # Cancel safety
    /// The same as [`set`](Self::set).
    pub async fn run(
        &self,
        token: FencingToken,
        script: &FencedScript,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<Fenced<ScriptReply>, BackendError> {
        let Some(resource) = keys.first() else {
            return Err(BackendError::new(
                BackendErrorKind::Misconfigured,
                "redis: a fenced write requires at least one key",
            )
            .as_refused());
        };
        let token_key = FencedScript::token_key(resource);
        let mut names = vec![token_key.as_str()];
        names.extend(keys);
        let mut call = script.0.call(names).arg(token.get());
        for argument in arguments {
            call = call.arg(*argument);
        }
        let slot = if self.is_cluster { hash_slot(resource) } else { 0 };
        let response = self.connections.run(slot, &call).await.map_err(|error| {
            // A command of the script may have failed after earlier commands had written.
            if may_follow_a_write(&error) { error.as_unknown() } else { error }
        })?;
        match response {
            Value::Array(parts) => match &parts[..] {
                [Value::Int(1)] => Ok(Fenced::Written(ScriptReply::Nil)),
                [Value::Int(1), reply] => Ok(Fenced::Written(parse_reply(reply)?)),
                [Value::Int(0), Value::BulkString(newest)] => {
                    let newest =
                        std::str::from_utf8(newest).ok().and_then(|text| text.parse().ok());
                    let newest =
                        newest.and_then(FencingToken::new).ok_or_else(unexpected_response)?;
                    Ok(Fenced::Stale { newest })
                }
                _ => Err(unexpected_response()),
            },
            _ => Err(unexpected_response()),
        }
    }
}

impl<T> Fenced<T> {
    fn map<U>(self, op: impl FnOnce(T) -> U) -> Fenced<U> {
        match self {
            Self::Written(reply) => Fenced::Written(op(reply)),
            Self::Stale { newest } => Fenced::Stale { newest },
        }
    }
}

fn parse_reply(value: &Value) -> Result<ScriptReply, BackendError> {
    Ok(match value {
        Value::Nil => ScriptReply::Nil,
        Value::Int(number) => ScriptReply::Int(*number),
        Value::BulkString(text) => ScriptReply::Bytes(text.clone()),
        Value::SimpleString(text) => ScriptReply::Bytes(text.clone().into_bytes()),
        Value::Okay => ScriptReply::Bytes(b"OK".to_vec()),
        Value::Array(values) => {
            ScriptReply::Array(values.iter().map(parse_reply).collect::<Result<_, _>>()?)
        }
        _ => return Err(unexpected_response()),
    })
}

impl fmt::Debug for FencedWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FencedWrites").field(&self.connections).finish()
    }
}
