//! What a clause needs of a store beside the required operations, and whether a store has it.

use std::fmt;

use registry_core::{Capabilities, Reach};

use crate::harness::Harness;
use crate::lab::Lab;

/// What a clause needs of a store. A store without it skips the clause, visibly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// [`Store::faithful`](crate::Store::faithful): the clause calls the SPI itself, or counts what reaches the store.
    Faithful,
    /// [`Capabilities::fencing`].
    Fencing,
    /// [`Capabilities::fair`].
    Fair,
    /// Not [`Capabilities::fair`]: only then claims are handed over inside the process.
    Handoff,
    /// [`Capabilities::wakes`].
    Wakes,
    /// [`Capabilities::tells_losses`].
    TellsLosses,
    /// [`Capabilities::labels`].
    Labels,
    /// [`Capabilities::inspect`].
    Inspect,
    /// [`Store::stranger`](crate::Store::stranger).
    Namespaces,
    /// [`Store::restart`](crate::Store::restart).
    Restart,
    /// [`Store::wipe`](crate::Store::wipe).
    Wipe,
    /// [`Store::remote`](crate::Store::remote).
    Remote,
    /// [`Store::roams`](crate::Store::roams).
    Roaming,
}

impl Need {
    /// All needs, in the order of their declaration.
    pub const ALL: [Self; 13] = [
        Self::Faithful,
        Self::Fencing,
        Self::Fair,
        Self::Handoff,
        Self::Wakes,
        Self::TellsLosses,
        Self::Labels,
        Self::Inspect,
        Self::Namespaces,
        Self::Restart,
        Self::Wipe,
        Self::Remote,
        Self::Roaming,
    ];

    /// The word for this need in `without = [..]`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Faithful => "faithful",
            Self::Fencing => "fencing",
            Self::Fair => "fair",
            Self::Handoff => "handoff",
            Self::Wakes => "wakes",
            Self::TellsLosses => "tells_losses",
            Self::Labels => "labels",
            Self::Inspect => "inspect",
            Self::Namespaces => "namespaces",
            Self::Restart => "restart",
            Self::Wipe => "wipe",
            Self::Remote => "remote",
            Self::Roaming => "roaming",
        }
    }

    /// The need of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|need| need.name() == name)
    }

    /// What the capabilities alone say about this need; `None` when they say nothing.
    pub(crate) fn told_by(self, capabilities: &Capabilities) -> Option<bool> {
        match self {
            Self::Fencing => Some(capabilities.fencing),
            Self::Fair => Some(capabilities.fair),
            Self::Handoff => Some(!capabilities.fair),
            Self::Wakes => Some(capabilities.wakes),
            Self::TellsLosses => Some(capabilities.tells_losses),
            Self::Labels => Some(capabilities.labels),
            Self::Inspect => Some(capabilities.inspect),
            // A store beyond this process outlives its clients, so its harness can always restart it somehow.
            Self::Restart if capabilities.reach > Reach::Process => Some(true),
            _ => None,
        }
    }

    /// Whether the stores of `harness` have what is needed. Tries it out on a fresh store where only that can tell.
    pub(crate) async fn is_met_by(self, harness: &dyn Harness) -> bool {
        let lab = Lab::open(harness).await;
        if let Some(told) = self.told_by(lab.capabilities()) {
            return told;
        }
        match self {
            Self::Faithful => lab.store().faithful(),
            Self::Namespaces => lab.store().stranger().await.is_some(),
            Self::Restart => lab.store().restart().await,
            Self::Wipe => lab.store().wipe().await,
            Self::Remote => lab.store().remote(lab.long()).await.is_some(),
            Self::Roaming => lab.store().roams(),
            told => unreachable!("{told} is told by the capabilities"),
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
