//! The data of a lock's node: a JSON object for operators. No decision of the backend depends on
//! this data.

use registry_core::Claim;
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct NodeData<'a> {
    #[serde(skip_serializing_if = "Option::is_none", borrow)]
    label: Option<std::borrow::Cow<'a, str>>,
    host: std::borrow::Cow<'a, str>,
    pid: u32,
}

/// Returns the data of the node of `claim`. The server itself stores the creation time (`ctime`).
pub(crate) fn encode_node_data(claim: &Claim) -> Vec<u8> {
    let node_data = NodeData {
        label: claim.label().map(Into::into),
        host: host().into(),
        pid: std::process::id(),
    };
    // The serialization of strings and a number cannot fail.
    serde_json::to_vec(&node_data).unwrap_or_default()
}

/// Returns the label in a node's data. If another program wrote text, such as the address that
/// Curator writes, the text is the label.
pub(crate) fn decode_label(data: &[u8]) -> Option<String> {
    if let Ok(node_data) = serde_json::from_slice::<NodeData<'_>>(data) {
        return node_data.label.map(std::borrow::Cow::into_owned);
    }
    let text = std::str::from_utf8(data).ok()?;
    let is_label = !text.is_empty() && text.len() <= LABEL_MAX && !text.contains(char::is_control);
    is_label.then(|| text.to_owned())
}

#[cfg(unix)]
fn host() -> String {
    nix::unistd::gethostname().map_or_else(|_| String::new(), |name| name.to_string_lossy().into())
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}

/// The maximum length of another program's text that is used as a label.
const LABEL_MAX: usize = 1024;

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
    fn a_label_round_trips_and_is_readable_text() {
        for text in [None, Some(""), Some("nightly \"report\" 🔒\n\0'")] {
            assert_eq!(decode_label(&encode_node_data(&claim(text))).as_deref(), text);
        }
        let text = String::from_utf8(encode_node_data(&claim(Some("nightly report")))).unwrap();
        assert!(text.starts_with("{\"label\":\"nightly report\",\"host\":\""), "{text}");
    }

    #[test]
    fn text_of_other_programs_is_a_label() {
        assert_eq!(decode_label(b"192.0.2.7").as_deref(), Some("192.0.2.7"));
        for not_a_label in [&b""[..], b"\xff", b"a\nb", &[b'x'; 2_000], b"{}\0"] {
            assert_eq!(decode_label(not_a_label), None, "{not_a_label:?}");
        }
    }
}
