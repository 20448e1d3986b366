//! The fault proxy in front of a real server: each mode has its documented effect and can be ended.

#![expect(clippy::unwrap_used, reason = "the helpers of tests are tests as well")]

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use registry_testkit::proxy::{FaultProxy, Mode};
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
struct Echo {
    addr: SocketAddr,
    heard: watch::Receiver<Vec<u8>>,
    _tasks: JoinSet<()>,
}

impl Echo {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (said, heard) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let said = said.clone();
                clients.spawn(async move {
                    let mut buffer = [0; 4_096];
                    while let Ok(length) = client.read(&mut buffer).await {
                        if length == 0 {
                            _ = client.write_all(b"bye").await;
                            return;
                        }
                        said.send_modify(|all| all.extend_from_slice(&buffer[..length]));
                        if client.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { addr, heard, _tasks: tasks }
    }

    async fn has_heard(&self, text: &[u8]) {
        let mut heard = self.heard.clone();
        let such = heard.wait_for(|all| all.ends_with(text));
        drop(within(LIMIT, such).await.unwrap());
    }
}

struct Lab {
    echo: Echo,
    proxy: FaultProxy,
}

impl Lab {
    async fn new() -> Self {
        let echo = Echo::start().await;
        let proxy = FaultProxy::start(echo.addr).unwrap();
        Self { echo, proxy }
    }

    async fn client(&self) -> TcpStream {
        within(LIMIT, TcpStream::connect(self.proxy.addr())).await.unwrap()
    }

    async fn set(&self, mode: Mode) {
        within(LIMIT, self.proxy.set_mode(mode)).await.unwrap();
    }
}

async fn say(client: &mut TcpStream, text: &[u8]) {
    within(LIMIT, client.write_all(text)).await.unwrap();
}

async fn hear(client: &mut TcpStream, text: &[u8]) {
    let mut reply = vec![0; text.len()];
    within(LIMIT, client.read_exact(&mut reply)).await.unwrap();
    assert_eq!(reply, text);
}

async fn hear_nothing(client: &mut TcpStream) {
    let heard = tokio::time::timeout(SILENCE, client.read_u8()).await;
    assert!(heard.is_err(), "heard {heard:?}");
}

/// Returns the remaining bytes of the stream, and the error that ended it.
async fn hear_the_end(client: &mut TcpStream) -> (Vec<u8>, Option<ErrorKind>) {
    let mut rest = Vec::new();
    let ended = within(LIMIT, client.read_to_end(&mut rest)).await;
    (rest, ended.err().map(|error| error.kind()))
}

#[tokio::test]
async fn passing_carries_everything_and_counts_it() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    for text in [b"one", b"two"] {
        say(&mut client, text).await;
        hear(&mut client, text).await;
    }
    let counts = lab.proxy.counts();
    assert_eq!((counts.accepted, counts.live, counts.requests), (1, 1, 2));
    assert_eq!((counts.request_bytes, counts.reply_bytes, counts.reply_bytes_lost), (6, 6, 0));
    drop(client);
    let counts = lab.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
    assert_eq!(counts.reset, 0);
}

#[tokio::test]
async fn passing_keeps_megabytes_intact() {
    let lab = Lab::new().await;
    let (mut from, mut to) = lab.client().await.into_split();
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
async fn a_client_may_end_its_stream_and_still_hear_the_reply() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    say(&mut client, b"last").await;
    client.shutdown().await.unwrap();
    assert_eq!(hear_the_end(&mut client).await, (b"lastbye".to_vec(), None));
}

#[tokio::test]
async fn a_delay_counts_in_each_direction() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::Delay(Duration::from_millis(100))).await;
    let asked = Instant::now();
    say(&mut client, b"slow").await;
    hear(&mut client, b"slow").await;
    assert!(asked.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn a_healed_delay_lets_go_what_was_under_way() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::Delay(LIMIT * 100)).await;
    say(&mut client, b"slow").await;
    hear_nothing(&mut client).await;
    lab.set(Mode::Pass).await;
    hear(&mut client, b"slow").await;
}

