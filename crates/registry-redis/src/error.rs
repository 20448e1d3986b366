//! Maps the errors of the server and of the client library to `BackendError`: one table.

use redis::{ErrorKind, RedisError, ServerErrorKind};
use registry_core::{BackendError, BackendErrorKind};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Returns `Misconfigured` for a configuration that cannot work, with the cause.
pub(crate) fn unusable(error: &RedisError) -> BackendError {
    let says = "redis: the configuration cannot be used";
    BackendError::new(Misconfigured, says).with_source(error.clone()).as_refused()
}

/// Classifies an error and describes the remedy.
pub(crate) fn explain(error: &RedisError) -> BackendError {
    let Verdict { kind, says, refused } = judge(error);
    // The client library's errors contain no password: they do not repeat the URL, and the server
    // never sends a password.
    let source = without_user(error).unwrap_or_else(|| error.clone());
    let explained = BackendError::new(kind, format!("redis: {says}")).with_source(source);
    if refused { explained.as_refused() } else { explained }
}

/// Returns the error without the user name, which Valkey 9 includes in messages about missing
/// rights.
fn without_user(error: &RedisError) -> Option<RedisError> {
    let detail = error.detail()?;
    let (before, named) = detail.split_once("User ")?;
    let (_, after) = named.split_once(" has no ")?;
    let says = format!("{before}this user has no {after}");
    Some((error.kind(), "missing rights", says).into())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Verdict {
    kind: BackendErrorKind,
    says: &'static str,
    /// The server did nothing.
    refused: bool,
}

const fn refused(kind: BackendErrorKind, says: &'static str) -> Verdict {
    Verdict { kind, says, refused: true }
}

const fn open(kind: BackendErrorKind, says: &'static str) -> Verdict {
    Verdict { kind, says, refused: false }
}

fn judge(error: &RedisError) -> Verdict {
    // Only newer servers give a script's error the code of a missing right.
    if error.detail().is_some_and(|detail| detail.contains("ACL failure in script")) {
        return server(ServerErrorKind::NoPerm, None);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => {
            refused(Denied, "the server does not take this user or password")
        }
        ErrorKind::InvalidClientConfig => {
            refused(Misconfigured, "the configuration cannot be used")
        }
        ErrorKind::Io if error.is_connection_refusal() => {
            refused(Transient, "the connection was refused")
        }
        ErrorKind::Io if error.is_timeout() => open(Transient, "the server did not answer in time"),
        ErrorKind::Io => encryption(error).unwrap_or(open(Transient, "the connection was lost")),
        ErrorKind::Client | ErrorKind::ClusterConnectionNotFound => {
            refused(Transient, "there is no connection to the server")
        }
        ErrorKind::Server(kind) => server(kind, error.code()),
        ErrorKind::Extension => code(error.code()),
        // The client library reports a truncated response as a parse error.
        ErrorKind::Parse if error.to_string().contains("end of input") => {
            open(Transient, "the connection was lost")
        }
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
            open(Protocol, "the server answered what no Redis server answers")
        }
        ErrorKind::RESP3NotSupported => {
            refused(Misconfigured, "the server is older than version 6")
        }
        // Kinds that the client library may add: the outcome is unknown, and a retry is not known
        // to help.
        _ => open(Protocol, "the client failed"),
    }
}

/// Classifies a failure of the TLS handshake. The client library reports its cause only as text.
fn encryption(error: &RedisError) -> Option<Verdict> {
    let text = error.to_string();
    if text.starts_with("invalid peer certificate") {
        return Some(refused(
            Misconfigured,
            "the server's certificate is not trusted; the authority that signed it can be given",
        ));
    }
    let alert = text.strip_prefix("received fatal alert: ")?;
    let ours = ["Certificate", "UnknownCA", "AccessDenied"];
    Some(if ours.iter().any(|word| alert.contains(word)) {
        refused(Denied, "the server does not take our certificate, or wants one")
    } else {
        refused(Misconfigured, "the server does not encrypt as we do")
    })
}

fn server(kind: ServerErrorKind, named: Option<&str>) -> Verdict {
    match kind {
        ServerErrorKind::NoPerm => refused(
            Denied,
            "this user may not do that; see the book for the rights that are needed",
        ),
        ServerErrorKind::BusyLoading => refused(Transient, "the server is loading its data"),
        ServerErrorKind::NoScript => refused(Transient, "the server forgot the script just now"),
        ServerErrorKind::ReadOnly => refused(Transient, "the server is a replica now"),
        ServerErrorKind::MasterDown => refused(Transient, "the replica has lost its master"),
        ServerErrorKind::ClusterDown => refused(Transient, "the cluster is down"),
        ServerErrorKind::TryAgain => refused(Transient, "the slot is being moved"),
        ServerErrorKind::Moved | ServerErrorKind::Ask => {
            refused(Misconfigured, "the server is part of a cluster; use redis+cluster://")
        }
        ServerErrorKind::CrossSlot => {
            refused(Protocol, "the keys are in different slots of the cluster")
        }
        _ => code(named),
    }
}

