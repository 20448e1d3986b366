//! Hears of keys that are deleted: one stream for all of them. Wakes those who wait, and passes on losses. Decides nothing.

use std::collections::HashMap;
use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::poll_fn;
use registry_core::{Key, LossHints};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::link::Link;
use crate::wire::{
    NO_PUTS, WATCH, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    WatchResponse, WatchUnion,
};

/// The task that has the stream. It ends with this handle.
pub(crate) struct Ears {
    orders: Orders,
    next_id: AtomicI64,
    listeners: Arc<Listeners>,
    task: JoinHandle<()>,
}

// Without a limit: whoever waits or holds a lock has one watch.
type Orders = mpsc::UnboundedSender<Order>;

enum Order {
    Begin { id: i64, key: Vec<u8>, from: i64, who: Who, told: Arc<Told> },
    End(i64),
}

/// Who wants to know.
enum Who {
    /// It reads what has come of its watch.
    Waiter,
    Holder(Key),
}

/// What was heard of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It was deleted.
    Deleted,
    /// Nothing, and nothing will be.
    Nothing,
}

/// The registries that want to hear of losses.
#[derive(Default)]
struct Listeners(Mutex<Vec<LossHints>>);

/// Something that is listened for until this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    id: i64,
    told: Arc<Told>,
    orders: Orders,
}

/// What has come of a watch.
#[derive(Debug, Default)]
struct Told {
    /// The member has said that it will tell.
    confirmed: AtomicBool,
    over: AtomicBool,
    deleted: AtomicBool,
    /// Notified at the end.
    ended: Notify,
}

impl Watch {
    /// Whether it is still listened for.
    pub(crate) fn lives(&self) -> bool {
        !self.told.over.load(Ordering::Acquire)
    }

    /// Whether a deletion of the key would be heard: the member has confirmed the watch, and its stream is not known to have ended.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.told.confirmed.load(Ordering::Acquire) && self.lives()
    }

    /// Waits until something is heard, or nothing will be.
    pub(crate) fn heard(&self) -> impl Future<Output = Heard> + Send + use<> {
        let told = Arc::clone(&self.told);
        async move {
            loop {
                let mut ended = pin!(told.ended.notified());
                ended.as_mut().enable();
                if told.over.load(Ordering::Acquire) {
                    let deleted = told.deleted.load(Ordering::Acquire);
                    return if deleted { Heard::Deleted } else { Heard::Nothing };
                }
                ended.await;
            }
        }
    }

    /// Whether the key was deleted.
    pub(crate) fn heard_of_end(&self) -> bool {
        self.told.deleted.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.lives() {
            _ = self.orders.send(Order::End(self.id));
            self.told.over.store(true, Ordering::Release);
            self.told.ended.notify_waiters();
        }
    }
}

impl Ears {
    pub(crate) fn new(link: Link) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let listeners = Arc::<Listeners>::default();
        let task = tokio::spawn(listen(link, received, Arc::clone(&listeners)));
        Self { orders, next_id: 1.into(), listeners, task }
    }

    /// Listens for the end of `name`, from the revision `from` on.
    pub(crate) fn wait(&self, name: Vec<u8>, from: i64) -> Watch {
        self.begin(name, from, Who::Waiter)
    }

    /// Passes on when `name`, by which somebody here holds `key`, ends after the revision `from`.
    pub(crate) fn watch_over(&self, key: &Key, name: Vec<u8>, from: i64) -> Watch {
        self.begin(name, from, Who::Holder(key.clone()))
    }

    fn begin(&self, key: Vec<u8>, from: i64, who: Who) -> Watch {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let told = Arc::<Told>::default();
        _ = self.orders.send(Order::Begin { id, key, from, who, told: Arc::clone(&told) });
        Watch { id, told, orders: self.orders.clone() }
    }

    /// One more registry that wants to hear of losses.
    pub(crate) fn tell(&self, hints: LossHints) {
        self.listeners.with(|all| all.push(hints));
    }

    /// Whether any registry, of those that are not closed, wants to hear of losses.
    pub(crate) fn are_wanted(&self) -> bool {
        self.listeners.with(|all| !all.is_empty())
    }
}

impl Drop for Ears {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Ears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ears").finish_non_exhaustive()
    }
}

impl Listeners {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<LossHints>) -> T) -> T {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(LossHints::is_live);
        work(&mut all)
    }

    fn hear_of(&self, key: &Key) {
        let all = self.with(|all| all.clone());
        all.iter().for_each(|hints| hints.look_at(key));
    }
}

