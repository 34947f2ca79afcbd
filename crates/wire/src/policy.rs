//! Policies that the command line, the configuration file and the agent's environment name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What becomes of a client's huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// Pages are merged out of them: saves most.
    #[default]
    Split,
    /// They are left alone: keeps the guest's speed.
    Keep,
}

impl HugePages {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Split, Self::Keep];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Keep => "keep",
        }
    }

    /// The names of all policies.
    pub fn names() -> Vec<&'static str> {
        Self::ALL.map(Self::name).into()
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No policy has this name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy {0:?} for huge pages; there are split and keep")]
pub struct UnknownPolicy(pub String);

impl FromStr for HugePages {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_has_one_name_everywhere() {
        for policy in HugePages::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let unknown = "big".parse::<HugePages>().unwrap_err().to_string();
        assert!(unknown.starts_with("there is no policy \"big\""), "{unknown}");
        assert!(HugePages::names().iter().all(|name| unknown.contains(name)), "{unknown}");
    }
}
