//! The data of a lock's node: one line of JSON for people. No decision depends on it.

use registry_core::{BackendError, Claim};
use serde::{Deserialize, Serialize};
use zookeeper_client::{CreateMode, Error};

use crate::error::explain;
use crate::session::Session;

#[derive(Serialize, Deserialize)]
struct Note<'a> {
    #[serde(skip_serializing_if = "Option::is_none", borrow)]
    label: Option<std::borrow::Cow<'a, str>>,
    host: std::borrow::Cow<'a, str>,
    pid: u32,
}

/// Returns the data of the node of `claim`. The server itself stores the creation time (`ctime`).
pub(crate) fn note(claim: &Claim) -> Vec<u8> {
    let note =
        Note { label: claim.label().map(Into::into), host: host().into(), pid: std::process::id() };
    // Strings and a number always serialize.
    serde_json::to_vec(&note).unwrap_or_default()
}

/// Returns the label in a node's data. Data of other programs is used as the label if it is text,
/// such as Curator's address.
pub(crate) fn label(data: &[u8]) -> Option<String> {
    if let Ok(note) = serde_json::from_slice::<Note<'_>>(data) {
        return note.label.map(std::borrow::Cow::into_owned);
    }
    let text = std::str::from_utf8(data).ok()?;
    let is_label = !text.is_empty() && text.len() <= LABEL_MAX && !text.contains(char::is_control);
    is_label.then(|| text.to_owned())
}

/// Creates `path` and its parents as containers: nodes that the servers delete after they have been
/// empty for a while.
pub(crate) async fn make_parents(session: &Session, path: &str) -> Result<(), BackendError> {
    let acls = session.config().acls();
    for mode in [CreateMode::Container, CreateMode::Persistent] {
        // `NoNode` means that a parent was deleted during the call.
        for _ in 0..TRIES {
            match session.bounded(session.client().mkdir(path, &mode.with_acls(acls))).await? {
                Ok(()) => return Ok(()),
                Err(Error::NoNode) => {}
                // Servers before 3.5 do not support containers.
                Err(Error::Unimplemented) if mode == CreateMode::Container => break,
                Err(error) => return Err(explain(&error)),
            }
        }
    }
    Err(explain(&Error::NoNode))
}

#[cfg(unix)]
fn host() -> String {
    nix::unistd::gethostname().map_or_else(|_| String::new(), |name| name.to_string_lossy().into())
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// Longer data of other programs is not used as a label.
const LABEL_MAX: usize = 1024;
const TRIES: u32 = 4;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use registry_core::Key;

    use super::*;

    fn claim(label: Option<&str>) -> Claim {
        let key = Key::new("orders/42").unwrap();
        Claim::new(key, Duration::from_secs(1)).with_label(label.map(Into::into))
    }

    #[test]
    fn labels_are_read_back_and_people_can_read_them_too() {
        for text in [None, Some(""), Some("nightly \"report\" 🔒\n\0'")] {
            assert_eq!(label(&note(&claim(text))).as_deref(), text);
        }
        let text = String::from_utf8(note(&claim(Some("nightly report")))).unwrap();
        assert!(text.starts_with("{\"label\":\"nightly report\",\"host\":\""), "{text}");
    }

    #[test]
    fn what_others_have_written_is_a_label_if_it_is_text() {
        assert_eq!(label(b"192.0.2.7").as_deref(), Some("192.0.2.7"));
        for none in [&b""[..], b"\xff", b"a\nb", &[b'x'; 2_000], b"{}\0"] {
            assert_eq!(label(none), None, "{none:?}");
        }
    }
}
