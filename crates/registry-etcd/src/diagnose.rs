//! Checks the members' versions and states for hazards.

use futures_util::future::join_all;
use registry_core::{BackendError, Finding};

use crate::backend::EtcdBackend;
use crate::error::Failure;
use crate::wire::{MemberListRequest, StatusRequest, StatusResponse};

impl EtcdBackend {
    /// Checks all configured members.
    pub(crate) async fn look_for_trouble(&self) -> Result<Vec<Finding>, BackendError> {
        let members = 0..self.link.members();
        let looks = members.map(|member| self.link.call_at(member, StatusRequest {}));
        let looks = join_all(looks).await;
        // Some unreachable members are a finding; if all of them are unreachable, that is an error.
        let (mut findings, mut failed, mut reached) = (Vec::new(), None, false);
        for (look, (host, port)) in looks.into_iter().zip(&self.config.members) {
            match look {
                Ok(status) => {
                    reached = true;
                    findings.extend(of_member(&format!("{host}:{port}"), &status));
                }
                Err(error) => {
                    findings.push(Finding::warning(format!("{host}:{port}: {error}")));
                    failed = Some(error);
                }
            }
        }
        if let Some(error) = failed.filter(|_| !reached) {
            return Err(error);
        }
        // Not every user has the right to list the members.
        let list = self.link.call(MemberListRequest {}).await.map_err(Failure::into_error);
        if let Ok(list) = list {
            let voters = list.members.iter().filter(|member| !member.is_learner).count();
            findings.push(of_cluster(voters));
        }
        Ok(findings)
    }
}

fn of_member(name: &str, status: &StatusResponse) -> Vec<Finding> {
    let mut findings = vec![Finding::note(format!("{name}: etcd {}", status.version))];
    let version = version(&status.version);
    if version.is_some_and(|version| version < OLDEST) {
        findings.push(Finding::warning(format!(
            "{name}: this version is older than 3.4 and not tested; update the member"
        )));
    } else if version.is_some_and(ends_leases_early) {
        findings.push(Finding::warning(format!(
            "{name}: a leader of this version that stood still for longer than a lease may end leases that its successor has kept alive \
             (etcd issue 15247): two may then believe for a moment that they hold a lock, and only fenced writes are safe; update to \
             3.4.31, 3.5.13 or later"
        )));
    }
    if status.leader == 0 {
        findings.push(Finding::warning(format!(
            "{name}: knows no leader: most members are down or cannot reach each other"
        )));
    }
    for error in status.errors.iter().filter(|error| !error.contains("no leader")) {
        findings.push(Finding::warning(format!("{name}: says {error}")));
    }
    findings
}

fn of_cluster(voters: usize) -> Finding {
    match voters {
        1 => Finding::note(
            "the cluster has one member: while it is down there are no locks; three are the usual number",
        ),
        even if even.is_multiple_of(2) => Finding::warning(format!(
            "the cluster has {even} members: it survives no more failures than with {}, and fewer are enough to stop it",
            even - 1
        )),
        odd => {
            Finding::note(format!("the cluster has {odd} members and survives {} of them", odd / 2))
        }
    }
}

fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split(['.', '-', '+']).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

fn ends_leases_early(version: (u32, u32, u32)) -> bool {
    version < (3, 4, 31) || ((3, 5, 0)..(3, 5, 13)).contains(&version)
}

const OLDEST: (u32, u32, u32) = (3, 4, 0);

#[cfg(test)]
mod tests {
    use registry_core::Severity;

    use super::*;

    #[test]
    fn versions_are_told_apart() {
        for (text, early) in [
            ("3.4.23", true),
            ("3.4.31", false),
            ("3.5.0", true),
            ("3.5.13", false),
            ("3.6.0-rc.1", false),
            ("what", false),
        ] {
            assert_eq!(version(text).is_some_and(ends_leases_early), early, "{text}");
        }
    }

    #[test]
    fn an_even_number_of_members_is_a_mistake() {
        assert_eq!(of_cluster(1).severity, Severity::Note);
        assert_eq!(of_cluster(2).severity, Severity::Warning);
        assert_eq!(of_cluster(3).severity, Severity::Note);
    }
}
