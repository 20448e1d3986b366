//! The program `lock-sections`: our side of a lock that is shared with programs of others. Its one argument is a
//! [`Task`] as JSON. It says "ready", begins at a line of input, says "done", and ends; at the end of its input it dies.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::sync::Arc;
use std::{env, process, thread};

use lock_registry_tests::sections::{Form, Task, take_sections};
use registry_core::{LockRegistry, Registry};
use registry_redis::{Layout, Publish, RedisBackend, RedisConfig};
use tokio::sync::oneshot;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let argument = env::args().nth(1).unwrap_or_default();
    let task: Task = serde_json::from_str(&argument)?;
    let registry = if task.url.starts_with("redis") {
        in_redis(&task).await?
    } else {
        // Everything that matters is in the URL.
        lock_registry::connect(&task.url).await?
    };
    say("ready");
    cue().await?;
    take_sections(&registry.obtain(&task.key), &task).await?;
    say("done");
    Ok(())
}

async fn in_redis(task: &Task) -> Result<Registry, Box<dyn Error>> {
    let layout = match task.form {
        Form::Spring => Layout::Spring,
        Form::Redisson => Layout::Redisson,
    };
    let publish = if task.plain_messages { Publish::Plain } else { Publish::Auto };
    let config = RedisConfig::from_url(&task.url)?;
    let config = config.with_namespace(&task.namespace).with_layout(layout).with_publish(publish);
    let backend = RedisBackend::open(config).await?;
    Ok(Registry::builder(Arc::new(backend)).build()?)
}

fn say(line: &str) {
    // Whoever listened may be gone; then nobody misses it.
    _ = writeln!(io::stdout(), "{line}");
}

/// Waits for a line of input. At the end of the input the test is gone, and so is this process.
async fn cue() -> Result<(), Box<dyn Error>> {
    let (given, cue) = oneshot::channel();
    thread::spawn(move || {
        let mut lines = io::stdin().lock().lines().map_while(Result::ok);
        if lines.next().is_some() {
            _ = given.send(());
            lines.for_each(drop);
        }
        process::exit(3);
    });
    Ok(cue.await?)
}
