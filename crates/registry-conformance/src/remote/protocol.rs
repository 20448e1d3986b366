//! The protocol between a test and a helper process, for helper processes of any kind. Each message
//! and each reply is one line of JSON. Both sides come from one build, so the protocol has no
//! version.

use std::io::{self, BufRead, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

/// [`Reply::reply_to`] of the reply that reports the helper process as ready. No message has this
/// number.
pub const READY: u64 = 0;

/// A message to the helper process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_enums, reason = "both sides come from one build")]
pub enum Message<Q> {
    /// Execute this request, concurrently with all others.
    Request(u64, Q),
    /// Drop the future that executes the request with this number. Has no reply.
    Cancel(u64),
    /// Clean up and end.
    Close(u64),
}

/// The reply to one message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::exhaustive_structs, reason = "both sides come from one build")]
pub struct Reply<E> {
    /// The number of the message.
    pub reply_to: u64,
    /// The result of the request, whose type follows from the request.
    pub result: Result<Value, E>,
}

/// Returns the result of a request as JSON.
///
/// # Errors
/// Returns the error of `result`.
///
/// # Panics
/// If the result cannot be represented in JSON.
pub fn json_result<T: Serialize, E>(result: Result<T, E>) -> Result<Value, E> {
    result.map(|value| serde_json::to_value(value).expect("a result can be represented in JSON"))
}

/// Returns a message or a reply as one line.
///
/// # Panics
/// If `content` cannot be represented in JSON.
pub fn to_line(content: &impl Serialize) -> String {
    serde_json::to_string(content).expect("a message can be represented in JSON") + "\n"
}

/// Writes `content` as one line to the standard output. Ignores errors, because the reader may have
/// ended.
///
/// # Panics
/// If `content` cannot be represented in JSON.
pub fn print_line(content: &impl Serialize) {
    print_text(&to_line(content));
}

fn print_text(text: &str) {
    // A single write, so that a stopped process leaves no half line.
    let mut stdout = io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// Executes the messages on this process's standard input, until the input ends or a
/// [`Message::Close`] arrives. `execute` returns the result of a request.
///
/// Returns the number of that `Close`, to which the caller must reply, or `None` at the end of the
/// input. Also returns the requests in execution.
///
/// # Cancel safety
/// Dropping the future drops the requests in execution. Further messages are ignored.
///
/// # Panics
/// At the next message, if a request panicked.
pub async fn execute_messages<Q, E, F>(execute: impl Fn(Q) -> F) -> (Option<u64>, JoinSet<()>)
where
    Q: DeserializeOwned + Send + 'static,
    E: Serialize + 'static,
    F: Future<Output = Result<Value, E>> + Send + 'static,
{
    let mut messages = read_messages();
    let mut tasks = JoinSet::new();
    let mut running = Vec::new();
    // The test harness may have printed the start of a line.
    print_text("\n");
    print_line(&Reply::<E> { reply_to: READY, result: Ok(Value::Null) });
    while let Some(message) = messages.recv().await {
        while let Some(ended) = tasks.try_join_next() {
            resume_panic(ended);
        }
        running.retain(|(_, task): &(u64, tokio::task::AbortHandle)| !task.is_finished());
        match message {
            Message::Request(number, request) => {
                let result = execute(request);
                let task = tasks.spawn(async move {
                    print_line(&Reply { reply_to: number, result: result.await });
                });
                running.push((number, task));
            }
            Message::Cancel(number) => {
                let cancelled = running.iter().filter(|(request, _)| *request == number);
                cancelled.for_each(|(_, task)| task.abort());
            }
            Message::Close(number) => return (Some(number), tasks),
        }
    }
    (None, tasks)
}

/// Reads the input on a thread, because a task that waits for input would keep the runtime from
/// shutting down.
fn read_messages<Q: DeserializeOwned + Send + 'static>() -> mpsc::UnboundedReceiver<Message<Q>> {
    let (sender, messages) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let message = serde_json::from_str(&line).expect("both sides come from one build");
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    messages
}

/// Continues the panic of a request. A cancelled request is no error.
pub(super) fn resume_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::time::Duration;

    use registry_core::{
        Attempt, BackendError, BackendErrorKind, Busy, Claim, FencingToken, Finding, Grant, Holder,
        Key, Queueing, Release, Renewal,
    };

    use super::super::serve::BackendRequest;
    use super::*;

    #[test]
    fn requests_arrive_as_they_were_sent() {
        let claim = |key: &str| Claim::new(Key::new(key).unwrap(), Duration::from_millis(1_500));
        let claims = vec![
            claim("a b\n\0🔒").with_label(Some("".into())),
            claim("=").with_queueing(Queueing::Join).with_token_block(33),
            claim("-").with_label(Some("- =".into())),
        ];
        let key = claims[0].key().clone();
        for request in [
            BackendRequest::Acquire(claims[0].clone()),
            BackendRequest::Release(claims[1].clone()),
            BackendRequest::Wait(claims[2].clone(), Busy::new().with_seen_version(u64::MAX)),
            BackendRequest::Renew(claims),
            BackendRequest::Renew(Vec::new()),
            BackendRequest::Inspect(key.clone()),
            BackendRequest::ForceRelease(key),
            BackendRequest::List,
            BackendRequest::Diagnose,
        ] {
            for message in
                [Message::Request(7, request), Message::Cancel(u64::MAX), Message::Close(8)]
            {
                let line = to_line(&message);
                assert_eq!(line.find('\n'), Some(line.len() - 1), "{line}");
                assert_eq!(serde_json::from_str::<Message<_>>(&line).unwrap(), message, "{line}");
            }
        }
    }

    #[test]
    fn replies_arrive_as_they_were_sent() {
        let holder = Holder::new(Key::new(" ").unwrap())
            .with_label(Some("é".into()))
            .with_token(FencingToken::new(5))
            .with_times(None, Some(Duration::from_nanos(1)));
        let busy = Busy::new().with_retry_after(Duration::ZERO).with_seen_version(9);
        let error = BackendError::new(BackendErrorKind::Denied, "no way").as_refused();
        let error = error.with_address("db.example:5432");
        assert_arrives(&Attempt::Granted(Grant::new(FencingToken::MAX, Duration::from_secs(1))));
        assert_arrives(&Attempt::Granted(Grant::new(
            FencingToken::new(8).unwrap(),
            Duration::MAX / 4,
        )));
        assert_arrives(&Attempt::Busy(Busy::new()));
        assert_arrives(&Attempt::Busy(busy.with_holder(holder.clone())));
        assert_arrives(&vec![
            Ok(Renewal::Gone),
            Err(error.clone()),
            Ok(Renewal::Renewed(Duration::from_secs(2))),
        ]);
        assert_arrives(&[Release::Freed, Release::NotHeld]);
        assert_arrives(&Some(Holder::new(holder.key.clone())));
        assert_arrives(&vec![holder]);
        assert_arrives(&None::<Holder>);
        assert_arrives(&vec![Finding::note("all is well"), Finding::warning("")]);
        let line = to_line(&Reply { reply_to: 7, result: Err(error.clone()) });
        let read = serde_json::from_str::<Reply<BackendError>>(&line).unwrap();
        assert_eq!(read.reply_to, 7);
        assert_eq!(format!("{:?}", read.result), format!("{:?}", Err::<Value, _>(error)));
    }

    fn assert_arrives<T: Serialize + DeserializeOwned + Debug>(result: &T) {
        let line =
            to_line(&Reply { reply_to: 7, result: json_result(Ok::<_, BackendError>(result)) });
        let read = serde_json::from_str::<Reply<BackendError>>(&line).unwrap();
        let read: T = serde_json::from_value(read.result.unwrap()).unwrap();
        assert_eq!(format!("{read:?}"), format!("{result:?}"), "{line}");
    }

    #[test]
    fn other_output_of_a_test_program_is_no_reply() {
        for line in ["", "running 1 test", "test the_other_process ... ", "7", "{}", "[7]"] {
            assert!(serde_json::from_str::<Reply<BackendError>>(line).is_err(), "{line:?}");
        }
    }
}
