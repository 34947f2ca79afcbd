//! What a guest's state depends on: a QEMU that differs takes the state of another guest, and says
//! nothing, in many of these points.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::monitor::{Monitor, MonitorError};

/// A guest, as its QEMU describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// QEMU's version, with the distribution's.
    pub qemu: String,
    /// The machine's type, with its version.
    pub machine: String,
    /// The processors' model.
    pub cpu: String,
    /// The words of CPUID that describe their features.
    pub features: Vec<String>,
    /// Number of processors.
    pub cpus: usize,
    /// Bytes of RAM.
    pub ram: u64,
    /// The devices that the command line names: their kinds, in order.
    pub devices: Vec<String>,
}

impl Facts {
    /// Asks a QEMU.
    pub(crate) fn of(qmp: &mut Monitor) -> Result<Self, MonitorError> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let version = qmp.execute("query-version", json!({}))?;
        let number = &version["qemu"];
        let (number, package) = (|part: &str| number[part].to_string(), text(&version["package"]));
        let number = ["major", "minor", "micro"].map(number).join(".");
        let qemu = if package.is_empty() { number } else { format!("{number} ({package})") };
        let machine = text(&get(qmp, "/machine", "type")?);
        let processors = qmp.execute("query-cpus-fast", json!({}))?;
        let processors = processors.as_array().map_or(&[][..], Vec::as_slice);
        let first = processors.first().map_or(String::new(), |cpu| text(&cpu["qom-path"]));
        let cpu = text(&get(qmp, &first, "type")?);
        // Only x86 has these.
        let words = get(qmp, &first, "feature-words").unwrap_or_default();
        let features = words.as_array().into_iter().flatten().map(Value::to_string).collect();
        let memory = qmp.execute("query-memory-size-summary", json!({}))?;
        let mut devices = Vec::new();
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let list = qmp.execute("qom-list", json!({ "path": folder }))?;
            let kinds = list.as_array().into_iter().flatten().map(|child| text(&child["type"]));
            devices.extend(kinds.filter_map(|kind| Some(kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned())));
        }
        let ram = memory["base-memory"].as_u64().unwrap_or_default();
        Ok(Self { qemu, machine, cpu, features, cpus: processors.len(), ram, devices })
    }

    /// In what another guest differs from this one, in words.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut all = Vec::new();
        let mut compare = |what: &str, stored: String, here: String| {
            if stored != here {
                all.push(format!("{what} {here} (the snapshot has {stored})"));
            }
        };
        compare("QEMU", self.qemu.clone(), other.qemu.clone());
        compare("the machine", self.machine.clone(), other.machine.clone());
        compare("the processor", self.cpu.clone(), other.cpu.clone());
        compare("the number of processors:", self.cpus.to_string(), other.cpus.to_string());
        let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
        compare("RAM:", mib(self.ram), mib(other.ram));
        compare("devices:", self.devices.join(", "), other.devices.join(", "));
        if self.cpu == other.cpu && self.features != other.features {
            let missing = |a: &Self, b: &Self| {
                let only = a.features.iter().filter(|word| !b.features.contains(word));
                only.cloned().collect::<Vec<_>>().join(" ")
            };
            let (here, stored) = (missing(other, self), missing(self, other));
            all.push(format!("the processor's features: {here} (the snapshot has {stored})"));
        }
        all
    }
}

fn get(qmp: &mut Monitor, path: &str, property: &str) -> Result<Value, MonitorError> {
    qmp.execute("qom-get", json!({ "path": path, "property": property }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_named_with_both_sides() {
        let one = Facts { qemu: "7.2.0".into(), ram: 512 << 20, features: vec!["a".into()], ..Facts::default() };
        let other = Facts { ram: 256 << 20, features: vec!["b".into()], ..one.clone() };
        assert!(one.differences(&one).is_empty());
        let all = one.differences(&other);
        assert_eq!(all[0], "RAM: 256 MiB (the snapshot has 512 MiB)");
        assert_eq!(all[1], "the processor's features: b (the snapshot has a)");
    }
}
