//! Tests `FaultProxy` in front of an echo server: each mode has its documented effect and can be
//! ended.

#![expect(clippy::unwrap_used, reason = "test helpers may panic")]

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use registry_testkit::proxy::{FaultProxy, ProxyMode};
use registry_testkit::within;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Sufficient for the slowest machine. It costs time only when a test fails.
const LIMIT: Duration = Duration::from_secs(30);
/// How long the tests wait for bytes that must not arrive. Too short a time could hide a fault, but
/// never cause a failure.
const SILENCE: Duration = Duration::from_millis(150);

/// A server that echoes and records all received bytes. After the client's end of stream, it sends
/// `bye`.
struct EchoServer {
    addr: SocketAddr,
    received: watch::Receiver<Vec<u8>>,
    tasks: JoinSet<()>,
}

impl EchoServer {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (received_sender, received) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let received_sender = received_sender.clone();
                clients.spawn(async move {
                    let mut buffer = [0; 4_096];
                    while let Ok(length) = client.read(&mut buffer).await {
                        if length == 0 {
                            _ = client.write_all(b"bye").await;
                            return;
                        }
                        received_sender.send_modify(|all| all.extend_from_slice(&buffer[..length]));
                        if client.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { addr, received, tasks }
    }

    async fn wait_until_received(&self, text: &[u8]) {
        let mut received = self.received.clone();
        let arrival = received.wait_for(|all| all.ends_with(text));
        drop(within(LIMIT, arrival).await.unwrap());
    }
}

struct ProxyTest {
    echo: EchoServer,
    proxy: FaultProxy,
}

impl ProxyTest {
    async fn new() -> Self {
        let echo = EchoServer::start().await;
        let proxy = FaultProxy::start(echo.addr).unwrap();
        Self { echo, proxy }
    }

    async fn client(&self) -> TcpStream {
        within(LIMIT, TcpStream::connect(self.proxy.addr())).await.unwrap()
    }

    async fn set(&self, mode: ProxyMode) {
        within(LIMIT, self.proxy.set_mode(mode)).await.unwrap();
    }
}

async fn send(client: &mut TcpStream, text: &[u8]) {
    within(LIMIT, client.write_all(text)).await.unwrap();
}

async fn expect_bytes(client: &mut TcpStream, text: &[u8]) {
    let mut reply = vec![0; text.len()];
    within(LIMIT, client.read_exact(&mut reply)).await.unwrap();
    assert_eq!(reply, text);
}

async fn expect_silence(client: &mut TcpStream) {
    let received = tokio::time::timeout(SILENCE, client.read_u8()).await;
    assert!(received.is_err(), "received {received:?}");
}

/// Returns the remaining bytes of the stream, and the error that ended it.
async fn expect_end(client: &mut TcpStream) -> (Vec<u8>, Option<ErrorKind>) {
    let mut rest = Vec::new();
    let ended = within(LIMIT, client.read_to_end(&mut rest)).await;
    (rest, ended.err().map(|error| error.kind()))
}

#[tokio::test]
async fn passing_carries_everything_and_counts_it() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    for text in [b"one", b"two"] {
        send(&mut client, text).await;
        expect_bytes(&mut client, text).await;
    }
    let counts = test.proxy.counts();
    assert_eq!((counts.accepted, counts.live, counts.requests), (1, 1, 2));
    assert_eq!((counts.request_bytes, counts.reply_bytes, counts.reply_bytes_lost), (6, 6, 0));
    drop(client);
    let counts = test.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
    assert_eq!(counts.reset, 0);
}

#[tokio::test]
async fn passing_keeps_megabytes_intact() {
    let test = ProxyTest::new().await;
    let (mut from, mut to) = test.client().await.into_split();
    let sent: Vec<u8> =
        (0..4_000_000_u32).map(|number| number as u8 ^ (number >> 8) as u8).collect();
    let copy = sent.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        to.write_all(&copy).await.unwrap();
        to.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    within(LIMIT, from.read_to_end(&mut got)).await.unwrap();
    assert!(got.strip_suffix(b"bye").unwrap() == sent);
}

#[tokio::test]
async fn a_client_may_end_its_stream_and_still_receive_the_reply() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    send(&mut client, b"last").await;
    client.shutdown().await.unwrap();
    assert_eq!(expect_end(&mut client).await, (b"lastbye".to_vec(), None));
}

