//! The connection actor: runs commands on a session's state, one at a time. Knows nothing of the
//! commands. Used by `session`.
//!
//! If the state is free, a caller runs its command itself, which saves a message to the actor's
//! task and one back. The task runs everything else: commands of concurrent callers, scheduled
//! work, and commands that a caller has not finished. For the latter, a command is stored where the
//! task can reach it. So no caller waits for another one that was dropped or is not polled.
//!
//! Commands run in the task's runtime, whichever task polls them. Their timers and connections
//! belong to that runtime, and last as long as the task.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The state on which commands run, one after the other.
pub(super) trait Desk: Send + 'static {
    /// The result of a command, with the channel for its caller.
    type Answer: Send + 'static;

    /// Returns when scheduled work is due.
    fn next_errand(&self) -> Option<Instant>;
}

/// A running command. Returns the state at its end.
pub(super) type Errand<D> =
    Pin<Box<dyn Future<Output = (Box<D>, <D as Desk>::Answer)> + Send + 'static>>;

pub(super) struct Hands<D: Desk> {
    state: Mutex<State<D>>,
    /// Whether a caller has left a command to the task.
    is_left: AtomicBool,
    /// Wakes the task, which then checks what to do.
    bell: Notify,
    runtime: Handle,
}

struct State<D: Desk> {
    desk: Whose<D>,
    /// The number of the latest command that a caller runs.
    errands: u64,
    /// When the task next runs without being woken.
    planned: Option<Instant>,
    /// Whether a caller used the state since the task last did.
    was_used: bool,
}

enum Whose<D: Desk> {
    Nobodys(Box<D>),
    Callers {
        number: u64,
        errand: Errand<D>,
        caller: Option<Waker>,
    },
    Tasks,
    /// The task has ended, and the state was dropped.
    Gone,
}

/// The result of an attempt to run a command in the caller.
pub(super) enum Begun<D: Desk, C> {
    /// The command runs while this is polled.
    Here(Here<D>),
    /// The state is in use: send the command to the task.
    Taken(C),
    /// The state was dropped.
    Gone(C),
}

impl<D: Desk> Hands<D> {
    /// Creates an actor for `desk`. The caller then starts its task in `runtime`.
    pub(super) fn new(desk: D, runtime: Handle) -> Self {
        let desk = Whose::Nobodys(Box::new(desk));
        let state = State { desk, errands: 0, planned: None, was_used: false };
        let state = Mutex::new(state);
        Self { state, is_left: AtomicBool::new(false), bell: Notify::new(), runtime }
    }

