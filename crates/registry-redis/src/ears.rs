//! Hears of releases. One connection, one task, and one subscription per key that somebody waits for; knows nothing of locks.
//!
//! A message may be lost with its connection, so everybody is woken after each reconnect; and waiting never relies on messages
//! alone, that is the engine's part.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use redis::aio::{PubSubSink, PubSubStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::link::Listening;

/// How long a channel that nobody listens to any more stays subscribed: who waited once often waits again.
const LINGER: Duration = Duration::from_secs(1);

/// The pauses between tries to connect.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// All channels that are listened to.
pub(crate) struct Ears {
    table: Arc<Table>,
    orders: mpsc::UnboundedSender<Arc<str>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Table {
    /// Numbers all changes of all channels, so that a channel that was forgotten and is listened to anew never counts as unchanged.
    changes: AtomicU64,
    channels: Mutex<HashMap<Arc<str>, Arc<Channel>>>,
}

/// One channel.
struct Channel {
    /// Zero until the server has confirmed the subscription; then counts what may have changed since.
    changes: AtomicU64,
    changed: Notify,
    listeners: AtomicU64,
}

impl Ears {
    /// Listens over connections that `connect` makes, the first of them when there is something to listen to.
    pub(crate) fn new(connect: impl Fn() -> Listening + Send + 'static) -> Self {
        let table = Arc::new(Table::default());
        let (orders, inbox) = mpsc::unbounded_channel();
        let task = tokio::spawn(work(Arc::clone(&table), connect, inbox));
        Self { table, orders, task }
    }

    /// How many changes were heard of on `channel`; zero if it is not listened to. To be read before a question whose answer may be
    /// outdated by a change.
    pub(crate) fn heard(&self, channel: &str) -> u64 {
        let channels = self.table.channels();
        channels.get(channel).map_or(0, |channel| channel.changes.load(Ordering::Acquire))
    }

    /// Returns when something has changed since `heard` was read. If nothing was listened to then, returns as soon as it is.
    pub(crate) async fn wait(&self, name: &str, heard: u64) {
        let channel = self.table.listen(name, &self.orders);
        let _listener = Listener(&channel);
        loop {
            let changed = channel.changed.notified();
            tokio::pin!(changed);
            // Listening starts before the look, or a change could slip through in between.
            changed.as_mut().enable();
            if channel.changes.load(Ordering::Acquire) != heard {
                return;
            }
            changed.await;
        }
    }

    /// Ends the connection. Whoever waits hears nothing any more.
    pub(crate) fn close(&self) {
        self.task.abort();
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.close();
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
    fn listen(&self, name: &str, orders: &mpsc::UnboundedSender<Arc<str>>) -> Arc<Channel> {
        let mut channels = self.channels();
        if let Some(channel) = channels.get(name) {
            channel.listeners.fetch_add(1, Ordering::AcqRel);
            return Arc::clone(channel);
        }
        let name: Arc<str> = name.into();
        let channel = Arc::new(Channel {
            changes: AtomicU64::new(0),
            changed: Notify::new(),
            listeners: AtomicU64::new(1),
        });
        channels.insert(Arc::clone(&name), Arc::clone(&channel));
        // Without the task nobody hears anything; the engine looks by itself.
        let _ = orders.send(name);
        channel
    }

    fn names(&self) -> Vec<Arc<str>> {
        self.channels().keys().cloned().collect()
    }

    /// Notes that something may have changed on `name`.
    fn change(&self, name: &str) {
        if let Some(channel) = self.channels().get(name) {
            self.note(channel);
        }
    }

    fn has(&self, name: &str) -> bool {
        self.channels().contains_key(name)
    }

    /// To be called while the table is locked.
    fn note(&self, channel: &Channel) {
        channel.changes.store(self.changes.fetch_add(1, Ordering::AcqRel) + 1, Ordering::Release);
        channel.changed.notify_waiters();
    }

    /// Notes that whatever happened on any channel was not heard.
    fn deafened(&self) {
        for channel in self.channels().values() {
            self.note(channel);
        }
    }

    /// Takes out the channels that nobody listens to.
    fn forget_idle(&self) -> Vec<Arc<str>> {
        let mut channels = self.channels();
        let idle = |channel: &Channel| channel.listeners.load(Ordering::Acquire) == 0;
        let names: Vec<_> = channels
            .iter()
            .filter(|(_, channel)| idle(channel))
            .map(|(name, _)| Arc::clone(name))
            .collect();
        for name in &names {
            channels.remove(name);
        }
        names
    }

    fn channels(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who waits.
struct Listener<'a>(&'a Channel);

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.0.listeners.fetch_sub(1, Ordering::AcqRel);
    }
}

async fn work(
    table: Arc<Table>,
    connect: impl Fn() -> Listening + Send,
    mut orders: mpsc::UnboundedReceiver<Arc<str>>,
) {
    let mut pause = RETRY_MIN;
    loop {
        // The first who waits calls for the first connection.
        if table.names().is_empty() && orders.recv().await.is_none() {
            return;
        }
        if let Ok(connection) = connect().await {
            let (sink, stream) = connection.split();
            match serve(&table, sink, stream, &mut orders).await {
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
    /// Before the first subscription was confirmed.
    NeverUp,
    Broken,
    NobodyLeft,
}

/// Listens until the connection breaks, or nobody can give orders any more.
async fn serve(
    table: &Table,
    mut sink: PubSubSink,
    mut stream: PubSubStream,
    orders: &mut mpsc::UnboundedReceiver<Arc<str>>,
) -> Ended {
    // What was ordered so far is in the table, or was forgotten since.
    while orders.try_recv().is_ok() {}
    if !subscribed(&mut sink, &table.names()).await {
        return Ended::NeverUp;
    }
    table.deafened();
    let mut tidy = tokio::time::interval(LINGER);
    tidy.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = 0_u32;
    loop {
        let well = tokio::select! {
            message = stream.next() => match message {
                Some(message) => {
                    table.change(message.get_channel_name());
                    true
                }
                None => false,
            },
            order = orders.recv() => {
                let Some(name) = order else { return Ended::NobodyLeft };
                // Who asked may be gone and the channel forgotten: then nobody would ever unsubscribe from it.
                let well = !table.has(&name)
                    || subscribed(&mut sink, std::slice::from_ref(&name)).await;
                table.change(&name);
                well
            }
            _ = tidy.tick() => {
                ticks = ticks.wrapping_add(1);
                let idle = table.forget_idle();
                let well = idle.is_empty() || unsubscribed(&mut sink, &idle).await;
                // A connection that has died without a word answers nothing. Asking for what is there already changes nothing.
                well && (!ticks.is_multiple_of(HEARTBEAT_TICKS)
                    || subscribed(&mut sink, &table.names()).await)
            }
        };
        if !well {
            return Ended::Broken;
        }
    }
}

async fn subscribed(sink: &mut PubSubSink, names: &[Arc<str>]) -> bool {
    if names.is_empty() {
        return true;
    }
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    matches!(timeout(ANSWER_LIMIT, sink.subscribe(names)).await, Ok(Ok(())))
}

async fn unsubscribed(sink: &mut PubSubSink, names: &[Arc<str>]) -> bool {
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    matches!(timeout(ANSWER_LIMIT, sink.unsubscribe(names)).await, Ok(Ok(())))
}

/// How many ticks pass between two looks at whether the connection is alive.
const HEARTBEAT_TICKS: u32 = 5;

/// How long the server may take to confirm a subscription.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
