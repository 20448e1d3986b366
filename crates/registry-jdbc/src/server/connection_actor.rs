//! The connection actor: runs commands on a session's state, one at a time. `session` uses this
//! module and defines the commands.
//!
//! If the state is free, a caller runs its command itself, which saves a message to the actor's
//! task and one back. The task runs everything else: commands of concurrent callers, scheduled
//! work, and commands that a caller has not finished. The actor stores an unfinished command, so
//! that the task can finish it. So a dropped or unpolled caller blocks no other caller.
//!
//! Each poll of a command enters the actor's runtime, even if a caller in another runtime polls it.
//! So timers and connections of commands belong to the actor's runtime, and last as long as its
//! task.

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
pub(super) trait ActorState: Send + 'static {
    /// The result of a command, with the channel for its caller.
    type Output: Send + 'static;

    /// Returns when scheduled work is due.
    fn next_due(&self) -> Option<Instant>;
}

/// A running command. Returns the state at its end.
pub(super) type RunningCommand<S> =
    Pin<Box<dyn Future<Output = (Box<S>, <S as ActorState>::Output)> + Send + 'static>>;

pub(super) struct ConnectionActor<S: ActorState> {
    inner: Mutex<Inner<S>>,
    /// Whether a caller has dropped an unfinished command.
    has_abandoned_command: AtomicBool,
    /// Wakes the task, which then checks what to do.
    task_wakeup: Notify,
    runtime: Handle,
}

struct Inner<S: ActorState> {
    slot: StateSlot<S>,
    /// The id of the last command that started in a caller.
    last_command_id: u64,
    /// When the task next runs without being woken.
    wake_at: Option<Instant>,
    /// Whether a caller used the state since the task last did.
    was_used: bool,
}

enum StateSlot<S: ActorState> {
    Idle(Box<S>),
    InCaller {
        command_id: u64,
        future: RunningCommand<S>,
        caller: Option<Waker>,
    },
    InTask,
    /// The state was dropped, because the task has ended or a command panicked.
    Closed,
}

/// The result of an attempt to run a command in the caller.
pub(super) enum StartOutcome<S: ActorState, C> {
    /// The state was free. The command runs while its caller polls the contained future.
    Inline(InlineCommand<S>),
    /// The state is in use: send the command to the task.
    InUse(C),
    /// The state was dropped.
    Closed(C),
}

impl<S: ActorState> ConnectionActor<S> {
    /// Creates an actor for `state`. The caller then starts its task in `runtime`.
    pub(super) fn new(state: S, runtime: Handle) -> Self {
        let slot = StateSlot::Idle(Box::new(state));
        let inner = Inner { slot, last_command_id: 0, wake_at: None, was_used: false };
        let inner = Mutex::new(inner);
        Self {
            inner,
            has_abandoned_command: AtomicBool::new(false),
            task_wakeup: Notify::new(),
            runtime,
        }
    }

