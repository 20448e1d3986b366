//! The data of a claim's node: a JSON object.
//!
//! - It contains the claim's mode if the claim was converted, takes units of Curator's semaphore,
//!   or holds that semaphore exclusively.
//! - It contains the token of a claim that was downgraded.
//! - The rest is for operators.
//!
//! If the data contains no token, the token is the transaction that last wrote the data. This
//! transaction created the node, upgraded the claim, granted an exclusive claim in Curator's
//! semaphore, or gave the claim a later token (see `later_token`). Nodes of Curator's
//! readers-writer lock, and nodes whose data another program wrote, have the transaction that
//! created the node as their token.

use std::borrow::Cow;

use registry_core::{Claim, ClaimMode, QueuedEntry};
use serde::{Deserialize, Serialize};
use zookeeper_client::Stat;

use crate::queue::parse_queued_entry;

#[derive(Serialize, Deserialize)]
struct NodeData<'a> {
    #[serde(skip_serializing_if = "Option::is_none", borrow)]
    label: Option<Cow<'a, str>>,
    host: Cow<'a, str>,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none", borrow)]
    mode: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<i64>,
}

/// The present mode of the claim of a node, and the token of its grant. A conversion changes both,
/// except that a downgrade keeps the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeGrant {
    pub(crate) mode: ClaimMode,
    pub(crate) token: i64,
}

/// Returns the data of the node of `claim`. The server itself stores the creation time (`ctime`).
pub(crate) fn encode_node_data(
    claim: &Claim,
    mode: Option<ClaimMode>,
    token: Option<i64>,
) -> Vec<u8> {
    let node_data = NodeData {
        label: claim.label().map(Into::into),
        host: host().into(),
        pid: std::process::id(),
        mode: mode.map(|mode| mode.to_string().into()),
        token,
    };
    // The serialization of strings and numbers cannot fail.
    serde_json::to_vec(&node_data).unwrap_or_default()
}

/// Parses the mode in a node's data, which has the `Display` format of [`ClaimMode`].
pub(crate) fn decode_stated_mode(data: &[u8]) -> Option<ClaimMode> {
    let node_data = serde_json::from_slice::<NodeData<'_>>(data).ok()?;
    node_data.mode.as_deref()?.parse().ok()
}

/// Returns whether the claim of a node with this name may have been converted. Claims of Curator's
/// readers-writer lock are never converted, and their data belongs to the application.
pub(crate) fn is_convertible(name: &str) -> bool {
    let entry = parse_queued_entry(name);
    !is_of_read_write_lock(name)
        && matches!(entry, QueuedEntry::Claim(ClaimMode::Exclusive | ClaimMode::Upgradable))
}

/// Returns whether a node belongs to Curator's readers-writer lock.
fn is_of_read_write_lock(name: &str) -> bool {
    let before_number = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    ["__READ__", "__WRIT__"].iter().any(|marker| before_number.ends_with(marker))
}

/// Returns the present mode and token of the claim of a node. Returns `None` if the claim may have
/// been converted, and another program has replaced the data or the mode is invalid.
pub(crate) fn decode_grant(name: &str, data: &[u8], stat: &Stat) -> Option<NodeGrant> {
    let mode_in_name = match parse_queued_entry(name) {
        QueuedEntry::Claim(mode) => mode,
        QueuedEntry::UpgradeRequest => ClaimMode::Exclusive,
    };
    let node_data = serde_json::from_slice::<NodeData<'_>>(data).ok();
    if !is_convertible(name) {
        // Another program may have written other data.
        let is_own_data = node_data.is_some() && !is_of_read_write_lock(name);
        let token = if is_own_data { stat.mzxid } else { stat.czxid };
        return Some(NodeGrant { mode: mode_in_name, token });
    }
    let node_data = node_data?;
    let mode = match node_data.mode.as_deref() {
        None => mode_in_name,
        Some(text) => text.parse().ok()?,
    };
    Some(NodeGrant { mode, token: node_data.token.unwrap_or(stat.mzxid) })
}

/// Like [`decode_grant`]. Where that function returns `None`, the claim counts as exclusive, which
/// is the safe assumption for all other claims.
pub(crate) fn decode_grant_or_exclusive(name: &str, data: &[u8], stat: &Stat) -> NodeGrant {
    let unknown = NodeGrant { mode: ClaimMode::Exclusive, token: stat.czxid };
    decode_grant(name, data, stat).unwrap_or(unknown)
}

/// Returns the mode of a claim in the queue of Curator's semaphore. Data of another program counts
/// as one permit of one unit, because the number of units is unknown. This library's data without a
/// mode counts as exclusive.
pub(crate) fn decode_semaphore_mode(data: &[u8]) -> ClaimMode {
    match serde_json::from_slice::<NodeData<'_>>(data) {
        Ok(node_data) => node_data.mode.and_then(|mode| mode.parse().ok()),
        Err(_) => Some(ClaimMode::Permits { take: 1, of: 1 }),
    }
    .unwrap_or(ClaimMode::Exclusive)
}

