//! Reads the costs that the operating system and the server report, and starts child processes.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use registry_testkit::process::HelperProcess;
use registry_testkit::redis::RedisServer;

/// The time limit of a child process, on top of its measured time.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Starts this program again as a child process with these arguments.
pub fn start_child(arguments: &[&str]) -> HelperProcess {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("child").args(arguments);
    HelperProcess::spawn(command).unwrap()
}

/// The CPU time of all threads of a process.
pub fn cpu_time(process: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let cpu_time = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(cpu_time.sum())
}

/// The resident memory of this process, in bytes.
pub fn resident_bytes() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1_024
}

pub async fn info(server: &RedisServer, section: &str) -> String {
    server.send_command_args(&["INFO", section]).await.unwrap().text().unwrap_or_default()
}

pub async fn info_number(server: &RedisServer, section: &str, name: &str) -> u32 {
    let info = info(server, section).await;
    let fields = info.lines().filter_map(|line| line.split_once(':'));
    fields.filter(|field| field.0 == name).find_map(|field| field.1.parse().ok()).unwrap()
}

/// The number of calls of these commands since the last `CONFIG RESETSTAT`, including calls from
/// scripts.
pub async fn calls(server: &RedisServer, names: &[&str]) -> u64 {
    let info = info(server, "commandstats").await;
    let calls = |line: &str| -> Option<u64> {
        let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        if names.contains(&name) { rest.split(',').next()?.parse().ok() } else { None }
    };
    info.lines().filter_map(calls).sum()
}

/// Pings a server without a pause for `time`. Returns the latency of each reply.
pub fn pings(addr: SocketAddr, time: Duration) -> Vec<Duration> {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_nodelay(true).unwrap();
    let end = Instant::now() + time;
    let mut times = Vec::new();
    let mut reply = [0; 7];
    while Instant::now() < end {
        let requested = Instant::now();
        stream.write_all(b"PING\r\n").unwrap();
        stream.read_exact(&mut reply).unwrap();
        times.push(requested.elapsed());
    }
    times
}

/// The `q` quantile of the values, or zero without values.
pub fn quantile(values: impl IntoIterator<Item = f64>, q: f64) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let at = ((values.len() as f64 - 1.0) * q).round() as usize;
    values.get(at).copied().unwrap_or_default()
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    quantile(values, 0.5)
}
