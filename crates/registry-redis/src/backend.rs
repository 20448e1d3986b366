//! What is asked of a lock's key. Says nothing of Lua, see `script`, and nothing of names, see `names`.

use std::fmt;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redis::Value;
use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Capabilities, Claim, FencingToken, Finding,
    Grant, GuaranteeClass, Holder, Key, LockBackend, Reach, Release, Renewal,
};

use crate::config::RedisConfig;
use crate::ears::Ears;
use crate::link::Link;
use crate::names::Names;
use crate::record::{Record, lease_left};
use crate::script;

/// Locks in a Redis or Valkey server.
///
/// A grant lives until its lease is over on the server's clock. Tokens are that clock's microseconds, or one more than the last of the key
/// where that is larger: they grow over release, expiry, and a restart without data. A release wakes the waiters of all processes
/// by a message.
///
/// What the server forgets is free: without a file of all writes (`appendonly yes`, `appendfsync always`) a restart may free locks that
/// are held. Their holders learn of it at their next renewal; tokens grow even then, so fenced writes stay safe.
///
/// Two connections belong to a backend, however many locks are held or awaited; the second is made when somebody waits.
pub struct RedisBackend {
    config: RedisConfig,
    pub(crate) names: Names,
    pub(crate) link: Link,
    ears: Ears,
}

impl RedisBackend {
    /// Connects to the server.
    ///
    /// # Errors
    /// [`BackendError`] with a message that says what to do: `Misconfigured` for a configuration that cannot work, `Denied` for a
    /// wrong user or password, `Transient` when the server cannot be reached.
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection.
    pub async fn open(config: RedisConfig) -> Result<Self, BackendError> {
        check(&config)?;
        let link = Link::open(&config).await?;
        // A server that wants a password from somebody who has none takes the connection, and says so to the first question.
        let _: Value = link.ask(&redis::cmd("TIME")).await?;
        let ears = Ears::new(link.listener());
        Ok(Self { names: Names::new(&config.namespace), config, link, ears })
    }

    /// The namespace that this backend's locks live in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.config.namespace
    }

    /// Looks at locks, 500 at a time: the holders of those that are held.
    async fn look(&self, keys: &[Key]) -> Result<Vec<Holder>, BackendError> {
        let mut holders = Vec::new();
        for keys in keys.chunks(LOOK_AT_ONCE) {
            let mut call = script::LOOK.prepare_invoke();
            for key in keys {
                call.key(self.names.lock(key));
            }
            let answer: Vec<Value> = self.link.run(&call).await?;
            let (now, records) = read_look(&answer)?;
            let held = keys.iter().zip(records).filter(|(_, (record, _))| !record.is_empty());
            holders.extend(
                held.map(|(key, (record, left))| {
                    Record::read(&record).holder(key.clone(), now, left)
                }),
            );
        }
        Ok(holders)
    }
}

fn check(config: &RedisConfig) -> Result<(), BackendError> {
    let no =
        |says: String| Err(BackendError::new(BackendErrorKind::Misconfigured, says).as_refused());
    if config.namespace.is_empty() || config.namespace.len() > NAMESPACE_BYTES_MAX {
        return no(format!("redis: a namespace has 1 to {NAMESPACE_BYTES_MAX} bytes"));
    }
    for (option, given) in [
        ("connect_timeout", config.connect_timeout),
        ("response_timeout", config.response_timeout),
        ("token_memory", config.token_memory),
    ] {
        if !(Duration::from_millis(10)..=TIME_MAX).contains(&given) {
            return no(format!("redis: {option} of {given:?} is not between 10 ms and 366 days"));
        }
    }
    Ok(())
}

