//! The program `lock-sections`: our side of a lock that is shared with other programs. Its one
//! argument is a [`SectionTask`] as JSON. The program prints "ready", runs the task after a line of
//! input, prints "done", and exits. At the end of its input, it exits at once with status 3.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::{env, process, thread};

use lock_registry_tests::sections::{
    CONNECT_TIMEOUT, PeerLayout, SectionTask, TIMEOUT, run_sections,
};
use registry_core::Registry;
use registry_redis::{Layout, Publish, RedisBackend, RedisConfig};
use tokio::sync::oneshot;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let argument = env::args().nth(1).unwrap_or_default();
    let task: SectionTask = serde_json::from_str(&argument)?;
    let registry = if task.url.starts_with("redis") {
        connect_redis(&task).await?
    } else {
        // For other stores, all options are in the URL.
        lock_registry::connect(&task.url).await?
    };
    print_line("ready");
    wait_for_start().await?;
    run_sections(&registry.obtain(&task.key), &task).await?;
    print_line("done");
    Ok(())
}

async fn connect_redis(task: &SectionTask) -> Result<Registry, Box<dyn Error>> {
    let layout = match task.layout {
        PeerLayout::Spring => Layout::Spring,
        PeerLayout::Redisson => Layout::Redisson,
    };
    let publish = if task.plain_messages { Publish::Plain } else { Publish::Auto };
    let config = RedisConfig::from_url(&task.url)?;
    let config = config.with_namespace(&task.namespace).with_layout(layout).with_publish(publish);
    let config = config.with_connect_timeout(CONNECT_TIMEOUT).with_response_timeout(TIMEOUT);
    let backend = RedisBackend::open(config).await?;
    Ok(Registry::builder(Arc::new(backend)).timeout(TIMEOUT).build()?)
}

fn print_line(line: &str) {
    // An error means that the reader of the output has exited; no other process needs the line.
    _ = writeln!(io::stdout(), "{line}");
}

/// Waits for a line of input. The end of the input means that the test has ended, so the process
/// exits.
async fn wait_for_start() -> Result<(), Box<dyn Error>> {
    let (sender, start) = oneshot::channel();
    thread::spawn(move || {
        let mut lines = io::stdin().lock().lines().map_while(Result::ok);
        if lines.next().is_some() {
            _ = sender.send(());
            lines.for_each(drop);
        }
        process::exit(3);
    });
    Ok(start.await?)
}
