//! The protocol between a remote backend and its process. Each request and each reply is one
//! line. Fields are separated by spaces, and texts are written as hexadecimal digits. Both sides
//! come from one build, so the protocol has no version.

use std::fmt::Write as _;
use std::str::SplitWhitespace;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimId, FencingToken, Grant, Holder,
    Key, Queueing, Release, Renewal,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RemoteRequest {
    Acquire(Claim),
    Renew(Vec<Claim>),
    Release(Claim),
    Wait(Claim, u64),
    Inspect(Key),
    List,
    ForceRelease(Key),
    Diagnose,
    Close,
    /// The caller of the request with this number was dropped.
    Cancel,
}

#[derive(Debug)]
pub(super) enum RemoteReply {
    Attempt(Attempt),
    Renewals(Vec<Result<Renewal, BackendError>>),
    Release(Release),
    Holders(Vec<Holder>),
    Findings(Vec<String>),
    Failed(BackendError),
    Done,
}

/// Starts every reply, to distinguish it from the other output of a test program.
const MARK: &str = "@reply";

/// The number of the reply that reports that the other process serves. No request has this number.
pub(super) const READY: u64 = 0;

pub(super) fn write_request(request: &RemoteRequest) -> String {
    let mut line = LineWriter::default();
    match request {
        RemoteRequest::Acquire(claim) => line.word("acquire").claim(claim),
        RemoteRequest::Renew(claims) => line.word("renew").list(claims, LineWriter::claim),
        RemoteRequest::Release(claim) => line.word("release").claim(claim),
        RemoteRequest::Wait(claim, mark) => line.word("wait").claim(claim).number(*mark),
        RemoteRequest::Inspect(key) => line.word("inspect").text(key.as_str()),
        RemoteRequest::List => line.word("list"),
        RemoteRequest::ForceRelease(key) => line.word("break").text(key.as_str()),
        RemoteRequest::Diagnose => line.word("diagnose"),
        RemoteRequest::Close => line.word("close"),
        RemoteRequest::Cancel => line.word("cancel"),
    };
    line.0
}

pub(super) fn read_request(line: &str) -> Option<(u64, RemoteRequest)> {
    let mut reader = LineReader(line.split_whitespace());
    let number = reader.number()?;
    let request = match reader.word()? {
        "acquire" => RemoteRequest::Acquire(reader.claim()?),
        "renew" => RemoteRequest::Renew(reader.list(LineReader::claim)?),
        "release" => RemoteRequest::Release(reader.claim()?),
        "wait" => RemoteRequest::Wait(reader.claim()?, reader.number()?),
        "inspect" => RemoteRequest::Inspect(reader.key()?),
        "list" => RemoteRequest::List,
        "break" => RemoteRequest::ForceRelease(reader.key()?),
        "diagnose" => RemoteRequest::Diagnose,
        "close" => RemoteRequest::Close,
        "cancel" => RemoteRequest::Cancel,
        _ => return None,
    };
    Some((number, request))
}

pub(super) fn write_reply(number: u64, reply: &RemoteReply) -> String {
    let mut line = LineWriter::default();
    line.word(MARK).number(number);
    match reply {
        RemoteReply::Attempt(Attempt::Granted(grant)) => {
            line.word("granted").number(grant.token.get()).time(grant.lease)
        }
        RemoteReply::Attempt(Attempt::Busy(busy)) => {
            line.word("busy").optional(busy.retry_after.map(nanos)).number(busy.mark);
            line.list(busy.holder.as_slice(), LineWriter::holder)
        }
        RemoteReply::Renewals(answers) => line.word("renewals").list(answers, LineWriter::renewal),
        RemoteReply::Release(Release::Freed) => line.word("freed"),
        RemoteReply::Release(Release::NotHeld) => line.word("not-held"),
        RemoteReply::Holders(holders) => line.word("holders").list(holders, LineWriter::holder),
        RemoteReply::Findings(texts) => {
            line.word("findings").list(texts, |line, text: &String| line.text(text))
        }
        RemoteReply::Failed(error) => line.word("failed").error(error),
        RemoteReply::Done => line.word("done"),
    };
    line.0
}

pub(super) fn read_reply(line: &str) -> Option<(u64, RemoteReply)> {
    let mut reader = LineReader(line.split_whitespace());
    if reader.word()? != MARK {
        return None;
    }
    let number = reader.number()?;
    let reply = match reader.word()? {
        "granted" => {
            let token = FencingToken::new(reader.number()?)?;
            RemoteReply::Attempt(Attempt::Granted(Grant::new(token, reader.time()?)))
        }
        "busy" => {
            let retry_after = reader.optional()?.map(Duration::from_nanos);
            let mut busy = Busy::new().with_mark(reader.number()?);
            busy.retry_after = retry_after;
            busy.holder = reader.list(LineReader::holder)?.pop();
            RemoteReply::Attempt(Attempt::Busy(busy))
        }
        "renewals" => RemoteReply::Renewals(reader.list(LineReader::renewal)?),
        "freed" => RemoteReply::Release(Release::Freed),
        "not-held" => RemoteReply::Release(Release::NotHeld),
        "holders" => RemoteReply::Holders(reader.list(LineReader::holder)?),
        "findings" => RemoteReply::Findings(reader.list(LineReader::text)?),
        "failed" => RemoteReply::Failed(reader.error()?),
        "done" => RemoteReply::Done,
        _ => return None,
    };
    Some((number, reply))
}