    /// Runs `errand` with `command` in the caller, if the state is free.
    pub(super) fn begin<C>(
        self: &Arc<Self>,
        command: C,
        errand: impl FnOnce(Box<D>, C) -> Errand<D>,
    ) -> Begun<D, C> {
        // The mutex is locked during each poll of a command, so this must not block.
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

    /// For the task: takes the state, and finishes a caller's command. Returns `None` if the state
    /// is gone.
    pub(super) async fn fetch(&self) -> Option<(Box<D>, Option<D::Answer>)> {
        match self.take() {
            Whose::Nobodys(desk) => Some((desk, None)),
            Whose::Callers { errand, caller, .. } => {
                // The caller of the command must now wait for its reply channel.
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
        mem::replace(&mut self.state().desk, Whose::Tasks)
    }

    /// For the task: returns the state.
    pub(super) fn leave(&self, desk: Box<D>) {
        let mut state = self.state();
        let was_used = mem::take(&mut state.was_used);
        // A recent caller will probably return. While the task stays scheduled, that caller need
        // not wake it.
        let soon = was_used.then(|| Instant::now() + ROUND);
        state.planned = desk.next_errand().into_iter().chain(soon).min();
        state.desk = Whose::Nobodys(desk);
    }

    /// For the task: waits until there is something to do.
    pub(super) async fn idle(&self) {
        loop {
            if self.is_left.swap(false, Ordering::AcqRel) {
                return;
            }
            let planned = self.state().planned;
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

    /// Schedules the task for `moment` at the latest.
    fn plan(&self, mut state: MutexGuard<'_, State<D>>, moment: Instant) {
        if state.planned.is_none_or(|planned| moment < planned) {
            state.planned = Some(moment);
            drop(state);
            self.bell.notify_one();
        }
    }

    /// Drops the state, and any command that runs on it.
    pub(super) fn give_up(&self) {
        let rest = mem::replace(&mut self.state().desk, Whose::Gone);
        if let Whose::Callers { errand, caller: Some(caller), .. } = rest {
            drop(errand);
            caller.wake();
        }
    }

    fn state(&self) -> MutexGuard<'_, State<D>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command that its caller runs. Dropping it unfinished leaves the command to the task.
pub(super) struct Here<D: Desk> {
    hands: Arc<Hands<D>>,
    number: u64,
    is_done: bool,
}

impl<D: Desk> Here<D> {
    /// Polls the command. Returns `None` if the task has taken it over, or if the state is gone. In
    /// the first case the task sends the answer.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<D::Answer>> {
        let hands = Arc::clone(&self.hands);
        // Locked during the poll, so that the task, and with it the runtime, cannot end meanwhile.
        // A command wakes no caller, so no foreign code runs under this lock.
        let mut state = hands.state();
        let (mut errand, mut caller) = match mem::replace(&mut state.desk, Whose::Gone) {
            Whose::Callers { number, errand, caller } if number == self.number => (errand, caller),
            others => {
                state.desk = others;
                self.is_done = true;
                return Poll::Ready(None);
            }
        };
        // If this panics, the state remains `Gone`.
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
            // If the caller stops polling, the command may be complete on the server without an
            // answer. So the task takes over after a while.
            hands.plan(state, Instant::now() + ROUND);
            return Poll::Pending;
        };
        self.is_done = true;
        state.was_used = true;
        let next = desk.next_errand();
        state.desk = Whose::Nobodys(desk);
        if let Some(next) = next {
            hands.plan(state, next);
        }
        Poll::Ready(Some(answer))
    }
}

impl<D: Desk> Drop for Here<D> {
    fn drop(&mut self) {
        // If the task has taken the command over, it detects that. The drop must not wait for the
        // current user of the state, so it only sets a flag.
        if !self.is_done {
            self.hands.is_left.store(true, Ordering::Release);
            self.hands.bell.notify_one();
        }
    }
}

/// How long the task stays scheduled after a caller's command, and how long a caller may leave its
/// command unpolled.
const ROUND: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::poll;
    use tokio::sync::Semaphore;
    use tokio::time::{sleep, timeout};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    #[derive(Default)]
    struct Toy {
        done: Vec<u32>,
        due: Option<Instant>,
    }

    impl Desk for Toy {
        type Answer = u32;

        fn next_errand(&self) -> Option<Instant> {
            self.due
        }
    }

    fn toy() -> Arc<Hands<Toy>> {
        Arc::new(Hands::new(Toy::default(), Handle::current()))
    }

    /// Returns a command that ends when the gate opens.
    fn waiting(mut toy: Box<Toy>, (number, gate): (u32, Arc<Semaphore>)) -> Errand<Toy> {
        Box::pin(async move {
            gate.acquire().await.unwrap().forget();
            toy.done.push(number);
            (toy, number)
        })
    }

    fn here<C>(begun: Begun<Toy, C>) -> Here<Toy> {
        match begun {
            Begun::Here(here) => here,
            Begun::Taken(_) => panic!("somebody has the desk"),
            Begun::Gone(_) => panic!("the desk is gone"),
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_a_caller_who_does_not_go_on() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(0)));
        let mut first = here(hands.begin((1, Arc::clone(&gate)), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let second = hands.begin((2, Arc::clone(&gate)), waiting);
        assert!(matches!(second, Begun::Taken((2, _))));
        gate.add_permits(1);
        let (desk, answer) = hands.fetch().await.unwrap();
        assert_eq!((desk.done.as_slice(), answer), ([1].as_slice(), Some(1)));
        hands.leave(desk);
        assert!(poll_fn(|cx| first.poll(cx)).await.is_none(), "the task tells the answer");
    }

    #[tokio::test]
    async fn who_waits_for_an_errand_that_the_task_took_over_is_woken() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(0)));
        let mut first = here(hands.begin((1, Arc::clone(&gate)), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let caller = tokio::spawn(async move { poll_fn(|cx| first.poll(cx)).await });
        tokio::task::yield_now().await;
        let mut fetching = Box::pin(hands.fetch());
        assert!(poll!(&mut fetching).is_pending());
        assert!(caller.await.unwrap().is_none());
        gate.add_permits(1);
        assert_eq!(fetching.await.unwrap().1, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_caller_drops_is_finished_by_the_task() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(0)));
        let mut first = here(hands.begin((1, Arc::clone(&gate)), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        assert!(timeout(ROUND / 2, hands.idle()).await.is_err(), "nothing to do yet");
        drop(first);
        timeout(Duration::ZERO, hands.idle()).await.unwrap();
        gate.add_permits(1);
        assert_eq!(hands.fetch().await.unwrap().1, Some(1));
    }

    /// Even if no other command and no scheduled work wakes the task.
    #[tokio::test(start_paused = true)]
    async fn what_a_caller_does_not_go_on_with_is_finished_by_the_task() {
        let gate = Arc::new(Semaphore::new(0));
        let toy = Toy { due: Some(Instant::now() + HOUR), ..Toy::default() };
        let hands = Arc::new(Hands::new(toy, Handle::current()));
        let (desk, _) = hands.fetch().await.unwrap();
        hands.leave(desk);
        let mut idle = Box::pin(hands.idle());
        assert!(poll!(&mut idle).is_pending());
        let mut first = here(hands.begin((1, Arc::clone(&gate)), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        gate.add_permits(1);
        timeout(ROUND, idle).await.unwrap();
        assert_eq!(hands.fetch().await.unwrap().1, Some(1));
    }

    /// Not even for a command that runs on the same thread.
    #[tokio::test]
    async fn who_drops_an_errand_waits_for_no_other() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(1)));
        let first = here(hands.begin((1, gate), waiting));
        let (desk, _) = hands.fetch().await.unwrap();
        hands.leave(desk);
        let dropping = |toy, first: Here<Toy>| -> Errand<Toy> {
            Box::pin(async move {
                drop(first);
                (toy, 2)
            })
        };
        let mut second = here(hands.begin(first, dropping));
        assert_eq!(poll_fn(|cx| second.poll(cx)).await, Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_comes_when_what_a_caller_began_has_its_time() {
        let hands = toy();
        let mut idle = Box::pin(hands.idle());
        assert!(poll!(&mut idle).is_pending());
        let due = Instant::now() + Duration::from_secs(7);
        let plan = |mut toy: Box<Toy>, due| -> Errand<Toy> {
            Box::pin(async move {
                toy.due = Some(due);
                (toy, 0)
            })
        };
        let mut errand = here(hands.begin(due, plan));
        assert_eq!(poll_fn(|cx| errand.poll(cx)).await, Some(0));
        timeout(HOUR, idle).await.unwrap();
        assert_eq!(Instant::now(), due);
        // The task stays scheduled once more for a repeated use.
        let (mut desk, _) = hands.fetch().await.unwrap();
        desk.due = None;
        hands.leave(desk);
        timeout(ROUND, hands.idle()).await.unwrap();
        // After that nothing is scheduled.
        let (desk, _) = hands.fetch().await.unwrap();
        hands.leave(desk);
        assert!(timeout(HOUR, hands.idle()).await.is_err());
    }

    #[tokio::test]
    async fn an_errand_outlives_the_runtime_of_its_caller() {
        let hands = toy();
        let theirs = Arc::clone(&hands);
        let slow = |toy: Box<Toy>, ()| -> Errand<Toy> {
            Box::pin(async move {
                sleep(Duration::from_millis(100)).await;
                (toy, 1)
            })
        };
        let elsewhere = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut errand = here(theirs.begin((), slow));
                assert!(poll!(poll_fn(|cx| errand.poll(cx))).is_pending());
            });
        });
        elsewhere.join().unwrap();
        hands.idle().await;
        assert_eq!(hands.fetch().await.unwrap().1, Some(1));
    }

    #[tokio::test]
    async fn what_is_at_a_desk_ends_with_it() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(0)));
        let mut first = here(hands.begin((1, Arc::clone(&gate)), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        hands.give_up();
        assert_eq!(Arc::strong_count(&gate), 1, "the errand is dropped");
        assert!(poll_fn(|cx| first.poll(cx)).await.is_none());
        assert!(matches!(hands.begin((2, gate), waiting), Begun::Gone(_)));
        assert!(hands.fetch().await.is_none());
    }

    #[tokio::test]
    async fn who_waits_at_a_desk_that_ends_is_woken() {
        let (hands, gate) = (toy(), Arc::new(Semaphore::new(0)));
        let mut first = here(hands.begin((1, gate), waiting));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let caller = tokio::spawn(async move { poll_fn(|cx| first.poll(cx)).await });
        tokio::task::yield_now().await;
        hands.give_up();
        assert!(timeout(HOUR, caller).await.unwrap().unwrap().is_none());
    }

    #[tokio::test]
    async fn an_errand_that_panics_is_the_end_of_its_desk() {
        let hands = toy();
        let wrong = |_: Box<Toy>, ()| -> Errand<Toy> { Box::pin(async { panic!("on purpose") }) };
        let mut errand = here(hands.begin((), wrong));
        let caller = tokio::spawn(async move { poll_fn(|cx| errand.poll(cx)).await });
        assert!(caller.await.unwrap_err().is_panic());
        let gate = Arc::new(Semaphore::new(1));
        assert!(matches!(hands.begin((1, gate), waiting), Begun::Gone(_)));
        assert!(hands.fetch().await.is_none());
    }
}
