//! The program `lock-holder`: acquires locks on request, for tests that need a second process. See
//! `registry_testkit::holder`.
//!
//! Its only argument is a store (`memory:`, `sqlite:PATH`, `mysql://…`) or the options as a JSON
//! object.

use std::env;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{LockBackend, MemoryBackend, Registry};
use registry_jdbc::{MySqlBackend, MySqlConfig, SqliteBackend, SqliteConfig};
use registry_testkit::holder::{HolderOptions, HolderReport, serve, write_report};

#[tokio::main]
async fn main() -> ExitCode {
    let argument = env::args().nth(1).unwrap_or_default();
    match run(&argument).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            write_report(&HolderReport::failed(None, "open its store", &*error));
            ExitCode::FAILURE
        }
    }
}

async fn run(argument: &str) -> Result<(), Box<dyn Error>> {
    let options = match argument.strip_prefix('{') {
        Some(_) => serde_json::from_str(argument)?,
        None => HolderOptions::new(argument),
    };
    let mut builder = Registry::builder(open(&options.store).await?);
    if let Some(lease) = options.lease_ms {
        builder = builder.lease(Duration::from_millis(lease));
    }
    if let Some(renew) = options.renew {
        builder = builder.auto_renew(renew);
    }
    if let Some(poll) = options.poll_ms {
        builder = builder.poll(Duration::from_millis(poll));
    }
    if let Some(handoff) = options.handoff {
        builder = builder.handoff(handoff);
    }
    if let Some(label) = &options.label {
        builder = builder.label(label);
    }
    serve(Arc::new(builder.build()?), &options).await;
    Ok(())
}

async fn open(store: &str) -> Result<Arc<dyn LockBackend>, Box<dyn Error>> {
    match store.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryBackend::new())),
        Some(("sqlite", path)) => Ok(Arc::new(SqliteBackend::open(SqliteConfig::new(path)).await?)),
        Some(("mysql", _)) => {
            Ok(Arc::new(MySqlBackend::open(MySqlConfig::from_url(store)?).await?))
        }
        // The error omits the value because it may contain a password.
        _ => Err("this is no store: give `memory:`, `sqlite:PATH` or `mysql://…`".into()),
    }
}
