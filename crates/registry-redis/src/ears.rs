//! Receives release messages: one subscriber connection and one task per server, and one
//! subscription per awaited lock. This module handles channels and does not interpret locks. `Node`
//! owns an [`Ears`].
//!
//! A message may be lost with its connection, so every reconnect wakes all waiters. The engine also
//! polls, so no waiter depends on messages alone. Commands never use this connection, because a
//! push message could be mistaken for the response to a command.

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

/// How long an unused channel stays subscribed. A caller that waited once often waits again.
const LINGER: Duration = Duration::from_secs(1);

/// The limits of the pause between connection attempts.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The channels on which releases are published.
#[derive(Debug, Clone)]
pub(crate) struct Hearing {
    pub(crate) names: Names,
    /// Sharded Pub/Sub: each channel belongs to a hash slot.
    pub(crate) sharded: bool,
}

/// All subscribed channels of one server.
pub(crate) struct Ears {
    table: Arc<Table>,
    orders: mpsc::UnboundedSender<Arc<str>>,
    task: JoinHandle<()>,
}

struct Table {
    hearing: Hearing,
    channels: Mutex<HashMap<Arc<str>, Arc<Channel>>>,
    /// Notified when another server has taken the place of this one.
    renewed: Notify,
}

/// One channel.
struct Channel {
    /// The value of [`CHANGES`] at the last change; zero until the server confirms the
    /// subscription.
    changed_at: AtomicU64,
    /// The server has confirmed the subscription on the current connection.
    subscribed: AtomicBool,
    changed: Notify,
    listeners: AtomicU64,
    /// A caller has waited since the last search for idle channels. A waiter that is between two
    /// attempts comes back soon.
    is_recent: AtomicBool,
}

/// Numbers the changes of all channels of all servers. A channel that was dropped and subscribed
/// again, or that moved to another server, therefore never counts as unchanged.
static CHANGES: AtomicU64 = AtomicU64::new(1);

/// Returns the current change number, for [`Ears::wait`]. Read it before a request whose response a
/// later change may make obsolete.
pub(crate) fn moment() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

impl Ears {
    /// Starts the task, which opens connections with `dial`. The first one is opened when a caller
    /// first waits.
    pub(crate) fn new(dial: Dial, hearing: Hearing) -> Self {
        let table = Arc::new(Table { hearing, channels: Mutex::default(), renewed: Notify::new() });
        let (orders, inbox) = mpsc::unbounded_channel();
        let task = tokio::spawn(work(Arc::clone(&table), dial, inbox));
        Self { table, orders, task }
    }

    /// Waits until the channel `name` has changed after `moment`. If the channel was not subscribed
    /// at `moment`, waits until it is.
    pub(crate) async fn wait(&self, name: &str, moment: u64) {
        let listener = self.table.listen(name, &self.orders);
        let channel = &listener.0;
        loop {
            let changed = channel.changed.notified();
            tokio::pin!(changed);
            // Registers before the check, so that no change between the two is missed.
            changed.as_mut().enable();
            if channel.changed_at.load(Ordering::Acquire) > moment {
                return;
            }
            changed.await;
        }
    }

    /// Returns whether a message on this channel would arrive: the subscription is confirmed on a
    /// connection that answers.
    pub(crate) fn are_confirmed(&self, name: &str) -> bool {
        let channels = self.table.channels();
        channels.get(name).is_some_and(|channel| channel.subscribed.load(Ordering::Acquire))
    }

    /// Replaces the connection, because another server has taken the place of this one.
    pub(crate) fn renew(&self) {
        self.table.renewed.notify_one();
    }

    /// Closes the connection. Running waits receive no more messages.
    pub(crate) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.close();
        // The waiters must find out which server has the lock now.
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
        // Without the task no message arrives; the engine polls.
        let _ = orders.send(name);
        Listener(channel)
    }

    fn names(&self) -> Vec<Arc<str>> {
        self.channels().keys().cloned().collect()
    }

    /// Records a possible change on `name`.
    fn change(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            note(channel);
        }
    }

    /// Records that messages on `name` arrive from now on.
    fn confirm(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            channel.subscribed.store(true, Ordering::Release);
            note(channel);
        }
    }

    /// Removes a channel that has moved to another server and wakes its waiters.
    fn lose(&self, name: &str) {
        if let Some(channel) = self.channels().remove(name) {
            note(&channel);
        }
    }

    fn has(&self, name: &str) -> bool {
        self.channels().contains_key(name)
    }

    /// Marks all channels as changed, because messages may have been missed.
    fn deafened(&self) {
        self.channels().values().for_each(|channel| note(channel));
    }

    /// Marks all channels as unsubscribed, because the connection is closed.
    fn unsubscribe_all(&self) {
        for channel in self.channels().values() {
            channel.subscribed.store(false, Ordering::Release);
        }
    }

    /// Removes and returns the channels without a waiter since the last call.
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