#[async_trait]
impl LockBackend for RedisBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("redis", GuaranteeClass::B, Reach::Network)
            .with_fencing()
            .with_wakes()
            .with_labels()
            .with_inspect()
    }

    async fn try_acquire(&self, claim: &Claim) -> Result<Attempt, BackendError> {
        let lock = self.names.lock(claim.key());
        // Before the question: what is heard of after it was asked may outdate the answer.
        let heard = self.ears.heard(&lock);
        let mut call = script::ACQUIRE.key(lock);
        call.key(self.names.token(claim.key()))
            .arg(claim.id().to_string())
            .arg(millis(claim.lease()))
            .arg(claim.token_block())
            .arg(millis(self.config.token_memory))
            .arg(claim.label().unwrap_or_default());
        match read_attempt(self.link.run(&call).await?)? {
            Answer::Granted { token, left_ms } => {
                let lease = lease_left(left_ms).unwrap_or_else(|| claim.lease());
                Ok(Attempt::Granted(Grant::new(Some(token), lease)))
            }
            Answer::Busy { left_ms, record, now_us } => {
                let holder = Record::read(&record).holder(claim.key().clone(), now_us, left_ms);
                let mut busy = Busy::new().with_mark(heard).with_holder(holder);
                if let Some(left) = lease_left(left_ms) {
                    busy = busy.with_retry_after(left);
                }
                Ok(Attempt::Busy(busy))
            }
        }
    }

    async fn renew(&self, claims: &[Claim]) -> Vec<Result<Renewal, BackendError>> {
        let mut call = script::RENEW.prepare_invoke();
        for claim in claims {
            call.key(self.names.lock(claim.key()));
            call.arg(claim.id().to_string()).arg(millis(claim.lease()));
        }
        let answers: Result<Vec<i64>, _> = self.link.run(&call).await;
        match answers {
            Ok(answers) if answers.len() == claims.len() => {
                let renewal = |left| lease_left(left).map_or(Renewal::Gone, Renewal::Renewed);
                answers.into_iter().map(|left| Ok(renewal(left))).collect()
            }
            Ok(_) => vec![Err(unreadable()); claims.len()],
            Err(error) => vec![Err(error); claims.len()],
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release, BackendError> {
        let mut call = script::RELEASE.key(self.names.lock(claim.key()));
        call.arg(claim.id().to_string());
        self.link.run(&call).await.map(freed)
    }

    async fn wait(&self, claim: &Claim, busy: &Busy) {
        self.ears.wait(&self.names.lock(claim.key()), busy.mark).await;
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holder>, BackendError> {
        Ok(self.look(std::slice::from_ref(key)).await?.pop())
    }

    async fn list(&self) -> Result<Vec<Holder>, BackendError> {
        let mut keys = Vec::new();
        let mut cursor = 0_u64;
        let began = Instant::now();
        // SCAN looks at a bounded piece of the database at a time, so nobody else is held up.
        loop {
            let scan = redis::cmd("SCAN")
                .arg(cursor)
                .arg("MATCH")
                .arg(self.names.pattern())
                .arg("COUNT")
                .arg(LOOK_AT_ONCE)
                .to_owned();
            let (next, names): (u64, Vec<Vec<u8>>) = self.link.ask(&scan).await?;
            let name = |name: Vec<u8>| self.names.key(std::str::from_utf8(&name).ok()?);
            keys.extend(names.into_iter().filter_map(name));
            cursor = next;
            if cursor == 0 {
                break;
            }
            // The caller has long gone, and a proxy may lead in circles.
            if began.elapsed() > LIST_LIMIT {
                return Err(BackendError::transient(
                    "redis: the database is too large to be listed in time",
                ));
            }
        }
        // A key may be told twice while the database is rearranged.
        keys.sort();
        keys.dedup();
        self.look(&keys).await
    }

    async fn force_release(&self, key: &Key) -> Result<Release, BackendError> {
        let call = script::BREAK.key(self.names.lock(key));
        self.link.run(&call).await.map(freed)
    }

    async fn diagnose(&self) -> Result<Vec<Finding>, BackendError> {
        self.look_for_trouble().await
    }

    async fn close(&self) {
        self.ears.close();
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What the script that acquires has answered.
enum Answer {
    Granted { token: FencingToken, left_ms: i64 },
    Busy { left_ms: i64, record: Vec<u8>, now_us: i64 },
}

fn read_attempt(answer: Value) -> Result<Answer, BackendError> {
    let Value::Array(parts) = answer else { return Err(unreadable()) };
    match &parts[..] {
        [Value::Int(1), token, Value::Int(left_ms)] => {
            let token = number(token).and_then(|token| FencingToken::try_from(token).ok());
            Ok(Answer::Granted { token: token.ok_or_else(unreadable)?, left_ms: *left_ms })
        }
        [Value::Int(0), Value::Int(left_ms), Value::BulkString(record), now] => Ok(Answer::Busy {
            left_ms: *left_ms,
            record: record.clone(),
            now_us: number(now).ok_or_else(unreadable)?,
        }),
        _ => Err(unreadable()),
    }
}

/// A lock's record, and the lease that it has left.
type Found = (Vec<u8>, i64);

/// The time on the server's clock, and what was found for each lock.
fn read_look(answer: &[Value]) -> Result<(i64, Vec<Found>), BackendError> {
    let (now, records) = answer.split_first().ok_or_else(unreadable)?;
    let now = number(now).ok_or_else(unreadable)?;
    let record = |pair: &[Value]| match pair {
        [Value::BulkString(record), Value::Int(left)] => Ok((record.clone(), *left)),
        _ => Err(unreadable()),
    };
    Ok((now, records.chunks(2).map(record).collect::<Result<_, _>>()?))
}

fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(text) => std::str::from_utf8(text).ok()?.parse().ok(),
        _ => None,
    }
}

fn unreadable() -> BackendError {
    BackendError::new(
        BackendErrorKind::Protocol,
        "redis: a script was answered in a way that it cannot answer; is there a proxy in between?",
    )
}

const fn freed(answer: i64) -> Release {
    if answer == 1 { Release::Freed } else { Release::NotHeld }
}

/// Whole milliseconds, rounded up: a lease must not be shorter than it was asked for.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// How many locks are looked at in one step of the server.
const LOOK_AT_ONCE: usize = 500;
/// Ten times what the engine waits for.
const LIST_LIMIT: Duration = Duration::from_secs(30);
const NAMESPACE_BYTES_MAX: usize = 255;
const TIME_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);