/// Classifies the codes for which the client library has no name.
fn code(code: Option<&str>) -> Verdict {
    match code {
        Some("NOAUTH") => refused(Denied, "the server asks for a password"),
        Some("WRONGPASS") => refused(Denied, "the server does not take this user or password"),
        Some("WRONGTYPE") => refused(
            Protocol,
            "the lock's key holds something else than a lock; use another namespace",
        ),
        Some("OOM") => refused(Transient, "the server has no memory left for writes (maxmemory)"),
        Some("MISCONF") => refused(Transient, "the server cannot save its data and refuses writes"),
        Some("NOREPLICAS") => {
            refused(Transient, "the server has too few replicas (min-replicas-to-write)")
        }
        Some("BUSY") => refused(Transient, "the server is busy with somebody's script"),
        Some("LOADING") => refused(Transient, "the server is loading its data"),
        Some("READONLY") => refused(Transient, "the server is a replica now"),
        Some("UNBLOCKED") => open(Transient, "the server changed its role"),
        _ => open(Protocol, "the server said no"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(line: &str) -> Verdict {
        judge(&redis::parse_redis_value(line.as_bytes()).unwrap().extract_error().unwrap_err())
    }

    #[test]
    fn what_passes_is_tried_again_and_what_does_not_is_told() {
        for (line, kind) in [
            ("-LOADING Redis is loading the dataset in memory\r\n", Transient),
            ("-READONLY You can't write against a read only replica.\r\n", Transient),
            ("-MASTERDOWN Link with MASTER is down\r\n", Transient),
            ("-CLUSTERDOWN Hash slot not served\r\n", Transient),
            ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", Transient),
            ("-BUSY Redis is busy running a script.\r\n", Transient),
            ("-NOREPLICAS Not enough good replicas to write.\r\n", Transient),
            ("-NOAUTH Authentication required.\r\n", Denied),
            ("-WRONGPASS invalid username-password pair or user is disabled.\r\n", Denied),
            ("-NOPERM this user has no permissions to run the 'eval' command\r\n", Denied),
            ("-WRONGTYPE Operation against a key holding the wrong kind of value\r\n", Protocol),
            ("-MOVED 3999 127.0.0.1:6381\r\n", Misconfigured),
        ] {
            let verdict = verdict(line);
            assert_eq!((verdict.kind, verdict.refused), (kind, true), "{line}");
        }
    }

    #[test]
    fn a_right_that_a_script_misses_is_a_missing_right() {
        for line in [
            "-ERR ACL failure in script: this user has no permissions to run the 'getex' command script: f, on @user_script:5.\r\n",
            "-NOPERM ACL failure in script: User worker has no permissions to run the 'getex' command\r\n",
        ] {
            let verdict = verdict(line);
            assert_eq!((verdict.kind, verdict.refused), (Denied, true), "{line}");
        }
    }

    #[test]
    fn the_name_of_a_user_is_not_printed() {
        let line = "-NOPERM User worker has no permissions to run the 'eval' command\r\n";
        let answer = redis::parse_redis_value(line.as_bytes()).unwrap();
        let error = explain(&answer.extract_error().unwrap_err());
        let text = format!("{error:?} {}", std::error::Error::source(&error).unwrap());
        assert!(!text.contains("worker") && text.contains("'eval'"), "{text}");
        assert_eq!(error.kind(), Denied);
    }

    #[test]
    fn an_answer_that_was_cut_off_is_lost_and_not_wrong() {
        let whole = b"*3\r\n:1\r\n$2\r\nab\r\n:3\r\n";
        redis::parse_redis_value(whole).unwrap();
        for length in 1..whole.len() {
            let error = redis::parse_redis_value(&whole[..length]).unwrap_err();
            assert_eq!(judge(&error), open(Transient, "the connection was lost"), "{error:?}");
        }
        let error = redis::parse_redis_value(b"?nonsense\r\n").unwrap_err();
        assert_eq!(judge(&error).kind, Protocol, "{error:?}");
    }

    #[test]
    fn after_an_unknown_error_the_outcome_is_open() {
        assert_eq!(verdict("-ERR something else\r\n"), open(Protocol, "the server said no"));
    }
}