#[tokio::test]
async fn a_delay_counts_in_each_direction() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::Delay(Duration::from_millis(100))).await;
    let sent_at = Instant::now();
    send(&mut client, b"slow").await;
    expect_bytes(&mut client, b"slow").await;
    assert!(sent_at.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn ending_a_delay_delivers_the_bytes_in_flight() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::Delay(LIMIT * 100)).await;
    send(&mut client, b"slow").await;
    expect_silence(&mut client).await;
    test.set(ProxyMode::Pass).await;
    expect_bytes(&mut client, b"slow").await;
}

#[tokio::test]
async fn a_throttle_bounds_the_rate() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::Throttle { bytes_per_second: 50_000 }).await;
    let sent_at = Instant::now();
    let text = vec![7; 20_000];
    send(&mut client, &text).await;
    expect_bytes(&mut client, &text).await;
    assert!(sent_at.elapsed() >= Duration::from_millis(400), "{:?}", sent_at.elapsed());
}

#[tokio::test]
async fn a_black_hole_accepts_and_is_silent_until_the_mode_changes() {
    let test = ProxyTest::new().await;
    let mut old = test.client().await;
    send(&mut old, b"before").await;
    expect_bytes(&mut old, b"before").await;
    test.set(ProxyMode::BlackHole).await;
    let mut new = test.client().await;
    send(&mut old, b"old").await;
    send(&mut new, b"new").await;
    expect_silence(&mut old).await;
    expect_silence(&mut new).await;
    assert_eq!(test.proxy.counts().requests, 1);
    assert_eq!(*test.echo.received.borrow(), b"before");
    test.set(ProxyMode::Pass).await;
    expect_bytes(&mut old, b"old").await;
    expect_bytes(&mut new, b"new").await;
}

#[tokio::test]
async fn held_replies_arrive_late() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::HoldReplies).await;
    send(&mut client, b"set").await;
    test.echo.wait_until_received(b"set").await;
    expect_silence(&mut client).await;
    test.set(ProxyMode::Pass).await;
    expect_bytes(&mut client, b"set").await;
}

#[tokio::test]
async fn dropped_replies_never_arrive_though_the_server_acted() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::DropReplies).await;
    send(&mut client, b"set").await;
    test.echo.wait_until_received(b"set").await;
    test.proxy.until(LIMIT, |counts| counts.reply_bytes_lost == 3).await.unwrap();
    expect_silence(&mut client).await;
    assert_eq!(test.proxy.counts().reply_bytes, 0);
    // Delivering the next reply now would answer the wrong request.
    test.set(ProxyMode::Pass).await;
    assert_eq!(expect_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    let mut client = test.client().await;
    send(&mut client, b"get").await;
    expect_bytes(&mut client, b"get").await;
}

#[tokio::test]
async fn a_connection_that_lost_nothing_survives_dropped_replies() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    send(&mut client, b"one").await;
    expect_bytes(&mut client, b"one").await;
    test.set(ProxyMode::DropReplies).await;
    test.set(ProxyMode::Pass).await;
    send(&mut client, b"two").await;
    expect_bytes(&mut client, b"two").await;
}

#[tokio::test]
async fn a_client_that_leaves_while_replies_drop_ends_its_connection() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::DropReplies).await;
    send(&mut client, b"set").await;
    test.echo.wait_until_received(b"set").await;
    drop(client);
    test.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
}

#[tokio::test]
async fn a_reset_comes_after_the_request_reached_the_server() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::ResetAfterRequest).await;
    send(&mut client, b"set").await;
    assert_eq!(expect_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    assert_eq!(*test.echo.received.borrow(), b"set");
    let counts = test.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
    assert_eq!((counts.requests, counts.reset, counts.reply_bytes), (1, 1, 0));
}

#[tokio::test]
async fn a_reply_is_cut_in_its_middle() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    send(&mut client, b"whole").await;
    expect_bytes(&mut client, b"whole").await;
    test.set(ProxyMode::CutAfter { reply_bytes: 4 }).await;
    send(&mut client, b"partial").await;
    assert_eq!(expect_end(&mut client).await, (b"part".to_vec(), None));
    assert_eq!(*test.echo.received.borrow(), b"wholepartial");
}