/// All that is listened for.
#[derive(Default)]
struct Watches(HashMap<i64, (Who, Arc<Told>)>);

impl Watches {
    /// Tells what was heard. False if nobody wants to know any more.
    fn tell(&mut self, id: i64, heard: Heard, listeners: &Listeners) -> bool {
        let Some((who, told)) = self.0.remove(&id) else { return false };
        told.deleted.store(heard == Heard::Deleted, Ordering::Release);
        told.over.store(true, Ordering::Release);
        told.ended.notify_waiters();
        match who {
            Who::Waiter => {}
            // In any case: what was not heard may have happened.
            Who::Holder(key) => listeners.hear_of(&key),
        }
        true
    }

    fn confirm(&self, id: i64) {
        if let Some((_, told)) = self.0.get(&id) {
            told.confirmed.store(true, Ordering::Release);
        }
    }

    fn tell_all(&mut self, listeners: &Listeners) {
        for id in self.0.keys().copied().collect::<Vec<_>>() {
            self.tell(id, Heard::Nothing, listeners);
        }
    }
}

async fn listen(link: Link, mut orders: mpsc::UnboundedReceiver<Order>, listeners: Arc<Listeners>) {
    let mut watches = Watches::default();
    while let Some(order) = orders.recv().await {
        // Of what a stream had when it ended, nothing more is heard.
        hear(&link, &mut orders, order, &mut watches, &listeners).await;
        watches.tell_all(&listeners);
    }
}

/// Has a stream until it ends.
async fn hear(
    link: &Link,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    first: Order,
    watches: &mut Watches,
    listeners: &Listeners,
) {
    let (requests, mut outgoing) = mpsc::unbounded_channel();
    let obey = |order: Order, watches: &mut Watches| match order {
        Order::Begin { id, key, from, who, told } => {
            watches.0.insert(id, (who, told));
            let filters = vec![NO_PUTS];
            let create = WatchCreateRequest { key, start_revision: from, filters, watch_id: id };
            requests.send(WatchRequest { request: Some(WatchUnion::Create(create)) }).is_ok()
        }
        Order::End(id) => {
            // What has been told is over in any case.
            watches.0.remove(&id).is_none() || requests.send(cancel(id)).is_ok()
        }
    };
    if !obey(first, watches) || watches.0.is_empty() {
        return;
    }
    let Ok(wire) = link.wire().await else { return };
    let mut departures = link.departures();
    let outgoing = poll_fn(move |cx| outgoing.poll_recv(cx));
    let Ok(mut news) = link.stream(&wire, WATCH, outgoing).await else {
        link.leave(wire.number, true);
        return;
    };
    wire.heard();
    // When the member was asked to show that it is there, and has not answered.
    let mut asked: Option<Instant> = None;
    loop {
        let has_watches = !watches.0.is_empty();
        let check_at = asked.unwrap_or_else(|| wire.last_heard()) + link.patience();
        tokio::select! {
            order = orders.recv() => {
                if !order.is_some_and(|order| obey(order, watches)) {
                    return;
                }
            }
            answer = news.message() => {
                let Ok(Some(answer)) = answer else {
                    link.leave(wire.number, true);
                    return;
                };
                wire.heard();
                asked = None;
                let WatchResponse { watch_id, created, canceled, events } = answer;
                if canceled && watch_id < 0 {
                    // A watch that was never begun is not named.
                    return;
                }
                if created && !canceled {
                    watches.confirm(watch_id);
                }
                if canceled {
                    watches.tell(watch_id, Heard::Nothing, listeners);
                } else if events.iter().any(|event| event.kind == DELETED)
                    && watches.tell(watch_id, Heard::Deleted, listeners)
                {
                    _ = requests.send(cancel(watch_id));
                }
            }
            left = departures.wait_for(|&left| left >= wire.number) => {
                drop(left);
                return;
            }
            () = sleep_until(check_at), if has_watches => {
                if wire.was_heard_within(link.patience()) {
                    asked = None;
                } else if asked.is_some() {
                    link.leave(wire.number, true);
                    return;
                } else {
                    // Waiters rely on a silent stream, so a stream that has died must not pass for one.
                    asked = Some(Instant::now());
                    let progress = WatchUnion::Progress(WatchProgressRequest {});
                    _ = requests.send(WatchRequest { request: Some(progress) });
                }
            }
        }
    }
}

fn cancel(watch_id: i64) -> WatchRequest {
    WatchRequest { request: Some(WatchUnion::Cancel(WatchCancelRequest { watch_id })) }
}

const DELETED: i32 = 1;
