//! Reports findings of `doctor` about the members: their versions and their states.

use futures_util::future::join_all;
use registry_core::config::display_host;
use registry_core::{BackendError, Finding};

use crate::backend::EtcdBackend;
use crate::error::CallError;
use crate::proto::{MemberListRequest, StatusRequest, StatusResponse};

impl EtcdBackend {
    /// Checks all configured members.
    pub(crate) async fn check_members(&self) -> Result<Vec<Finding>, BackendError> {
        let members = 0..self.client.member_count();
        let statuses = members.map(|member| self.client.call_member(member, StatusRequest {}));
        let statuses = join_all(statuses).await;
        // An unreachable member is a finding. If no member is reachable, the call returns an error.
        let (mut findings, mut last_error, mut is_any_reachable) = (Vec::new(), None, false);
        for (status, member) in statuses.into_iter().zip(&self.config.members) {
            match status {
                Ok(status) => {
                    is_any_reachable = true;
                    findings.extend(member_findings(&display_host(member), &status));
                }
                Err(error) => {
                    findings.push(Finding::warning(error.to_string()));
                    last_error = Some(error);
                }
            }
        }
        if let Some(error) = last_error.filter(|_| !is_any_reachable) {
            return Err(error);
        }
        // Some versions of etcd require a permission for `MemberList`, which this user may lack.
        // Its error is therefore ignored.
        let list = self.client.call(MemberListRequest {}).await.map_err(CallError::into_error);
        if let Ok(list) = list {
            let voters = list.members.iter().filter(|member| !member.is_learner).count();
            findings.push(cluster_finding(voters));
        }
        Ok(findings)
    }
}

fn member_findings(name: &str, status: &StatusResponse) -> Vec<Finding> {
    let mut findings = vec![Finding::note(format!("{name}: etcd {}", status.version))];
    let version = parse_version(&status.version);
    if version.is_some_and(|version| version < VERSION_MIN) {
        findings.push(Finding::warning(format!(
            "{name}: versions before 3.4 are not tested; update the member"
        )));
    } else if version.is_some_and(may_end_leases_early) {
        findings.push(Finding::warning(format!(
            "{name}: after a pause longer than a lease, a leader of this version may end leases that its \
             successor has kept alive (etcd issue 15247). Two guards of one lock may then be valid until the \
             first holder is notified, and only fenced writes are safe; update to 3.4.31, 3.5.13 or later"
        )));
    }
    if status.leader == 0 {
        findings.push(Finding::warning(format!(
            "{name}: has no leader: a majority of the members is down or disconnected"
        )));
    }
    for error in status.errors.iter().filter(|error| !error.contains("no leader")) {
        findings.push(Finding::warning(format!("{name}: reports {error}")));
    }
    findings
}

fn cluster_finding(voters: usize) -> Finding {
    match voters {
        0 => Finding::warning(
            "the member reports no voting member; check the cluster with `etcdctl member list`",
        ),
        1 => Finding::note(
            "the cluster has one member: while it is down, no lock is available; use three members",
        ),
        even if even.is_multiple_of(2) => Finding::warning(format!(
            "the cluster has {even} members: it survives no more failures than with {}; use an odd number",
            even - 1
        )),
        odd => Finding::note(format!(
            "the cluster has {odd} members and survives the failure of {}",
            odd / 2
        )),
    }
}

fn parse_version(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split(['.', '-', '+']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

fn may_end_leases_early(version: (u32, u32, u32)) -> bool {
    version < (3, 4, 31) || ((3, 5, 0)..(3, 5, 13)).contains(&version)
}

const VERSION_MIN: (u32, u32, u32) = (3, 4, 0);

#[cfg(test)]
mod tests {
    use registry_core::Severity;

    use super::*;

    #[test]
    fn versions_with_the_lease_bug_are_detected() {
        for (text, early) in [
            ("3.4.23", true),
            ("3.4.31", false),
            ("3.5.0", true),
            ("3.5.13", false),
            ("3.6.0-rc.1", false),
            ("what", false),
        ] {
            assert_eq!(parse_version(text).is_some_and(may_end_leases_early), early, "{text}");
        }
    }

    #[test]
    fn an_even_number_of_members_is_a_warning() {
        assert_eq!(cluster_finding(1).severity, Severity::Note);
        assert_eq!(cluster_finding(2).severity, Severity::Warning);
        assert_eq!(cluster_finding(3).severity, Severity::Note);
    }
}
