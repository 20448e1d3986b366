//! Maps the errors of the server and of the client library to `BackendError`.

use redis::{ErrorKind, RedisError, ServerErrorKind};
use registry_core::{BackendError, BackendErrorKind};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Returns a `Misconfigured` error for a configuration that cannot work. Its source is `error`.
pub(crate) fn invalid_client_config(error: &RedisError) -> BackendError {
    let message = "redis: the configuration cannot be used; see the source of this error";
    BackendError::new(Misconfigured, message).with_source(error.clone()).as_refused()
}

/// Classifies an error and describes the remedy.
pub(crate) fn to_backend_error(error: &RedisError) -> BackendError {
    let RedisErrorClass { kind, message, refused } = classify(error);
    // The error contains no password: the client library does not repeat the URL, and
    // `redact_credentials` replaces each error that repeats a login.
    let source = redact_user(error).unwrap_or_else(|| error.clone());
    let backend_error = BackendError::new(kind, format!("redis: {message}")).with_source(source);
    if refused { backend_error.as_refused() } else { backend_error }
}

/// Returns whether a member of a cluster does not have the slot of a command.
pub(crate) fn is_redirection(error: &BackendError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.map(RedisError::kind).is_some_and(|kind| {
        matches!(kind, ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask))
    })
}

/// Returns the error of the command that failed inside a script. Redis before version 7 returns it
/// within the text of another error. Returns any other error unchanged.
pub(crate) fn error_of_script_command(error: RedisError) -> RedisError {
    let line = error.code().and_then(|code| {
        let text = format!("{code} {}", error.detail().unwrap_or_default());
        parse_script_error(&text).map(|reply| format!("-{reply}\r\n"))
    });
    let reply = line.and_then(|line| redis::parse_redis_value(line.as_bytes()).ok());
    reply.and_then(|reply| reply.extract_error().err()).unwrap_or(error)
}

/// Returns the reply of a command from an error of Redis 6.2, such as `ERR Error running script
/// (call to f_..): @user_script:1: @user_script: 1: -READONLY You can't write ..`.
fn parse_script_error(text: &str) -> Option<&str> {
    let ends = ["@user_script:", "=[C]:"]
        .into_iter()
        .filter_map(|place| text.rfind(place).map(|start| start + place.len()));
    let (line, reply) = text.get(ends.max()?..)?.trim_start().split_once(": ")?;
    line.parse::<i64>().ok()?;
    Some(reply.strip_prefix('-').unwrap_or(reply))
}

/// Returns the error without the user name, or `None` if the error contains no user name. Some
/// servers, such as Valkey 9, include the user name in messages about missing rights.
fn redact_user(error: &RedisError) -> Option<RedisError> {
    let detail = error.detail()?;
    let (before, rest) = detail.split_once("User ")?;
    let (_, after) = rest.split_once(" has no ")?;
    let message = format!("{before}this user has no {after}");
    Some((error.kind(), "missing rights", message).into())
}

const CONNECTION_LOST: &str =
    "the connection was lost; check the network and that the server still runs";
const UNEXPECTED_ERROR: &str =
    "the server returned an unexpected error; see the source of this error";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RedisErrorClass {
    kind: BackendErrorKind,
    message: &'static str,
    /// The server did not execute the command.
    refused: bool,
}

const fn refused(kind: BackendErrorKind, message: &'static str) -> RedisErrorClass {
    RedisErrorClass { kind, message, refused: true }
}

const fn unknown_outcome(kind: BackendErrorKind, message: &'static str) -> RedisErrorClass {
    RedisErrorClass { kind, message, refused: false }
}

