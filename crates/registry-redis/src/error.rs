//! Maps the errors of the server and of the client library to `BackendError`.

use std::error::Error as _;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use registry_core::{BackendError, BackendErrorKind};

use BackendErrorKind::{Denied, Misconfigured, Protocol, Transient};

/// Returns a `Misconfigured` error for a configuration that cannot work. Its source is `error`.
pub(crate) fn invalid_client_config(error: &RedisError) -> BackendError {
    let message = "redis: the configuration cannot be used; see the source of this error";
    BackendError::new(Misconfigured, message).with_source(error.clone()).as_refused()
}

/// Returns the error of a server that does not support the required durability. `error` is the
/// server's response to `WAIT` or `WAITAOF`.
pub(crate) fn unsupported_durability(error: &RedisError) -> BackendError {
    let detail = error.detail().unwrap_or_default();
    // A replica refuses both commands. The text of `error` then names the cause.
    if !detail.contains("WAITAOF") || detail.contains("replica instances") {
        return invalid_client_config(error);
    }
    let message = "redis: the server cannot confirm writes to its disk (`fsync`); use Redis 7.2 or later with `appendonly yes`";
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

/// Returns whether the server answered `MOVED` or `ASK`.
pub(crate) fn is_redirection(error: &BackendError) -> bool {
    matches!(
        kind_of_source(error),
        Some(ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask))
    )
}

/// Returns whether the server answered with an error that a script may raise after it has written.
pub(crate) fn may_follow_a_write(error: &BackendError) -> bool {
    match kind_of_source(error) {
        // The server has not executed the script.
        Some(ErrorKind::Server(
            ServerErrorKind::NoScript | ServerErrorKind::Moved | ServerErrorKind::Ask,
        )) => false,
        Some(ErrorKind::Server(_) | ErrorKind::Extension) => true,
        _ => false,
    }
}

/// Returns the kind of the client library's error, if any.
fn kind_of_source(error: &BackendError) -> Option<ErrorKind> {
    error.source().and_then(|source| source.downcast_ref()).map(RedisError::kind)
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
const UNREACHABLE: &str = "the host cannot be found or reached; check its name and the network";
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
        ErrorKind::Io => classify_connect_error(error)
            .or_else(|| classify_tls_error(error))
            .unwrap_or(unknown_outcome(Transient, CONNECTION_LOST)),
        ErrorKind::Client | ErrorKind::ClusterConnectionNotFound => {
            refused(Transient, "there is no connection to the server; check that it runs")
        }
        ErrorKind::Server(kind) => classify_select_error(error)
            .unwrap_or_else(|| classify_server_error(kind, error.code())),
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

/// Classifies an I/O error that prevents a connection.
fn classify_connect_error(error: &RedisError) -> Option<RedisErrorClass> {
    // The standard library has no public kind for a failed name resolution.
    if error.to_string().contains("failed to lookup address information") {
        return Some(refused(Transient, UNREACHABLE));
    }
    match io_error(error)?.kind() {
        // An open connection can fail with these errors too, so the outcome is unknown.
        io::ErrorKind::PermissionDenied => Some(unknown_outcome(
            Transient,
            "the system denied the connection; check the permissions of the socket, or the firewall",
        )),
        io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable
        | io::ErrorKind::NetworkDown => Some(unknown_outcome(Transient, UNREACHABLE)),
        _ => None,
    }
}

/// Returns the I/O error that the client library has wrapped.
fn io_error(error: &RedisError) -> Option<&io::Error> {
    let source: &Arc<dyn std::error::Error + Send + Sync> = error.source()?.downcast_ref()?;
    source.downcast_ref()
}

/// Classifies an error of `SELECT`. The client library keeps only its text and not its code.
fn classify_select_error(error: &RedisError) -> Option<RedisErrorClass> {
    if !error.to_string().starts_with("Redis server refused to switch database") {
        return None;
    }
    let detail = error.detail().unwrap_or_default();
    let missing_database = ["out of range", "cluster mode", "unknown command"];
    Some(if detail.contains("permissions") {
        classify_server_error(ServerErrorKind::NoPerm, None)
    } else if missing_database.iter().any(|text| detail.contains(text)) {
        refused(
            Misconfigured,
            "the server does not have this database; use a smaller database number, or none",
        )
    } else {
        refused(Transient, "the server did not select the database; see the source of this error")
    })
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
    fn an_error_of_select_is_classified_by_its_text() {
        for (detail, kind) in [
            ("DB index is out of range", Misconfigured),
            ("value is not an integer or out of range", Misconfigured),
            ("SELECT is not allowed in cluster mode", Misconfigured),
            ("this user has no permissions to run the 'select' command", Denied),
            ("User worker has no permissions to run the 'select' command", Denied),
            ("Redis is busy running a script.", Transient),
            ("Redis is loading the dataset in memory", Transient),
        ] {
            let text = "Redis server refused to switch database";
            let kind_of_select = ErrorKind::Server(ServerErrorKind::ResponseError);
            let class = classify(&(kind_of_select, text, detail.to_owned()).into());
            assert_eq!((class.kind, class.refused), (kind, true), "{detail}");
        }
    }

    #[test]
    fn an_io_error_while_connecting_is_classified() {
        let lookup = "failed to lookup address information: Name or service not known";
        for (error, kind, refused) in [
            (io::Error::from(io::ErrorKind::PermissionDenied), Transient, false),
            (io::Error::other(lookup), Transient, true),
            (io::Error::from(io::ErrorKind::HostUnreachable), Transient, false),
        ] {
            let class = classify(&error.into());
            assert_eq!((class.kind, class.refused), (kind, refused), "{}", class.message);
            assert_ne!(class.message, CONNECTION_LOST);
        }
    }

    #[test]
    fn an_unsupported_fsync_names_the_required_version_and_setting() {
        for detail in [
            "unknown command 'WAITAOF', with args beginning with: '1' '0' '1' ",
            "WAITAOF cannot be used when numlocal is set but appendonly is disabled.",
        ] {
            let kind = ErrorKind::Server(ServerErrorKind::ResponseError);
            let error = unsupported_durability(&(kind, "error", detail.to_owned()).into());
            assert_eq!((error.kind(), error.refused()), (Misconfigured, true));
            for word in ["`fsync`", "7.2", "`appendonly yes`"] {
                assert!(error.message().contains(word), "{error}");
            }
        }
    }

    #[test]
    fn only_an_error_of_an_executed_script_may_follow_a_write() {
        for (line, expected) in [
            ("-NOSCRIPT No matching script.\r\n", false),
            ("-MOVED 3999 127.0.0.1:6381\r\n", false),
            ("-ASK 3999 127.0.0.1:6381\r\n", false),
            ("-BUSY later\r\n", true),
            ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", true),
            ("-ERR something else\r\n", true),
        ] {
            let response = redis::parse_redis_value(line.as_bytes()).unwrap();
            let error = to_backend_error(&response.extract_error().unwrap_err());
            assert_eq!(may_follow_a_write(&error), expected, "{line}");
        }
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert!(!may_follow_a_write(&to_backend_error(&refused.into())));
    }

    #[test]
    fn an_unknown_error_leaves_the_outcome_unknown() {
        assert_eq!(
            class_of("-ERR something else\r\n"),
            unknown_outcome(Protocol, UNEXPECTED_ERROR)
        );
    }
}