#[tokio::test]
async fn a_throttle_bounds_the_rate() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::Throttle { bytes_per_second: 50_000 }).await;
    let asked = Instant::now();
    let text = vec![7; 20_000];
    say(&mut client, &text).await;
    hear(&mut client, &text).await;
    assert!(asked.elapsed() >= Duration::from_millis(400), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_black_hole_accepts_and_says_nothing_until_it_heals() {
    let lab = Lab::new().await;
    let mut old = lab.client().await;
    say(&mut old, b"before").await;
    hear(&mut old, b"before").await;
    lab.set(Mode::BlackHole).await;
    let mut new = lab.client().await;
    say(&mut old, b"old").await;
    say(&mut new, b"new").await;
    hear_nothing(&mut old).await;
    hear_nothing(&mut new).await;
    assert_eq!(lab.proxy.counts().requests, 1);
    assert_eq!(*lab.echo.heard.borrow(), b"before");
    lab.set(Mode::Pass).await;
    hear(&mut old, b"old").await;
    hear(&mut new, b"new").await;
}

#[tokio::test]
async fn held_replies_arrive_late() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::HoldReplies).await;
    say(&mut client, b"set").await;
    lab.echo.has_heard(b"set").await;
    hear_nothing(&mut client).await;
    lab.set(Mode::Pass).await;
    hear(&mut client, b"set").await;
}

#[tokio::test]
async fn dropped_replies_never_arrive_though_the_server_acted() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::DropReplies).await;
    say(&mut client, b"set").await;
    lab.echo.has_heard(b"set").await;
    lab.proxy.until(LIMIT, |counts| counts.reply_bytes_lost == 3).await.unwrap();
    hear_nothing(&mut client).await;
    assert_eq!(lab.proxy.counts().reply_bytes, 0);
    // Delivering the next reply now would answer the wrong request.
    lab.set(Mode::Pass).await;
    assert_eq!(hear_the_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    let mut client = lab.client().await;
    say(&mut client, b"get").await;
    hear(&mut client, b"get").await;
}

#[tokio::test]
async fn a_connection_that_lost_nothing_survives_the_dropping() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    say(&mut client, b"one").await;
    hear(&mut client, b"one").await;
    lab.set(Mode::DropReplies).await;
    lab.set(Mode::Pass).await;
    say(&mut client, b"two").await;
    hear(&mut client, b"two").await;
}

#[tokio::test]
async fn a_client_that_leaves_while_replies_drop_ends_its_connection() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::DropReplies).await;
    say(&mut client, b"set").await;
    lab.echo.has_heard(b"set").await;
    drop(client);
    lab.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
}

#[tokio::test]
async fn a_reset_comes_after_the_request_reached_the_server() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::ResetAfterRequest).await;
    say(&mut client, b"set").await;
    assert_eq!(hear_the_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    assert_eq!(*lab.echo.heard.borrow(), b"set");
    let counts = lab.proxy.until(LIMIT, |counts| counts.live == 0).await.unwrap();
    assert_eq!((counts.requests, counts.reset, counts.reply_bytes), (1, 1, 0));
}

#[tokio::test]
async fn a_reply_is_cut_in_its_middle() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    say(&mut client, b"whole").await;
    hear(&mut client, b"whole").await;
    lab.set(Mode::CutAfter { reply_bytes: 4 }).await;
    say(&mut client, b"partial").await;
    assert_eq!(hear_the_end(&mut client).await, (b"part".to_vec(), None));
    assert_eq!(*lab.echo.heard.borrow(), b"wholepartial");
}

#[tokio::test]
async fn a_cut_after_no_bytes_closes_when_the_reply_comes() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    lab.set(Mode::CutAfter { reply_bytes: 0 }).await;
    hear_nothing(&mut client).await;
    say(&mut client, b"set").await;
    assert_eq!(hear_the_end(&mut client).await, (vec![], None));
    assert_eq!(*lab.echo.heard.borrow(), b"set");
}

