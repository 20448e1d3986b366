//! Findings of `doctor`: settings that weaken a promise now or soon.

use std::time::Duration;

use registry_core::{BackendError, Finding};
use zookeeper_client::Error;

use crate::backend::ZkBackend;
use crate::config::Acl;
use crate::error::explain;
use crate::queue::is_contender;
use crate::recipe::read;
use crate::session::{By, Session};

impl ZkBackend {
    pub(crate) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let session = self.sessions().get().await?;
        session.round(By::Majority).await?;
        let mut findings = Vec::new();
        let config = session.config();
        if session.timeout() > LONG_TIMEOUT {
            findings.push(Finding::note(format!(
                "the servers keep the session for {:?} after the last word of its client: so long nobody else gets the locks of a process \
                 that has died",
                session.timeout()
            )));
        }
        if config.has_login() && config.acl == Acl::Open {
            findings.push(Finding::note(
                "there is a login, but everybody may touch the nodes of locks; `acl=creator` keeps them to those who log in alike",
            ));
        }
        if config.has_login() && !config.is_encrypted() {
            findings.push(Finding::warning(
                "the login is sent in the clear: connections are not encrypted",
            ));
        }
        self.look_at_base(&session, &mut findings).await?;
        Ok(findings)
    }

    /// Checks whether the parent of all keys is readable, is not a lock itself, and has more than
    /// one server.
    async fn look_at_base(
        &self,
        session: &std::sync::Arc<Session>,
        findings: &mut Vec<Finding>,
    ) -> Result<(), BackendError> {
        let base = self.paths().base();
        match read(session, base).await? {
            Ok(children) => {
                if children.iter().any(|name| is_contender(name)) {
                    findings.push(Finding::warning(format!(
                        "somebody contends for {base} itself, as if that were a lock: its keys are children of that lock"
                    )));
                }
            }
            Err(Error::NoNode) => findings.push(Finding::note(format!(
                "{base} is not there yet; it is made with the first lock"
            ))),
            Err(error) => return Err(explain(&error)),
        }
        if let Some(servers) = servers(session).await?
            && servers.len() == 1
        {
            findings
                .push(Finding::note("there is one server: nobody gets a lock while it is away"));
        }
        Ok(())
    }
}

/// Returns the servers of the ensemble, or `None` if this client cannot read them.
async fn servers(session: &Session) -> Result<Option<Vec<String>>, BackendError> {
    // Older servers do not have the configuration node, and rights may hide it.
    let Ok((config, _)) = session.bounded(session.client().get_config()).await? else {
        return Ok(None);
    };
    let text = String::from_utf8_lossy(&config).into_owned();
    let servers: Vec<String> =
        text.lines().filter(|line| line.starts_with("server.")).map(str::to_owned).collect();
    // A standalone server lists no servers.
    Ok(Some(servers).filter(|servers| !servers.is_empty()))
}

/// A dead process keeps its locks for the session time-out; more than this is reported.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
