//! Reports findings of `doctor`: settings that weaken a promise, or may weaken it later.

use std::time::Duration;

use registry_core::{BackendError, Finding};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::config::Acl;
use crate::error::to_backend_error;
use crate::nodes::read_children;
use crate::queue::is_contender;
use crate::session::{ConfirmedBy, ZkSession};

impl ZkBackend {
    pub(crate) async fn run_diagnostics(&self) -> Result<Vec<Finding>, BackendError> {
        let session = self.sessions().get_or_open().await?;
        session.confirm(ConfirmedBy::Majority).await?;
        let mut findings = Vec::new();
        let config = session.config();
        if session.timeout() > SESSION_TIMEOUT_NOTED_ABOVE {
            findings.push(Finding::note(format!(
                "the session time-out is {:?}: the locks of a process that dies stay held for that time; lower the session time-out",
                session.timeout()
            )));
        }
        if config.has_login() && config.acl == Acl::Open {
            findings.push(Finding::note(
                "a login is configured, but every client has all rights to the lock nodes; `acl=creator` restricts them to clients with the same login",
            ));
        }
        if config.has_login() && !config.is_encrypted() {
            findings.push(Finding::warning("the login is sent unencrypted; use zks://"));
        }
        self.check_base(&session, &mut findings).await?;
        Ok(findings)
    }

    /// Checks that the parent of all keys is readable and is not itself a lock. Checks that the
    /// ensemble has more than one server.
    async fn check_base(
        &self,
        session: &std::sync::Arc<ZkSession>,
        findings: &mut Vec<Finding>,
    ) -> Result<(), BackendError> {
        let base = self.paths().base();
        match read_children(session, base).await? {
            Ok(children) => {
                if children.iter().any(|name| is_contender(name)) {
                    findings.push(Finding::warning(format!(
                        "{base} itself has contenders, as if it were a lock: the nodes of all keys are children of that lock; use another root or namespace"
                    )));
                }
            }
            Err(Error::NoNode) => findings.push(Finding::note(format!(
                "{base} does not exist yet; the first lock creates it"
            ))),
            Err(error) => return Err(to_backend_error(&error)),
        }
        if count_servers(session).await? == Some(1) {
            findings.push(Finding::note(
                "the ensemble has one server: no lock can be acquired while this server is down",
            ));
        }
        Ok(())
    }
}

/// Returns the number of servers. Returns `None` if this client cannot read the configuration.
async fn count_servers(session: &ZkSession) -> Result<Option<usize>, BackendError> {
    // Older servers do not have the configuration node. This login may also lack the right to read
    // the node.
    let Ok((config, _)) = session.with_request_timeout(session.client().get_config()).await? else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&config);
    let listed = text.lines().filter(|line| line.starts_with("server.")).count();
    // The configuration of a standalone server lists no server.
    Ok(Some(listed.max(1)))
}

/// The session time-out above which `doctor` reports a finding. A dead process keeps its locks for
/// the session time-out.
const SESSION_TIMEOUT_NOTED_ABOVE: Duration = Duration::from_secs(60);
