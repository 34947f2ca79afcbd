//! What is found out of a guest's images and clones before it stops.

use super::{Guest, SaveError};
use crate::agent::{Agent, AgentError, Port};
use crate::clone::{CloneError, check_layer, trial};
use crate::disks::Running;
use crate::monitor::Monitor;
use crate::record::{Description, Disk, Layer};
use crate::rights::{Asked, Untried};
use crate::undo::{FINAL, Task};
use guests::words::options;

impl Guest {
    /// Sees that no stored image below its disks was changed. `known`: those of other snapshots.
    ///
    /// # Errors
    /// [`CloneError::Changed`]; or an image cannot be read.
    pub fn check_layers<'a>(&self, known: impl Iterator<Item = &'a Layer>) -> Result<(), SaveError> {
        let (mut below, account) = (Vec::new(), self.account()?);
        for disk in self.disks.iter().filter(|disk| !disk.raw) {
            let mut own = Disk { image: disk.image.clone(), ..Disk::default() };
            own.note_layers(&account).map_err(|(image, source)| CloneError::Image { image, source })?;
            below.extend(own.layers.into_iter().skip(1).map(|layer| layer.image));
        }
        Ok(known.filter(|layer| below.contains(&layer.image)).try_for_each(check_layer)?)
    }

    /// Starts QEMU as for a clone, beside the guest, which goes on: what was plugged in since its
    /// start, or is only there once, would keep all clones from running. Gives why none was tried.
    ///
    /// # Errors
    /// [`SaveError::NeverRuns`]; or QEMU does not answer.
    pub fn try_clone(&mut self, asked: &Asked) -> Result<Option<Untried>, SaveError> {
        let disk = |disk: &Running| Disk {
            word: disk.word.clone(),
            image: disk.image.clone(),
            raw: disk.raw,
            ..Disk::default()
        };
        let disks = self.disks.iter().map(disk).collect();
        let media = trial::media(&mut self.qmp)?;
        trial::run(&Description { disks, ..self.description.clone() }, &media, asked).map_err(SaveError::NeverRuns)
    }

    /// Has the record say whether the guest's kernel makes new random numbers in each clone: if it
    /// has the device, and its agent says that it has the driver.
    pub fn ask_for_driver(&mut self) {
        let Description { words, directory, .. } = &self.description;
        let has_device = options(words).any(|option| option.name == "device" && option.first() == "vmgenid");
        let Some(port) = Port::find(words).filter(|_| has_device) else { return };
        let asked = |qmp: &mut Monitor| -> Result<bool, AgentError> {
            Ok(port.is_open(qmp)? && Agent::connect(&directory.join(&port.socket), self.pid as u32)?.knows_vmgenid()?)
        };
        self.description.reseeds = asked(&mut self.qmp).unwrap_or(false);
    }

    /// Notes whether it runs: others who have a monitor may stop it, or let it go on, at any time.
    pub(super) fn look(&mut self, task: &mut Task) -> Result<(), SaveError> {
        match self.qmp.state()?.as_str() {
            "running" => task.ran = true,
            "paused" => task.ran = false,
            // Of a migration QEMU is left in a state of its own, in which it wakes nobody.
            state if state == "suspended" || FINAL.contains(&state) => return Err(SaveError::State(state.into())),
            _ => {}
        }
        Ok(())
    }
}
