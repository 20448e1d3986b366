//! Tests `ClockShim` with a Rust program: the test starts itself again as a child process whose
//! clocks jump.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io::stdin;
use std::process::Command;
use std::time::Duration;

use nix::time::ClockId;
use registry_testkit::clock::ClockShim;
use registry_testkit::process::HelperProcess;

/// Set in the child process.
const CHILD: &str = "THE_PROGRAM_WITH_THE_CLOCK";
/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(60);
/// In seconds: more than any delay of the machine, less than the jumps.
const TOLERANCE: f64 = 300.0;

/// Returns the wall clock, the monotonic clock and the time since boot, in seconds.
fn seconds() -> [f64; 3] {
    [ClockId::CLOCK_REALTIME, ClockId::CLOCK_MONOTONIC, ClockId::CLOCK_BOOTTIME]
        .map(|clock| Duration::from(clock.now().unwrap()).as_secs_f64())
}

#[tokio::test]
async fn a_program_sees_only_the_jumps_of_its_own_clock() {
    if std::env::var_os(CHILD).is_some() {
        // Ends the line that the test harness has begun.
        println!();
        for _ in stdin().lines() {
            println!("seconds {:?}", seconds());
        }
        return;
    }
    let (clock, other) = (ClockShim::new().unwrap(), ClockShim::new().unwrap());
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args([
        "clock::a_program_sees_only_the_jumps_of_its_own_clock",
        "--exact",
        "--nocapture",
    ]);
    program.env(CHILD, "yes").envs(clock.environment());
    let mut program = HelperProcess::spawn(program).unwrap();
    let steps = [(0, 0), (3_600, 0), (-7_200, 1_000), (3_600, -2_000)];
    let mut ahead = [0.0; 3];
    for (wall, monotonic) in steps {
        clock.jump_wall(wall).unwrap();
        clock.jump_monotonic(monotonic).unwrap();
        other.jump_wall(1_000_000).unwrap();
        ahead[0] += f64::from(i32::try_from(wall).unwrap());
        ahead[1] += f64::from(i32::try_from(monotonic).unwrap());
        program.write_line("now").unwrap();
        let readings = program
            .expect_map(|line| serde_json::from_str(line.strip_prefix("seconds ")?).ok(), LIMIT);
        let readings: [f64; 3] = readings.await.unwrap();
        for (clock, real) in seconds().into_iter().enumerate() {
            let error = readings[clock] - real - ahead[clock];
            assert!(error.abs() < TOLERANCE, "clock {clock} is {error} s off after {ahead:?}");
        }
    }
}