/// A line that is being written.
#[derive(Default)]
struct LineWriter(String);

impl LineWriter {
    fn word(&mut self, word: &str) -> &mut Self {
        if !self.0.is_empty() {
            self.0.push(' ');
        }
        self.0.push_str(word);
        self
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.word(&number.to_string())
    }

    fn optional(&mut self, number: Option<u64>) -> &mut Self {
        match number {
            Some(number) => self.number(number),
            None => self.word("-"),
        }
    }

    fn time(&mut self, time: Duration) -> &mut Self {
        self.number(nanos(time))
    }

    /// A leading `=` keeps the field of an empty text from vanishing.
    fn text(&mut self, text: &str) -> &mut Self {
        self.word("=");
        for byte in text.bytes() {
            write!(self.0, "{byte:02x}").expect("writing to a string never fails");
        }
        self
    }

    fn optional_text(&mut self, text: Option<&str>) -> &mut Self {
        match text {
            Some(text) => self.text(text),
            None => self.word("-"),
        }
    }

    fn list<T>(
        &mut self,
        items: &[T],
        write: impl for<'a> Fn(&'a mut Self, &T) -> &'a mut Self,
    ) -> &mut Self {
        self.number(items.len() as u64);
        for item in items {
            write(self, item);
        }
        self
    }

    fn claim(&mut self, claim: &Claim) -> &mut Self {
        self.text(claim.key().as_str())
            .word(&claim.id().to_string())
            .time(claim.lease())
            .number(u64::from(claim.joins_queue()))
            .number(u64::from(claim.token_block()))
            .optional_text(claim.label())
    }

    fn holder(&mut self, holder: &Holder) -> &mut Self {
        self.text(holder.key.as_str())
            .optional_text(holder.label.as_deref())
            .optional(holder.token.map(u64::from))
            .optional(holder.held_for.map(nanos))
            .optional(holder.lease_left.map(nanos))
    }

    fn renewal(&mut self, answer: &Result<Renewal, BackendError>) -> &mut Self {
        match answer {
            Ok(Renewal::Renewed(left)) => self.word("renewed").time(*left),
            Ok(Renewal::Gone) => self.word("gone"),
            Err(error) => self.word("failed").error(error),
        }
    }

    fn error(&mut self, error: &BackendError) -> &mut Self {
        let kind = match error.kind() {
            BackendErrorKind::Transient => "transient",
            BackendErrorKind::Denied => "denied",
            BackendErrorKind::Misconfigured => "misconfigured",
            _ => "protocol",
        };
        self.word(kind).number(u64::from(error.refused())).text(error.message());
        self.optional_text(error.address())
    }
}

/// A line that is being read. Methods return `None` for a line that the other side did not write.
struct LineReader<'a>(SplitWhitespace<'a>);