    /// Starts `command` in the caller, if the state is free. `run` returns the future of the
    /// command.
    pub(super) fn try_start<C>(
        self: &Arc<Self>,
        command: C,
        run: impl FnOnce(Box<S>, C) -> RunningCommand<S>,
    ) -> StartOutcome<S, C> {
        // The mutex is locked during each poll of a command, so `try_start` must not wait for it.
        let mut inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::WouldBlock) => return StartOutcome::InUse(command),
            Err(TryLockError::Poisoned(inner)) => inner.into_inner(),
        };
        match mem::replace(&mut inner.slot, StateSlot::Closed) {
            StateSlot::Idle(state) => {
                inner.last_command_id += 1;
                let command_id = inner.last_command_id;
                inner.slot =
                    StateSlot::InCaller { command_id, future: run(state, command), caller: None };
                StartOutcome::Inline(InlineCommand {
                    actor: Arc::clone(self),
                    command_id,
                    is_done: false,
                })
            }
            StateSlot::Closed => StartOutcome::Closed(command),
            other => {
                inner.slot = other;
                StartOutcome::InUse(command)
            }
        }
    }

    /// For the task: takes the state. If a caller has started a command, completes this command and
    /// also returns its output. Returns `None` if the state was dropped.
    pub(super) async fn take_over(&self) -> Option<(Box<S>, Option<S::Output>)> {
        match self.take_slot() {
            StateSlot::Idle(state) => Some((state, None)),
            StateSlot::InCaller { future, caller, .. } => {
                // The woken caller finds its command gone, and waits for the response on its reply
                // channel.
                if let Some(caller) = caller {
                    caller.wake();
                }
                let (state, output) = future.await;
                Some((state, Some(output)))
            }
            // The task took the state before and did not return it.
            StateSlot::InTask => None,
            StateSlot::Closed => {
                self.close();
                None
            }
        }
    }

    fn take_slot(&self) -> StateSlot<S> {
        mem::replace(&mut self.lock().slot, StateSlot::InTask)
    }

    /// For the task: stores the state, so that callers can use it.
    pub(super) fn return_state(&self, state: Box<S>) {
        let mut inner = self.lock();
        let was_used = mem::take(&mut inner.was_used);
        // After recent use, the actor keeps a wake-up scheduled, so that the next caller need not
        // notify the task.
        let soon = was_used.then(|| Instant::now() + TAKEOVER_DELAY);
        inner.wake_at = state.next_due().into_iter().chain(soon).min();
        inner.slot = StateSlot::Idle(state);
    }

    /// For the task: waits until a caller has dropped an unfinished command, or until `wake_at`.
    /// Does not wait for queued commands.
    pub(super) async fn wait_for_work(&self) {
        loop {
            if self.has_abandoned_command.swap(false, Ordering::AcqRel) {
                return;
            }
            let wake_at = self.lock().wake_at;
            let time = async {
                match wake_at {
                    Some(time) => sleep_until(time).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = time => return,
                () = self.task_wakeup.notified() => {}
            }
        }
    }

    /// Schedules the task for `time` at the latest.
    fn schedule(&self, mut inner: MutexGuard<'_, Inner<S>>, time: Instant) {
        if inner.wake_at.is_none_or(|wake_at| time < wake_at) {
            inner.wake_at = Some(time);
            drop(inner);
            self.task_wakeup.notify_one();
        }
    }

    /// Drops the state, and the command of a caller that runs on it. Later calls of
    /// [`try_start`](Self::try_start) return [`StartOutcome::Closed`].
    pub(super) fn close(&self) {
        let last_slot = mem::replace(&mut self.lock().slot, StateSlot::Closed);
        if let StateSlot::InCaller { future, caller: Some(caller), .. } = last_slot {
            drop(future);
            caller.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<S>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command that its caller runs. If the caller drops it unfinished, the task finishes the
/// command.
pub(super) struct InlineCommand<S: ActorState> {
    actor: Arc<ConnectionActor<S>>,
    command_id: u64,
    is_done: bool,
}

impl<S: ActorState> InlineCommand<S> {
    /// Polls the command. Returns `None` if the task has taken the command over and sends the
    /// response, or if the state was dropped.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<S::Output>> {
        let actor = Arc::clone(&self.actor);
        // The mutex stays locked during the poll, so the actor's task and runtime cannot end before
        // the poll returns. The poll calls no caller's waker, so no woken task runs under the
        // mutex. It may clone and drop wakers.
        let mut inner = actor.lock();
        let (mut future, mut caller) = match mem::replace(&mut inner.slot, StateSlot::Closed) {
            StateSlot::InCaller { command_id, future, caller } if command_id == self.command_id => {
                (future, caller)
            }
            other => {
                inner.slot = other;
                self.is_done = true;
                return Poll::Ready(None);
            }
        };
        // If the poll panics, the state remains `Closed`.
        let polled = {
            let _runtime = actor.runtime.enter();
            future.as_mut().poll(cx)
        };
        let Poll::Ready((state, output)) = polled else {
            match &mut caller {
                Some(caller) => caller.clone_from(cx.waker()),
                empty @ None => *empty = Some(cx.waker().clone()),
            }
            inner.slot = StateSlot::InCaller { command_id: self.command_id, future, caller };
            // The caller may stop polling while the server completes the command. So the task takes
            // over after [`TAKEOVER_DELAY`], or at an earlier `wake_at`. Later polls do not restart
            // the delay.
            actor.schedule(inner, Instant::now() + TAKEOVER_DELAY);
            return Poll::Pending;
        };
        self.is_done = true;
        inner.was_used = true;
        let next = state.next_due();
        inner.slot = StateSlot::Idle(state);
        if let Some(next) = next {
            actor.schedule(inner, next);
        }
        Poll::Ready(Some(output))
    }
}

impl<S: ActorState> Drop for InlineCommand<S> {
    fn drop(&mut self) {
        // If the task has already taken the command over, the flag has no effect. The drop must not
        // wait for the current user of the state, so it only sets a flag.
        if !self.is_done {
            self.actor.has_abandoned_command.store(true, Ordering::Release);
            self.actor.task_wakeup.notify_one();
        }
    }
}

/// The maximum time from a command's first poll to its takeover by the task. After a caller has
/// used the state, the task also wakes once after this time.
const TAKEOVER_DELAY: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::poll;
    use tokio::sync::Semaphore;
    use tokio::time::{sleep, timeout};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    #[derive(Default)]
    struct TestState {
        done: Vec<u32>,
        due: Option<Instant>,
    }

    impl ActorState for TestState {
        type Output = u32;

        fn next_due(&self) -> Option<Instant> {
            self.due
        }
    }

    fn test_actor() -> Arc<ConnectionActor<TestState>> {
        Arc::new(ConnectionActor::new(TestState::default(), Handle::current()))
    }

    /// Returns a command that ends when the gate opens.
    fn gated_command(
        mut state: Box<TestState>,
        (number, gate): (u32, Arc<Semaphore>),
    ) -> RunningCommand<TestState> {
        Box::pin(async move {
            gate.acquire().await.unwrap().forget();
            state.done.push(number);
            (state, number)
        })
    }

    fn expect_inline<C>(outcome: StartOutcome<TestState, C>) -> InlineCommand<TestState> {
        match outcome {
            StartOutcome::Inline(command) => command,
            StartOutcome::InUse(_) => panic!("the state is in use"),
            StartOutcome::Closed(_) => panic!("the state was dropped"),
        }
    }

    #[tokio::test]
    async fn taking_the_state_finishes_the_callers_command() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(0)));
        let mut first = expect_inline(actor.try_start((1, Arc::clone(&gate)), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let second = actor.try_start((2, Arc::clone(&gate)), gated_command);
        assert!(matches!(second, StartOutcome::InUse((2, _))));
        gate.add_permits(1);
        let (state, output) = actor.take_over().await.unwrap();
        assert_eq!((state.done.as_slice(), output), ([1].as_slice(), Some(1)));
        actor.return_state(state);
        assert!(poll_fn(|cx| first.poll(cx)).await.is_none(), "the task sends the response");
    }

    #[tokio::test]
    async fn a_caller_is_woken_when_the_task_takes_over_its_command() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(0)));
        let mut first = expect_inline(actor.try_start((1, Arc::clone(&gate)), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let caller = tokio::spawn(async move { poll_fn(|cx| first.poll(cx)).await });
        tokio::task::yield_now().await;
        let mut takeover = Box::pin(actor.take_over());
        assert!(poll!(&mut takeover).is_pending());
        assert!(caller.await.unwrap().is_none());
        gate.add_permits(1);
        assert_eq!(takeover.await.unwrap().1, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_finishes_a_dropped_command() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(0)));
        let mut first = expect_inline(actor.try_start((1, Arc::clone(&gate)), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        assert!(
            timeout(TAKEOVER_DELAY / 2, actor.wait_for_work()).await.is_err(),
            "nothing to do yet"
        );
        drop(first);
        timeout(Duration::ZERO, actor.wait_for_work()).await.unwrap();
        gate.add_permits(1);
        assert_eq!(actor.take_over().await.unwrap().1, Some(1));
    }

    // The scheduled work is due only after an hour, and no other command wakes the task.
    #[tokio::test(start_paused = true)]
    async fn an_unpolled_command_wakes_the_task() {
        let gate = Arc::new(Semaphore::new(0));
        let state = TestState { due: Some(Instant::now() + HOUR), ..TestState::default() };
        let actor = Arc::new(ConnectionActor::new(state, Handle::current()));
        let (state, _) = actor.take_over().await.unwrap();
        actor.return_state(state);
        let mut idle = Box::pin(actor.wait_for_work());
        assert!(poll!(&mut idle).is_pending());
        let mut first = expect_inline(actor.try_start((1, Arc::clone(&gate)), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        gate.add_permits(1);
        timeout(TAKEOVER_DELAY, idle).await.unwrap();
        assert_eq!(actor.take_over().await.unwrap().1, Some(1));
    }

    // The mutex is locked while a command drops another command.
    #[tokio::test]
    async fn dropping_a_command_does_not_block() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(1)));
        let first = expect_inline(actor.try_start((1, gate), gated_command));
        let (state, _) = actor.take_over().await.unwrap();
        actor.return_state(state);
        let drop_command = |state, first: InlineCommand<TestState>| -> RunningCommand<TestState> {
            Box::pin(async move {
                drop(first);
                (state, 2)
            })
        };
        let mut second = expect_inline(actor.try_start(first, drop_command));
        assert_eq!(poll_fn(|cx| second.poll(cx)).await, Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_wakes_when_scheduled_work_is_due() {
        let actor = test_actor();
        let mut idle = Box::pin(actor.wait_for_work());
        assert!(poll!(&mut idle).is_pending());
        let due = Instant::now() + Duration::from_secs(7);
        let schedule = |mut state: Box<TestState>, due| -> RunningCommand<TestState> {
            Box::pin(async move {
                state.due = Some(due);
                (state, 0)
            })
        };
        let mut future = expect_inline(actor.try_start(due, schedule));
        assert_eq!(poll_fn(|cx| future.poll(cx)).await, Some(0));
        timeout(HOUR, idle).await.unwrap();
        assert_eq!(Instant::now(), due);
        // Because the state was used, the task wakes once more after `TAKEOVER_DELAY`.
        let (mut state, _) = actor.take_over().await.unwrap();
        state.due = None;
        actor.return_state(state);
        timeout(TAKEOVER_DELAY, actor.wait_for_work()).await.unwrap();
        // After that nothing is scheduled.
        let (state, _) = actor.take_over().await.unwrap();
        actor.return_state(state);
        assert!(timeout(HOUR, actor.wait_for_work()).await.is_err());
    }

    #[tokio::test]
    async fn a_command_outlives_the_runtime_of_its_caller() {
        let actor = test_actor();
        let shared = Arc::clone(&actor);
        let slow = |state: Box<TestState>, ()| -> RunningCommand<TestState> {
            Box::pin(async move {
                sleep(Duration::from_millis(100)).await;
                (state, 1)
            })
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut future = expect_inline(shared.try_start((), slow));
                assert!(poll!(poll_fn(|cx| future.poll(cx))).is_pending());
            });
        });
        thread.join().unwrap();
        actor.wait_for_work().await;
        assert_eq!(actor.take_over().await.unwrap().1, Some(1));
    }

    #[tokio::test]
    async fn closing_the_actor_drops_the_running_command() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(0)));
        let mut first = expect_inline(actor.try_start((1, Arc::clone(&gate)), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        actor.close();
        assert_eq!(Arc::strong_count(&gate), 1, "the command is dropped");
        assert!(poll_fn(|cx| first.poll(cx)).await.is_none());
        assert!(matches!(actor.try_start((2, gate), gated_command), StartOutcome::Closed(_)));
        assert!(actor.take_over().await.is_none());
    }

    #[tokio::test]
    async fn closing_the_actor_wakes_the_waiting_caller() {
        let (actor, gate) = (test_actor(), Arc::new(Semaphore::new(0)));
        let mut first = expect_inline(actor.try_start((1, gate), gated_command));
        assert!(poll!(poll_fn(|cx| first.poll(cx))).is_pending());
        let caller = tokio::spawn(async move { poll_fn(|cx| first.poll(cx)).await });
        tokio::task::yield_now().await;
        actor.close();
        assert!(timeout(HOUR, caller).await.unwrap().unwrap().is_none());
    }

    #[tokio::test]
    async fn a_panicking_command_closes_the_actor() {
        let actor = test_actor();
        let panicking = |_: Box<TestState>, ()| -> RunningCommand<TestState> {
            Box::pin(async { panic!("on purpose") })
        };
        let mut future = expect_inline(actor.try_start((), panicking));
        let caller = tokio::spawn(async move { poll_fn(|cx| future.poll(cx)).await });
        assert!(caller.await.unwrap_err().is_panic());
        let gate = Arc::new(Semaphore::new(1));
        assert!(matches!(actor.try_start((1, gate), gated_command), StartOutcome::Closed(_)));
        assert!(actor.take_over().await.is_none());
    }
}
