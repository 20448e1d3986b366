//! Tests `HelperProcess` with real programs: output, pauses, exit status, and that no process is
//! left behind.

#![cfg(unix)]
#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry_testkit::eventually;
use registry_testkit::process::HelperProcess;

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(150);

fn shell(script: &str) -> HelperProcess {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    HelperProcess::spawn(command).unwrap()
}

/// Returns whether the process has ended. A zombie that init has not reaped yet counts as ended.
fn has_ended(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH)
        || stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

#[tokio::test]
async fn lines_are_read_in_order_and_others_skipped() {
    let mut helper = shell("echo one; echo two; echo three; cat");
    let line = helper.expect_line(|line| line.starts_with("tw"), LIMIT).await.unwrap();
    assert_eq!(&*line, "two");
    let line = helper.expect_line(|_| true, LIMIT).await.unwrap();
    assert_eq!(&*line, "three");
    helper.write_line("four").unwrap();
    let length = helper.expect_map(|line| Some(line.len()), LIMIT).await.unwrap();
    assert_eq!(length, 4);
    assert_eq!(helper.lines().len(), 4);
}

#[tokio::test]
async fn a_missing_line_ends_the_wait_at_the_limit_with_the_transcript() {
    let mut helper = shell("echo out; echo problem >&2; cat");
    eventually(LIMIT, async || helper.stderr() == "problem\n").await;
    let late = helper.expect_line(|line| line == "never", SHORT).await.unwrap_err().to_string();
    assert!(late.contains("alive") && late.contains("out") && late.contains("problem"), "{late}");
}

#[tokio::test]
async fn a_line_that_can_no_longer_arrive_ends_the_wait() {
    let mut helper = shell("printf unfinished; exit 3");
    let line = helper.expect_line(|_| true, LIMIT).await.unwrap();
    assert_eq!(&*line, "unfinished");
    let ended = helper.expect_line(|_| true, LIMIT * 1_000).await.unwrap_err();
    assert!(ended.to_string().contains("ended without"), "{ended}");
    assert_eq!(helper.wait_exit(LIMIT).await.unwrap().code(), Some(3));
    assert_eq!(helper.signal(Signal::SIGTERM).unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_helper_that_reads_its_input_ends_with_it() {
    let mut helper = shell("cat; exit 4");
    helper.close_stdin();
    assert_eq!(helper.write_line("late").unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(helper.wait_exit(LIMIT).await.unwrap().code(), Some(4));
}

#[tokio::test]
async fn a_paused_process_does_nothing_until_it_is_resumed() {
    let mut helper = shell("echo ready; exec cat");
    helper.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    for round in ["first", "second"] {
        helper.pause().await.unwrap();
        helper.write_line(round).unwrap();
        helper.expect_line(|_| true, SHORT).await.unwrap_err();
        helper.resume().unwrap();
        helper.expect_line(|line| line == round, LIMIT).await.unwrap();
    }
}

#[tokio::test]
async fn the_exit_status_is_reported() {
    let terminated = shell("exec sleep 1000");
    terminated.terminate().unwrap();
    assert_eq!(terminated.wait_exit(LIMIT).await.unwrap().signal(), Some(Signal::SIGTERM as i32));
    let killed = shell("exec sleep 1000");
    killed.pause().await.unwrap();
    killed.kill().unwrap();
    assert_eq!(killed.wait_exit(LIMIT).await.unwrap().signal(), Some(Signal::SIGKILL as i32));
    assert_eq!(killed.pause().await.unwrap_err().kind(), ErrorKind::NotFound);
    let mut ignoring_sigterm = shell("trap '' TERM; echo ready; exec sleep 1000");
    ignoring_sigterm.expect_line(|line| line == "ready", LIMIT).await.unwrap();
    ignoring_sigterm.terminate().unwrap();
    let late = ignoring_sigterm.wait_exit(SHORT).await.unwrap_err();
    assert!(late.to_string().contains("did not end"), "{late}");
}

#[tokio::test]
async fn dropping_kills_the_process_and_its_children() {
    let mut helper = shell("sleep 1000 & echo $!; wait");
    let child = helper.expect_map(|line| line.parse::<i32>().ok(), LIMIT).await.unwrap();
    let leader = i32::try_from(helper.id()).unwrap();
    assert!(!has_ended(leader) && !has_ended(child));
    drop(helper);
    assert!(has_ended(leader));
    eventually(LIMIT, async || has_ended(child)).await;
}

#[tokio::test]
async fn dropping_kills_a_stopped_process() {
    let helper = shell("exec sleep 1000");
    helper.pause().await.unwrap();
    let pid = i32::try_from(helper.id()).unwrap();
    drop(helper);
    assert!(has_ended(pid));
}

#[tokio::test]
async fn dropping_kills_children_of_an_ended_process() {
    let mut helper = shell("sleep 1000 & echo $!");
    let child = helper.expect_map(|line| line.parse::<i32>().ok(), LIMIT).await.unwrap();
    helper.wait_exit(LIMIT).await.unwrap();
    assert!(!has_ended(child));
    drop(helper);
    eventually(LIMIT, async || has_ended(child)).await;
}

#[test]
fn a_panicking_test_leaves_no_process() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut pid = 0;
    let test = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        runtime.block_on(async {
            let helper = shell("exec sleep 1000");
            pid = i32::try_from(helper.id()).unwrap();
            panic!("on purpose");
        })
    }));
    assert!(test.is_err() && has_ended(pid));
}

#[test]
fn a_program_that_does_not_exist_is_an_error() {
    let missing = HelperProcess::spawn(Command::new("/nonexistent/program")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}