/// Returns the label in a node's data. If another program wrote text, such as the address that
/// Curator writes, the text is the label.
pub(crate) fn decode_label(data: &[u8]) -> Option<String> {
    if let Ok(node_data) = serde_json::from_slice::<NodeData<'_>>(data) {
        return node_data.label.map(Cow::into_owned);
    }
    let text = std::str::from_utf8(data).ok()?;
    let is_label =
        !text.is_empty() && text.len() <= LABEL_BYTES_MAX && !text.contains(char::is_control);
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

/// The maximum bytes of another program's text that is used as a label.
const LABEL_BYTES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use registry_core::Key;

    use super::*;

    /// Returns the properties of a node that transaction 7 created. Transaction 8 last wrote its
    /// data.
    fn stat() -> Stat {
        Stat {
            czxid: 7,
            mzxid: 8,
            pzxid: 7,
            ctime: 0,
            mtime: 0,
            version: 1,
            cversion: 0,
            aversion: 0,
            ephemeral_owner: 1,
            data_length: 0,
            num_children: 0,
        }
    }

    fn claim(label: Option<&str>) -> Claim {
        let key = Key::new("orders/42").unwrap();
        Claim::new(key, Duration::from_secs(1)).with_label(label.map(Into::into))
    }

    #[test]
    fn a_label_round_trips_and_is_readable_text() {
        for text in [None, Some(""), Some("nightly \"report\" 🔒\n\0'")] {
            assert_eq!(decode_label(&encode_node_data(&claim(text), None, None)).as_deref(), text);
        }
        let text = encode_node_data(&claim(Some("nightly report")), None, None);
        let text = String::from_utf8(text).unwrap();
        assert!(text.starts_with("{\"label\":\"nightly report\",\"host\":\""), "{text}");
    }

    #[test]
    fn text_of_other_programs_is_a_label() {
        assert_eq!(decode_label(b"192.0.2.7").as_deref(), Some("192.0.2.7"));
        for not_a_label in [&b""[..], b"\xff", b"a\nb", &[b'x'; 2_000], b"{}\0"] {
            assert_eq!(decode_label(not_a_label), None, "{not_a_label:?}");
        }
    }

    #[test]
    fn the_data_of_a_readers_writer_lock_of_curator_states_no_mode() {
        const ID: &str = "_c_01234567-89ab-cdef-0123-456789abcdef";
        let shared = encode_node_data(&claim(None), Some(ClaimMode::Shared), Some(9));
        for (marker, mode) in [("__READ__", ClaimMode::Shared), ("__WRIT__", ClaimMode::Exclusive)]
        {
            for number in ["0000000007", "-000000005", "-2147483648"] {
                let name = format!("{ID}-{marker}{number}");
                assert!(!is_convertible(&name), "{name}");
                for data in [&b""[..], b"{\"mode\":\"shared\"}", &shared] {
                    let named = NodeGrant { mode, token: 7 };
                    assert_eq!(decode_grant(&name, data, &stat()), Some(named), "{name}");
                }
            }
        }
        assert!(is_convertible(&format!("{ID}-lock-0000000007")));
    }

    #[test]
    fn the_data_states_the_mode_of_a_converted_claim() {
        const ID: &str = "0123456789abcdef0123456789abcdef";
        let named = |mode: &str| format!("{ID}{mode}__lock__0000000001");
        let data = encode_node_data(&claim(Some("label")), None, None);
        for (name, mode) in [
            (named(""), ClaimMode::Exclusive),
            (named("-u"), ClaimMode::Upgradable),
            (named("-s"), ClaimMode::Shared),
            (named("-p1-2"), ClaimMode::Permits { take: 1, of: 2 }),
        ] {
            let written = NodeGrant { mode, token: 8 };
            assert_eq!(decode_grant(&name, &data, &stat()), Some(written), "{name}");
        }
        // The data of another program does not change the token of a reader.
        let created = NodeGrant { mode: ClaimMode::Shared, token: 7 };
        assert_eq!(decode_grant(&named("-s"), b"__REVOKE__", &stat()), Some(created));
        for name in [named(""), named("-u")] {
            for mode in [ClaimMode::Exclusive, ClaimMode::Upgradable, ClaimMode::Shared] {
                let converted = NodeGrant { mode, token: 9 };
                let data = encode_node_data(&claim(Some("label")), Some(mode), Some(9));
                assert_eq!(decode_grant(&name, &data, &stat()), Some(converted), "{name}");
                assert_eq!(decode_label(&data).as_deref(), Some("label"));
            }
            // `__REVOKE__` is the request of Curator's `Revoker`.
            for foreign in [&b""[..], b"__REVOKE__", b"{}"] {
                let exclusive = NodeGrant { mode: ClaimMode::Exclusive, token: 7 };
                assert_eq!(decode_grant(&name, foreign, &stat()), None, "{name}");
                assert_eq!(decode_grant_or_exclusive(&name, foreign, &stat()), exclusive, "{name}");
            }
        }
    }
}
