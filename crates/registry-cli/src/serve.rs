//! `lockreg serve`: serves the holders and waiters of a store to browsers and to programs.
//!
//! [`monitor`] takes snapshots of the store, and [`http`] answers requests from the last snapshot.
//! [`history`] and [`wait_graph`] derive past holds and deadlocks from the snapshots.

mod history;
mod http;
mod metrics;
mod monitor;
mod wait_graph;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use lock_registry::observe::MetricsObserver;
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

use self::http::{BreakToken, Server};
use self::monitor::Monitor;
use crate::acquire::close_without_locks;
use crate::args::{self, GlobalArgs};
use crate::exit::CliError;
use crate::output::Output;
use crate::signals::Signals;
use crate::store::StoreConfig;

/// A validated `lockreg serve`, before any access to the store.
#[derive(Debug)]
pub(crate) struct ServeCommand {
    store: StoreConfig,
    address: SocketAddr,
    interval: Duration,
    break_token: Option<BreakToken>,
    allowed_hosts: Option<Vec<String>>,
}

impl ServeCommand {
    pub(crate) fn from_args(global: &GlobalArgs, args: args::ServeArgs) -> Result<Self, CliError> {
        let store = StoreConfig::choose(global)?;
        let break_token = break_token(&args)?;
        // Without `--allow-host`, the header `Host` is checked only on a loopback address. On other
        // addresses, any name may be a valid name of this host.
        let is_loopback = args.listen.ip().to_canonical().is_loopback();
        let allowed_hosts = (is_loopback || !args.allow_host.is_empty()).then_some(args.allow_host);
        let (address, interval) = (args.listen, args.interval);
        Ok(Self { store, address, interval, break_token, allowed_hosts })
    }

    /// Serves until a signal requests the end of the process. Returns status 0.
    pub(crate) async fn execute(
        self,
        mut signals: Signals,
        output: Output,
    ) -> Result<u8, CliError> {
        // An address in use is reported before any access to the store.
        let listener = TcpListener::bind(self.address)
            .await
            .map_err(|source| CliError::Listen { address: self.address, source })?;
        let address =
            listener.local_addr().map_err(CliError::os("cannot read the bound address"))?;
        let registry = Arc::new(tokio::select! {
            registry = self.store.open(output) => registry?,
            _ = signals.next_termination() => return Ok(0),
        });
        let monitor = tokio::select! {
            monitor = Monitor::start(Arc::clone(&registry)) => monitor?,
            _ = signals.next_termination() => return Ok(0),
        };
        let server = Arc::new(Server {
            monitor,
            names: MetricsObserver::new(registry.capabilities().store),
            break_token: self.break_token,
            allowed_hosts: self.allowed_hosts,
            age_limit: AGE_LIMIT.max(self.interval * 3),
            output,
        });
        if !address.ip().to_canonical().is_loopback() {
            output.notice(
                "warning",
                &format!(
                    "other hosts can read all keys and labels at {address}, without encryption; to serve other hosts, \
                     listen on 127.0.0.1, and put a proxy that authenticates users in front"
                ),
                json!({ "address": address.to_string() }),
            );
        }
        let url = format!("http://{address}/");
        output.result(&json!({ "url": url }), || format!("{url}\n"))?;
        let connections = accept(listener, http::router(Arc::clone(&server)));
        tokio::select! {
            () = server.monitor.run(self.interval) => {}
            () = connections => {}
            _ = signals.next_termination() => {}
        }
        close_without_locks(&registry).await;
        Ok(0)
    }
}

/// Returns the token that a client must send to release a lock. Returns `None` without
/// `--allow-break`.
fn break_token(args: &args::ServeArgs) -> Result<Option<BreakToken>, CliError> {
    if !args.allow_break {
        return Ok(None);
    }
    let token = match &args.token_file {
        Some(path) => read_token(path)?,
        None => std::env::var(TOKEN_VARIABLE).unwrap_or_default(),
    };
    let token = token.trim();
    if token.len() < TOKEN_BYTES_MIN {
        let hint = match &args.token_file {
            Some(path) => format!("write a longer one to {}", path.display()),
            None => format!("set {TOKEN_VARIABLE} or use --token-file"),
        };
        return Err(CliError::usage(format!(
            "--allow-break needs a token of at least {TOKEN_BYTES_MIN} characters, but the token has {}; {hint}; \
             `openssl rand -hex 16` prints a suitable one",
            token.len()
        )));
    }
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(CliError::usage(
            "the token of --allow-break contains spaces or other characters that are not allowed; use letters and digits",
        ));
    }
    Ok(Some(BreakToken::new(token)))
}

fn read_token(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path).map_err(|error| {
        CliError::usage(format!("cannot read the token from {path:?}: {error}; check --token-file"))
    })
}

async fn accept(listener: TcpListener, router: Router) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let router = router.clone();
                tokio::spawn(async move {
                    answer(stream, router).await;
                    drop(slot);
                });
            }
            // Too many open files, for example. Without a pause, this loop would spin.
            Err(_) => tokio::time::sleep(ACCEPT_RETRY_PAUSE).await,
        }
    }
}

/// Answers the requests of one connection until the client closes the connection or exceeds
/// [`CLIENT_TIMEOUT`].
async fn answer(stream: TcpStream, router: Router) {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(CLIENT_TIMEOUT));
    // An error affects only this connection, and its client notices it.
    _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CLIENT_TIMEOUT)
        // A client may close its sending side after its request.
        .half_close(true)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router))
        .await;
}

/// The environment variable with the token of `--allow-break`. The token is not an argument,
/// because all users of the host can read the arguments of a process.
const TOKEN_VARIABLE: &str = "LOCKREG_SERVE_TOKEN";
const TOKEN_BYTES_MIN: usize = 16;
/// The maximum number of open connections. Further clients wait until a connection ends.
const CONNECTIONS_MAX: usize = 500;
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How long a client may take to send the head of a request, or to accept the next bytes of an
/// answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(15);
/// `/healthz` fails if the last snapshot is older than this and older than three intervals, or if
/// the last attempt to take a snapshot failed.
const AGE_LIMIT: Duration = Duration::from_secs(90);