fn classify(error: &RedisError) -> RedisErrorClass {
    // Older servers report a missing right inside a script without the code `NOPERM`.
    let texts = ["ACL failure in script", "executing the script can't run this command"];
    if error.detail().is_some_and(|detail| texts.iter().any(|text| detail.contains(text))) {
        return classify_server_error(ServerErrorKind::NoPerm, None);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => {
            refused(Denied, "the server rejected this user or password; check both")
        }
        ErrorKind::InvalidClientConfig => {
            refused(Misconfigured, "the configuration cannot be used; see the source of this error")
        }
        ErrorKind::Io if error.is_connection_refusal() => refused(
            Transient,
            "the connection was refused; check that the server runs at this address",
        ),
        ErrorKind::Io if error.is_timeout() => unknown_outcome(
            Transient,
            "the server did not respond in time; check its load and the network",
        ),
        ErrorKind::Io => {
            classify_tls_error(error).unwrap_or(unknown_outcome(Transient, CONNECTION_LOST))
        }
        ErrorKind::Client | ErrorKind::ClusterConnectionNotFound => {
            refused(Transient, "there is no connection to the server; check that it runs")
        }
        ErrorKind::Server(kind) => classify_server_error(kind, error.code()),
        ErrorKind::Extension => classify_code(error.code()),
        // The client library reports a truncated response as a parse error.
        ErrorKind::Parse if error.to_string().contains("end of input") => {
            unknown_outcome(Transient, CONNECTION_LOST)
        }
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => unknown_outcome(
            Protocol,
            "the response is not valid Redis protocol; check for a proxy between client and server",
        ),
        ErrorKind::RESP3NotSupported => refused(
            Misconfigured,
            "the server does not support RESP3; update it to Redis 6.2 or later",
        ),
        // A later version of the client library may add kinds. The outcome is then unknown, and a
        // retry may not help.
        _ => unknown_outcome(
            Protocol,
            "the client library reported an unknown error; see the source of this error",
        ),
    }
}

/// Classifies a failure of the TLS handshake. The client library reports its cause only as text.
fn classify_tls_error(error: &RedisError) -> Option<RedisErrorClass> {
    let text = error.to_string();
    if text.starts_with("invalid peer certificate") {
        return Some(refused(
            Misconfigured,
            "the server's certificate is not trusted; configure the certificate authority that signed it",
        ));
    }
    let alert = text.strip_prefix("received fatal alert: ")?;
    let certificate_alerts = ["Certificate", "UnknownCA", "AccessDenied"];
    Some(if certificate_alerts.iter().any(|word| alert.contains(word)) {
        refused(
            Denied,
            "the server rejected the client certificate, or requires one; check options `cert` and `key`",
        )
    } else {
        refused(
            Misconfigured,
            "the server rejected the TLS handshake; check its TLS versions and ciphers",
        )
    })
}

fn classify_server_error(kind: ServerErrorKind, code: Option<&str>) -> RedisErrorClass {
    match kind {
        ServerErrorKind::NoPerm => {
            refused(Denied, "this user lacks a required right; the book lists the rights")
        }
        ServerErrorKind::BusyLoading => {
            refused(Transient, "the server is loading its data; wait until it has started")
        }
        ServerErrorKind::NoScript => {
            refused(Transient, "the script cache of the server was flushed during the call; retry")
        }
        ServerErrorKind::ReadOnly => {
            refused(Transient, "the server is a replica; use the address of the master")
        }
        ServerErrorKind::MasterDown => {
            refused(Transient, "the replica has no connection to its master; check the master")
        }
        ServerErrorKind::ClusterDown => {
            refused(Transient, "the cluster is down; see `CLUSTER INFO` of its nodes")
        }
        ServerErrorKind::TryAgain => refused(Transient, "the slot is migrating; retry"),
        ServerErrorKind::Moved | ServerErrorKind::Ask => {
            refused(Misconfigured, "the server is part of a cluster; use redis+cluster://")
        }
        ServerErrorKind::CrossSlot => refused(
            Protocol,
            "the keys are in different slots of the cluster; use the same hash tag in all keys",
        ),
        _ => classify_code(code),
    }
}

