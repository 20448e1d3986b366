//! The features that a clause can need beyond the required operations, and the check whether a
//! store has them.

use std::fmt;

use registry_core::{Capabilities, Reach};

use crate::context::TestContext;
use crate::harness::Harness;

/// A feature that a clause needs. A store without it skips the clause as an ignored test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// [`Store::fault_free`](crate::Store::fault_free): an injected fault would make the clause
    /// fail. Such a clause usually calls the backend directly, or counts the requests to the store.
    FaultFree,
    /// [`Capabilities::fencing`].
    Fencing,
    /// [`Capabilities::fair`].
    Fair,
    /// Not [`Capabilities::fair`]: only then are claims handed over inside the process.
    Handoff,
    /// [`Capabilities::fair_on_request`].
    FairOnRequest,
    /// [`Capabilities::shared`].
    Shared,
    /// [`Capabilities::upgradable`].
    Upgradable,
    /// [`Capabilities::permits`].
    Permits,
    /// [`Capabilities::values`].
    Values,
    /// [`Capabilities::waiters`].
    Waiters,
    /// [`Capabilities::wakes`].
    Wakes,
    /// [`Capabilities::reports_invalidations`].
    ReportsInvalidations,
    /// [`Capabilities::labels`].
    Labels,
    /// [`Capabilities::inspect`].
    Inspect,
    /// [`Store::other_namespace`](crate::Store::other_namespace).
    Namespaces,
    /// [`Store::restart`](crate::Store::restart).
    Restart,
    /// [`Store::wipe`](crate::Store::wipe).
    Wipe,
    /// [`Store::remote`](crate::Store::remote).
    Remote,
    /// [`Store::grants_outlive_client`](crate::Store::grants_outlive_client).
    GrantsOutliveClient,
}

impl Need {
    /// All needs, in the order of their declaration.
    pub const ALL: [Self; 19] = [
        Self::FaultFree,
        Self::Fencing,
        Self::Fair,
        Self::Handoff,
        Self::FairOnRequest,
        Self::Shared,
        Self::Upgradable,
        Self::Permits,
        Self::Values,
        Self::Waiters,
        Self::Wakes,
        Self::ReportsInvalidations,
        Self::Labels,
        Self::Inspect,
        Self::Namespaces,
        Self::Restart,
        Self::Wipe,
        Self::Remote,
        Self::GrantsOutliveClient,
    ];

    /// Returns the name of this need in `without = [..]`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FaultFree => "fault_free",
            Self::Fencing => "fencing",
            Self::Fair => "fair",
            Self::Handoff => "handoff",
            Self::FairOnRequest => "fair_on_request",
            Self::Shared => "shared",
            Self::Upgradable => "upgradable",
            Self::Permits => "permits",
            Self::Values => "values",
            Self::Waiters => "waiters",
            Self::Wakes => "wakes",
            Self::ReportsInvalidations => "reports_invalidations",
            Self::Labels => "labels",
            Self::Inspect => "inspect",
            Self::Namespaces => "namespaces",
            Self::Restart => "restart",
            Self::Wipe => "wipe",
            Self::Remote => "remote",
            Self::GrantsOutliveClient => "grants_outlive_client",
        }
    }

    /// Returns the need with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|need| need.name() == name)
    }

    /// Returns whether a store with these capabilities has the feature, or `None` if the
    /// capabilities do not determine it.
    pub(crate) fn stated_by(self, capabilities: &Capabilities) -> Option<bool> {
        match self {
            Self::Fencing => Some(capabilities.fencing),
            Self::Fair => Some(capabilities.fair),
            Self::Handoff => Some(!capabilities.fair),
            Self::FairOnRequest => Some(capabilities.fair_on_request),
            Self::Shared => Some(capabilities.shared),
            Self::Upgradable => Some(capabilities.upgradable),
            Self::Permits => Some(capabilities.permits),
            Self::Values => Some(capabilities.values),
            Self::Waiters => Some(capabilities.waiters),
            Self::Wakes => Some(capabilities.wakes),
            Self::ReportsInvalidations => Some(capabilities.reports_invalidations),
            Self::Labels => Some(capabilities.labels),
            Self::Inspect => Some(capabilities.inspect),
            // A store outside this process outlives its clients, so its harness must be able to
            // restart it.
            Self::Restart if capabilities.reach > Reach::Process => Some(true),
            _ => None,
        }
    }

    /// Returns whether the stores of `harness` have the feature. Tries it on a fresh store if the
    /// capabilities do not determine it.
    pub(crate) async fn is_met_by(self, harness: &dyn Harness) -> bool {
        let context = TestContext::open(harness).await;
        if let Some(known) = self.stated_by(context.capabilities()) {
            return known;
        }
        match self {
            Self::FaultFree => context.store().fault_free(),
            Self::Namespaces => context.store().other_namespace().await.is_some(),
            Self::Restart => context.store().restart().await,
            Self::Wipe => context.store().wipe().await,
            Self::Remote => context.store().remote(context.long_lease()).await.is_some(),
            Self::GrantsOutliveClient => context.store().grants_outlive_client(),
            known => unreachable!("{known} is determined by the capabilities"),
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
