//! The protocol between a distant backend and its other process. Each request and each reply is one
//! line. Fields are separated by spaces, and texts are written as hexadecimal digits. Both sides
//! come from one build, so the protocol has no version.

use std::fmt::Write as _;
use std::str::SplitWhitespace;
use std::sync::Arc;
use std::time::Duration;

use registry_core::{
    Attempt, BackendError, BackendErrorKind, Busy, Claim, ClaimId, FencingToken, Grant, Holder,
    Key, Release, Renewal,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
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
pub(super) enum Reply {
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

pub(super) fn write_request(request: &Request) -> String {
    let mut line = Line::default();
    match request {
        Request::Acquire(claim) => line.word("acquire").claim(claim),
        Request::Renew(claims) => line.word("renew").many(claims, Line::claim),
        Request::Release(claim) => line.word("release").claim(claim),
        Request::Wait(claim, mark) => line.word("wait").claim(claim).number(*mark),
        Request::Inspect(key) => line.word("inspect").text(key.as_str()),
        Request::List => line.word("list"),
        Request::ForceRelease(key) => line.word("break").text(key.as_str()),
        Request::Diagnose => line.word("diagnose"),
        Request::Close => line.word("close"),
        Request::Cancel => line.word("cancel"),
    };
    line.0
}

pub(super) fn read_request(line: &str) -> Option<(u64, Request)> {
    let mut words = Words(line.split_whitespace());
    let number = words.number()?;
    let request = match words.word()? {
        "acquire" => Request::Acquire(words.claim()?),
        "renew" => Request::Renew(words.many(Words::claim)?),
        "release" => Request::Release(words.claim()?),
        "wait" => Request::Wait(words.claim()?, words.number()?),
        "inspect" => Request::Inspect(words.key()?),
        "list" => Request::List,
        "break" => Request::ForceRelease(words.key()?),
        "diagnose" => Request::Diagnose,
        "close" => Request::Close,
        "cancel" => Request::Cancel,
        _ => return None,
    };
    Some((number, request))
}

pub(super) fn write_reply(number: u64, reply: &Reply) -> String {
    let mut line = Line::default();
    line.word(MARK).number(number);
    match reply {
        Reply::Attempt(Attempt::Granted(grant)) => {
            line.word("granted").maybe(grant.token.map(u64::from)).time(grant.lease)
        }
        Reply::Attempt(Attempt::Busy(busy)) => {
            line.word("busy").maybe(busy.retry_after.map(nanos)).number(busy.mark);
            line.many(busy.holder.as_slice(), Line::holder)
        }
        Reply::Renewals(answers) => line.word("renewals").many(answers, Line::renewal),
        Reply::Release(Release::Freed) => line.word("freed"),
        Reply::Release(Release::NotHeld) => line.word("not-held"),
        Reply::Holders(holders) => line.word("holders").many(holders, Line::holder),
        Reply::Findings(texts) => {
            line.word("findings").many(texts, |line, text: &String| line.text(text))
        }
        Reply::Failed(error) => line.word("failed").error(error),
        Reply::Done => line.word("done"),
    };
    line.0
}

pub(super) fn read_reply(line: &str) -> Option<(u64, Reply)> {
    let mut words = Words(line.split_whitespace());
    if words.word()? != MARK {
        return None;
    }
    let number = words.number()?;
    let reply = match words.word()? {
        "granted" => {
            let token = words.maybe()?.and_then(FencingToken::new);
            Reply::Attempt(Attempt::Granted(Grant::new(token, words.time()?)))
        }
        "busy" => {
            let retry_after = words.maybe()?.map(Duration::from_nanos);
            let mut busy = Busy::new().with_mark(words.number()?);
            busy.retry_after = retry_after;
            busy.holder = words.many(Words::holder)?.pop();
            Reply::Attempt(Attempt::Busy(busy))
        }
        "renewals" => Reply::Renewals(words.many(Words::renewal)?),
        "freed" => Reply::Release(Release::Freed),
        "not-held" => Reply::Release(Release::NotHeld),
        "holders" => Reply::Holders(words.many(Words::holder)?),
        "findings" => Reply::Findings(words.many(Words::text)?),
        "failed" => Reply::Failed(words.error()?),
        "done" => Reply::Done,
        _ => return None,
    };
    Some((number, reply))
}

/// A line that is being written.
#[derive(Default)]
struct Line(String);

impl Line {
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

    fn maybe(&mut self, number: Option<u64>) -> &mut Self {
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
            write!(self.0, "{byte:02x}").expect("a string takes everything");
        }
        self
    }

    fn maybe_text(&mut self, text: Option<&str>) -> &mut Self {
        match text {
            Some(text) => self.text(text),
            None => self.word("-"),
        }
    }

    fn many<T>(
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
            .number(u64::from(claim.queue()))
            .number(u64::from(claim.token_block()))
            .maybe_text(claim.label())
    }

    fn holder(&mut self, holder: &Holder) -> &mut Self {
        self.text(holder.key.as_str())
            .maybe_text(holder.label.as_deref())
            .maybe(holder.token.map(u64::from))
            .maybe(holder.held_for.map(nanos))
            .maybe(holder.lease_left.map(nanos))
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
        self.word(kind).number(u64::from(error.refused())).text(&error.to_string())
    }
}

/// A line that is being read. Methods return `None` for a line that the other side did not write.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    fn number(&mut self) -> Option<u64> {
        self.word()?.parse().ok()
    }

    fn maybe(&mut self) -> Option<Option<u64>> {
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

    fn maybe_text(&mut self) -> Option<Option<String>> {
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

    fn many<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        (0..self.number()?).map(|_| read(self)).collect()
    }

    fn key(&mut self) -> Option<Key> {
        Key::new(&self.text()?).ok()
    }

    fn claim(&mut self) -> Option<Claim> {
        let key = self.key()?;
        let id = ClaimId::from_bits(u128::from_str_radix(self.word()?, 16).ok()?);
        let claim = Claim::new(key, self.time()?).with_id(id).with_queue(self.number()? == 1);
        let claim = claim.with_token_block(u32::try_from(self.number()?).ok()?);
        Some(claim.with_label(self.maybe_text()?.map(Arc::from)))
    }

    fn holder(&mut self) -> Option<Holder> {
        let holder = Holder::new(self.key()?).with_label(self.maybe_text()?);
        let holder = holder.with_token(self.maybe()?.and_then(FencingToken::new));
        let held_for = self.maybe()?.map(Duration::from_nanos);
        Some(holder.with_times(held_for, self.maybe()?.map(Duration::from_nanos)))
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
            claim("=").with_queue(true).with_token_block(33),
            claim("-").with_label(Some("- =".into())),
        ]
    }

    #[test]
    fn requests_arrive_as_they_were_sent() {
        let claims = claims();
        let key = claims[0].key().clone();
        for request in [
            Request::Acquire(claims[0].clone()),
            Request::Release(claims[1].clone()),
            Request::Wait(claims[2].clone(), u64::MAX),
            Request::Renew(claims),
            Request::Renew(Vec::new()),
            Request::Inspect(key.clone()),
            Request::ForceRelease(key),
            Request::List,
            Request::Diagnose,
            Request::Close,
            Request::Cancel,
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
        for reply in [
            Reply::Attempt(Attempt::Granted(Grant::new(None, Duration::from_secs(1)))),
            Reply::Attempt(Attempt::Granted(Grant::new(FencingToken::new(8), Duration::MAX / 4))),
            Reply::Attempt(Attempt::Busy(Busy::new())),
            Reply::Attempt(Attempt::Busy(busy.with_holder(holder.clone()))),
            Reply::Renewals(vec![
                Ok(Renewal::Gone),
                Err(error.clone()),
                Ok(Renewal::Renewed(Duration::from_secs(2))),
            ]),
            Reply::Release(Release::Freed),
            Reply::Release(Release::NotHeld),
            Reply::Holders(vec![holder.clone(), Holder::new(holder.key)]),
            Reply::Holders(Vec::new()),
            Reply::Findings(vec!["all is well".into(), String::new()]),
            Reply::Failed(error),
            Reply::Done,
        ] {
            let line = write_reply(7, &reply);
            let (number, read) = read_reply(&line).unwrap();
            // Times beyond five centuries are truncated, which no test needs.
            let again = write_reply(number, &read);
            assert_eq!((number, again), (7, line));
        }
    }

    #[test]
    fn what_a_test_program_prints_is_no_reply() {
        for line in ["", "running 1 test", "test the_other_process ... ", "@reply", "@reply x done"]
        {
            assert!(read_reply(line).is_none(), "{line:?}");
        }
    }
}