/// Counts one waiter of a channel.
struct Listener(Arc<Channel>);

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.listeners.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn work(table: Arc<Table>, dial: Dial, mut orders: mpsc::UnboundedReceiver<Arc<str>>) {
    let mut pause = RETRY_MIN;
    loop {
        // The first waiter triggers the first connection.
        if table.names().is_empty() && orders.recv().await.is_none() {
            return;
        }
        let (told, pushes) = mpsc::unbounded_channel();
        let hear: Pushes = Arc::new(move |push| _ = told.send(push));
        if let Ok(connection) = dial(hear).await {
            let ended = serve(&table, connection, pushes, &mut orders).await;
            table.unsubscribe_all();
            match ended {
                // The pause keeps growing: some servers accept the connection but refuse every
                // subscription.
                Ended::NeverUp => {}
                // The connection was in use, so this failure is a new one.
                Ended::Broken => pause = RETRY_MIN,
                Ended::NobodyLeft => return,
            }
        }
        table.forget_idle();
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// Why a connection ended.
enum Ended {
    /// The first subscriptions were not answered.
    NeverUp,
    Broken,
    NobodyLeft,
}

/// Serves subscriptions until the connection breaks, or all senders of orders are dropped.
async fn serve(
    table: &Table,
    mut connection: MultiplexedConnection,
    mut pushes: mpsc::UnboundedReceiver<PushInfo>,
    orders: &mut mpsc::UnboundedReceiver<Arc<str>>,
) -> Ended {
    // Earlier orders are in the table already, or their channels have been dropped again.
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
                // The channel may have been dropped since the order. Subscribing it now would leave
                // it subscribed forever.
                names.retain(|name| table.has(name));
                subscribed(table, &mut connection, &names).await
            }
            () = table.renewed.notified() => false,
            _ = tidy.tick() => {
                ticks = ticks.wrapping_add(1);
                let idle = table.forget_idle();
                let verb = if table.hearing.sharded { "SUNSUBSCRIBE" } else { "UNSUBSCRIBE" };
                let well = plain(&mut connection, verb, &idle).await;
                // A connection that died silently answers no PING.
                well && (!ticks.is_multiple_of(HEARTBEAT_TICKS) || answers(&mut connection).await)
            }
        };
        if !well {
            // Messages are lost until the next connection, whose first subscriptions wake all
            // waiters.
            return Ended::Broken;
        }
    }
}

/// Handles a push message. Returns false if the connection is no longer usable.
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
        // An unsubscription that was not requested means that the slot has moved. The client may
        // have taken it for the response to another command.
        PushKind::SUnsubscribe => text(push.data.first()).is_none_or(|name| !table.has(&name)),
        PushKind::Disconnection => false,
        _ => true,
    }
}

/// Subscribes to channels and records a possible change of each. Returns false if the connection is
/// no longer usable.
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
                // The channel stays unconfirmed and its waiters poll. The next connection tries
                // again, as does a new wait after the channel was dropped as idle.
                Err(_) => {}
            }
        }
    }
    true
}

/// Sends the same command for each name. Returns false if the connection is no longer usable.
async fn plain(connection: &mut MultiplexedConnection, verb: &str, names: &[Arc<str>]) -> bool {
    for names in names.chunks(AT_ONCE) {
        if each(connection, verb, names).await.is_none() {
            return false;
        }
    }
    true
}

/// Returns the responses to the same command for each name. Channels of different slots must not
/// share one command.
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

/// The number of ticks between two PINGs.
const HEARTBEAT_TICKS: u32 = 5;

/// The time limit for a response of the server.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The number of channels per pipeline.
const AT_ONCE: usize = 500;
