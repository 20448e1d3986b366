//! Hears of releases. One connection per server, one task, and one subscription per lock that somebody waits for; knows nothing of locks.
//!
//! A message may be lost with its connection, so everybody is woken after each reconnect; and waiting never relies on messages
//! alone, that is the engine's part. Commands never use this connection: a message that nobody asked for could be taken for the answer to
//! a command.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, PushInfo, PushKind, ServerErrorKind, Value};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::link::{Dial, Pushes};
use crate::names::Names;

/// How long a channel that nobody listens to any more stays subscribed: who waited once often waits again.
const LINGER: Duration = Duration::from_secs(1);

/// The pauses between tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// How releases are told.
#[derive(Debug, Clone)]
pub(crate) struct Hearing {
    pub(crate) names: Names,
    /// Channels belong to slots.
    pub(crate) sharded: bool,
}

/// All channels of one server that are listened to.
pub(crate) struct Ears {
    table: Arc<Table>,
    orders: mpsc::UnboundedSender<Arc<str>>,
    task: JoinHandle<()>,
}

struct Table {
    hearing: Hearing,
    channels: Mutex<HashMap<Arc<str>, Arc<Channel>>>,
    /// The server is another one now.
    renewed: Notify,
}

/// One channel.
struct Channel {
    /// Zero until the server has confirmed the subscription; then the moment since when nothing has changed.
    changed_at: AtomicU64,
    /// The server has confirmed the subscription on the connection that is up now.
    subscribed: AtomicBool,
    changed: Notify,
    listeners: AtomicU64,
    /// Somebody has waited since idle channels were last looked for. A waiter that tries in between comes back.
    is_recent: AtomicBool,
}

/// Numbers all changes of all channels of all servers, so that a channel that was forgotten and is listened to anew, or has moved to another
/// server, never counts as unchanged.
static CHANGES: AtomicU64 = AtomicU64::new(1);

/// This moment, for [`Ears::wait`]. To be read before a question whose answer may be outdated by a change.
pub(crate) fn moment() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

impl Ears {
    /// Listens over connections that `dial` makes, the first of them when there is something to listen to.
    pub(crate) fn new(dial: Dial, hearing: Hearing) -> Self {
        let table = Arc::new(Table { hearing, channels: Mutex::default(), renewed: Notify::new() });
        let (orders, inbox) = mpsc::unbounded_channel();
        let task = tokio::spawn(work(Arc::clone(&table), dial, inbox));
        Self { table, orders, task }
    }

    /// Returns when something has changed after `moment`. If nothing was listened to then, returns as soon as it is.
    pub(crate) async fn wait(&self, name: &str, moment: u64) {
        let listener = self.table.listen(name, &self.orders);
        let channel = &listener.0;
        loop {
            let changed = channel.changed.notified();
            tokio::pin!(changed);
            // Listening starts before the look, or a change could slip through in between.
            changed.as_mut().enable();
            if channel.changed_at.load(Ordering::Acquire) > moment {
                return;
            }
            changed.await;
        }
    }

    /// Returns whether a message on this channel would arrive: the subscription is confirmed, and its connection answers.
    pub(crate) fn are_confirmed(&self, name: &str) -> bool {
        let channels = self.table.channels();
        channels.get(name).is_some_and(|channel| channel.subscribed.load(Ordering::Acquire))
    }

    /// Gives the connection up for a new one: the server is another one now.
    pub(crate) fn renew(&self) {
        self.table.renewed.notify_one();
    }

    /// Ends the connection. Whoever waits hears nothing any more.
    pub(crate) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.close();
        // Whoever waits here must look where the lock is now.
        self.table.deafened();
    }
}

impl fmt::Debug for Ears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ears")
            .field("channels", &self.table.channels().len())
            .finish_non_exhaustive()
    }
}

