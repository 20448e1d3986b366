//! Jobs that run once per tick, over all processes.

use std::time::Duration;

use registry_core::once::{CatchUp, Outcome, Run, Tick};
use registry_core::{Claim, LockError, LockOptions, LockRegistryExt as _, Registry};
use tokio::sync::oneshot;

use crate::context::{TestContext, assert_granted, key};
use crate::faulty::{Fault, Faults, Operation};
use crate::sweep::{SweepOutcome, sweep};

/// A tick runs once, regardless of the process that requests it. Later calls return `AlreadyDone`
/// with the tick and the label of its run.
pub async fn a_tick_runs_once_over_all_processes(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let options = LockOptions::new().label("host 1");
    let ran = first
        .once("report")
        .tick(7)
        .options(options)
        .run(async |run: Run| run.tick().clone())
        .await;
    assert_eq!(ran.expect("the job runs"), Outcome::Ran(Tick::Number(7)));
    for registry in [&first, &second] {
        match run_tick(registry, 7).await {
            Outcome::AlreadyDone { tick, label, .. } => {
                assert_eq!(tick, Tick::Number(7));
                let has_labels = context.capabilities().labels;
                assert!(label.as_deref() == Some("host 1") || !has_labels, "{label:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(run_tick(&second, 8).await, Outcome::Ran(Some(8)));
}

/// A tick that is not larger than the last completed tick returns `AlreadyDone`.
pub async fn an_earlier_tick_is_already_done(context: &TestContext) {
    let registry = context.registry().await;
    assert_eq!(run_tick(&registry, 7).await, Outcome::Ran(Some(7)));
    for tick in [0, 6, 7] {
        let outcome = run_tick(&registry, tick).await;
        assert!(
            matches!(outcome, Outcome::AlreadyDone { tick: Tick::Number(7), .. }),
            "{outcome:?}"
        );
    }
}

/// While one process runs a tick, other processes receive `Outcome::Busy`.
pub async fn a_tick_that_another_process_runs_is_busy(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let outcome = first.once("report").tick(7).run(async |_: Run| run_tick(&second, 7).await).await;
    assert_eq!(outcome.expect("the job runs"), Outcome::Ran(Outcome::Busy));
}

/// A caller that waits returns `AlreadyDone` if another process completes the tick during the wait.
pub async fn a_caller_that_waits_does_not_repeat_the_tick(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let (finish, finished) = oneshot::channel::<()>();
    let mut finished = Some(finished);
    let (start, started) = oneshot::channel::<()>();
    let mut start = Some(start);
    let running = tokio::spawn(async move {
        let work = |_| {
            start.take().expect("one run").send(()).expect("the test waits");
            finished.take().expect("one run")
        };
        first.once("report").tick(7).run(work).await
    });
    started.await.expect("the job starts");
    let options = LockOptions::new().wait(context.max_wait());
    let waiting = tokio::spawn(async move {
        second.once("report").tick(7).options(options).run(async |_: Run| ()).await
    });
    tokio::task::yield_now().await;
    finish.send(()).expect("the work waits");
    assert_eq!(running.await.expect("no panic").expect("the job runs"), Outcome::Ran(Ok(())));
    let waited = waiting.await.expect("no panic").expect("the store answers");
    assert!(matches!(waited, Outcome::AlreadyDone { .. }), "{waited:?}");
}

/// A tick whose work fails is not completed and can run again.
pub async fn a_failed_run_leaves_the_tick_available(context: &TestContext) {
    let registry = context.registry().await;
    let job = registry.once("report").tick(7);
    let failed =
        job.try_run(async |_: Run| Err::<(), _>("no disk")).await.expect("the store answers");
    assert_eq!(failed, Outcome::Ran(Err("no disk")));
    let ran = job.try_run(async |_: Run| Ok::<_, ()>(1)).await.expect("the store answers");
    assert_eq!(ran, Outcome::Ran(Ok(1)));
}

/// A tick whose process dies is not completed. Another process runs it after the lease.
pub async fn the_tick_of_a_dead_process_runs_after_its_lease(context: &TestContext) {
    let dead = context.client().await;
    assert_granted(&*dead, &Claim::new(key("report"), context.short_lease())).await;
    let registry = context.registry().await;
    let wait = context.short_lease() * 4 + context.max_wait();
    let job = registry.once("report").tick(7).options(LockOptions::new().wait(wait));
    assert_eq!(job.run(async |_: Run| 1).await.expect("the job runs"), Outcome::Ran(1));
}

/// Missed ticks are run as the job states: none, the latest one, or all of them.
pub async fn catch_up_selects_which_missed_ticks_run(context: &TestContext) {
    let registry = context.registry().await;
    let mut ran = Vec::new();
    for (catch_up, tick) in
        [(CatchUp::All, 3), (CatchUp::Skip, 6), (CatchUp::Latest, 10), (CatchUp::All, 14)]
    {
        let job = registry.once("report").tick(tick).catch_up(catch_up);
        let work = |run: Run| {
            ran.extend(run.tick().number());
            std::future::ready(())
        };
        assert_eq!(job.run(work).await.expect("the job runs"), Outcome::Ran(()));
    }
    assert_eq!(ran, [3, 6, 9, 10, 11, 12, 13, 14]);
    // Ticks of different kinds are not ordered, so a tick of another kind always runs.
    let time = registry.once("report").tick(std::time::UNIX_EPOCH).run(async |_: Run| ()).await;
    assert_eq!(time.expect("the job runs"), Outcome::Ran(()));
}

/// The runs of a job have increasing fencing tokens.
pub async fn each_run_has_a_larger_token(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let mut last = None;
    for tick in 1..=10 {
        let registry = if tick % 2 == 0 { &first } else { &second };
        let outcome =
            registry.once("report").tick(tick).run(async |run: Run| run.fencing_token()).await;
        let Outcome::Ran(token) = outcome.expect("the job runs") else { panic!("not run") };
        assert!(last < Some(token), "{token} after {last:?}");
        last = Some(token);
    }
}

/// A run of `every` is recorded under the start of its period, so the same period does not run
/// twice. A job may change the length of its periods.
pub async fn a_period_runs_once(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    // The period does not end during the test.
    let period = Duration::from_secs(100 * 366 * 24 * 3_600);
    let outcome = first.once("report").every(period).run(async |run: Run| run.tick().clone()).await;
    assert_eq!(outcome.expect("the job runs"), Outcome::Ran(Tick::Time(0)));
    let again = second.once("report").every(period).run(async |_: Run| ()).await;
    assert!(matches!(again.expect("the store answers"), Outcome::AlreadyDone { .. }));
    let shorter = second.once("report").every(period / 10_000).run(async |_: Run| ()).await;
    assert_eq!(shorter.expect("the job runs"), Outcome::Ran(()));
    let longer = first.once("report").every(period).run(async |_: Run| ()).await;
    assert!(matches!(longer.expect("the store answers"), Outcome::AlreadyDone { .. }));
    let error = second.once("report").every(Duration::from_micros(1)).run(async |_: Run| ()).await;
    assert!(matches!(error.expect_err("too short"), LockError::InvalidOption(_)));
}

/// A run whose lock was broken does not record its tick.
pub async fn a_run_that_lost_its_lock_does_not_record_the_tick(context: &TestContext) {
    let (first, second) = (context.registry().await, context.registry().await);
    let job = first.once("report").tick(7);
    let work = async |_: Run| second.force_release("report").await.expect("a held lock is broken");
    let error = job.run(work).await.expect_err("the lock was broken");
    assert!(matches!(error, LockError::Lost { .. }), "{error}");
    assert_eq!(run_tick(&second, 7).await, Outcome::Ran(Some(7)));
}

/// If the reply to the write of a job's record (its last completed tick) is lost, the write is
/// repeated. The tick does not run again, and the call continues with the next missed tick.
pub async fn a_record_write_with_a_lost_reply_is_repeated(context: &TestContext) {
    let faults = Faults::none().at_call(Operation::SetValue, 1, Fault::LoseReply);
    let faulty = context.faulty(faults).await;
    let (local, remote) =
        (context.registry_over(&faulty, context.long_lease()), context.registry().await);
    assert_eq!(run_tick(&remote, 5).await, Outcome::Ran(Some(5)));
    let mut ran = Vec::new();
    let work = |run: Run| {
        ran.extend(run.tick().number());
        std::future::ready(())
    };
    let job = local.once("report").tick(8).catch_up(CatchUp::All);
    assert_eq!(job.run(work).await.expect("the job runs"), Outcome::Ran(()));
    assert_eq!(ran, [6, 7, 8]);
    let again = run_tick(&remote, 8).await;
    assert!(matches!(again, Outcome::AlreadyDone { .. }), "{again:?}");
}

/// A key whose value is not the record of a job is refused, and its value stays.
pub async fn a_foreign_value_is_refused(context: &TestContext) {
    let registry = context.registry().await;
    let lock = registry.obtain("report");
    let guard = lock.lock().await.expect("a free lock is acquired");
    guard.set_value("mine").await.expect("the holder writes");
    guard.unlock().await.expect("the lock is released");
    let error = registry.once("report").tick(7).run(async |_: Run| ()).await.expect_err("foreign");
    assert!(matches!(error, LockError::ForeignValue { .. }), "{error}");
    let value = lock.value().await.expect("the value is read").map(|value| value.bytes);
    assert_eq!(value, Some(b"mine".to_vec()));
}

/// A run may be dropped at every poll. Its tick is then completed or not, and the lock becomes
/// free.
#[expect(clippy::async_yields_async, reason = "each call of `make` returns a new future to sweep")]
pub async fn a_run_may_be_dropped_at_every_poll(context: &TestContext) {
    let (local, remote) = (context.registry().await, context.registry().await);
    let mut tick = 0;
    let make = async || {
        tick += 1;
        // The lock of the previous run may still be released in the background.
        let options = LockOptions::new().wait(context.max_wait());
        let job = local.once("report").tick(tick).options(options);
        async move { job.run(async |_: Run| tokio::task::yield_now().await).await }
    };
    let mut other_tick = 0;
    sweep(make, 1_000, async |end| {
        if let SweepOutcome::Completed { output, .. } = end {
            let outcome = output.expect("the store answers");
            assert!(matches!(outcome, Outcome::Ran(()) | Outcome::AlreadyDone { .. }));
        }
        // Another job of the same store still runs.
        other_tick += 1;
        let options = LockOptions::new().wait(context.max_wait());
        let job = remote.once("other").tick(other_tick).options(options.clone());
        assert_eq!(job.run(async |_: Run| ()).await.expect("the job runs"), Outcome::Ran(()));
        // The lock of the dropped run is released.
        let lock = remote.obtain("report").lock_with(options).await.expect("the lock is free");
        lock.unlock().await.expect("the lock is released");
    })
    .await;
}

/// A named tick returns `AlreadyDone` only while it is the last completed tick. After another tick,
/// it runs again.
pub async fn a_named_tick_is_not_repeated_while_it_is_the_last_one(context: &TestContext) {
    let registry = context.registry().await;
    for (name, runs) in [("v1.9", true), ("v1.9", false), ("v1.10", true), ("v1.9", true)] {
        let outcome = registry.once("deploy").tick(name).run(async |_: Run| ()).await;
        let outcome = outcome.expect("the store answers");
        assert_eq!(outcome == Outcome::Ran(()), runs, "{name}: {outcome:?}");
    }
    let error = registry.once("deploy").tick("a\nb").run(async |_: Run| ()).await;
    assert!(matches!(error.expect_err("a line break"), LockError::InvalidOption(_)));
}

async fn run_tick(registry: &Registry, tick: u64) -> Outcome<Option<u64>> {
    let outcome =
        registry.once("report").tick(tick).run(async |run: Run| run.tick().number()).await;
    outcome.expect("the store answers")
}
