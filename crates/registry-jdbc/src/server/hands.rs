//! In whose hands a desk is: those of the caller whose errand it runs, those of the task that attends to it, or nobody's. Knows nothing of what is done at it.
//!
//! Whoever comes to a desk that nobody has runs their errand themselves, which costs no message to the task and none back. The task does everything else: the errands of those
//! who come meanwhile, what has its time, and whatever a caller leaves unfinished. For the last of these an errand stays where the task can reach it. So nothing waits for a caller who is
//! gone, or who is there and does not go on.
//!
//! Errands run in the task's runtime, whoever polls them: their timers and connections are that runtime's and live as long as the task.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Where errands are run, one after the other.
pub(super) trait Desk: Send + 'static {
    /// The answer to an errand, and whom to tell.
    type Answer: Send + 'static;

    /// When there is something to do that nobody asks for.
    fn next_errand(&self) -> Option<Instant>;
}

/// An errand under way. Gives the desk back.
pub(super) type Errand<D> =
    Pin<Box<dyn Future<Output = (Box<D>, <D as Desk>::Answer)> + Send + 'static>>;

pub(super) struct Hands<D: Desk> {
    state: Mutex<State<D>>,
    /// For the task: something is to be looked at.
    bell: Notify,
    runtime: Handle,
}

struct State<D: Desk> {
    desk: Whose<D>,
    /// Numbers the errands of callers.
    errands: u64,
    /// When the task comes by itself.
    planned: Option<Instant>,
    /// Whether a caller has left an errand to the task.
    is_left: bool,
    /// Whether a caller had the desk since the task did.
    was_used: bool,
}

enum Whose<D: Desk> {
    Nobodys(Box<D>),
    Callers { number: u64, errand: Errand<D>, caller: Option<Waker> },
    Tasks,
    /// The task has ended, and all that was at the desk with it.
    Gone,
}

/// What comes of trying to run an errand oneself.
pub(super) enum Begun<D: Desk, C> {
    /// It runs as this is polled.
    Here(Here<D>),
    /// Somebody has the desk: ask the task.
    Taken(C),
    /// There is no desk any more.
    Gone(C),
}

impl<D: Desk> Hands<D> {
    /// A desk that a task of this runtime is about to attend to.
    pub(super) fn new(desk: D, runtime: Handle) -> Self {
        let desk = Whose::Nobodys(Box::new(desk));
        let state = State { desk, errands: 0, planned: None, is_left: false, was_used: false };
        Self { state: Mutex::new(state), bell: Notify::new(), runtime }
    }

    /// Runs `errand` with `command`, if nobody has the desk.
    pub(super) fn begin<C>(
        self: &Arc<Self>,
        command: C,
        errand: impl FnOnce(Box<D>, C) -> Errand<D>,
    ) -> Begun<D, C> {
        // Whoever has the lock may be in the middle of an errand.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::WouldBlock) => return Begun::Taken(command),
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
        };
        match mem::replace(&mut state.desk, Whose::Gone) {
            Whose::Nobodys(desk) => {
                state.errands += 1;
                let number = state.errands;
                state.desk = Whose::Callers { number, errand: errand(desk, command), caller: None };
                Begun::Here(Here { hands: Arc::clone(self), number, is_done: false })
            }
            Whose::Gone => Begun::Gone(command),
            others => {
                state.desk = others;
                Begun::Taken(command)
            }
        }
    }

    /// For the task: takes the desk, and finishes what a caller may have begun. `None` if there is none any more.
    pub(super) async fn fetch(&self) -> Option<(Box<D>, Option<D::Answer>)> {
        match self.take() {
            Whose::Nobodys(desk) => Some((desk, None)),
            Whose::Callers { errand, caller, .. } => {
                // Who waits for the errand waits for its answer from now on.
                if let Some(caller) = caller {
                    caller.wake();
                }
                let (desk, answer) = errand.await;
                Some((desk, Some(answer)))
            }
            Whose::Tasks => None,
            Whose::Gone => {
                self.give_up();
                None
            }
        }
    }

    fn take(&self) -> Whose<D> {
        let mut state = self.state();
        state.is_left = false;
        mem::replace(&mut state.desk, Whose::Tasks)
    }

    /// For the task: gives the desk back.
    pub(super) fn leave(&self, desk: Box<D>) {
        let mut state = self.state();
        let was_used = mem::take(&mut state.was_used);
        // Whoever used it just now may do so again: then nobody need ring for what comes of it.
        let soon = was_used.then(|| Instant::now() + ROUND);
        state.planned = desk.next_errand().or(soon);
        state.desk = Whose::Nobodys(desk);
    }

    /// For the task: waits until there is something to do for it.
    pub(super) async fn idle(&self) {
        loop {
            let (planned, is_left) = {
                let state = self.state();
                (state.planned, state.is_left)
            };
            if is_left {
                return;
            }
            let time = async {
                match planned {
                    Some(moment) => sleep_until(moment).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = time => return,
                () = self.bell.notified() => {}
            }
        }
    }

    /// Ends the desk, and whatever is at it.
    pub(super) fn give_up(&self) {
        let rest = mem::replace(&mut self.state().desk, Whose::Gone);
        drop(rest);
    }

    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An errand that its caller runs. Dropped in the middle it is left to the task.
pub(super) struct Here<D: Desk> {
    hands: Arc<Hands<D>>,
    number: u64,
    is_done: bool,
}

impl<D: Desk> Here<D> {
    /// Goes on with the errand. `None` when it was left to the task, which tells the answer itself, or nobody does.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<D::Answer>> {
        let hands = Arc::clone(&self.hands);
        // Held while the errand goes on: until then the task, and with it the runtime, does not end. An errand wakes nobody, so no foreign code runs in here.
        let mut state = hands.state();
        let (mut errand, mut caller) = match mem::replace(&mut state.desk, Whose::Gone) {
            Whose::Callers { number, errand, caller } if number == self.number => (errand, caller),
            others => {
                state.desk = others;
                self.is_done = true;
                return Poll::Ready(None);
            }
        };
        // If this panics, the desk is gone.
        let polled = {
            let _runtime = hands.runtime.enter();
            errand.as_mut().poll(cx)
        };
        let Poll::Ready((desk, answer)) = polled else {
            match &mut caller {
                Some(caller) => caller.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            state.desk = Whose::Callers { number: self.number, errand, caller };
            return Poll::Pending;
        };
        self.is_done = true;
        state.was_used = true;
        let next = desk.next_errand();
        let is_early = |next: &Instant| state.planned.is_none_or(|planned| *next < planned);
        let is_news = next.as_ref().is_some_and(is_early);
        if is_news {
            state.planned = next;
        }
        state.desk = Whose::Nobodys(desk);
        drop(state);
        if is_news {
            hands.bell.notify_one();
        }
        Poll::Ready(Some(answer))
    }
}

impl<D: Desk> Drop for Here<D> {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        let mut state = self.hands.state();
        let is_mine = matches!(&state.desk, Whose::Callers { number, .. } if *number == self.number);
        if is_mine {
            state.is_left = true;
        }
        drop(state);
        if is_mine {
            self.hands.bell.notify_one();
        }
    }
}

/// How long the task stays awake for those who use the desk again and again.
const ROUND: Duration = Duration::from_millis(300);