#[tokio::test]
async fn a_cut_after_no_bytes_closes_when_the_reply_arrives() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    test.set(ProxyMode::CutAfter { reply_bytes: 0 }).await;
    expect_silence(&mut client).await;
    send(&mut client, b"set").await;
    assert_eq!(expect_end(&mut client).await, (vec![], None));
    assert_eq!(*test.echo.received.borrow(), b"set");
}

#[tokio::test]
async fn a_half_closed_connection_still_carries_requests() {
    let test = ProxyTest::new().await;
    let mut client = test.client().await;
    send(&mut client, b"one").await;
    expect_bytes(&mut client, b"one").await;
    test.set(ProxyMode::HalfClose).await;
    assert_eq!(expect_end(&mut client).await, (vec![], None));
    send(&mut client, b"two").await;
    test.echo.wait_until_received(b"two").await;
    // An end of stream is final in every later mode.
    test.set(ProxyMode::Pass).await;
    send(&mut client, b"three").await;
    test.echo.wait_until_received(b"three").await;
    assert_eq!(expect_end(&mut client).await, (vec![], None));
}

#[tokio::test]
async fn refusing_rejects_new_connections_and_keeps_open_ones() {
    let test = ProxyTest::new().await;
    let mut open = test.client().await;
    send(&mut open, b"one").await;
    expect_bytes(&mut open, b"one").await;
    for _ in 0..3 {
        test.set(ProxyMode::Refuse).await;
        let refused = TcpStream::connect(test.proxy.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        send(&mut open, b"two").await;
        expect_bytes(&mut open, b"two").await;
        test.set(ProxyMode::Pass).await;
        let mut new = test.client().await;
        send(&mut new, b"new").await;
        expect_bytes(&mut new, b"new").await;
    }
}

#[tokio::test]
async fn cutting_resets_every_open_connection_and_no_later_one() {
    let test = ProxyTest::new().await;
    let mut open = Vec::new();
    for _ in 0..5 {
        let mut client = test.client().await;
        send(&mut client, b"hello").await;
        expect_bytes(&mut client, b"hello").await;
        open.push(client);
    }
    // This client waits in the black hole, without a connection to the server.
    test.set(ProxyMode::BlackHole).await;
    open.push(test.client().await);
    test.proxy.until(LIMIT, |counts| counts.live == 6).await.unwrap();
    within(LIMIT, test.proxy.cut_all()).await;
    let counts = test.proxy.counts();
    assert_eq!((counts.live, counts.reset), (0, 6));
    for mut client in open {
        assert_eq!(expect_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    }
    test.set(ProxyMode::Pass).await;
    let mut client = test.client().await;
    send(&mut client, b"again").await;
    expect_bytes(&mut client, b"again").await;
    within(LIMIT, test.proxy.cut_all()).await;
    within(LIMIT, test.proxy.cut_all()).await;
}

#[tokio::test]
async fn a_server_that_is_gone_resets_its_clients() {
    let mut test = ProxyTest::new().await;
    let mut client = test.client().await;
    send(&mut client, b"one").await;
    expect_bytes(&mut client, b"one").await;
    test.echo.tasks.shutdown().await;
    expect_end(&mut client).await;
    let mut late = test.client().await;
    assert_eq!(expect_end(&mut late).await, (vec![], Some(ErrorKind::ConnectionReset)));
}

#[tokio::test]
async fn a_proxy_ends_with_its_handle() {
    let ProxyTest { echo: _echo, proxy } = ProxyTest::new().await;
    let addr = proxy.addr();
    let mut client = TcpStream::connect(addr).await.unwrap();
    send(&mut client, b"one").await;
    expect_bytes(&mut client, b"one").await;
    drop(proxy);
    expect_end(&mut client).await;
    registry_testkit::eventually(LIMIT, async || TcpStream::connect(addr).await.is_err()).await;
}

#[tokio::test]
async fn waiting_for_counts_that_are_never_reached_ends_at_its_limit() {
    let test = ProxyTest::new().await;
    let error = test.proxy.until(SILENCE, |counts| counts.accepted > 0).await.unwrap_err();
    assert!(error.to_string().contains("accepted: 0"), "{error}");
}
