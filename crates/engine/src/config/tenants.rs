//! The rules that make domains of tenants.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An enum whose variants have names in the configuration.
macro_rules! names {
    ($(#[doc = $doc:literal])+ $name:ident { $( $(#[doc = $help:literal])+ $variant:ident = $text:literal, )+ }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name { $( $(#[doc = $help])+ #[serde(rename = $text)] $variant, )+ }

        impl $name {
            /// Its name in the configuration and in `status`.
            pub fn name(self) -> &'static str {
                match self { $( Self::$variant => $text, )+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

names! {
    /// What started a guest, and keeps it.
    ManagedBy {
        /// libvirt, also under nova or oVirt.
        Libvirt = "libvirt",
        /// Proxmox VE.
        Proxmox = "proxmox",
        /// A pod, KubeVirt's too.
        Kubernetes = "kubernetes",
        /// A slice that the administrator made, or a machine of systemd-machined.
        Systemd = "systemd",
        /// A container of anything else.
        Container = "container",
        /// The kernel's files about the process cannot be read.
        Unknown = "unknown",
    }
}

names! {
    /// Where a tenant is taken from.
    TenantBy {
        /// nova's project.
        Project = "project",
        /// A slice of systemd, or libvirt's partition.
        Slice = "slice",
        /// Proxmox' pool.
        Pool = "pool",
        /// A tag of Proxmox.
        Tag = "tag",
        /// Kubernetes' namespace.
        Namespace = "namespace",
        /// UUID, VMID or the pod's uid.
        Guest = "guest",
        /// The guest's name.
        Name = "name",
    }
}

/// A rule: which guests, and the domain that they get.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantRule {
    /// What manages them; `None`: anything.
    pub manager: Option<ManagedBy>,
    /// What they must have; `None`: nothing.
    pub by: Option<TenantBy>,
    /// The values that match; empty: any.
    pub is: Vec<String>,
    /// The name of their domain; `None`: one for each value.
    pub domain: Option<String>,
}

impl TenantRule {
    /// What is wrong with it, and what would be right.
    pub(super) fn check(&self) -> Result<(), String> {
        let problem = match self {
            Self { by: None, domain: None, .. } => "it needs `by` or `domain`, or both",
            Self { by: None, is, .. } if !is.is_empty() => "`is` lists values of `by`, which is missing",
            // A guest may have several, and which counts must not depend on their order.
            Self { by: Some(TenantBy::Tag), is, .. } if is.is_empty() => {
                "by = \"tag\" needs the tags that name tenants, in the list `is`: a guest may have others"
            }
            Self { domain: Some(domain), .. } if domain.is_empty() || domain.len() > 64 => {
                "`domain` is no name of 1 to 64 bytes"
            }
            _ => return Ok(()),
        };
        Err(problem.into())
    }
}

/// As it stands in the configuration, on one line.
impl fmt::Display for TenantRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manager = self.manager.map(|manager| format!("manager = \"{manager}\""));
        let by = self.by.map(|by| format!("by = \"{by}\""));
        let is = (!self.is.is_empty()).then(|| format!("is = {:?}", self.is));
        let domain = self.domain.as_ref().map(|domain| format!("domain = {domain:?}"));
        f.write_str(&[manager, by, is, domain].into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_that_cannot_be_meant_is_named_with_its_number() {
        let rule = TenantRule { by: Some(TenantBy::Pool), ..TenantRule::default() };
        let config = |second: TenantRule| crate::Config { tenants: vec![rule.clone(), second], ..Default::default() };
        config(rule.clone()).check().unwrap();
        let problem = |rule| config(rule).check().unwrap_err().to_string();
        assert_eq!(problem(TenantRule::default()), "tenants: rule 2: it needs `by` or `domain`, or both");
        let tags = TenantRule { by: Some(TenantBy::Tag), ..TenantRule::default() };
        assert!(problem(tags).contains("in the list `is`"));
        let is = TenantRule { is: vec!["a".into()], domain: Some("b".into()), ..TenantRule::default() };
        assert!(problem(is).contains("`by`, which is missing"));
        let long = TenantRule { domain: Some("x".repeat(65)), ..TenantRule::default() };
        assert!(problem(long).contains("64 bytes"));
    }
}
