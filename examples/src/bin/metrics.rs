//! Exports the metrics of locks to Prometheus, by an HTTP server with the path `/metrics`.

use axum::routing::{Router, get};
use lock_registry::RegistryConfig;
use lock_registry::observe::{KeyNames, MetricsObserver};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

// ANCHOR: exporter
/// Installs a recorder for all metrics of this process, and returns the service that exports them.
fn exporter() -> Result<Router, BuildError> {
    let times = Matcher::Suffix("_seconds".into());
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(times, &MetricsObserver::BUCKETS)?
        .install_recorder()?;
    Ok(Router::new().route("/metrics", get(|| async move { recorder.render() })))
}
// ANCHOR_END: exporter

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The recorder must exist before `connect`, which describes the metrics to it.
    let exporter = exporter()?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(axum::serve(listener, exporter).into_future());

    // ANCHOR: names
    let names = KeyNames::new().pattern("tenants/*/import");
    let locks = RegistryConfig::from_url("memory:")?.metric_names(names).connect().await?;
    // ANCHOR_END: names
    let order = locks.obtain("orders/42").lock().await?;
    let import = locks.obtain("tenants/acme/import").lock().await?;
    assert!(locks.obtain("orders/42").try_lock().await?.is_none());

    for line in scrape(addr).await?.lines().filter(|line| line.starts_with("lock_registry_held")) {
        println!("{line}");
    }
    import.unlock().await?;
    order.unlock().await?;
    for line in scrape(addr).await?.lines().filter(|line| line.contains("not_acquired")) {
        println!("{line}");
    }
    Ok(())
}

/// Requests the metrics, as Prometheus does.
async fn scrape(addr: std::net::SocketAddr) -> std::io::Result<String> {
    let mut connection = TcpStream::connect(addr).await?;
    connection.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
    let mut response = String::new();
    connection.read_to_string(&mut response).await?;
    Ok(response)
}