impl Table {
    fn listen(&self, name: &str, orders: &mpsc::UnboundedSender<Arc<str>>) -> Listener {
        let mut channels = self.channels();
        if let Some(channel) = channels.get(name) {
            channel.listeners.fetch_add(1, Ordering::AcqRel);
            channel.is_recent.store(true, Ordering::Release);
            return Listener(Arc::clone(channel));
        }
        let name: Arc<str> = name.into();
        let channel = Arc::new(Channel {
            changed_at: AtomicU64::new(0),
            subscribed: AtomicBool::new(false),
            changed: Notify::new(),
            listeners: AtomicU64::new(1),
            is_recent: AtomicBool::new(true),
        });
        channels.insert(Arc::clone(&name), Arc::clone(&channel));
        // Without the task nobody hears anything; the engine looks by itself.
        let _ = orders.send(name);
        Listener(channel)
    }

    fn names(&self) -> Vec<Arc<str>> {
        self.channels().keys().cloned().collect()
    }

    /// Notes that something may have changed on `name`.
    fn change(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            note(channel);
        }
    }

    /// Notes that messages on `name` arrive from here on.
    fn confirm(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            channel.subscribed.store(true, Ordering::Release);
            note(channel);
        }
    }

    /// Takes out a channel that is elsewhere now; whoever waits must look there.
    fn lose(&self, name: &str) {
        if let Some(channel) = self.channels().remove(name) {
            note(&channel);
        }
    }

    fn has(&self, name: &str) -> bool {
        self.channels().contains_key(name)
    }

    /// Notes that whatever happened on any channel was not heard.
    fn deafened(&self) {
        self.channels().values().for_each(|channel| note(channel));
    }

    /// Notes that the connection is gone, and its subscriptions with it.
    fn unsubscribe_all(&self) {
        for channel in self.channels().values() {
            channel.subscribed.store(false, Ordering::Release);
        }
    }

    /// Takes out the channels that nobody listens to, and has not since the last call.
    fn forget_idle(&self) -> Vec<Arc<str>> {
        let mut channels = self.channels();
        let idle = |channel: &Channel| {
            let is_recent = channel.is_recent.swap(false, Ordering::AcqRel);
            channel.listeners.load(Ordering::Acquire) == 0 && !is_recent
        };
        channels.extract_if(|_, channel| idle(channel)).map(|(name, _)| name).collect()
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn note(channel: &Channel) {
    channel.changed_at.store(CHANGES.fetch_add(1, Ordering::AcqRel) + 1, Ordering::Release);
    channel.changed.notify_waiters();
}

/// Somebody who waits.
struct Listener(Arc<Channel>);

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.listeners.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn work(table: Arc<Table>, dial: Dial, mut orders: mpsc::UnboundedReceiver<Arc<str>>) {
    let mut pause = RETRY_MIN;
    loop {
        // The first who waits calls for the first connection.
        if table.names().is_empty() && orders.recv().await.is_none() {
            return;
        }
        let (told, pushes) = mpsc::unbounded_channel();
        let hear: Pushes = Arc::new(move |push| _ = told.send(push));
        if let Ok(connection) = dial(hear).await {
            let ended = serve(&table, connection, pushes, &mut orders).await;
            table.unsubscribe_all();
            match ended {
                // As if there was no connection: a server may take it and let us listen to nothing.
                Ended::NeverUp => {}
                // It had been up; whatever comes now is new trouble.
                Ended::Broken => pause = RETRY_MIN,
                Ended::NobodyLeft => return,
            }
        }
        table.forget_idle();
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// Why a connection was given up.
enum Ended {
    /// Before the first subscriptions were answered.
    NeverUp,
    Broken,
    NobodyLeft,
}

/// Listens until the connection breaks, or nobody can give orders any more.
async fn serve(
    table: &Table,
    mut connection: MultiplexedConnection,
    mut pushes: mpsc::UnboundedReceiver<PushInfo>,
    orders: &mut mpsc::UnboundedReceiver<Arc<str>>,
) -> Ended {
    // What was ordered so far is in the table, or was forgotten since.
    while orders.try_recv().is_ok() {}
    if let Some(common) = table.hearing.names.common_channel()
        && !plain(&mut connection, "SUBSCRIBE", &[common.into()]).await
    {
        return Ended::NeverUp;
    }
    if !subscribed(table, &mut connection, &table.names()).await {
        return Ended::NeverUp;
    }
    let mut tidy = tokio::time::interval(LINGER);
    tidy.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0_u32;
    loop {
        let well = tokio::select! {
            biased;
            push = pushes.recv() => push.is_some_and(|push| heard(table, push)),
            order = orders.recv() => {
                let Some(name) = order else { return Ended::NobodyLeft };
                let mut names = vec![name];
                while names.len() < AT_ONCE && let Ok(name) = orders.try_recv() {
                    names.push(name);
                }
                // Who asked may be gone and the channel forgotten: then nobody would ever unsubscribe from it.
                names.retain(|name| table.has(name));
                subscribed(table, &mut connection, &names).await
            }
            () = table.renewed.notified() => false,
            _ = tidy.tick() => {
                ticks = ticks.wrapping_add(1);
                let idle = table.forget_idle();
                let verb = if table.hearing.sharded { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
                let well = plain(&mut connection, verb, &idle).await;
                // A connection that has died without a word answers nothing.
                well && (!ticks.is_multiple_of(HEARTBEAT_TICKS) || answers(&mut connection).await)
            }
        };
        if !well {
            // What changes from here on is not heard until there is a new connection; after it everybody is woken.
            return Ended::Broken;
        }
    }
}

/// Takes in what the server has said; false when the connection is of no use any more.
fn heard(table: &Table, push: PushInfo) -> bool {
    let text = |value: Option<&Value>| match value {
        Some(Value::BulkString(text)) => String::from_utf8(text.clone()).ok(),
        _ => None,
    };
    match push.kind {
        PushKind::Message | PushKind::SMessage => {
            let channel = text(push.data.first());
            let names = &table.hearing.names;
            let meant = match (channel.as_deref(), push.data.get(1)) {
                (Some(channel), Some(Value::BulkString(message)))
                    if Some(channel) == names.common_channel() =>
                {
                    names.meant_by(message)
                }
                _ => channel,
            };
            if let Some(channel) = meant {
                table.change(&channel);
            }
            true
        }
        // Unless we have asked for it, the slot has moved. The client may have taken this for the answer to something else.
        PushKind::SUnsubscribe => text(push.data.first()).is_none_or(|name| !table.has(&name)),
        PushKind::Disconnection => false,
        _ => true,
    }
}

/// Subscribes to channels, and notes of each that it may have changed before.
async fn subscribed(
    table: &Table,
    connection: &mut MultiplexedConnection,
    names: &[Arc<str>],
) -> bool {
    let verb = if table.hearing.sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
    for names in names.chunks(AT_ONCE) {
        let Some(answers) = each(connection, verb, names).await else { return false };
        for (name, answer) in names.iter().zip(answers) {
            match answer.extract_error() {
                Ok(_) => table.confirm(name),
                Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::Moved) => {
                    table.lose(name);
                }
                // It stays unheard. Waiters look by themselves, and try again when they wait anew.
                Err(_) => {}
            }
        }
    }
    true
}

/// The same command for each name; false when the connection is of no use any more.
async fn plain(connection: &mut MultiplexedConnection, verb: &str, names: &[Arc<str>]) -> bool {
    for names in names.chunks(AT_ONCE) {
        if each(connection, verb, names).await.is_none() {
            return false;
        }
    }
    true
}

/// The answers to the same command for each name: one command each, because channels of different slots must not share one.
async fn each(
    connection: &mut MultiplexedConnection,
    verb: &str,
    names: &[Arc<str>],
) -> Option<Vec<Value>> {
    if names.is_empty() {
        return Some(Vec::new());
    }
    let mut commands = redis::pipe();
    for name in names {
        commands.cmd(verb).arg(&**name);
    }
    let sent = connection.send_packed_commands(&commands, 0, names.len());
    timeout(ANSWER_LIMIT, sent).await.ok()?.ok()
}

async fn answers(connection: &mut MultiplexedConnection) -> bool {
    let ping = redis::cmd("PING");
    matches!(timeout(ANSWER_LIMIT, connection.send_packed_command(&ping)).await, Ok(Ok(_)))
}

/// How many ticks pass between two looks at whether the connection is alive.
const HEARTBEAT_TICKS: u32 = 5;

/// How long the server may take to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How many channels are subscribed to together.
const AT_ONCE: usize = 500;