/// Classifies the error codes for which the client library has no variant.
fn classify_code(code: Option<&str>) -> RedisErrorClass {
    match code {
        Some("NOAUTH") => refused(Denied, "the server requires a password; configure it"),
        Some("WRONGPASS") => {
            refused(Denied, "the server rejected this user or password; check both")
        }
        Some("WRONGTYPE") => {
            refused(Protocol, "the key holds a value of another type; use another key or namespace")
        }
        Some("OOM") => refused(
            Transient,
            "the server has reached its memory limit; raise `maxmemory` or delete data",
        ),
        Some("MISCONF") => {
            refused(Transient, "the server cannot save its data and refuses writes; see its log")
        }
        Some("NOREPLICAS") => refused(
            Transient,
            "the server has too few replicas; connect more, or lower `min-replicas-to-write`",
        ),
        Some("BUSY") => refused(
            Transient,
            "the server is busy with a long-running script; end it with `SCRIPT KILL`",
        ),
        Some("LOADING") => {
            refused(Transient, "the server is loading its data; wait until it has started")
        }
        Some("READONLY") => {
            refused(Transient, "the server is a replica; use the address of the master")
        }
        Some("UNBLOCKED") => unknown_outcome(Transient, "the server changed its role; retry"),
        _ => unknown_outcome(Protocol, UNEXPECTED_ERROR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class_of(line: &str) -> RedisErrorClass {
        classify(&redis::parse_redis_value(line.as_bytes()).unwrap().extract_error().unwrap_err())
    }

    #[test]
    fn server_errors_are_classified() {
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
            let class = class_of(line);
            assert_eq!((class.kind, class.refused), (kind, true), "{line}");
        }
    }

    /// These texts are from Redis 6.2.14.
    #[test]
    fn errors_inside_scripts_are_classified_on_redis_6() {
        for (line, kind) in [
            (
                "-ERR Error running script (call to f_4c26): @user_script:1: @user_script: 1: The user executing the script can't run this command or subcommand\r\n",
                Denied,
            ),
            (
                "-@user_script: 1: The user executing the script can't run this command or subcommand\r\n",
                Denied,
            ),
            (
                "-=[C]: -1: The user executing the script can't run this command or subcommand\r\n",
                Denied,
            ),
            (
                "-ERR Error running script (call to f_9e8a): @user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.\r\n",
                Transient,
            ),
            ("-=[C]: -1: -READONLY You can't write against a read only replica.\r\n", Transient),
            (
                "-ERR Error running script (call to f_9e8a): @user_script:1: @user_script: 1: -OOM command not allowed when used memory > 'maxmemory'.\r\n",
                Transient,
            ),
            (
                "-ERR Error running script (call to f_7d51): @user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
                Protocol,
            ),
        ] {
            let error = redis::parse_redis_value(line.as_bytes()).unwrap().extract_error();
            let class = classify(&error_of_script_command(error.unwrap_err()));
            assert_eq!((class.kind, class.refused), (kind, true), "{line}");
        }
        let line = "-ERR the token is not stored any more script: f, on @user_script:5.\r\n";
        let error = redis::parse_redis_value(line.as_bytes()).unwrap().extract_error().unwrap_err();
        assert_eq!(error_of_script_command(error.clone()), error, "an error of Redis 7");
    }

    #[test]
    fn a_missing_right_inside_a_script_is_denied() {
        for line in [
            "-ERR ACL failure in script: this user has no permissions to run the 'getex' command script: f, on @user_script:5.\r\n",
            "-NOPERM ACL failure in script: User worker has no permissions to run the 'getex' command\r\n",
            "-ERR The user executing the script can't run this command or subcommand script: f, on @user_script:18.\r\n",
        ] {
            let class = class_of(line);
            assert_eq!((class.kind, class.refused), (Denied, true), "{line}");
        }
    }

    #[test]
    fn the_name_of_a_user_is_not_printed() {
        let line = "-NOPERM User worker has no permissions to run the 'eval' command\r\n";
        let response = redis::parse_redis_value(line.as_bytes()).unwrap();
        let error = to_backend_error(&response.extract_error().unwrap_err());
        let text = format!("{error:?} {}", std::error::Error::source(&error).unwrap());
        assert!(!text.contains("worker") && text.contains("'eval'"), "{text}");
        assert_eq!(error.kind(), Denied);
    }

    #[test]
    fn a_truncated_response_is_a_lost_connection() {
        let whole = b"*3\r\n:1\r\n$2\r\nab\r\n:3\r\n";
        redis::parse_redis_value(whole).unwrap();
        for length in 1..whole.len() {
            let error = redis::parse_redis_value(&whole[..length]).unwrap_err();
            assert_eq!(classify(&error), unknown_outcome(Transient, CONNECTION_LOST), "{error:?}");
        }
        let error = redis::parse_redis_value(b"?nonsense\r\n").unwrap_err();
        assert_eq!(classify(&error).kind, Protocol, "{error:?}");
    }

    #[test]
    fn an_unknown_error_leaves_the_outcome_unknown() {
        assert_eq!(
            class_of("-ERR something else\r\n"),
            unknown_outcome(Protocol, UNEXPECTED_ERROR)
        );
    }
}
