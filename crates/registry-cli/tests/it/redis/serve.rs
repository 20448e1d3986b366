//! `lockreg serve` over Redis: a store that does not answer, and the processor time for many locks.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{SysconfVar, sysconf};
use registry_testkit::proxy::{FaultProxy, ProxyMode};

use super::Redis;
use crate::serve::{Serve, next_event};
use crate::support::{TestProcess, wait_until};

#[test]
fn a_store_that_does_not_answer_is_unhealthy_until_it_answers() {
    let redis = Redis::start(&[], "");
    let server = redis.servers.as_ref().unwrap().addr();
    let _inside = redis.runtime.enter();
    let proxy = FaultProxy::start(server).unwrap();
    let arguments = ["serve", "--listen", "0", "--interval", "50ms"];
    let url = format!("redis://{}", proxy.addr());
    let mut serve = Serve::of(redis.command(&arguments).env("LOCK_REGISTRY_URL", &url));
    let holder = TestProcess::start(&mut redis.command(&["hold", "a/1"]));
    holder.next_line();
    serve.wait_for("api/locks/a/1", |lock| lock["held"] == true);
    redis.runtime.block_on(proxy.set_mode(ProxyMode::BlackHole)).unwrap();
    wait_until("an unhealthy answer", || serve.get("healthz").status == 503);
    assert_eq!(serve.get("api/locks/a/1").json()["held"], true, "the last state");
    redis.runtime.block_on(proxy.set_mode(ProxyMode::Pass)).unwrap();
    wait_until("a healthy answer", || serve.get("healthz").status == 200);
    assert_eq!(holder.finish(), 0);
    serve.wait_for("api/locks/a/1", |lock| lock["held"] == false);

    // SIGTERM ends `serve` even if the store does not answer.
    redis.runtime.block_on(proxy.set_mode(ProxyMode::BlackHole)).unwrap();
    serve.process.signal(Signal::SIGTERM);
    assert_eq!(serve.process.wait(), 0);
}

#[test]
fn ten_thousand_locks_cost_at_most_a_twentieth_of_a_processor() {
    const PROCESSES: usize = 10;
    const WINDOW: Duration = Duration::from_secs(60);
    let redis = Redis::start(&[], "");
    let holders: Vec<_> = (0..PROCESSES)
        .map(|process| {
            let mut command =
                redis.command(&["hold", "--lease", "10m", &format!("jobs/{process}/0")]);
            for index in 1..10_000 / PROCESSES {
                command.args(["--also", &format!("jobs/{process}/{index}")]);
            }
            TestProcess::start(&mut command)
        })
        .collect();
    for holder in &holders {
        holder.next_line();
    }
    let serve = Serve::of(&mut redis.command(&["serve", "--listen", "0", "--interval", "50ms"]));
    let mut events = serve.events();
    let first = next_event(&mut events, |_| true);
    assert_eq!(first["held"], 10_000);
    // The measurement begins after an event with changes only, so the processor time of the start
    // does not count.
    next_event(&mut events, |event| event["all"] == false);
    let hertz = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap();
    let processor_time = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", serve.process.pid())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let ticks: i64 = fields[11].parse::<i64>().unwrap() + fields[12].parse::<i64>().unwrap();
        Duration::from_millis((ticks * 1_000 / hertz).unsigned_abs())
    };
    let before = processor_time();
    std::thread::sleep(WINDOW);
    let used = processor_time() - before;
    assert!(used <= WINDOW / 20, "{used:?} of processor time in {WINDOW:?}");
    drop(holders);
}