#[tokio::test]
async fn a_half_closed_connection_still_carries_requests() {
    let lab = Lab::new().await;
    let mut client = lab.client().await;
    say(&mut client, b"one").await;
    hear(&mut client, b"one").await;
    lab.set(Mode::HalfClose).await;
    assert_eq!(hear_the_end(&mut client).await, (vec![], None));
    say(&mut client, b"two").await;
    lab.echo.has_heard(b"two").await;
    // An end of stream is final in every later mode.
    lab.set(Mode::Pass).await;
    say(&mut client, b"three").await;
    lab.echo.has_heard(b"three").await;
    assert_eq!(hear_the_end(&mut client).await, (vec![], None));
}

#[tokio::test]
async fn refusing_turns_new_connections_away_and_leaves_living_ones() {
    let lab = Lab::new().await;
    let mut living = lab.client().await;
    say(&mut living, b"one").await;
    hear(&mut living, b"one").await;
    for _ in 0..3 {
        lab.set(Mode::Refuse).await;
        let refused = TcpStream::connect(lab.proxy.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        say(&mut living, b"two").await;
        hear(&mut living, b"two").await;
        lab.set(Mode::Pass).await;
        let mut new = lab.client().await;
        say(&mut new, b"new").await;
        hear(&mut new, b"new").await;
    }
}

#[tokio::test]
async fn cutting_resets_every_living_connection_and_no_later_one() {
    let lab = Lab::new().await;
    let mut living = Vec::new();
    for _ in 0..5 {
        let mut client = lab.client().await;
        say(&mut client, b"hello").await;
        hear(&mut client, b"hello").await;
        living.push(client);
    }
    // This client waits in the black hole, without a connection to the server.
    lab.set(Mode::BlackHole).await;
    living.push(lab.client().await);
    lab.proxy.until(LIMIT, |counts| counts.live == 6).await.unwrap();
    within(LIMIT, lab.proxy.cut_all()).await;
    let counts = lab.proxy.counts();
    assert_eq!((counts.live, counts.reset), (0, 6));
    for mut client in living {
        assert_eq!(hear_the_end(&mut client).await, (vec![], Some(ErrorKind::ConnectionReset)));
    }
    lab.set(Mode::Pass).await;
    let mut client = lab.client().await;
    say(&mut client, b"again").await;
    hear(&mut client, b"again").await;
    within(LIMIT, lab.proxy.cut_all()).await;
    within(LIMIT, lab.proxy.cut_all()).await;
}

#[tokio::test]
async fn a_server_that_is_gone_resets_its_clients() {
    let mut lab = Lab::new().await;
    let mut client = lab.client().await;
    say(&mut client, b"one").await;
    hear(&mut client, b"one").await;
    lab.echo._tasks.shutdown().await;
    hear_the_end(&mut client).await;
    let mut late = lab.client().await;
    assert_eq!(hear_the_end(&mut late).await, (vec![], Some(ErrorKind::ConnectionReset)));
}

#[tokio::test]
async fn a_proxy_ends_with_its_handle() {
    let Lab { echo: _echo, proxy } = Lab::new().await;
    let addr = proxy.addr();
    let mut client = TcpStream::connect(addr).await.unwrap();
    say(&mut client, b"one").await;
    hear(&mut client, b"one").await;
    drop(proxy);
    hear_the_end(&mut client).await;
    registry_testkit::eventually(LIMIT, async || TcpStream::connect(addr).await.is_err()).await;
}

#[tokio::test]
async fn waiting_for_counts_that_never_come_ends_at_its_limit() {
    let lab = Lab::new().await;
    let late = lab.proxy.until(SILENCE, |counts| counts.accepted > 0).await.unwrap_err();
    assert!(late.to_string().contains("accepted: 0"), "{late}");
}