impl<'a> LineReader<'a> {
    fn word(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    fn number(&mut self) -> Option<u64> {
        self.word()?.parse().ok()
    }

    fn optional(&mut self) -> Option<Option<u64>> {
        match self.word()? {
            "-" => Some(None),
            number => Some(Some(number.parse().ok()?)),
        }
    }

    fn time(&mut self) -> Option<Duration> {
        self.number().map(Duration::from_nanos)
    }

    fn text(&mut self) -> Option<String> {
        Self::unhex(self.word()?)
    }

    fn optional_text(&mut self) -> Option<Option<String>> {
        match self.word()? {
            "-" => Some(None),
            text => Some(Some(Self::unhex(text)?)),
        }
    }

    fn unhex(text: &str) -> Option<String> {
        let digits = text.strip_prefix('=')?.as_bytes();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        String::from_utf8(digits.chunks(2).map(byte).collect::<Option<_>>()?).ok()
    }

    fn list<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.number()?).map(|_| read(self)).collect()
    }

    fn key(&mut self) -> Option<Key> {
        Key::new(&self.text()?).ok()
    }

    fn claim(&mut self) -> Option<Claim> {
        let key = self.key()?;
        let id = ClaimId::from_bits(u128::from_str_radix(self.word()?, 16).ok()?);
        let lease = self.time()?;
        let queueing = if self.number()? == 1 { Queueing::Join } else { Queueing::Skip };
        let claim = Claim::new(key, lease).with_id(id).with_queueing(queueing);
        let claim = claim.with_token_block(u32::try_from(self.number()?).ok()?);
        Some(claim.with_label(self.optional_text()?.map(Arc::from)))
    }

    fn holder(&mut self) -> Option<Holder> {
        let holder = Holder::new(self.key()?).with_label(self.optional_text()?);
        let holder = holder.with_token(self.optional()?.and_then(FencingToken::new));
        let held_for = self.optional()?.map(Duration::from_nanos);
        Some(holder.with_times(held_for, self.optional()?.map(Duration::from_nanos)))
    }

    fn renewal(&mut self) -> Option<Result<Renewal, BackendError>> {
        Some(match self.word()? {
            "renewed" => Ok(Renewal::Renewed(self.time()?)),
            "gone" => Ok(Renewal::Gone),
            "failed" => Err(self.error()?),
            _ => return None,
        })
    }

    fn error(&mut self) -> Option<BackendError> {
        let kind = match self.word()? {
            "transient" => BackendErrorKind::Transient,
            "denied" => BackendErrorKind::Denied,
            "misconfigured" => BackendErrorKind::Misconfigured,
            _ => BackendErrorKind::Protocol,
        };
        let refused = self.number()? == 1;
        let error = BackendError::new(kind, self.text()?);
        let error = match self.optional_text()? {
            Some(address) => error.with_address(address),
            None => error,
        };
        Some(if refused { error.as_refused() } else { error })
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> Vec<Claim> {
        let claim = |key: &str| Claim::new(Key::new(key).unwrap(), Duration::from_millis(1_500));
        vec![
            claim("a b\n\0🔒").with_label(Some("".into())),
            claim("=").with_queueing(Queueing::Join).with_token_block(33),
            claim("-").with_label(Some("- =".into())),
        ]
    }

    #[test]
    fn requests_arrive_as_they_were_sent() {
        let claims = claims();
        let key = claims[0].key().clone();
        for request in [
            RemoteRequest::Acquire(claims[0].clone()),
            RemoteRequest::Release(claims[1].clone()),
            RemoteRequest::Wait(claims[2].clone(), u64::MAX),
            RemoteRequest::Renew(claims),
            RemoteRequest::Renew(Vec::new()),
            RemoteRequest::Inspect(key.clone()),
            RemoteRequest::ForceRelease(key),
            RemoteRequest::List,
            RemoteRequest::Diagnose,
            RemoteRequest::Close,
            RemoteRequest::Cancel,
        ] {
            let line = format!("7 {}", write_request(&request));
            assert_eq!(read_request(&line), Some((7, request)), "{line}");
        }
    }

    #[test]
    fn replies_arrive_as_they_were_sent() {
        let holder = Holder::new(Key::new(" ").unwrap())
            .with_label(Some("é".into()))
            .with_token(FencingToken::new(5))
            .with_times(None, Some(Duration::from_nanos(1)));
        let busy = Busy::new().with_retry_after(Duration::ZERO).with_mark(9);
        let error = BackendError::new(BackendErrorKind::Denied, "no way").as_refused();
        let error = error.with_address("db.example:5432");
        for reply in [
            RemoteReply::Attempt(Attempt::Granted(Grant::new(
                FencingToken::MAX,
                Duration::from_secs(1),
            ))),
            RemoteReply::Attempt(Attempt::Granted(Grant::new(
                FencingToken::new(8).unwrap(),
                Duration::MAX / 4,
            ))),
            RemoteReply::Attempt(Attempt::Busy(Busy::new())),
            RemoteReply::Attempt(Attempt::Busy(busy.with_holder(holder.clone()))),
            RemoteReply::Renewals(vec![
                Ok(Renewal::Gone),
                Err(error.clone()),
                Ok(Renewal::Renewed(Duration::from_secs(2))),
            ]),
            RemoteReply::Release(Release::Freed),
            RemoteReply::Release(Release::NotHeld),
            RemoteReply::Holders(vec![holder.clone(), Holder::new(holder.key)]),
            RemoteReply::Holders(Vec::new()),
            RemoteReply::Findings(vec!["all is well".into(), String::new()]),
            RemoteReply::Failed(error),
            RemoteReply::Done,
        ] {
            let line = write_reply(7, &reply);
            let (number, read) = read_reply(&line).unwrap();
            // Times beyond five centuries are truncated, which no test needs.
            let again = write_reply(number, &read);
            assert_eq!((number, again), (7, line));
        }
    }

    #[test]
    fn other_output_of_a_test_program_is_no_reply() {
        for line in ["", "running 1 test", "test the_other_process ... ", "@reply", "@reply x done"]
        {
            assert!(read_reply(line).is_none(), "{line:?}");
        }
    }
}
